"""The command ``lorabench report``: run the notebooks and write their pages."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lorabench.errors import CheckError, ConfigError

if TYPE_CHECKING:
    from lorabench.report import ReportFacts


def report(
    notebooks: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="NOTEBOOK", help="What to run; by default every notebook of the checkout."
        ),
    ] = None,
    size: Annotated[
        str, typer.Option(metavar="tiny|small|laptop|full", help="How much of LTX-2.5 to work on.")
    ] = "laptop",
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the pages go.")] = Path(
        "reports"
    ),
    scratch: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where sample weights are kept.")
    ] = Path("scratch"),
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0.01, help="The longest a cell may take.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep what an earlier run into this folder measured.")
    ] = False,
) -> None:
    """Run the notebooks and write their pages; print the path of the page that lists them."""
    from lorabench.arguments import check_size, make_folder
    from lorabench.records import read
    from lorabench.report import NotebookError, build_reports, check_notebooks

    check_size(size)
    chosen = notebooks or _notebooks_of_checkout()
    records, results = out.resolve() / "records.jsonl", out.resolve() / "results"
    parameters = {
        "SIZE": size,
        "SCRATCH": scratch.resolve(),
        "RECORDS": records,
        "RESULTS": results,
    }
    check_notebooks(chosen, out, parameters)  # before an earlier run's results go
    make_folder(results)
    if not resume:
        if records.exists():
            read(records)  # raises, if it is somebody's file and none of ours
        for old in (records, *(results / f"{notebook.stem}.json" for notebook in chosen)):
            old.unlink(missing_ok=True)
    try:
        index = build_reports(chosen, out, parameters, _report_facts(size), timeout)
    except (NotebookError, CheckError):
        typer.echo(f"note: {out / 'index.html'} lists what failed and what didn't", err=True)
        raise
    typer.echo(index)


def _notebooks_of_checkout() -> list[Path]:
    for folder in (Path(), Path(__file__).parent.parent):
        if (folder / "lorabench" / "cli.py").is_file():
            if found := sorted((folder / "notebooks").glob("*.ipynb")):
                return found
    raise ConfigError(
        "no notebook was named, and this isn't run in a checkout with a folder 'notebooks'; name "
        "the notebooks or go to the checkout"
    )


def _report_facts(size: str) -> "ReportFacts":
    from datetime import UTC, datetime

    from lorabench.machine import environment, git_commit
    from lorabench.report import ReportFacts

    here = environment()
    machine = f"{here['cpu']}, {here['cores']} cores"
    if isinstance(memory := here["memory_bytes"], int):
        machine += f", {memory / 1e9:.0f} GB"
    if here["cuda_device"]:
        machine += f", {here['cuda_device']}"
    return ReportFacts(
        machine=machine,
        commit=git_commit(),
        date=datetime.now(UTC).isoformat(timespec="minutes"),
        size=size,
        sources="Figures show what this run measured, unless they name the committed records or "
        "the publication that they show.",
    )
