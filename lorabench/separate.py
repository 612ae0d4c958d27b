"""Rates from timings: what weights took, taken apart into launches, products and elements.

Pure arithmetic. A rate that the timings don't show is bounded, never negative, and says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from lorabench.rates import Origin, Pace

LEAST_SHARE = 0.02
"""Of a timing, what is left to a part at least that subtracting the others leaves nothing of."""


@dataclass(frozen=True)
class Timing:
    """One operation on some weights, timed several times; amounts are of each time."""

    what: str
    """What was run, to be told."""
    seconds: tuple[float, ...]
    weights: int = 0
    flops: int = 0
    params: int = 0
    nbytes: int = 0

    @property
    def median(self) -> float:
        """The middle of the samples, in seconds."""
        return median(self.seconds)

    @property
    def origin(self) -> Origin:
        """What was run, how often, and the median."""
        return _origin([self])


@dataclass(frozen=True)
class Rate:
    """A figure, and where it is from."""

    value: float
    origin: Origin


def launch_seconds(tiny: Timing) -> Rate:
    """Return what a weight takes beside its bytes and FLOP: weights with next to none of either."""
    return Rate(tiny.median / tiny.weights, tiny.origin)


def bytes_per_second(moved: Timing) -> Rate:
    """Return the rate at which bytes were moved."""
    return Rate(moved.nbytes / moved.median, moved.origin)


def pace(more: Timing, less: Timing, launch: float) -> tuple[Pace, Origin]:
    """Tell products from elements, by the same weights with more FLOP and with less.

    A timing is ``weights * launch + flops / flops_per_second + params / params_per_second``. From
    two of them that differ in FLOP both rates follow, so that both come out as they were measured;
    where noise leaves nothing to one of the two, ``more`` does.
    """
    assert more.params == less.params
    assert more.flops > less.flops
    beside_launches = more.median - more.weights * launch
    taken = max(beside_launches, LEAST_SHARE * more.median)
    if taken > beside_launches:
        note = "launches take all of it, so that the rate is a bound"
        return Pace(more.flops / taken), _origin([more, less], note)
    a_flop = (taken - (less.median - less.weights * launch)) / (more.flops - less.flops)
    note = ""
    if a_flop * more.flops < LEAST_SHARE * taken:
        a_flop = LEAST_SHARE * taken / more.flops
        note = "more FLOP take no longer, so that flops_per_second is a bound"
    elements = taken - a_flop * more.flops
    if elements <= 0:
        note = "elements take no time beside their products"
        return Pace(more.flops / taken), _origin([more, less], note)
    return Pace(1 / a_flop, more.params / elements), _origin([more, less], note)


def beside(whole: Timing, plain: Timing, amount: int) -> Rate:
    """Return the amount a second of what an operation does beside a plain one on the same."""
    taken = whole.median - plain.median
    note = ""
    if taken < LEAST_SHARE * plain.median:
        taken = LEAST_SHARE * plain.median
        note = "it takes no longer, so that the rate is a bound"
    return Rate(amount / taken, _origin([whole, plain], note))


def _origin(timings: Sequence[Timing], note: str = "") -> Origin:
    told = " and ".join(
        f"{t.what} ({len(t.seconds)} samples, median {t.median:.4g} s)" for t in timings
    )
    return Origin("measured", f"{told}; {note}" if note else told)
