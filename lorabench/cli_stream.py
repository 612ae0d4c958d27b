"""The commands that stream a base from disk: ``lorabench fuse`` and ``lorabench walk``."""

import json
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer

from lorabench.cli_options import (
    IN_SCRATCH,
    RECORDS,
    Adapters,
    AllowSkip,
    AllowUnmatched,
    Base,
    Device,
    Json,
    Out,
    RecipeName,
    Renders,
    Scratch,
    Size,
    Strategies,
)
from lorabench.cli_say import say
from lorabench.cli_subject import measure, walk_cases


def fuse(
    base: Annotated[
        Path, typer.Argument(metavar="BASE", help="A checkpoint: a file, an index or a folder.")
    ],
    adapters: Annotated[
        list[str],
        typer.Argument(
            metavar="ADAPTER[=STRENGTH]...",
            help="Files, in the order of fusing; by default of strength 1.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            *("--out", "-o"),
            metavar="PATH",
            help="The new file, .safetensors; for a base in shards, the new folder.",
        ),
    ],
    allow_unmatched: AllowUnmatched = False,
    allow_skip: AllowSkip = False,
    alphas: Annotated[
        list[str],
        typer.Option(
            "--alpha",
            metavar="NAME=ALPHA",
            help="Of an adapter that doesn't tell it, by its file's stem; by default its rank.",
        ),
    ] = [],  # noqa: B006
    rule: Annotated[
        str,
        typer.Option(metavar="R1|R2|R3|R4", help="How sums are rounded: R1 as LTX-2, R4 once."),
    ] = "R1",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the file; never a folder.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of text for people.")
    ] = False,
) -> None:
    """Fuse adapters into a base, from file to file, in a GB of memory whatever the size.

    Broken off, the same command goes on where it stopped.
    """
    from lorabench.adapter import Adapter
    from lorabench.arguments import parse_adapters, parse_alphas
    from lorabench.checkpoint import Checkpoint
    from lorabench.fusedfile import fuse_file
    from lorabench.inspected import left_out_text
    from lorabench.recipe import State
    from lorabench.tables import fused_text

    files = parse_adapters(adapters)
    told = parse_alphas(alphas, files)
    opened = Checkpoint.open(base)
    bound = {
        name: Adapter.open(
            path,
            opened.tensors,
            allow_unmatched=allow_unmatched,
            allow_skip=allow_skip,
            alpha=told.get(name),
        )
        for name, (path, _) in files.items()
    }
    for adapter in bound.values():
        if left_out := left_out_text(adapter):
            say(left_out, err=True)
    state = State({name: strength for name, (_, strength) in files.items()})
    start = perf_counter()
    fused = fuse_file(opened, bound, state, out, rule=rule, overwrite=overwrite)
    fields = {
        "path": str(fused.path),
        "state": state.as_dict(),
        "bytes": fused.nbytes,
        "resumed_bytes": fused.resumed_bytes,
        "seconds": perf_counter() - start,
        **asdict(fused.work),
    }
    typer.echo(json.dumps(fields, indent=2) if as_json else fused_text(fields))


def walk(
    recipe: RecipeName,
    strategies: Strategies = ["fast_kernel", "both_fixes"],  # noqa: B006
    renders: Renders = 1,
    size: Size = None,
    base: Base = None,
    adapters: Adapters = None,
    scratch: Scratch = IN_SCRATCH,
    out: Out = RECORDS,
    as_json: Json = False,
) -> None:
    """Carry out a recipe's plan on weights that needn't fit in memory, and time every action.

    Each load and rebind reads its weights from the disk, fuses them, sums up their bits and drops
    them. 'bench walk' does the same on weights that stay in memory.
    """
    cases = walk_cases(
        recipe, strategies, renders, size, base, adapters, Device.cpu, scratch, out, streamed=True
    )
    measure(cases, out, as_json)
