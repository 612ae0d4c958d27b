"""What forwards take, scaled from a few that were measured on a cut of a model.

At a few tokens a forward's time is linear in its arithmetic already, so that those of thousands of
tokens, of other phases and of the whole model follow: everything here is ``derived``. There is no
attention in it, which grows with the square of the tokens and is the same for every strategy.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import linear_regression, median
from typing import TYPE_CHECKING

from lorabench.plan import STRATEGY_VALUES
from lorabench.recipe import Phase, Recipe, State
from lorabench.records import Record
from lorabench.streams import STREAMS, Product, forward_work

if TYPE_CHECKING:
    import pandas as pd

_LEAST = 1e-18
"""Seconds of a FLOP, where the points of what is added are all noise."""

UNFUSED = tuple(way for way in STRATEGY_VALUES["apply"] if way != "resident")


@dataclass(frozen=True)
class ForwardLine:
    """Seconds over FLOP, as of one way of applying: of the products, or of what it adds to them."""

    fixed_seconds: float
    """With no arithmetic at all, for as many products as were measured."""
    flops_per_second: float
    products: int

    def seconds(self, flops: float, products: int) -> float:
        """Return what a forward takes, or what is added to it."""
        return self.fixed_seconds * products / self.products + flops / self.flops_per_second


def forward_points(records: Iterable[Record], products: Sequence[Product]) -> "pd.DataFrame":
    """List measured forwards: ``apply``, ``tokens``, ``seconds``, ``provenance``, and what is done.

    ``flops`` are those of the products and ``apply_flops`` those of what the way adds; ``over`` is
    what it takes beyond a forward of weights that are fused.

    Parameters
    ----------
    records
        Of `lorabench.bench.denoise_case`.
    products
        Of the geometry that was measured, with the adapters that were applied.
    """
    import pandas as pd

    rows = []
    for record in records:
        case = record.case
        if case["bench"] != "denoise":
            continue
        number = int(str(case["tokens"]))
        tokens = {str(stream): number for stream in STREAMS}
        apply, state = str(case["apply"]), State.parse(str(case["state"]))
        work = forward_work(products, tokens, state, apply)
        rows.append(
            {
                "apply": apply,
                "tokens": case["tokens"],
                "seconds": median(record.seconds),
                "products": work.products,
                "flops": work.flops,
                "apply_flops": work.apply.flops,
                "provenance": record.provenance,
            }
        )
    frame = pd.DataFrame(rows)
    plain = frame[frame["apply"] == "resident"].set_index("tokens").seconds
    return frame.assign(over=frame.seconds - frame.tokens.map(plain))


def forward_lines(points: "pd.DataFrame") -> dict[str, ForwardLine]:
    """Fit a line to the points of each way: all seconds of ``resident``, what others add to it.

    A line goes through 0 where there is no fixed part to be seen: per layer, where what is added
    doesn't grow with the tokens, and where points say that more arithmetic takes less.
    """
    lines = {}
    for apply, rows in points.groupby("apply", sort=False):
        x, y = (rows.flops, rows.seconds) if apply == "resident" else (rows.apply_flops, rows.over)
        slope, fixed = linear_regression(x, y) if x.nunique() > 1 else (0.0, 0.0)
        if slope <= 0 or fixed < 0:
            slope, fixed = max(y.sum() / x.sum(), _LEAST), 0.0
        lines[str(apply)] = ForwardLine(fixed, 1 / slope, int(rows.products.iloc[0]))
    return lines


def on_lines(points: "pd.DataFrame", lines: Mapping[str, ForwardLine]) -> "pd.DataFrame":
    """Return points as their lines have them, as ``predicted``."""

    def seconds(apply: str, products: int, flops: float, apply_flops: float) -> float:
        plain = lines["resident"].seconds(flops, products)
        return plain if apply == "resident" else plain + lines[apply].seconds(apply_flops, products)

    columns = ["apply", "products", "flops", "apply_flops"]
    told = [seconds(*row) for row in points[columns].itertuples(index=False)]
    return points.assign(seconds=told, provenance="predicted")


def phase_seconds(
    phase: Phase, apply: str, lines: Mapping[str, ForwardLine], products: Sequence[Product]
) -> float:
    """Return what a phase's forwards take; unless ``resident``, what the way adds to them."""
    work = forward_work(products, phase.tokens, phase.state, apply)
    if apply == "resident":
        return phase.forwards * lines[apply].seconds(work.flops, work.products)
    if not phase.state:
        return 0.0
    return phase.forwards * lines[apply].seconds(work.apply.flops, work.products)


def added_seconds(
    recipe: Recipe, apply: str, lines: Mapping[str, ForwardLine], products: Sequence[Product]
) -> float:
    """Return what a way of not fusing adds to all forwards of one render."""
    return sum(phase_seconds(phase, apply, lines, products) for phase in recipe.phases)


def forwards_frame(
    recipes: Iterable[Recipe], lines: Mapping[str, ForwardLine], products: Sequence[Product]
) -> "pd.DataFrame":
    """List every phase: its tokens, forwards and arithmetic, and what they take.

    Columns ``recipe``, ``phase``, ``state``, a column of tokens for each stream, ``forwards``,
    ``pflop`` (of all its forwards), ``seconds``, and for each way of not fusing what it adds.
    """
    import pandas as pd

    rows = []
    for recipe in recipes:
        for number, phase in enumerate(recipe.phases):
            flops = forward_work(products, phase.tokens).flops
            rows.append(
                {
                    "recipe": recipe.name,
                    "phase": number,
                    "state": str(phase.state),
                    **phase.tokens,
                    "forwards": phase.forwards,
                    "pflop": phase.forwards * flops / 1e15,
                    "seconds": phase_seconds(phase, "resident", lines, products),
                    **{w: phase_seconds(phase, w, lines, products) for w in UNFUSED},
                    "provenance": "derived",
                }
            )
    return pd.DataFrame(rows)
