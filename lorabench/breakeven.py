"""Where another plan becomes the cheapest: along one parameter, and over renders and memory."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

from lorabench.errors import ConfigError, did_you_mean
from lorabench.plan_text import duration, gib
from lorabench.planner import label
from lorabench.recipe import Phase, Recipe
from lorabench.routes import Course
from lorabench.setting import Pricings, Setting
from lorabench.ways import Candidate, candidates, cheapest, courses

PARAMETERS = {
    "renders": "renders",
    "batch": "renders that may go through a phase together",
    "idle": "seconds between a render or batch and the next",
    "memory": "bytes of the device's memory",
    "steps": "steps of the first phase, the others' in proportion",
    "tokens": "video tokens of the first phase that has any, the others' in proportion",
}
"""What may be varied, and in what it is counted."""

NOTHING = "nothing fits"
"""The answer where memory is too small for any plan."""

_POINTS = 48  # of a scan
_CLOSE = 1.01  # of bytes and of seconds: how near to a change is near enough


@dataclass(frozen=True)
class Change:
    """Where the answer changes along a parameter.

    Attributes
    ----------
    at
        The least value found that has the answer ``after``: exact for whole numbers, within 1 % of
        bytes and seconds.
    before, after
        Labels of the cheapest plans: see :func:`lorabench.planner.label`.
    """

    parameter: str
    at: float
    before: str
    after: str

    @property
    def says(self) -> str:
        """The change in words."""
        match self.parameter:
            case "memory":
                at = f"{gib(int(self.at))} of memory"
            case "idle":
                at = f"{duration(self.at)} idle after a render or batch"
            case "batch":
                at = f"{self.at:,.0f} renders in a batch"
            case "renders":
                at = f"{self.at:,.0f} renders"
            case _:
                many = {"steps": "steps", "tokens": "video tokens"}[self.parameter]
                at = f"{self.at:,.0f} {many} in the first phase, others in proportion"
        return f"from {at} on: {self.after}, rather than {self.before}"

    def as_dict(self) -> dict[str, Any]:
        """Return the change for JSON."""
        return asdict(self) | {"says": self.says}


def changes(setting: Setting, pricings: Pricings) -> tuple[Change, ...]:
    """Return where the answer changes along every parameter, around a setting.

    See `changes_of`; the setting's other parameters stay as they are.
    """
    found = []
    for parameter, (low, high) in _ranges(setting).items():
        found += changes_of(parameter, setting, pricings, low, high)
    return tuple(found)


def changes_of(
    parameter: str, setting: Setting, pricings: Pricings, low: float, high: float
) -> tuple[Change, ...]:
    """Return where the answer changes as one parameter grows from ``low`` to ``high``.

    The parameter is scanned at points that are evenly apart in its logarithm, and every interval
    between points with different answers is halved down to the changes in it. An answer that comes
    and goes within an interval stays unseen.

    Parameters
    ----------
    parameter
        One of `PARAMETERS`.

    Raises
    ------
    ConfigError
        There is no such parameter, the recipe has none, or the range is empty.
    """
    if parameter not in PARAMETERS:
        raise ConfigError(
            f"no parameter '{parameter}'{did_you_mean(parameter, PARAMETERS)}; there are "
            f"{', '.join(PARAMETERS)}"
        )
    if not (1 if parameter != "idle" else 0) <= low <= high < math.inf:
        raise ConfigError(f"{parameter}: expected a range upwards, found {low} to {high}")

    @cache
    def answer(value: float) -> str:
        found = _best(_varied(setting, parameter, value), pricings)
        return NOTHING if found is None else label(found)

    found = []
    for left, right in pairwise(_points(parameter, low, high)):
        for at in _crossings(parameter, answer, left, right):
            before = found[-1].after if found else answer(low)
            found.append(Change(parameter, at, before, answer(at)))
    return tuple(found)


def answer_map(
    settings: Iterable[Setting],
    renders: Sequence[int],
    memories: Sequence[int],
    pricings: Pricings,
) -> list[dict[str, Any]]:
    """Return the answer for every setting, number of renders and device memory, as rows.

    Returns
    -------
    list of dict
        ``recipe``, ``renders``, ``memory_bytes``, ``answer`` (a label, or `NOTHING`), and of the
        answer ``binding_seconds``, ``device_bytes`` and ``host_bytes``, which are None for none.
    """
    rows = []
    for setting in settings:
        known: dict[tuple[int, tuple[Course, ...]], tuple[Candidate, ...]] = {}
        for memory in memories:
            within = replace(setting, memory_bytes=memory)
            ways, limits = courses(within, pricings), pricings.limits(within)
            for number in renders:
                if (number, ways) not in known:
                    known[number, ways] = candidates(ways, replace(setting, renders=number))
                best = cheapest(known[number, ways], limits)
                rows.append(
                    {
                        "recipe": setting.recipe.name,
                        "renders": number,
                        "memory_bytes": memory,
                        "answer": NOTHING if best is None else label(best),
                        "binding_seconds": best and best.route.value.waited_ns / 1e9,
                        "device_bytes": best and best.memory.device_bytes,
                        "host_bytes": best and best.memory.host_bytes,
                    }
                )
    return rows


def _best(setting: Setting, pricings: Pricings) -> Candidate | None:
    found = candidates(courses(setting, pricings), setting)
    return cheapest(found, pricings.limits(setting))


def _ranges(setting: Setting) -> dict[str, tuple[float, float]]:
    """Return how far each parameter is varied around a setting."""
    steps, tokens = (_first(setting.recipe, name) for name in ("steps", "video_tokens"))
    ranges: dict[str, tuple[float, float]] = {
        "renders": (1, max(100, setting.renders)),
        "batch": (1, setting.renders),
        "idle": (0, max(60.0, 10 * setting.idle_seconds)),
        "memory": (max(1, setting.memory_bytes // 8), setting.memory_bytes * 8),
        "steps": (1, 10 * (steps or 1)),
        "tokens": (max(1, (tokens or 1) // 64), 8 * (tokens or 1)),
    }
    if tokens is None:
        del ranges["tokens"]
    return ranges


def _varied(setting: Setting, parameter: str, value: float) -> Setting:
    match parameter:
        case "renders":
            return replace(setting, renders=int(value))
        case "batch":
            return replace(setting, batch=int(value))
        case "idle":
            return replace(setting, idle_seconds=value)
        case "memory":
            return replace(setting, memory_bytes=int(value))
    field = {"steps": "steps", "tokens": "video_tokens"}[parameter]
    first = _first(setting.recipe, field)
    if first is None:
        raise ConfigError(f"recipe '{setting.recipe.name}' has no {parameter} to vary")

    def scaled(phase: Phase) -> Phase:
        number = getattr(phase, field)
        scaled = None if number is None else max(1, round(number * value / first))
        return replace(phase, **{field: scaled})

    phases = tuple(scaled(phase) for phase in setting.recipe.phases)
    return replace(setting, recipe=replace(setting.recipe, phases=phases))


def _first(recipe: Recipe, field: str) -> int | None:
    numbers = (getattr(phase, field) for phase in recipe.phases)
    return next((number for number in numbers if number), None)


def _points(parameter: str, low: float, high: float) -> list[float]:
    """Return the ends of a range and points between, evenly apart in their logarithm."""
    least = max(low, high / 1e6)  # a range that begins at 0 has its next point up here
    points = (least * (high / least) ** (i / _POINTS) for i in range(_POINTS + 1)) if high else ()
    inner = points if parameter == "idle" else map(round, points)
    return sorted({low, high, *(point for point in inner if low < point < high)})


def _crossings(
    parameter: str, answer: Callable[[float], str], left: float, right: float
) -> Iterator[float]:
    """Give where the answer changes between two points, until it is that of the right one."""
    while answer(left) != answer(right):
        below, at = left, right
        while not _near(parameter, below, at):
            middle = (below + at) / 2 if parameter == "idle" else (below + at) // 2
            below, at = (middle, at) if answer(middle) == answer(left) else (below, middle)
        yield at
        left = at


def _near(parameter: str, below: float, at: float) -> bool:
    if parameter in ("memory", "idle"):
        return at <= max(below * _CLOSE, 1e-3)
    return at - below <= 1
