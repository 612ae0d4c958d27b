"""What a whole plan takes: who waits for what, and how long."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from lorabench.plan import Action, Denoise, Load, Rebind, Strategy
from lorabench.pricing import Cost, Pricing
from lorabench.recipe import Recipe, State


@dataclass(frozen=True)
class Line:
    """An action and what it takes."""

    action: Action
    cost: Cost
    waited_seconds: float
    """What renders wait for it; less than it takes where it goes beside something else."""


@dataclass(frozen=True)
class Bill:
    """A plan, priced."""

    lines: tuple[Line, ...]

    @cached_property
    def critical_seconds(self) -> float:
        """What renders wait, their forwards included."""
        return math.fsum(line.waited_seconds for line in self.lines)

    @cached_property
    def binding_seconds(self) -> float:
        """What renders wait for loads, rebinds and unfused adapters: what a strategy decides."""
        return math.fsum(binding_seconds(line) for line in self.lines)

    @cached_property
    def total_seconds(self) -> float:
        """What all actions take, waited for or not."""
        return math.fsum(line.cost.seconds for line in self.lines)

    @cached_property
    def idle_needed_seconds(self) -> float:
        """The idle time after a render that would hide every rebind made in it."""
        hidden = (line.cost.seconds for line in self.lines if not line.action.critical)
        return max(hidden, default=0.0)


def binding_seconds(line: Line) -> float:
    """Return what renders wait for an action beside their forwards."""
    if isinstance(line.action, Denoise):
        return line.cost.parts.get("apply", 0.0)
    return line.waited_seconds


def first_and_later(bill: Bill, phases: int, renders: int) -> tuple[float, float | None]:
    """Split what is waited for binding: until the first render is done, and a later one's mean.

    Of renders that go through phases together, the first is done when its last phase is.
    """
    ends = (
        number
        for number, line in enumerate(bill.lines, start=1)
        if isinstance(line.action, Denoise)
        and (line.action.render, line.action.phase) == (0, phases - 1)
    )
    end = next(ends, len(bill.lines))
    first, later = (
        math.fsum(binding_seconds(line) for line in lines)
        for lines in (bill.lines[:end], bill.lines[end:])
    )
    return first, later / (renders - 1) if renders > 1 else None


def price_plan(
    actions: Sequence[Action],
    recipe: Recipe,
    strategy: Strategy,
    pricing: Pricing,
    *,
    idle_seconds: float = 0.0,
) -> Bill:
    """Price a plan's actions one after another.

    Parameters
    ----------
    actions, recipe, strategy
        A plan, as `lorabench.plan.plan` lists it, of a bound recipe.
    idle_seconds
        What an engine has between the end of a render (or of a batch) and the next one's begin, as
        while a video is decoded. A rebind that only makes ready for the next goes on in it; what
        is left when the next begins is waited for. Nobody waits after the last.
    """
    lines = []
    for index, (action, cost) in enumerate(
        zip(actions, costs(actions, recipe, strategy, pricing), strict=True)
    ):
        waited = cost.seconds
        if isinstance(action, Rebind):
            followed = index + 1 < len(actions)
            waited = waited_seconds(action, cost, recipe, pricing, idle_seconds, followed)
        lines.append(Line(action, cost, waited))
    return Bill(tuple(lines))


def waited_seconds(
    rebind: Rebind,
    cost: Cost,
    recipe: Recipe,
    pricing: Pricing,
    idle_seconds: float,
    followed: bool,
) -> float:
    """Return what renders wait for a rebind; ``followed`` says that a render comes after it."""
    if not rebind.critical:
        return max(0.0, cost.seconds - idle_seconds) if followed else 0.0
    if rebind.overlapped:
        assert rebind.phase is not None
        return pricing.exposed(cost, recipe.phases[rebind.phase])
    return cost.seconds


def costs(
    actions: Iterable[Action], recipe: Recipe, strategy: Strategy, pricing: Pricing
) -> Iterator[Cost]:
    """Give the cost of each action of a plan, from its load on."""
    imaged = set[State]()
    for action in actions:
        if isinstance(action, Denoise):
            yield pricing.denoise(recipe.phases[action.phase], action.apply)
        elif isinstance(action, Load):
            imaged = {action.state}
            yield pricing.load(action.state, strategy.restore, strategy.apply)
        else:
            known = action.after in imaged
            yield pricing.rebind(action.before, action.after, strategy.restore, imaged=known)
            imaged.add(action.after)
