"""What priced plans take, as frames: of every recipe, under every strategy, on every machine.

Everything here is ``predicted``: rows of what `lorabench.planner.advise` returns.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from lorabench.bill import binding_seconds, first_and_later, price_plan
from lorabench.breakeven import Change
from lorabench.cost import touches_of
from lorabench.counted import Counted
from lorabench.errors import UnavailableError
from lorabench.geometry import Geometry
from lorabench.plan import Action, Denoise, Load, Strategy, plan
from lorabench.planner import Advice, Choice, Pricings, Setting, advise
from lorabench.predicted import predict
from lorabench.pricing import Pricing
from lorabench.rates import Machine
from lorabench.recipe import Recipe, State
from lorabench.records import Record

if TYPE_CHECKING:
    import pandas as pd

ADVISED = "advised"
"""What the cheapest plan that fits is called among the named strategies."""

Advices = Mapping[str, Iterable[Advice]]
"""By machine, as a reader is to know it: advice for recipes."""


def advise_all(settings: Iterable[Setting], pricings: Pricings) -> list[Advice]:
    """Take advice in each setting, but for those in which nothing fits."""
    found = []
    for setting in settings:
        try:
            found.append(advise(setting, pricings))
        except UnavailableError:
            continue
    return found


def actions_frame(advices: Advices) -> "pd.DataFrame":
    """List every distinct load and rebind, and what unfused adapters add to a phase's forwards.

    Columns ``machine``, ``recipe``, ``strategy``, ``kind``, ``action``, ``waited`` (whether a
    render waits for it at all), ``seconds``, ``waited_s``, ``tflop``, gigabytes by way
    (``disk_gb``, ``host_gb``, ``link_gb``, ``device_gb``), ``memory_gb`` (the device's, of the
    plan), ``cache``, ``provenance``.
    """
    import pandas as pd

    rows = []
    for machine, recipe, strategy, choice in _choices(advices):
        seen = set()
        for line in choice.bill.lines:
            action, cost = line.action, line.cost
            waited = binding_seconds(line)
            seconds = waited if isinstance(action, Denoise) else cost.seconds
            key = _named(action), action.critical
            if key in seen or (isinstance(action, Denoise) and not seconds):
                continue
            seen.add(key)
            ways = {f"{way}_gb": getattr(cost, f"{way}_bytes") / 1e9 for way in _WAYS}
            rows.append(
                {
                    "machine": machine,
                    "recipe": recipe,
                    "strategy": strategy,
                    "kind": "apply" if isinstance(action, Denoise) else action.kind,
                    "action": _named(action),
                    "waited": action.critical,
                    "seconds": seconds,
                    "waited_s": waited,
                    "tflop": cost.work.flops / 1e12,
                    **ways,
                    "memory_gb": choice.memory.device_bytes / 1e9,
                    "cache": "cold" if choice.cold else "warm",
                    "provenance": "predicted",
                }
            )
    return pd.DataFrame(rows)


def waits_frame(advices: Advices) -> "pd.DataFrame":
    """List what renders wait for loads, rebinds and unfused adapters under each strategy.

    Columns ``machine``, ``recipe``, ``strategy``, ``renders``, ``first_s``, ``later_s`` (of each
    later render, in the mean), ``all_s`` (of all the renders), ``total_s`` (what all actions but
    the forwards take, waited for or not), ``memory_gib``, ``host_gib``, ``fits``, ``provenance``.
    """
    import pandas as pd

    rows = []
    for advice, (machine, recipe, strategy, choice) in _advised_choices(advices):
        setting, bill = advice.setting, choice.bill
        first, later = first_and_later(bill, len(setting.recipe.phases), setting.renders)
        forwards = sum(line.cost.parts.get("forward", 0.0) for line in bill.lines)
        rows.append(
            {
                "machine": machine,
                "recipe": recipe,
                "strategy": strategy,
                "renders": setting.renders,
                "first_s": first,
                "later_s": later,
                "all_s": bill.binding_seconds,
                "total_s": bill.total_seconds - forwards,
                "memory_gib": choice.memory.device_bytes / 2**30,
                "host_gib": choice.memory.host_bytes / 2**30,
                "fits": advice.fits(choice),
                "provenance": "predicted",
            }
        )
    return pd.DataFrame(rows)


def actions_table(actions: "pd.DataFrame", machine: str) -> "pd.DataFrame":
    """Lay :func:`actions_frame` out by strategy and action: seconds by machine, then what moves.

    Bytes, arithmetic and memory are those of one machine where it has such an action, and else of
    another; bytes over a link are the most of any.
    """
    import pandas as pd

    index = ["recipe", "strategy", "action"]
    seconds = actions.pivot(index=index, columns="machine", values="seconds")
    order = actions.assign(other=actions.machine != machine).sort_values("other", kind="stable")
    by_action = order.groupby(index, sort=False)
    moved = by_action[["tflop", "disk_gb", "host_gb", "device_gb", "memory_gb"]].first()
    moved.insert(3, "link_gb", by_action.link_gb.max())
    return pd.concat([seconds[[*dict.fromkeys(actions.machine)]].loc[moved.index], moved], axis=1)


def tokens_frame(
    recipes: Iterable[Recipe], pricings: Pricings, tokens: Iterable[int], restore: str = "reread"
) -> "pd.DataFrame":
    """List what binding adds to a later render by its video tokens: fused, at run time, per layer.

    Columns ``recipe``, ``apply``, ``tokens`` (of every phase that has video), ``seconds``,
    ``provenance``. The kernel is ``gemm``.
    """
    import pandas as pd

    rows = []
    for recipe, number in itertools.product(recipes, tokens):
        prices = pricings.of(recipe, "gemm")
        phases = tuple(
            replace(phase, video_tokens=number if phase.video_tokens else None)
            for phase in recipe.phases
        )
        sized = replace(recipe, phases=phases)
        for how, strategy in {
            f"fused, {restore}": Strategy(restore=restore),
            "runtime": Strategy(apply="runtime"),
            "per layer": Strategy(apply="per_layer"),
        }.items():
            bill = price_plan(plan(sized, strategy, 2), sized, strategy, prices)
            _, later = first_and_later(bill, len(phases), 2)
            row = {"recipe": recipe.name, "apply": how, "tokens": number, "seconds": later}
            rows.append(row | {"provenance": "predicted"})
    return pd.DataFrame(rows)


def changes_frame(changes: Iterable[Change]) -> "pd.DataFrame":
    """List where the answer changes, a row each, as a person tells it."""
    import pandas as pd

    def told(parameter: str, at: float) -> str:
        if parameter == "memory":
            return f"{at / 2**30:.3g} GiB"
        if parameter == "idle":
            return f"{at:.3g} s" if at > 1e-3 else "any"
        return f"{at:,.0f}"

    rows = [
        {
            "along": change.parameter,
            "from": told(change.parameter, change.at),
            "the answer becomes": change.after,
            "it was": change.before,
        }
        for change in changes
    ]
    return pd.DataFrame(rows, columns=["along", "from", "the answer becomes", "it was"])


def predicted_frame(
    records: Iterable[Record], machine: Machine, geometries: Iterable[Geometry]
) -> "pd.DataFrame":
    """Hold a machine's model against records of it: see :func:`lorabench.predicted.predict`.

    Records of a kernel that the machine has no figures of are left out. Every adapter that a
    record's case binds is taken to touch every target of its geometry.
    """
    import pandas as pd

    by_roles: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        if record.case.get("kernel", "gemm") in machine.kernels:
            by_roles.setdefault(_roles(record), []).append(record)
    found = []
    for geometry in geometries:
        for roles, mine in by_roles.items():
            counted = Counted(geometry, touches_of(geometry, roles))

            @cache
            def price(kernel: str, counted: Counted = counted) -> Pricing:
                return Pricing(machine, kernel, counted)

            found.append(predict(mine, price))
    return pd.concat(found, ignore_index=True)


def _roles(record: Record) -> tuple[str, ...]:
    case: Mapping[str, Any] = record.case
    if "roles" in case:
        return tuple(case["roles"])
    states = [State.parse(text) for text in (*case.get("phases", ()), case.get("state", "base"))]
    return tuple(sorted({role for state in states for role in state}))


_WAYS = ("disk", "host", "link", "device")


def _choices(advices: Advices) -> Iterator[tuple[str, str, str, Choice]]:
    return (found for _, found in _advised_choices(advices))


def _advised_choices(advices: Advices) -> Iterator[tuple[Advice, tuple[str, str, str, Choice]]]:
    for machine, asked in advices.items():
        for advice in asked:
            for name, choice in {**advice.named, ADVISED: advice.best}.items():
                yield advice, (machine, advice.setting.recipe.name, name, choice)


def _named(action: Action) -> str:
    if isinstance(action, Load):
        return f"load {action.state}"
    if isinstance(action, Denoise):
        return f"phase {action.phase} in {action.state}, unfused"
    hidden = "" if action.critical else ", after the render"
    ahead = ", ahead of the forward" if action.overlapped else ""
    return f"{action.before} → {action.after}{hidden}{ahead}"
