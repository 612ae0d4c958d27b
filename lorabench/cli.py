"""The command ``lorabench``: data on stdout; progress, notes and errors on stderr.

Exit codes: 0 done, 1 a check failed, 2 a mistake in usage, configuration or a file, 3 a notebook's
cell ran out of time, 4 a notebook's kernel died, 130 interrupted. torch, pandas and all that
imports them are imported by the commands that need them, when they run.
"""

import json
import os
import signal
import sys
import traceback
import warnings
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from lorabench.cli_advise import advise
from lorabench.cli_bench import bench
from lorabench.cli_calibrate import calibrate
from lorabench.cli_claims import claims
from lorabench.cli_decide import decide, denoise
from lorabench.cli_options import AllowSkip, AllowUnmatched
from lorabench.cli_report import report
from lorabench.cli_say import say
from lorabench.cli_stream import fuse, walk
from lorabench.errors import CheckError, ConfigError, FileError, LorabenchError

GEOMETRY = "ltx-2.5-22b"

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text for people.")]
Rank = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="The adapter's rank, in the place of the template's."),
]
Shrink = Annotated[
    int, typer.Option(metavar="N", min=1, help="Divide every size of the template by this.")
]
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="ROLE[=PATH[=STRENGTH]]",
        help="Bind an adapter to a role of the recipe; the strength multiplies the recipe's own. "
        "May be given for several roles; without any, the required roles are bound.",
    ),
]


class _Commands(TyperGroup):
    """Commands whose errors are told in one line, each kind with its exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except LorabenchError as error:
            if os.environ.get("LORABENCH_TRACEBACK") == "1":
                traceback.print_exception(error)
            say(f"error: {error}", err=True)
            failed = 1 if isinstance(error, CheckError) else 2
            raise typer.Exit(getattr(error, "exit_code", failed)) from error
        except BrokenPipeError:
            raise
        except OSError as error:  # what no module of ours foresaw: a name too long, a locked folder
            if os.environ.get("LORABENCH_TRACEBACK") == "1":
                traceback.print_exception(error)
            typer.echo(f"error: {error.filename or 'a file'}: {error.strerror}", err=True)
            raise typer.Exit(2) from error
        except KeyboardInterrupt as error:
            typer.echo("interrupted", err=True)
            raise typer.Exit(130) from error


app = typer.Typer(
    cls=_Commands,
    help="Measure what it costs a video diffusion engine to bind LoRA adapters phase by phase.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]},
)
app.add_typer(bench, name="bench")


def main() -> None:
    """Run the command line."""
    warnings.showwarning = _show_warning
    with suppress(ValueError):  # not in the main thread
        # As Ctrl-C does: what is half written goes, and child processes with it.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    app(prog_name="lorabench")


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    say(f"note: {message}", err=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        import lorabench

        typer.echo(f"lorabench {lorabench.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


def _print_json(data: object) -> None:
    typer.echo(json.dumps(data, indent=2, allow_nan=False))


@app.command("geometry")
def geometry_command(
    name_or_path: Annotated[
        str,
        typer.Argument(
            metavar="NAME_OR_PATH",
            help="A shipped template, a .toml template, or a safetensors checkpoint: a file, an "
            "index or a folder.",
        ),
    ],
    blocks: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Cut to this many blocks, without the connectors."),
    ] = None,
    shrink: Shrink = 1,
    rank: Rank = None,
    as_json: Json = False,
) -> None:
    """Count a model's tensors, parameters and bytes, and the work of one pass over it."""
    from lorabench.arguments import find_geometry
    from lorabench.describe import describe_geometry
    from lorabench.tables import geometry_text

    geometry = find_geometry(name_or_path, blocks=blocks, shrink=shrink, rank=rank)
    fields = describe_geometry(geometry)
    if as_json:
        _print_json(fields)
    else:
        say(geometry_text(fields))


