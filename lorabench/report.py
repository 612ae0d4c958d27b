"""Run notebooks, export each as a self-contained page, and write the page that lists them."""

import ast
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from lorabench.errors import ConfigError, LorabenchError
from lorabench.export import Article, ReportFacts, export_html
from lorabench.page import render, replace_file

__all__ = ["NotebookError", "ReportFacts", "build_reports", "export_html", "run_notebook"]

FAILED, TIMED_OUT, KERNEL_DIED = 1, 3, 4
PARAMETERS, INJECTED = "parameters", "injected-parameters"


class NotebookError(LorabenchError):
    """A notebook that didn't run to its end.

    Attributes
    ----------
    exit_code
        1 where a cell raised, 3 where a cell ran out of time, 4 where the kernel died.
    """

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Entry:
    """What the index page says of one notebook; ``article`` is None where it failed."""

    name: str
    page: str
    notebook: str
    took: str
    article: Article | None
    error: str | None


def run_notebook(
    source: Path,
    destination: Path,
    parameters: Mapping[str, Any],
    timeout_seconds: float | None,
) -> None:
    """Execute a notebook from top to bottom and save it with its outputs.

    The kernel is the caller's own interpreter, started in the notebook's folder. Cells tagged
    ``skip-execution`` are left alone. Progress goes to standard error, a line for each cell.

    Parameters
    ----------
    source
        The notebook as committed; it isn't changed.
    destination
        Where the executed notebook goes. It is written however the run ends.
    parameters
        Values that replace those of the cell tagged ``parameters``. Paths arrive as strings.
    timeout_seconds
        The longest that one cell may take; None for no limit.

    Raises
    ------
    ConfigError
        The notebook is missing or isn't one, or a parameter isn't assigned in its parameters cell.
    NotebookError
        A cell raised, ran out of time, or took the kernel down.
    """
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    notebook = with_parameters(source, parameters)
    todo = [
        (index, cell)
        for index, cell in enumerate(notebook.cells)
        if cell.cell_type == "code"
        and cell.source.strip()
        and "skip-execution" not in cell.metadata.get("tags", ())
    ]
    # Without folders to search, "python3" can only be this interpreter, whatever kernels the
    # user has installed under that name.
    manager = AsyncKernelManager(
        kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[])
    )

    class Client(NotebookClient):
        """Passes on what a cell says of its progress, which can take minutes."""

        def output(self, outs: Any, msg: Any, display_id: Any, cell_index: int) -> Any:
            if msg["msg_type"] == "stream" and msg["content"]["name"] == "stderr":
                text = msg["content"]["text"].rstrip("\n")
                print(f"\n      {text}", end=" ", file=sys.stderr, flush=True)
            return super().output(outs, msg, display_id, cell_index)

    client = Client(
        notebook,
        km=manager,
        timeout_func=lambda _cell: timeout_seconds,
        store_widget_state=False,
        coalesce_streams=True,
        record_timing=False,
        extra_arguments=["--log-level=CRITICAL"],  # its own log would break our lines
    )
    # Plain progress lines, because a widget would stay at 0% on the page; and figures as JSON
    # only, because the other renderers put plotly.js into the notebook.
    environment = os.environ | {
        "LORABENCH_PROGRESS": "text",
        "PLOTLY_RENDERER": "plotly_mimetype",
    }
    place = "while the kernel was starting"

    def failure(error: Exception, exit_code: int, what: str) -> NotebookError:
        print("failed", file=sys.stderr)
        return NotebookError(
            f"{source}: {place}: {what}; the partly executed notebook is {destination}", exit_code
        )

    try:
        folder = str(source.resolve().parent)
        with client.setup_kernel(cwd=folder, env=environment, cleanup_kc=True):
            print(source.name, file=sys.stderr)
            for position, (index, cell) in enumerate(todo, start=1):
                place = f"cell [{position}/{len(todo)}], `{_first_line(cell.source)}`"
                print(f"[{position}/{len(todo)}] ", end="", file=sys.stderr, flush=True)
                start = time.perf_counter()
                client.execute_cell(cell, index)
                print(f"{time.perf_counter() - start:.1f} s", file=sys.stderr)
    except CellExecutionError as error:
        what = " ".join(f"{error.ename}: {error.evalue}".split())
        raise failure(error, FAILED, what) from error
    except CellTimeoutError as error:
        raise failure(error, TIMED_OUT, f"took longer than {timeout_seconds:g} s") from error
    except (DeadKernelError, RuntimeError) as error:  # a kernel that never starts: RuntimeError
        raise failure(error, KERNEL_DIED, f"the kernel died ({_first_line(str(error))})") from error
    finally:
        replace_file(destination, nbformat.writes(notebook) + "\n")


def check_notebooks(notebooks: Sequence[Path], out: Path, parameters: Mapping[str, Any]) -> None:
    """Find what would go wrong with notebooks before any of them runs or anything is removed.

    Raises
    ------
    ConfigError
        A notebook is missing, lacks a parameter, shares its name, or would be overwritten.
    """
    stems = [notebook.stem for notebook in notebooks]
    for stem in stems:
        if stems.count(stem) > 1 or stem == "index":
            raise ConfigError(
                f"two pages would be called {stem}.html in {out}; rename a notebook of that name"
            )
    for notebook in notebooks:
        with_parameters(notebook, parameters)
        if (out / "notebooks" / notebook.name).resolve() == notebook.resolve():
            raise ConfigError(
                f"{notebook}: would be overwritten by its executed copy; choose another "
                f"folder than {out} for the pages"
            )


