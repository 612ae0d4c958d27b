"""What follows from measured walks by arithmetic: other depths, other kernels, other recipes.

Everything here is ``derived``: sums of measured parts, each scaled as its globals once plus its
blocks as many times as asked, never by a plain ratio.
"""

import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from lorabench.claims import Claim
from lorabench.cost import Parts, Prices
from lorabench.errors import ConfigError
from lorabench.geometry import Geometry
from lorabench.plan import Action, Denoise, Load, Strategy, plan
from lorabench.recipe import Recipe
from lorabench.records import Record

if TYPE_CHECKING:
    import pandas as pd


def prices(records: Iterable[Record], kernel: str, restore: str) -> Prices:
    """Take the parts' seconds from walks under a kernel and restore: the median of each part.

    A fuse doesn't depend on the restore, so it is the median over all of the kernel's walks, but
    for restores that keep something whenever they fuse.

    Raises
    ------
    ConfigError
        The records lack a load into the base, a rebind to it, or one from it.
    """
    walks = [r for r in records if r.case["bench"] == "walk" and r.case["kernel"] == kernel]

    def part(what: str, **fields: str) -> Parts:
        found = [r for r in walks if all(r.case.get(k) == v for k, v in fields.items())]
        if what == "fuse":
            keeping = ("residual", "images")
            found = [
                r for r in found if r.case["state"] != "base" and r.case["restore"] not in keeping
            ]
        if not found:
            raise ConfigError(
                f"no measured {what} under kernel '{kernel}' and restore '{restore}'; run "
                f"'lorabench bench walk ti2vid_two_stage' with such a strategy"
            )
        return Parts(
            statistics.median(float(r.details["globals_seconds"]) for r in found),  # pyright: ignore[reportArgumentType]
            statistics.median(float(r.details["block_seconds"]) for r in found),  # pyright: ignore[reportArgumentType]
        )

    return Prices(
        load=part("load", action="load", state="base", restore=restore),
        restore=part("restore", action="rebind", state="base", restore=restore),
        fuse=part("fuse", action="rebind", before="base"),
    )


def at_rate(measured: Prices, geometry: Geometry, flops_per_second: float) -> Prices:
    """Replace the fuse by one whose products run at a rate, as of a loop too slow to be run whole.

    ``geometry`` is the whole model's, whose globals and blocks the products are counted in.
    """
    none, one = (geometry.cut(blocks).counts().macs or 0 for blocks in (0, 1))
    fuse = Parts(2 * none / flops_per_second, 2 * (one - none) / flops_per_second)
    return replace(measured, fuse=fuse)


def timeline(
    recipe: Recipe, strategy: Strategy, priced: Prices, blocks: int, renders: int = 2
) -> "pd.DataFrame":
    """Lay out a render-major plan in time: a row for each part of each load and rebind.

    Columns ``render``, ``start`` and ``seconds`` (within the render, the load in render 0),
    ``part``, ``label``, ``critical``, and ``opening``: whether it comes before any denoise. A
    denoise has a row of no length.
    """
    import pandas as pd

    rows = []
    clock = dict.fromkeys(range(renders), 0.0)
    opening = True
    for action in plan(recipe, strategy, renders):
        render = 0 if isinstance(action, Load) else action.render
        opening = opening and not isinstance(action, Denoise)
        for part, seconds in _timed(action, priced, blocks):
            rows.append(
                {
                    "render": render,
                    "start": clock[render],
                    "seconds": seconds,
                    "part": part,
                    "label": _label(action, part),
                    "critical": action.critical,
                    "opening": opening,
                }
            )
            clock[render] += seconds
    return pd.DataFrame(rows).assign(provenance="derived")


def walked(records: Iterable[Record]) -> "pd.DataFrame":
    """Lay out measured walks, resident or streamed: a row for each load and rebind.

    The columns are :func:`timeline`'s. A load into a fused state is one row; its ``part`` is
    ``load``. ``strategy`` names the walk.
    """
    import pandas as pd

    rows = []
    for record in records:
        case = record.case
        if case["bench"] not in ("walk", "stream"):
            continue
        part = (
            "load" if case["action"] == "load" else "fuse" if case["state"] != "base" else "restore"
        )
        rows.append(
            {
                "strategy": case["strategy"],
                "render": case.get("render", 0),
                "seconds": record.seconds[0],
                "part": part if case["critical"] else "hidden rebind",
                "label": f"{case.get('before', 'file')} → {case['state']}",
                "critical": case["critical"],
                "opening": case["action"] == "load" or (case["render"], case["phase"]) == (0, 0),
                "provenance": record.provenance,
            }
        )
    return pd.DataFrame(rows)


