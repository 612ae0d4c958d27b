"""The cheapest loads and rebinds of a run, by dynamic programming over states and batches.

All renders of a batch go through a phase together; a batch of one is a render. What denoising takes
is the same whatever was rebound before, so that routes are compared by what binding takes alone,
in whole nanoseconds: their sums are exact, and equals are equal.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from lorabench.bill import Bill, binding_seconds, waited_seconds
from lorabench.errors import UnavailableError
from lorabench.plan import Action, Denoise, Load, Rebind, Strategy, visits
from lorabench.pricing import Memory, Pricing
from lorabench.recipe import BASE, Recipe, State


class Value(NamedTuple):
    """What routes are compared by, in this order."""

    waited_ns: int
    """What renders wait, their own forwards left out."""
    taken_ns: int
    """What loads, rebinds and unfused adapters take, waited for or not."""
    rebinds: int = 0
    made_ready: int = 0
    """Of these, the ones at the end of a batch."""


class Route(NamedTuple):
    """A load, and the rebinds at the ends of batches; those that phases ask for follow from them.

    ``ends`` is a chain: what the last end rebinds to, or None, and the chain of those before it.
    """

    value: Value
    load: State
    ends: tuple[State | None, "tuple | None"] | None = None

    @property
    def ready(self) -> list[State | None]:
        """What each batch's end rebinds to, in their order; not told is nothing."""
        states, ends = [], self.ends
        while ends:
            state, ends = ends
            states.append(state)
        return states[::-1]


_Front = dict[tuple[State, frozenset[State]], Route]  # (resident state, states with an image)