@app.command()
def inspect(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A base or an adapter: file, index or folder.")
    ],
    base: Annotated[
        str | None,
        typer.Option(
            metavar="BASE", help="Hold the adapter against this: a template's name or a checkpoint."
        ),
    ] = None,
    allow_unmatched: AllowUnmatched = False,
    allow_skip: AllowSkip = False,
    alpha: Annotated[
        float | None,
        typer.Option(
            metavar="ALPHA", help="Of an adapter that doesn't tell it; by default its rank."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Tell from its headers what a base or an adapter holds, and what that touches."""
    from lorabench.adapter import Adapter
    from lorabench.adapter_file import AdapterFile
    from lorabench.arguments import find_geometry, holds_adapter
    from lorabench.checkpoint import Checkpoint
    from lorabench.describe import describe_adapter, describe_base, describe_match
    from lorabench.inspected import inspect_text

    if holds_adapter(checkpoint := Checkpoint.open(path)):
        fields = describe_adapter(AdapterFile.open(path, allow_skip=True, alpha=alpha))
        if base is not None:
            geometry = find_geometry(base)
            adapter = Adapter.open(
                path,
                geometry.tensors,
                allow_unmatched=allow_unmatched,
                allow_skip=allow_skip,
                alpha=alpha,
            )
            fields["base"] = describe_match(adapter, geometry)
    elif base is not None or allow_unmatched or allow_skip or alpha is not None:
        raise ConfigError(
            f"{path}: is a base; --base, --allow-unmatched, --allow-skip and --alpha go with an "
            f"adapter"
        )
    else:
        fields = describe_base(checkpoint)
    if as_json:
        _print_json(fields)
    else:
        say(inspect_text(fields))


@app.command()
def synth(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Where the files go; made if it isn't there.")
    ],
    geometry: Annotated[
        str, typer.Option(metavar="NAME_OR_PATH", help="As for the command geometry.")
    ] = GEOMETRY,
    blocks: Annotated[
        str,
        typer.Option(
            metavar="N|all",
            help="A number of blocks, without the connectors; or all, with the connectors.",
        ),
    ] = "2",
    shrink: Shrink = 1,
    rank: Rank = None,
    adapters: Annotated[
        list[str], typer.Option("--adapter", metavar="NAME", help="An adapter's name; repeatable.")
    ] = ["distilled"],  # noqa: B006
    seed: Annotated[int, typer.Option(metavar="N", help="Two seeds give two models.")] = 0,
    ratio: Annotated[
        float, typer.Option(metavar="X", help="Std of a delta over std of its weight.")
    ] = 0.05,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Predict the bytes and write nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a seeded base and adapters with the real names, shapes and dtypes."""
    from lorabench.arguments import find_geometry, parse_blocks
    from lorabench.describe import describe_synthetic
    from lorabench.synthetic import Files, synthesize
    from lorabench.tables import synth_text

    model = find_geometry(geometry, blocks=parse_blocks(blocks), shrink=shrink, rank=rank)
    fields = describe_synthetic(model, Files.inside(folder, adapters))
    if not dry_run:
        synthesize(folder, model, adapters, seed=seed, ratio=ratio, overwrite=overwrite)
    if as_json:
        _print_json(fields | {"written": not dry_run})
    else:
        typer.echo(synth_text(fields, dry_run=dry_run))


@app.command("plan")
def plan_command(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A shipped recipe's name or alias, or a path.")
    ],
    strategy: Annotated[
        str,
        typer.Option(
            metavar="STRATEGY", help="A preset, field=value, or both, separated by commas."
        ),
    ] = "as_written",
    renders: Annotated[int, typer.Option(metavar="N", min=1, help="How many renders.")] = 1,
    adapters: Adapters = None,
    geometry: Annotated[
        str, typer.Option(metavar="NAME_OR_PATH", help="As for the command geometry.")
    ] = GEOMETRY,
    rank: Rank = None,
    as_json: Json = False,
) -> None:
    """List what an engine does to run renders of a recipe, and what each action takes.

    The prediction is for adapters that touch every target of the geometry at its rank; adapter
    files need only exist.
    """
    from lorabench.arguments import find_geometry, parse_bindings
    from lorabench.describe import describe_plan
    from lorabench.plan import parse_strategy
    from lorabench.recipe import load_recipe
    from lorabench.tables import plan_text

    how = parse_strategy(strategy)
    bindings = parse_bindings(adapters or ())
    strengths = {role: binding.strength for role, binding in bindings.items()}
    bound = load_recipe(recipe).bind(strengths or None)
    paths = [binding.path for binding in bindings.values() if binding.path is not None]
    if missing := [path for path in paths if not path.exists()]:
        raise FileError(f"{missing[0]}: there is no such adapter file; correct --adapter")
    model = find_geometry(geometry, rank=rank)
    fields = describe_plan(bound, strengths, how, renders, model)
    if paths:
        typer.echo(
            f"note: the work is predicted for rank {model.rank} on every target of {model.name}; "
            f"adapter files aren't read",
            err=True,
        )
    if as_json:
        _print_json(fields)
    else:
        typer.echo(plan_text(fields))


@app.command()
def recipes(as_json: Json = False) -> None:
    """List the shipped recipes."""
    from lorabench.describe import describe_recipe
    from lorabench.recipe import load_recipe, recipe_names
    from lorabench.tables import recipes_text

    shipped = [describe_recipe(load_recipe(name)) for name in recipe_names()]
    if as_json:
        _print_json(shipped)
    else:
        typer.echo(recipes_text(shipped))


@app.command()
def strategies(as_json: Json = False) -> None:
    """List the shipped strategies, and the fields that one may set."""
    from lorabench.plan import STRATEGIES, STRATEGY_NOTES
    from lorabench.tables import strategies_text

    presets = [
        {"name": name, "note": STRATEGY_NOTES[name], **asdict(strategy)}
        for name, strategy in STRATEGIES.items()
    ]
    if as_json:
        _print_json(presets)
    else:
        typer.echo(strategies_text(presets))


bench.command()(decide)
bench.command()(denoise)
app.command()(calibrate)
app.command()(advise)
app.command()(fuse)
app.command()(walk)
app.command()(claims)
app.command()(report)
