"""The advised plan beside every named strategy, carried out."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lorabench.bench.cases import Case, Subject
from lorabench.bench.walk import walk_case
from lorabench.forwards import added_seconds, forward_lines, forward_points
from lorabench.machine import machine_name
from lorabench.plan import STRATEGIES, plan
from lorabench.planner import Choice
from lorabench.recipe import Recipe
from lorabench.records import Record
from lorabench.streams import Product

if TYPE_CHECKING:
    import pandas as pd

ADVISED = "advised"


def decide_cases(
    subject: Subject,
    recipes: Mapping[str, tuple[Recipe, Choice]],
    renders: int = 2,
    rounds: int = 1,
) -> list[Case]:
    """Carry out, for recipes, the plan that was advised and those of every named strategy.

    Strategies of slower kernels make the same plans, which would take hours, and are left out. What
    comes to the same actions, done in the same way, is carried out once; its record's ``covers``
    lists every ``recipe strategy`` that it stands for.

    Parameters
    ----------
    recipes
        By name: the recipe, bound to the subject's roles, and what was advised.
    rounds
        How often all is carried out, in turn, so that a slow minute doesn't hit one alone.
    """
    ways: dict[object, Case] = {}
    for name, (recipe, advised) in recipes.items():
        kernel = advised.strategy.kernel
        named = {n: (s, plan(recipe, s, renders)) for n, s in STRATEGIES.items()}
        for way, (strategy, actions) in {
            ADVISED: (advised.strategy, advised.actions),
            **{n: made for n, made in named.items() if made[0].kernel == kernel},
        }.items():
            fused = strategy.apply == "resident"
            key = (actions, strategy.restore if fused else "", strategy.apply)
            if key not in ways:
                ways[key] = walk_case(subject, recipe, strategy, way, renders, actions=actions)
            what = ways[key].what
            covered = [*what.get("covers", ()), f"{name} {way}"]  # pyright: ignore
            ways[key] = replace(ways[key], what={**what, "covers": covered})
    return [
        replace(case, what={**case.what, "round": number})
        for number in range(rounds)
        for case in ways.values()
    ]


def decision_frame(
    records: Iterable[Record], added: Callable[[str, str], float] = lambda recipe, apply: 0.0
) -> "pd.DataFrame":
    """Return what renders waited for under each strategy: loads, rebinds and unfused adapters.

    Columns ``recipe``, ``strategy``, ``load_s``, ``rebinds_s``, ``apply_s``, ``binding_s`` (their
    sum, by which each is the median of its rounds), ``rebinds``, ``over_best`` (over the least of
    the recipe).

    Parameters
    ----------
    records
        Of `decide_cases`, each case's in the order of its actions.
    added
        For a recipe and a way of applying, the seconds that all of its forwards take longer, as
        measured and scaled: walks run no forward.
    """
    import pandas as pd

    cases: dict[tuple[str, str, int], list[Record]] = {}
    for record in records:
        for covered in record.case.get("covers", ()):  # pyright: ignore
            recipe, strategy = str(covered).split()
            cases.setdefault((recipe, strategy, record.case["round"]), []).append(record)  # pyright: ignore
    rows: list[dict[str, Any]] = []
    for (recipe, strategy, _), mine in cases.items():
        apply = str(mine[0].case["apply"])
        # Nobody waits for a rebind that makes ready for a next render, if it is the last action.
        waited = [r for r in mine if r.case["critical"] or r is not mine[-1]]
        load = sum(r.seconds[0] for r in waited if r.case["action"] == "load")
        rebinds = [r.seconds[0] for r in waited if r.case["action"] == "rebind"]
        extra = added(recipe, apply) if apply != "resident" else 0.0
        rows.append(
            {
                "recipe": recipe,
                "strategy": strategy,
                "load_s": load,
                "rebinds_s": sum(rebinds),
                "apply_s": extra,
                "binding_s": load + sum(rebinds) + extra,
                "rebinds": len(rebinds),
            }
        )
    rounds = pd.DataFrame(rows).groupby(["recipe", "strategy"], sort=False, as_index=False)
    frame = rounds.median()
    best = frame.groupby("recipe").binding_s.transform("min")
    return frame.assign(over_best=frame.binding_s / best)


def decisions_frame(
    records: Iterable[Record], recipes: Mapping[str, Recipe], products: Sequence[Product]
) -> "pd.DataFrame":
    """Return `decision_frame` of each machine that decided, its name first, in ``machine``.

    Parameters
    ----------
    records
        Of `decide_cases`, and of :func:`lorabench.bench.denoise_case` on the same machines: what
        adapters that aren't fused add to the forwards is scaled from these.
    recipes
        Bound, by name.
    products
        Of the geometry that was measured, with every adapter of the recipes.
    """
    import pandas as pd

    machines: dict[str, list[Record]] = {}
    for record in records:
        machines.setdefault(machine_name(record.environment), []).append(record)
    frames = {}
    for machine, mine in machines.items():
        decided = [record for record in mine if "covers" in record.case]
        if not decided:
            continue
        lines = forward_lines(forward_points(mine, products))
        renders = int(decided[0].case["renders"])  # pyright: ignore

        def added(recipe: str, apply: str) -> float:
            seconds = added_seconds(recipes[recipe], apply, lines, products)  # noqa: B023
            return renders * seconds  # noqa: B023

        frames[machine] = decision_frame(decided, added)
    return pd.concat(frames, names=["machine"]).reset_index(level=0)