@dataclass(frozen=True, eq=False)
class Course:
    """A way of binding whose loads and rebinds are yet to be chosen.

    Attributes
    ----------
    memory
        What it takes at most, whichever route it goes.
    strategy
        Its restore, apply and overlap matter; the kernel is the pricing's.
    loads
        The states that loading may leave, the preferred first.
    ends
        The states that a batch's end may rebind to.
    always
        Whether every batch's end, the last one too, is to rebind to the first of these.
    only_with
        A state that no phase asks for: a route that doesn't come to it is another course's, which
        takes less memory.
    """

    pricing: Pricing
    memory: Memory
    recipe: Recipe
    strategy: Strategy
    loads: tuple[State, ...]
    ends: tuple[State, ...] = ()
    always: bool = False
    idle_seconds: float = 0.0
    only_with: State | None = None

    def best(self, batches: int) -> Route | None:
        """Return the cheapest route through that many batches (unfused, through renders).

        Of equals it is the one with the fewest rebinds. None, if every route takes a figure that
        the machine's file doesn't have.
        """
        found, more = self._found
        while len(found) < batches:
            found.append(next(more))
        return found[batches - 1]

    @property
    def unpriced(self) -> tuple[str, ...]:
        """Which figures there are none of, if every route takes one of them."""
        return tuple(self._missing) if self.best(1) is None else ()

    @cached_property
    def _found(self) -> tuple[list[Route | None], Iterator[Route | None]]:
        fuses = self.strategy.apply == "resident"
        return [], self._search() if fuses else self._unfused()

    def _search(self) -> Iterator[Route | None]:
        """Give the best route for 1, 2, ... batches, each pass going on from the one before."""
        front: _Front = {}
        for state in self.loads:
            if (taken := self._load_ns(state)) is not None:
                images = frozenset([state] if self.strategy.restore == "images" else [])
                front[state, images] = Route(Value(taken, taken), state)
        while True:
            for number, phase in enumerate(self.recipe.phases):
                front = self._rebound(front, [phase.state], number)
            ended = self._rebound(front, self.ends, None, last=True) if self.always else front
            yield min(ended.values(), key=lambda route: route.value, default=None)
            front = self._rebound(front, self.ends, None)

    def _rebound(
        self, front: _Front, states: Sequence[State], phase: int | None, *, last: bool = False
    ) -> _Front:
        """Return the best route to each state, for a phase or at an end of a batch."""
        found: _Front = {}
        stays = phase is None and not self.always
        for (resident, images), route in front.items():
            for after in (resident, *states) if stays else states:
                value, load, ends = route
                if after != resident:
                    price = self._price(resident, after, after in images, phase, last)
                    if price is None:
                        continue
                    value = Value(
                        value.waited_ns + price[0],
                        value.taken_ns + price[1],
                        value.rebinds + 1,
                        value.made_ready + (phase is None),
                    )
                if phase is None:
                    ends = (after if after != resident else None, ends)
                known = images | {after} if images else images
                best = found.get((after, known))
                if best is None or value < best.value:
                    found[after, known] = Route(value, load, ends)
        return found

    def _unfused(self) -> Iterator[Route | None]:
        """Give the one route there is without a rebind, for 1, 2, ... renders."""
        loaded = self._load_ns(BASE)
        try:
            costs = [self.pricing.denoise(p, self.strategy.apply) for p in self.recipe.phases]
        except UnavailableError as error:
            loaded, costs = self._without(error), []
        each = sum(_ns(cost.parts.get("apply", 0.0)) for cost in costs)
        while True:
            if loaded is None:
                yield None
            else:
                loaded += each
                yield Route(Value(loaded, loaded), BASE)

    def _load_ns(self, state: State) -> int | None:
        try:
            cost = self.pricing.load(state, self.strategy.restore, self.strategy.apply)
        except UnavailableError as error:
            return self._without(error)
        return _ns(cost.seconds)

    def _price(
        self, before: State, after: State, imaged: bool, phase: int | None, last: bool
    ) -> tuple[int, int] | None:
        """Return what a rebind has renders wait and what it takes; None where no figure is."""
        key = (before, after, imaged, phase, last)
        if key not in self._prices:
            self._prices[key] = self._priced(*key)
        return self._prices[key]

    def _priced(
        self, before: State, after: State, imaged: bool, phase: int | None, last: bool
    ) -> tuple[int, int] | None:
        restore, pricing = self.strategy.restore, self.pricing
        try:
            cost = pricing.rebind(before, after, restore, imaged=imaged)
        except UnavailableError as error:
            return self._without(error)
        rebind = _rebind(before, after, 0, phase, self.strategy)
        waited = waited_seconds(rebind, cost, self.recipe, pricing, self.idle_seconds, not last)
        return _ns(waited), _ns(cost.seconds)

    def _without(self, error: UnavailableError) -> None:
        way = self.strategy.restore if self.strategy.apply == "resident" else self.strategy.apply
        self._missing.append(f"{way}: {error}")

    @cached_property
    def _missing(self) -> list[str]:
        return []

    @cached_property
    def _prices(self) -> dict[object, tuple[int, int] | None]:
        return {}


def value_of(bill: Bill) -> Value:
    """Return what a priced plan is compared by."""
    taken = [
        binding_seconds(line) if isinstance(line.action, Denoise) else line.cost.seconds
        for line in bill.lines
    ]
    rebinds = [line.action for line in bill.lines if isinstance(line.action, Rebind)]
    return Value(
        sum(_ns(binding_seconds(line)) for line in bill.lines),
        sum(map(_ns, taken)),
        len(rebinds),
        sum(not rebind.critical for rebind in rebinds),
    )


def actions_of(
    route: Route, recipe: Recipe, strategy: Strategy, renders: int, batch: int | None = None
) -> tuple[Action, ...]:
    """List what an engine does on a route, as :func:`lorabench.plan.plan` does for a strategy."""
    resident, ready = route.load, iter(route.ready)
    actions: list[Action] = [Load(resident)]
    for render, phase in visits(len(recipe.phases), renders, strategy.order, batch):
        wanted = next(ready, None) if phase is None else recipe.phases[phase].state
        if strategy.apply == "resident" and wanted is not None and wanted != resident:
            actions.append(_rebind(resident, wanted, render, phase, strategy))
            resident = wanted
        if phase is not None:
            actions.append(Denoise(recipe.phases[phase].state, render, phase, strategy.apply))
    return tuple(actions)


def _rebind(
    before: State, after: State, render: int, phase: int | None, strategy: Strategy
) -> Rebind:
    critical = phase is not None
    overlapped = critical and strategy.overlap != "none"
    return Rebind(before, after, render, phase, critical, overlapped)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
