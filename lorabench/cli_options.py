"""Options that several commands have, each with its meaning in one place."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Device(StrEnum):
    """Where weights may live."""

    cpu = "cpu"
    cuda = "cuda"


Size = Annotated[
    str | None,
    typer.Option(
        metavar="tiny|small|laptop|full",
        help="Measure on sample weights of LTX-2.5 in this size; tiny, if there is no --base.",
    ),
]
Base = Annotated[
    Path | None, typer.Option(metavar="PATH", help="Measure on this checkpoint instead.")
]
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="ROLE[=PATH]",
        help="An adapter's role, and its file if --base is given.",
    ),
]
RecipeName = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A shipped recipe's name or alias, or a path.")
]
Strategies = Annotated[
    list[str],
    typer.Option(
        "--strategy",
        metavar="STRATEGY",
        help="A preset, field=value, or both, separated by commas; repeatable.",
    ),
]
Renders = Annotated[int, typer.Option(metavar="N", min=1, help="How many renders.")]
MachineName = Annotated[
    str,
    typer.Option(
        "--machine",
        metavar="here|NAME|PATH",
        help="A shipped machine, a .toml that 'lorabench calibrate' wrote, or this one, which is "
        "measured if it wasn't yet.",
    ),
]
OnDevice = Annotated[Device, typer.Option("--device", help="Where the weights live.")]
Scratch = Annotated[Path, typer.Option(metavar="FOLDER", help="Where sample weights are kept.")]
Out = Annotated[Path, typer.Option(metavar="FILE", help="The file that records are added to.")]
AllowUnmatched = Annotated[
    bool, typer.Option("--allow-unmatched", help="Accept modules that the base lacks.")
]
AllowSkip = Annotated[
    bool,
    typer.Option("--allow-skip", help="Leave out modules of a kind that isn't applied."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the records as JSON lines.")]

IN_SCRATCH, RECORDS = Path("scratch"), Path("scratch/records.jsonl")
