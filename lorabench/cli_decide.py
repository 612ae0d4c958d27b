"""The commands ``lorabench bench decide`` and ``denoise``: what a decision rests on, done."""

from typing import Annotated

import typer

from lorabench.cli_options import (
    IN_SCRATCH,
    RECORDS,
    Adapters,
    Base,
    Device,
    Json,
    MachineName,
    OnDevice,
    Out,
    Renders,
    Scratch,
    Size,
)
from lorabench.cli_subject import find_subject, measure


def decide(
    recipes: Annotated[
        list[str] | None,
        typer.Argument(metavar="RECIPE", help="Shipped recipes; by default all."),
    ] = None,
    renders: Renders = 2,
    rounds: Annotated[
        int, typer.Option(metavar="N", min=1, help="How often all is carried out, in turn.")
    ] = 1,
    size: Annotated[
        str, typer.Option(metavar="tiny|small|laptop|full", help="Of the sample weights.")
    ] = "tiny",
    machine: MachineName = "here",
    scratch: Scratch = IN_SCRATCH,
    out: Out = RECORDS,
    as_json: Json = False,
) -> None:
    """Carry out each recipe's advised plan and those of every named strategy, on the CPU.

    Required roles are bound. A strategy of a slower kernel makes a plan that another has, and would
    take hours.
    """
    from lorabench.arguments import check_records_file, check_size, find_machine
    from lorabench.bench import Subject
    from lorabench.bench.decide import decide_cases
    from lorabench.planner import advise
    from lorabench.recipe import load_recipe, recipe_names
    from lorabench.setting import Pricings, Setting
    from lorabench.synthetic import sample_weights

    check_size(size)
    check_records_file(out)
    chosen = {name: load_recipe(name).bind() for name in recipes or recipe_names()}
    by_roles: dict[tuple[str, ...], list[str]] = {}
    for name, recipe in chosen.items():
        by_roles.setdefault(tuple(role.name for role in recipe.roles), []).append(name)
    where = find_machine(machine, scratch)
    cases = []
    for roles, names in by_roles.items():
        files = sample_weights(scratch, size, roles)
        subject = Subject(files.base, files.adapters)
        _, adapters = subject.open()
        touches = {role: adapter.targets for role, adapter in adapters.items()}
        pricings = Pricings(where, subject.geometry(), touches)
        advised = {
            name: advise(Setting(chosen[name], renders, where.memory_bytes), pricings).best
            for name in names
        }
        with_plans = {name: (chosen[name], advised[name]) for name in names}
        cases += decide_cases(subject, with_plans, renders, rounds)
    measure(cases, out, as_json)


def denoise(
    applies: Annotated[
        list[str] | None,
        typer.Option(
            "--apply",
            metavar="WAY",
            help="resident, runtime or per_layer; repeatable. By default all.",
        ),
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N", min=1, help="Of every stream; repeatable. By default 64, 128 and 256."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="How often, in turn.")] = 2,
    size: Size = None,
    base: Base = None,
    adapters: Adapters = None,
    device: OnDevice = Device.cpu,
    scratch: Scratch = IN_SCRATCH,
    out: Out = RECORDS,
    as_json: Json = False,
) -> None:
    """Time a forward's products with the adapters fused, at runtime and fused per layer."""
    from lorabench.arguments import parse_bindings
    from lorabench.bench import DENOISE_TOKENS, denoise_case
    from lorabench.plan import STRATEGY_VALUES

    bindings = parse_bindings(adapters or ["distilled"])
    subject = find_subject(size, base, bindings, device, scratch, out)
    ways = applies or STRATEGY_VALUES["apply"]
    case = denoise_case(subject, applies=ways, tokens=tokens or DENOISE_TOKENS, rounds=rounds)
    measure([case], out, as_json)
