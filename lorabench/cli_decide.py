"""The command ``lorabench bench decide``: what is advised, carried out beside what has a name."""

from typing import Annotated

import typer

from lorabench.cli_options import IN_SCRATCH, RECORDS, Json, Out, Renders, Scratch
from lorabench.cli_subject import measure


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
    machine: Annotated[
        str,
        typer.Option(
            metavar="here|NAME|PATH", help="Whose figures to plan by, as for the command advise."
        ),
    ] = "here",
    scratch: Scratch = IN_SCRATCH,
    out: Out = RECORDS,
    as_json: Json = False,
) -> None:
    """Carry out each recipe's advised plan and those of every named strategy, on the CPU.

    Required roles are bound. A strategy of a slower kernel makes a plan that another has, and would
    take hours.
    """
    from lorabench.arguments import check_records_file, check_size
    from lorabench.bench import Subject
    from lorabench.bench.decide import decide_cases
    from lorabench.calibrate import find_machine
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
