"""The commands ``lorabench bench``: measure cases, record them, and say what was recorded."""

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lorabench.errors import ConfigError, UnavailableError, did_you_mean

if TYPE_CHECKING:
    from lorabench.arguments import Binding
    from lorabench.bench import Case, Subject
    from lorabench.records import Record


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
OnDevice = Annotated[Device, typer.Option("--device", help="Where the weights live.")]
Scratch = Annotated[Path, typer.Option(metavar="FOLDER", help="Where sample weights are kept.")]
Out = Annotated[Path, typer.Option(metavar="FILE", help="The file that records are added to.")]
Json = Annotated[bool, typer.Option("--json", help="Print the records as JSON lines.")]

IN_SCRATCH, RECORDS = Path("scratch"), Path("scratch/records.jsonl")

bench = typer.Typer(
    help="Measure: each case runs in a process of its own, and what it computed is checked.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@bench.command()
def kernels(
    contenders: Annotated[
        list[str] | None,
        typer.Option(
            "--contender",
            metavar="NAME",
            help="A kernel, or ltx_core; repeatable. By default all that run here.",
        ),
    ] = None,
    budget: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.01, help="The most for one sample.")
    ] = 1.0,
    size: Size = None,
    base: Base = None,
    adapters: Adapters = None,
    device: OnDevice = Device.cpu,
    scratch: Scratch = IN_SCRATCH,
    out: Out = RECORDS,
    as_json: Json = False,
) -> None:
    """Time kernels in turn on the weight shape that has most of a pass's work."""
    from lorabench.bench import kernels_case

    role, bindings = _one_binding(adapters)
    chosen = _contenders(contenders, device)
    subject = _subject(size, base, bindings, device, scratch, out)
    measure([kernels_case(subject, role, chosen, budget)], out, as_json)


@bench.command()
def loop(
    budget: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=0.01,
            help="After how long to break the pass off; by default 20, unless --whole.",
        ),
    ] = None,
    whole: Annotated[
        bool,
        typer.Option(
            "--whole",
            help="Run the pass to its end, and say how well its first tenth told that.",
        ),
    ] = False,
    widen: Annotated[
        bool, typer.Option(help="Widen weights to f32 as the loop reaches them, and keep them.")
    ] = True,
    size: Size = None,
    base: Base = None,
    adapters: Adapters = None,
    device: OnDevice = Device.cpu,
    scratch: Scratch = IN_SCRATCH,
    out: Out = RECORDS,
    as_json: Json = False,
) -> None:
    """Run a pass by the scalar loop, and watch its threads, stacks and memory from outside."""
    from lorabench.bench import loop_case
    from lorabench.derive import first_tenth

    if whole and budget is not None:
        raise ConfigError(f"--whole and --budget {budget:g}: give one of the two")
    if device != Device.cpu:
        raise ConfigError(f"--device {device}: the scalar loop runs on the CPU only")
    role, bindings = _one_binding(adapters)
    subject = _subject(size, base, bindings, device, scratch, out)
    seconds = None if whole else 20.0 if budget is None else budget
    [record] = measure([loop_case(subject, role, seconds, widen)], out, as_json)
    if whole:
        told = first_tenth(record)
        typer.echo(
            f"note: at its first tenth's rate, {told.flops_per_second / 1e9:.3f} GFLOP/s, the pass "
            f"was to take {told.predicted_seconds:.2f} s; it took {told.seconds:.2f} s "
            f"(predicted {told.error:+.1%})",
            err=True,
        )


@bench.command()
def walk(
    recipe: RecipeName,
    strategies: Strategies = ["as_written", "both_fixes"],  # noqa: B006
    renders: Renders = 1,
    size: Size = None,
    base: Base = None,
    adapters: Adapters = None,
    device: OnDevice = Device.cpu,
    scratch: Scratch = IN_SCRATCH,
    out: Out = RECORDS,
    as_json: Json = False,
) -> None:
    """Carry out a recipe's plan under each strategy, and time every load and rebind."""
    cases = walk_cases(recipe, strategies, renders, size, base, adapters, device, scratch, out)
    measure(cases, out, as_json)


@bench.command("fuse")
def fuse_command(
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="How often, in turn.")] = 1,
    size: Size = None,
    base: Base = None,
    adapters: Adapters = None,
    scratch: Scratch = IN_SCRATCH,
    out: Out = RECORDS,
    as_json: Json = False,
) -> None:
    """Time a streamed fuse to a file, its two parts alone, and cp of the base, files in FOLDER."""
    from lorabench.arguments import parse_bindings
    from lorabench.bench import fuse_case

    bindings = parse_bindings(adapters or ["distilled"])
    subject = _subject(size, base, bindings, Device.cpu, scratch, out, held=False)
    measure([fuse_case(subject, scratch, rounds)], out, as_json)


