"""The ways of binding that a setting allows, and the best route of each."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from lorabench.plan import STRATEGY_VALUES, Strategy, loaded_state
from lorabench.pricing import Memory
from lorabench.recipe import BASE, State
from lorabench.routes import Course, Route
from lorabench.setting import Pricings, Setting


class Candidate(NamedTuple):
    """The best route of a way of binding."""

    course: Course
    strategy: Strategy
    route: Route

    @property
    def memory(self) -> Memory:
        """The memory that it takes."""
        return self.course.memory


def fits(memory: Memory, limits: Memory) -> bool:
    """Whether that memory is within limits."""
    return all(held <= limit for held, limit in zip(memory, limits, strict=True))


def courses(setting: Setting, pricings: Pricings) -> tuple[Course, ...]:
    """Return the ways of binding that a setting allows, whatever its renders, batch and memory.

    They differ in kernel, restore, apply and overlap, and in whether they come to a state that no
    phase asks for, which everything fused may be: that costs memory. What was searched for an
    earlier setting isn't searched again.
    """
    return tuple(itertools.chain(_fused(setting, pricings), _unfused(setting, pricings)))


def candidates(ways: Iterable[Course], setting: Setting) -> tuple[Candidate, ...]:
    """Return the best route of every way, the cheapest first.

    Where a field of the strategy makes no difference, there is one candidate, at its default.
    """
    found = []
    for course, order in itertools.product(ways, setting.may_be("order")):
        fused = course.strategy.apply == "resident"
        together = 1 if order == "render_major" else setting.batch or setting.renders
        route = course.best(-(-setting.renders // together) if fused else setting.renders)
        if route is None:
            continue
        if course.only_with is not None and course.only_with not in (route.load, *route.ready):
            continue
        strategy = _strategy(course, route, order, setting)
        if not (fused and _needless(strategy, route, setting)):
            found.append(Candidate(course, strategy, route))
    distinct: dict[object, Candidate] = {}
    for candidate in sorted(found, key=_preference):
        _, strategy, route = candidate
        told = (strategy.restore, strategy.apply, route.load, *route.value[:2])
        distinct.setdefault(told, candidate)
    return tuple(distinct.values())


def cheapest(found: Iterable[Candidate], limits: Memory) -> Candidate | None:
    """Return the first of some candidates that fits, if any does."""
    return next((candidate for candidate in found if fits(candidate.memory, limits)), None)


def _fused(setting: Setting, pricings: Pricings) -> Iterator[Course]:
    if "resident" not in setting.may_be("apply"):
        return
    recipe = setting.recipe
    asked = tuple(dict.fromkeys((*(phase.state for phase in recipe.phases), BASE)))
    everything = loaded_state(recipe, "all")
    for kernel, restore, overlap in itertools.product(
        _kernels(setting, pricings), setting.may_be("restore"), setting.may_be("overlap")
    ):
        if restore == "images" and overlap != "none":
            continue
        if restore == "device_snapshot" and pricings.machine.device == "cpu":
            continue
        strategy = Strategy(kernel=kernel, restore=restore, overlap=overlap)
        yield from _course(setting, pricings, strategy, asked)
        if everything not in asked:
            yield from _course(setting, pricings, strategy, (*asked, everything), everything)


def _course(
    setting: Setting,
    pricings: Pricings,
    strategy: Strategy,
    states: tuple[State, ...],
    only_with: State | None = None,
) -> Iterator[Course]:
    loads = (loaded_state(setting.recipe, load) for load in setting.may_be("load"))
    loads = tuple(dict.fromkeys(state for state in loads if state in states))
    leave = setting.may_be("leave")
    ends = states if len(leave) > 1 else () if leave == ("last_phase",) else states[:1]
    if loads:
        always = leave == ("first_phase",)
        yield pricings.course(setting, strategy, states, loads, ends, always, only_with)


def _unfused(setting: Setting, pricings: Pricings) -> Iterator[Course]:
    if "none" not in setting.may_be("overlap"):
        return
    kernels = _kernels(setting, pricings)
    states = tuple(dict.fromkeys(phase.state for phase in setting.recipe.phases))
    for apply in setting.may_be("apply"):
        if apply == "resident":
            continue
        for kernel in kernels[:1] if apply == "runtime" else kernels:
            given = {field: setting.may_be(field)[0] for field in ("load", "restore", "leave")}
            if "base" in setting.may_be("load"):
                given["load"] = "base"
            strategy = Strategy(kernel=kernel, apply=apply, **given)
            yield pricings.course(setting, strategy, states, (BASE,))


def _kernels(setting: Setting, pricings: Pricings) -> list[str]:
    return [kernel for kernel in setting.may_be("kernel") if kernel in pricings.machine.kernels]


def _strategy(course: Course, route: Route, order: str, setting: Setting) -> Strategy:
    """Return the point of the strategy space that a route is, or is nearest to."""
    if course.strategy.apply != "resident":
        return replace(course.strategy, order=order)
    load = next(
        load for load in setting.may_be("load") if loaded_state(setting.recipe, load) == route.load
    )
    leave = "first_phase" if course.always or route.value.made_ready else "last_phase"
    return replace(course.strategy, order=order, load=load, leave=leave)


def _needless(strategy: Strategy, route: Route, setting: Setting) -> bool:
    """Whether a way without a rebind says how to rebind, though it might say nothing of it."""
    fields = () if route.value.rebinds else ("restore", "order", "overlap")
    defaults = {field: STRATEGY_VALUES[field][0] for field in fields}
    return any(
        getattr(strategy, field) != default and default in setting.may_be(field)
        for field, default in defaults.items()
    )


def _preference(candidate: Candidate) -> tuple[object, ...]:
    course, strategy, route = candidate
    places = (values.index(getattr(strategy, f)) for f, values in STRATEGY_VALUES.items())
    return route.value[:2], sum(course.memory), tuple(places)
