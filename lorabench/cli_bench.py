"""The commands ``lorabench bench``: measure cases, record them, and say what was recorded."""

from typing import Annotated

import typer

from lorabench.cli_options import (
    IN_SCRATCH,
    RECORDS,
    Adapters,
    Base,
    Device,
    Json,
    OnDevice,
    Out,
    RecipeName,
    Renders,
    Scratch,
    Size,
    Strategies,
)
from lorabench.cli_subject import find_contenders, find_subject, measure, one_binding, walk_cases
from lorabench.errors import ConfigError

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
    from lorabench.bench import CONTENDERS, kernels_case

    role, bindings = one_binding(adapters)
    chosen = find_contenders(contenders, CONTENDERS, (), device)
    subject = find_subject(size, base, bindings, device, scratch, out)
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
    role, bindings = one_binding(adapters)
    subject = find_subject(size, base, bindings, device, scratch, out)
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
    subject = find_subject(size, base, bindings, Device.cpu, scratch, out, held=False)
    measure([fuse_case(subject, scratch, rounds)], out, as_json)


@bench.command()
def peers(
    contenders: Annotated[
        list[str] | None,
        typer.Option(
            "--contender",
            metavar="NAME",
            help="A kernel or a peer; repeatable. The others are compared with the first.",
        ),
    ] = None,
    threads: Annotated[
        list[int], typer.Option(metavar="N", min=1, help="Torch's threads; repeatable.")
    ] = [1, 2],  # noqa: B006
    budget: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0.01, help="The most for a pass; else a sample of it."),
    ] = 60.0,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Passes of each, in turn.")] = 3,
    size: Size = None,
    base: Base = None,
    adapters: Adapters = None,
    device: OnDevice = Device.cpu,
    scratch: Scratch = IN_SCRATCH,
    out: Out = RECORDS,
    as_json: Json = False,
) -> None:
    """Time passes by our kernel, ltx-core, PEFT and plain loops in turn, first and later ones."""
    from lorabench.bench import PASS_CONTENDERS, peers_case
    from lorabench.peers import PEERS

    role, bindings = one_binding(adapters)
    chosen = find_contenders(contenders, PASS_CONTENDERS, PEERS, device)
    subject = find_subject(size, base, bindings, device, scratch, out)
    cases = [peers_case(subject, role, chosen, n, budget, rounds) for n in threads]
    measure(cases, out, as_json)


@bench.command()
def rules(
    strengths: Annotated[
        list[float] | None,
        typer.Option("--strength", metavar="S", help="Repeatable; by default 1, 0.8, 0.25 and -1."),
    ] = None,
    ratios: Annotated[
        list[float] | None,
        typer.Option(
            "--ratio",
            metavar="R",
            help="Delta's spread over the weight's; repeatable; by default five from 0.01 to 1.",
        ),
    ] = None,
    side: Annotated[int, typer.Option(metavar="N", min=1, help="Of the square weight.")] = 1024,
    out: Out = RECORDS,
    as_json: Json = False,
) -> None:
    """Count how the rounding rules' bits differ on one input, and hold peers to theirs."""
    from lorabench.arguments import check_records_file
    from lorabench.bench import RULE_RATIOS, RULE_STRENGTHS, rules_case

    case = rules_case(strengths or RULE_STRENGTHS, ratios or RULE_RATIOS, side)
    check_records_file(out)
    measure([case], out, as_json)


@bench.command()
def restores(
    names: Annotated[
        list[str] | None,
        typer.Option("--restore", metavar="NAME", help="Repeatable; all that the device has."),
    ] = None,
    strengths: Annotated[
        list[float], typer.Option("--strength", metavar="S", help="Of the adapters; repeatable.")
    ] = [1.0],  # noqa: B006
    repetitions: Annotated[int, typer.Option(metavar="N", min=1, help="How many rounds.")] = 5,
    size: Size = None,
    base: Base = None,
    adapters: Adapters = None,
    device: OnDevice = Device.cpu,
    scratch: Scratch = IN_SCRATCH,
    out: Out = RECORDS,
    as_json: Json = False,
) -> None:
    """Time fuse, rebind and unfuse under each restore, and weigh what it keeps."""
    import torch

    from lorabench.arguments import parse_bindings
    from lorabench.bench import restores_case, restores_on
    from lorabench.restore import check_restore

    bindings = parse_bindings(adapters or ["distilled"])
    chosen = names or restores_on(device.value)
    for name in chosen:
        check_restore(name, torch.device(device.value))
    subject = find_subject(size, base, bindings, device, scratch, out)
    cases = [
        restores_case(subject, name, strength, repetitions)
        for name in chosen
        for strength in strengths
    ]
    measure(cases, out, as_json)


@bench.command()
def drift(
    cycles: Annotated[int, typer.Option(metavar="N", min=1, help="Of fuse and unfuse.")] = 1000,
    steps: Annotated[
        int, typer.Option(metavar="N", min=1, help="Of training the adapter of a real base.")
    ] = 10,
    out: Out = RECORDS,
    as_json: Json = False,
) -> None:
    """Follow what subtraction does to weights over many cycles, ours and PEFT's."""
    from lorabench.arguments import check_records_file
    from lorabench.bench import drift_case

    check_records_file(out)
    measure([drift_case(cycles, training_steps=steps)], out, as_json)


@bench.command()
def load(
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="How often, in turn.")] = 5,
    cold: Annotated[
        bool, typer.Option("--cold", help="Take the base out of the page cache before each load.")
    ] = False,
    restore: Annotated[
        str, typer.Option(metavar="NAME", help="What the loads keep on the way.")
    ] = "reread",
    size: Size = None,
    base: Base = None,
    adapters: Adapters = None,
    device: OnDevice = Device.cpu,
    scratch: Scratch = IN_SCRATCH,
    out: Out = RECORDS,
    as_json: Json = False,
) -> None:
    """Time a load into a state beside a plain load and a pass, in turn."""
    import torch

    from lorabench.arguments import parse_bindings
    from lorabench.bench import load_case
    from lorabench.restore import check_restore

    bindings = parse_bindings(adapters or ["distilled"])
    check_restore(restore, torch.device(device.value))
    subject = find_subject(size, base, bindings, device, scratch, out)
    measure([load_case(subject, rounds, cold=cold, restore=restore)], out, as_json)