def walk_cases(
    recipe: str,
    strategies: Sequence[str],
    renders: int,
    size: str | None,
    base: Path | None,
    adapters: Sequence[str] | None,
    device: Device,
    scratch: Path,
    out: Path,
    *,
    streamed: bool = False,
) -> "list[Case]":
    """Make the cases of a recipe's walks; what can't be meant or done is refused first."""
    import torch

    from lorabench.arguments import parse_bindings
    from lorabench.bench import walk_case
    from lorabench.kernels import get_kernel
    from lorabench.plan import parse_strategy
    from lorabench.recipe import load_recipe
    from lorabench.restore import check_restore
    from lorabench.streamed import check_streamed

    wanted = load_recipe(recipe)
    parsed = {name: parse_strategy(name) for name in strategies}
    required = [role.name for role in wanted.roles if role.required]
    bindings = parse_bindings(adapters or required)
    wanted.bind(dict.fromkeys(bindings, 1.0))  # a mistake shows before weights are written
    for how in parsed.values():
        if streamed:
            check_streamed(how.kernel, how.restore)
        else:
            check_restore(how.restore, torch.device(device.value))
            get_kernel(how.kernel, torch.device(device.value))
    subject = _subject(size, base, bindings, device, scratch, out, held=not streamed)
    return [
        walk_case(subject, wanted, how, name, renders, streamed=streamed)
        for name, how in parsed.items()
    ]


def _one_binding(adapters: Sequence[str] | None) -> "tuple[str, dict[str, Binding]]":
    from lorabench.arguments import parse_bindings

    bindings = parse_bindings(adapters or ["distilled"])
    if len(bindings) != 1:
        raise ConfigError(f"--adapter: expected one, found {', '.join(bindings)}; measure in turn")
    return next(iter(bindings)), bindings


def _subject(
    size: str | None,
    base: Path | None,
    bindings: "Mapping[str, Binding]",
    device: Device,
    scratch: Path,
    out: Path,
    *,
    held: bool = True,
) -> "Subject":
    """Find or write the weights to measure on; what can't be meant is refused before that.

    ``held`` says that they will be held in memory, and so have to fit.
    """
    import torch

    from lorabench.arguments import check_records_file, check_size
    from lorabench.bench import Subject
    from lorabench.synthetic import sample_weights

    if device == Device.cuda and not torch.cuda.is_available():
        raise UnavailableError(f"--device cuda: torch {torch.__version__} finds no CUDA GPU")
    if base is not None and size is not None:
        raise ConfigError(f"--base {base} and --size {size}: give one of the two")
    for role, binding in bindings.items():
        if binding.strength != 1:
            raise ConfigError(
                f"--adapter {role}: a strength is for the command plan; adapters are measured at 1"
            )
        if base is not None and binding.path is None:
            raise ConfigError(f"--adapter {role}: with --base, expected role=path")
        if base is None and binding.path is not None:
            raise ConfigError(f"--adapter {role}={binding.path}: a path needs --base")
    if base is not None:
        paths = {role: b.path for role, b in bindings.items() if b.path is not None}
        subject = Subject(base, paths, device.value)
        subject.open()
        check_records_file(out)
        return subject
    check_size(size := size or "tiny")
    check_records_file(out)
    files = sample_weights(scratch, size, list(bindings), held=held)
    return Subject(files.base, files.adapters, device.value)


def _contenders(asked: Sequence[str] | None, device: Device) -> Sequence[str]:
    """Check the contenders asked for; without any, take those that run here."""
    from lorabench.bench import CONTENDERS
    from lorabench.kernels import KERNELS

    known = dict.fromkeys((*CONTENDERS, *KERNELS))
    for name in asked or ():
        if name not in known:
            raise ConfigError(
                f"--contender {name}{did_you_mean(name, known)}: choose from {', '.join(known)}"
            )
    if asked:
        return asked
    missing = [] if importlib.util.find_spec("ltx_core") else ["ltx_core"]
    if device != Device.cpu:
        missing.append("scalar")
    if missing:
        typer.echo(f"note: measured without {' and '.join(missing)}, not available here", err=True)
    return [name for name in CONTENDERS if name not in missing]


def measure(cases: Sequence["Case"], out: Path, as_json: bool) -> "Sequence[Record]":
    """Measure cases and print what was recorded of them."""
    from lorabench import records
    from lorabench.bench import sweep
    from lorabench.tables import records_text

    held = records.read(out) if out.exists() else []
    found = sweep(cases, out)
    if repeated := sum(record in held for record in found):
        typer.echo(
            f"note: {repeated} of {len(found)} records were in {out} before and weren't measured "
            f"again; give another --out for that",
            err=True,
        )
    if as_json:
        for record in found:
            typer.echo(json.dumps({"schema": records.SCHEMA, **asdict(record)}, allow_nan=False))
    else:
        typer.echo(records_text(found))
    return found