def build_reports(
    notebooks: Sequence[Path],
    out: Path,
    parameters: Mapping[str, Any],
    facts: ReportFacts,
    timeout_seconds: float | None = None,
) -> Path:
    """Run every notebook, export every page, and write the index page.

    A notebook that fails doesn't stop the others: the index says how it failed, and the error is
    raised when everything else is done.

    Parameters
    ----------
    notebooks
        The notebooks, in the order in which the index lists them.
    out
        Folder of the pages; executed notebooks go to ``out/notebooks``.
    parameters
        Given to every notebook, so each must declare all of them.
    facts
        What the head of every page says.
    timeout_seconds
        The longest that one cell may take; None for no limit.

    Returns
    -------
    Path
        The index page, ``out/index.html``.

    Raises
    ------
    ConfigError
        Before anything runs: a notebook is missing, lacks a parameter, or shares its name.
    NotebookError
        After everything ran: one or more notebooks failed; carries the first one's exit code.
    LorabenchError
        After everything ran: the only failure was at export, such as a figure without alt text.
    """
    check_notebooks(notebooks, out, parameters)
    for name in (
        *(notebook.stem for notebook in notebooks),
        "index",
    ):  # an earlier run's page would pass for this run's
        (out / f"{name}.html").unlink(missing_ok=True)
    entries: list[Entry] = []
    failures: list[LorabenchError] = []
    for notebook in notebooks:
        executed = out / "notebooks" / notebook.name
        page = out / f"{notebook.stem}.html"
        article = None
        start = time.perf_counter()
        try:
            run_notebook(notebook, executed, parameters, timeout_seconds)
            seconds = time.perf_counter() - start
            article = export_html(executed, page, facts)
        except LorabenchError as error:
            seconds = time.perf_counter() - start
            failures.append(error)
        except Exception as error:  # an output that no page can be made of mustn't stop the others
            seconds = time.perf_counter() - start
            what = f"{type(error).__name__}: {_first_line(str(error))}"
            failures.append(NotebookError(f"{notebook}: can't be made a page: {what}"))
        entries.append(
            Entry(
                name=notebook.stem,
                page=page.name,
                notebook=f"notebooks/{notebook.name}",
                took=f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min",
                article=article,
                error=None if article else str(failures[-1]),
            )
        )

    index = out / "index.html"
    replace_file(index, render("index.html.j2", title="lorabench", facts=facts, entries=entries))
    if len(failures) > 1:
        codes = [getattr(failure, "exit_code", FAILED) for failure in failures]
        raise NotebookError("\n".join(map(str, failures)), codes[0])
    if failures:
        raise failures[0]
    return index


def with_parameters(source: Path, parameters: Mapping[str, Any]) -> NotebookNode:
    """Read a notebook and add a cell with ``parameters`` after the one that declares them.

    Raises
    ------
    ConfigError
        The file is missing or no notebook, or a parameter isn't assigned in its parameters cell.
    """
    try:
        notebook = nbformat.read(source, as_version=4)
    except FileNotFoundError as error:
        raise ConfigError(f"{source}: there is no such notebook") from error
    except OSError as error:
        raise ConfigError(f"{source}: can't be read as a notebook: {error.strerror}") from error
    except Exception as error:  # nbformat trips over bad files in many ways of its own
        raise ConfigError(f"{source}: not a Jupyter notebook: {_first_line(str(error))}") from error
    if not parameters:
        return notebook

    # A notebook that was executed before has the former run's values, which would win.
    cells = [cell for cell in notebook.cells if INJECTED not in cell.metadata.get("tags", ())]
    declaring = [
        index
        for index, cell in enumerate(cells)
        if cell.cell_type == "code" and PARAMETERS in cell.metadata.get("tags", ())
    ]
    if len(declaring) != 1:
        raise ConfigError(
            f"{source}: expected one code cell tagged {PARAMETERS!r}, found {len(declaring)}; "
            f"needed to set {', '.join(parameters)}"
        )
    known = _assigned_names(source, cells[declaring[0]].source)
    unknown = [name for name in parameters if name not in known]
    if unknown:
        raise ConfigError(
            f"{source}: unknown parameter {', '.join(unknown)}; "
            f"its parameters cell assigns {', '.join(known) or 'nothing'}"
        )
    lines = ["# The parameters of this run"]
    lines += [f"{name} = {_literal(source, name, value)}" for name, value in parameters.items()]
    injected = nbformat.v4.new_code_cell("\n".join(lines), metadata={"tags": [INJECTED]})
    cells.insert(declaring[0] + 1, injected)
    notebook.cells = cells
    return notebook


def _assigned_names(source: Path, code: str) -> list[str]:
    try:
        tree = ast.parse(code)
    except SyntaxError as error:
        raise ConfigError(f"{source}: the parameters cell isn't plain Python: {error}") from error
    return [
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]


def _literal(source: Path, name: str, value: object) -> str:
    text = repr(str(value) if isinstance(value, Path) else value)
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        raise ConfigError(
            f"{source}: parameter {name} must be a number, string, bool, None, path, or a list or "
            f"dict of them, found {type(value).__name__}"
        ) from error
    return text


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
