"""What is asked of a planner, and the prices that it goes by."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from lorabench.cost import Touches
from lorabench.counted import Counted
from lorabench.errors import ConfigError, did_you_mean
from lorabench.geometry import Geometry
from lorabench.plan import STRATEGY_VALUES, Strategy
from lorabench.pricing import Memory, Pricing
from lorabench.rates import Machine
from lorabench.recipe import Phase, Recipe, State
from lorabench.routes import Course

INEXACT = ("subtract",)
"""Restores that don't give the base's bits back: advised only where they are asked for by name."""


@dataclass(frozen=True)
class Setting:
    """What is to be rendered, and within what.

    Attributes
    ----------
    recipe
        A bound recipe.
    memory_bytes, host_bytes
        What weights may take of the device's memory, and of a host's memory apart from it (by
        default, all that the machine has).
    idle_seconds
        What there is between a render (or a batch) and the next.
    batch
        How many renders may go through a phase together; None: all.
    only
        What fields of a strategy may be; one that isn't named is free.

    Raises
    ------
    ConfigError
        A number is out of range, or ``only`` names what isn't.
    """

    recipe: Recipe
    renders: int
    memory_bytes: int
    host_bytes: int | None = None
    idle_seconds: float = 0.0
    batch: int | None = None
    only: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        least = {"renders": 1, "batch": 1, "memory_bytes": 1, "host_bytes": 0, "idle_seconds": 0}
        problems = [
            f"{name}: expected {low} or more, found {value}"
            for name, low in least.items()
            if (value := getattr(self, name)) is not None and not low <= value < math.inf
        ]
        for name, values in self.only.items():
            if name not in STRATEGY_VALUES:
                problems.append(
                    f"only: a strategy has no field '{name}'{did_you_mean(name, STRATEGY_VALUES)}; "
                    f"its fields: {', '.join(STRATEGY_VALUES)}"
                )
                continue
            known = ", ".join(STRATEGY_VALUES[name])
            if isinstance(values, str) or not values:
                problems.append(
                    f"only: {name}: expected some of {known} in a list, found {values!r}"
                )
            elif wrong := [value for value in values if value not in STRATEGY_VALUES[name]]:
                found = ", ".join(map(repr, wrong))
                problems.append(f"only: {name}: expected some of {known}, found {found}")
        if problems:
            raise ConfigError("setting: " + "; ".join(problems))

    def may_be(self, name: str) -> tuple[str, ...]:
        """Return what a field of a strategy may be, the default first."""
        values = STRATEGY_VALUES[name]
        if name in self.only:
            return tuple(value for value in values if value in self.only[name])
        return tuple(value for value in values if value not in INEXACT)


@dataclass(frozen=True)
class Pricings:
    """The prices of a base and adapters on a machine, worked out once for any number of settings.

    Attributes
    ----------
    touches
        What each adapter touches. A recipe may bind fewer: only what it binds is held and read.
    factor_bytes
        Bytes of all factors in their files; by default they are in bf16.
    cache
        Where the base's file comes from: the page cache (``warm``), the disk (``cold``), or the
        page cache if the memory that the weights leave has room for it (``auto``).
    """

    machine: Machine
    geometry: Geometry
    touches: Touches
    factor_bytes: int | None = None
    cache: str = "auto"

    def __post_init__(self) -> None:
        if self.cache not in ("auto", "warm", "cold"):
            raise ConfigError(f"cache: expected auto, warm or cold, found {self.cache!r}")

    def of(self, recipe: Recipe, kernel: str, *, cold: bool = False) -> Pricing:
        """Return the prices under a kernel where the adapters are those that a recipe binds."""
        roles = tuple(role.name for role in recipe.roles)
        key = (roles, kernel, cold)
        if key not in self._made:
            self._made[key] = Pricing(self.machine, kernel, self._counted(roles), cold)
        return self._made[key]

    def limits(self, setting: Setting) -> Memory:
        """Return the memory that a setting gives."""
        host = self.machine.host_bytes or 0
        if setting.host_bytes is not None and self.machine.host_bytes is not None:
            host = setting.host_bytes
        return Memory(setting.memory_bytes, host)

    def is_cold(self, setting: Setting, memory: Memory) -> bool:
        """Whether the base's file comes from the disk where weights take that memory.

        The page cache is in the machine's memory, or in its host's; a setting that gives more than
        the machine has speaks of a machine with more. A disk that no figure is known of isn't read.
        """
        if self.cache != "auto" or self.machine.read_cold is None:
            return self.cache == "cold"
        limits = self.limits(setting)
        there, held = max(self.machine.memory_bytes, limits.device_bytes), memory.device_bytes
        if self.machine.host_bytes is not None:
            there, held = max(self.machine.host_bytes, limits.host_bytes), memory.host_bytes
        base_bytes = self._counted(tuple(role.name for role in setting.recipe.roles)).base_bytes
        return there - held < base_bytes

    def held(
        self, setting: Setting, strategy: Strategy, states: Iterable[State]
    ) -> tuple[Pricing, Memory]:
        """Return a strategy's prices, and the memory that it takes to go through states."""
        warm = self.of(setting.recipe, strategy.kernel)
        memory = warm.memory(states, strategy.restore, strategy.apply)
        cold = self.is_cold(setting, memory)
        return (self.of(setting.recipe, strategy.kernel, cold=True) if cold else warm), memory

    def course(
        self,
        setting: Setting,
        strategy: Strategy,
        states: tuple[State, ...],
        loads: tuple[State, ...],
        ends: tuple[State, ...] = (),
        always: bool = False,
        only_with: State | None = None,
    ) -> Course:
        """Return a way of binding, the same one where it was asked for before."""
        pricing, memory = self.held(setting, strategy, states)
        recipe = replace(setting.recipe, name="", description="", source="", aliases=())
        if strategy.apply == "resident":  # steps don't matter to it, nor tokens unless overlapped
            tokens = strategy.overlap != "none"
            phases = (replace(p, steps=1) if tokens else Phase(p.state, 1) for p in recipe.phases)
            recipe = replace(recipe, phases=tuple(phases))
        rest = (recipe, strategy, loads, ends, always, setting.idle_seconds, only_with)
        key = (pricing.cold, *rest)
        if key not in self._made:
            self._made[key] = Course(pricing, memory, *rest)
        return self._made[key]

    def _counted(self, roles: tuple[str, ...]) -> Counted:
        if roles not in self._made:
            if missing := [role for role in roles if role not in self.touches]:
                raise ConfigError(
                    f"the recipe binds {', '.join(missing)}, and it isn't told what that touches; "
                    f"told of: {', '.join(self.touches) or 'none'}"
                )
            if self.factor_bytes is not None and set(roles) != set(self.touches):
                raise ConfigError(
                    f"factor_bytes are those of {', '.join(self.touches)}, but the recipe binds "
                    f"{', '.join(roles) or 'none'}; give those of the bound adapters alone"
                )
            touches = {role: self.touches[role] for role in roles}
            there = {tensor.name: tensor.shape for tensor in self.geometry.tensors}
            for role, target in ((r, t) for r, ts in touches.items() for t in ts):
                if (found := there.get(target.weight.name)) != target.weight.shape:
                    raise ConfigError(
                        f"adapter '{role}' touches '{target.weight.name}' of shape "
                        f"{list(target.weight.shape)}, which in geometry '{self.geometry.name}' "
                        f"{'is missing' if found is None else f'has shape {list(found)}'}; give "
                        f"the geometry of the adapter's base"
                    )
            self._made[roles] = Counted(self.geometry, touches, self.factor_bytes)
        return self._made[roles]

    @cached_property
    def _made(self) -> dict[object, Any]:
        return {}