def _timed(action: Action, priced: Prices, blocks: int) -> Iterator[tuple[str, float]]:
    if isinstance(action, Denoise):
        yield "denoise", 0.0
        return
    for part, seconds in priced.parts(action, blocks).items():
        yield (part if action.critical else "hidden rebind"), seconds


def _label(action: Action, part: str) -> str:
    if isinstance(action, Denoise):
        return f"phase {action.phase} in {action.state}"
    if isinstance(action, Load):
        return f"load into {action.state}: {part}"
    return f"{action.before} to {action.after}: {part}"


def rebind_costs(
    recipes: Iterable[Recipe], ways: Mapping[str, tuple[Strategy, Prices]], blocks: int
) -> "pd.DataFrame":
    """List each recipe's distinct rebinds, in the order they come, and what each takes by way.

    Columns ``recipe``, ``rebind``, ``way``, ``seconds``; a recipe without rebinds has no row.
    """
    import pandas as pd

    rows = []
    for recipe in recipes:
        for way, (strategy, priced) in ways.items():
            rebinds = [a for a in plan(recipe, strategy, 2) if a.kind == "rebind"]
            for action in {(a.before, a.after): a for a in rebinds}.values():
                rows.append(
                    {
                        "recipe": recipe.name,
                        "rebind": f"{action.before} → {action.after}",
                        "way": way,
                        "seconds": sum(priced.parts(action, blocks).values()),
                    }
                )
    return pd.DataFrame(rows)


_PUBLISHED = {
    "scalar_pass_seconds": ("as written", "Zen 5, projected in design notes"),
    "gemm_pass_seconds": ("fixed", "Zen 5, projected in design notes"),
    "sglang_apply_seconds": ("another engine", "sglang, on a machine of its own"),
    "ttmetal_refuse_seconds": ("another engine", "tt-metal, on a host of its own"),
}


def published_rebinds(claims: Iterable[Claim]) -> "pd.DataFrame":
    """List what others told of fusing the adapter of the second of two stages.

    Columns ``recipe``, ``rebind``, ``machine`` (and whose figure it is), ``way``, ``seconds``,
    ``provenance``.
    """
    import pandas as pd

    by_id = {claim.id: claim for claim in claims}
    return pd.DataFrame(
        [
            {
                "recipe": "ti2vid_two_stage",
                "rebind": "base → distilled@1",
                "machine": whose,
                "way": way,
                "seconds": by_id[name].value,
                "provenance": "published",
            }
            for name, (way, whose) in _PUBLISHED.items()
        ]
    )


class Extrapolation(NamedTuple):
    """What a pass's first part said of the whole, and what the whole then took."""

    flops_per_second: float
    predicted_seconds: float
    seconds: float

    @property
    def error(self) -> float:
        """Predicted over actual seconds, less one: below zero, if the prediction was too short."""
        return self.predicted_seconds / self.seconds - 1


def first_tenth(record: Record) -> Extrapolation:
    """Predict a whole scalar pass from the rate of its first tenth, and hold it against its time.

    The tenth is of the operations, and ends with the step that completes it.

    Raises
    ------
    ConfigError
        The record isn't of a scalar pass, or of one that was broken off.
    """
    flops, total = (record.counted.get(name, 0) for name in ("flops", "pass_flops"))
    if record.case["bench"] != "loop" or not total or flops < total:
        raise ConfigError(
            f"record of bench '{record.case['bench']}': expected a scalar pass that ran to its "
            f"end, found {flops:,} of {total:,} operations; run 'lorabench bench loop --whole'"
        )
    steps = cast("list[dict[str, Any]]", record.details["progress"])
    tenth = next(step for step in steps if step["flops"] >= total / 10)
    rate = tenth["flops"] / tenth["seconds"]
    return Extrapolation(rate, total / rate, record.seconds[0])


class Hours(NamedTuple):
    """A duration that was extrapolated, between the bounds that a known error gives it."""

    low: float
    expected: float
    high: float


def hours(flops: float, flops_per_second: float, error: float) -> Hours:
    """Return the hours that operations take at a rate that may be off as another one was.

    With ``error`` as `Extrapolation` has it, that prediction was off by the factor
    q = max(1 + error, 1 / (1 + error)). The bounds are the expected hours over and times q, so
    that one of them is the prediction corrected by the error, whichever way it went, and the other
    as far off on the other side.
    """
    expected = flops / flops_per_second / 3600
    factor = max(1 + error, 1 / (1 + error))
    return Hours(expected / factor, expected, expected * factor)
