"""What a run of renders does to the weights under a strategy: a list of actions, as pure data."""

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from lorabench.errors import ConfigError, did_you_mean
from lorabench.recipe import BASE, Recipe, State

# The values each field of a strategy may have, the default first.
STRATEGY_VALUES: dict[str, tuple[str, ...]] = {
    "kernel": ("gemm", "triton", "scalar", "reference"),
    "load": ("first_phase", "all", "base"),
    "restore": (
        "reread",
        "host_snapshot",
        "device_snapshot",
        "residual",
        "images",
        "subtract",
    ),
    "leave": ("last_phase", "first_phase"),
    "order": ("render_major", "phase_major"),
}


@dataclass(frozen=True)
class Strategy:
    """How an engine binds adapters to phases; `STRATEGY_VALUES` lists what each field may be.

    Attributes
    ----------
    kernel
        How a pass over the weights is computed.
    load
        The state that loading leaves: every role fused at its last strength (``all``), the first
        phase's state, or the base.
    restore
        How the base's bits come back.
    leave
        The state that a render leaves for the next one.
    order
        Whether a batch goes render by render, or all its renders go through a phase together.

    Raises
    ------
    ConfigError
        A field has a value that it can't have.
    """

    kernel: str = "gemm"
    load: str = "first_phase"
    restore: str = "reread"
    leave: str = "last_phase"
    order: str = "render_major"

    def __post_init__(self) -> None:
        problems = [
            f"{field}={value!r}: expected {', '.join(STRATEGY_VALUES[field])}"
            f"{did_you_mean(str(value), STRATEGY_VALUES[field])}"
            for field, value in dataclasses.asdict(self).items()
            if value not in STRATEGY_VALUES[field]
        ]
        if problems:
            raise ConfigError("strategy: " + "; ".join(problems))


_AS_WRITTEN = Strategy(kernel="scalar", load="all")
_BOTH_FIXES = Strategy(kernel="gemm", load="first_phase")
_SNAPSHOT = replace(_BOTH_FIXES, restore="host_snapshot")

STRATEGIES: dict[str, Strategy] = {
    "as_written": _AS_WRITTEN,
    "fast_kernel": replace(_AS_WRITTEN, kernel="gemm"),
    "phase_aware": replace(_AS_WRITTEN, load="first_phase"),
    "both_fixes": _BOTH_FIXES,
    "snapshot": _SNAPSHOT,
    "ready_for_next": replace(_SNAPSHOT, leave="first_phase"),
    "batched": replace(_SNAPSHOT, order="phase_major"),
    "subtract": replace(_BOTH_FIXES, restore="subtract"),
}

STRATEGY_NOTES: dict[str, str] = {
    "as_written": "scalar loop, everything fused at load, base re-read from the file",
    "fast_kernel": "as_written with the matrix product in place of the scalar loop",
    "phase_aware": "as_written with load leaving the first phase's state",
    "both_fixes": "matrix product, and load leaving the first phase's state",
    "snapshot": "both_fixes with the base's bits kept in host memory",
    "ready_for_next": "snapshot, each render ending with a rebind to the first phase's state",
    "batched": "snapshot, all renders of a batch going through each phase together",
    "subtract": "both_fixes with the deltas computed again and subtracted: not exact",
}


def parse_strategy(text: str) -> Strategy:
    """Read a strategy: a preset, overrides of its fields, or a preset and then overrides.

    For example ``both_fixes``, ``both_fixes,restore=host_snapshot``, or
    ``load=base,restore=subtract``, where the other fields have their defaults.

    Raises
    ------
    ConfigError
        An unknown preset, field or value, or a field given twice.
    """
    first, *rest = (part.strip() for part in text.split(","))
    strategy, overrides = Strategy(), [first, *rest]
    if "=" not in first:
        if first not in STRATEGIES:
            raise ConfigError(
                f"strategy '{text}': unknown preset '{first}'{did_you_mean(first, STRATEGIES)}; "
                f"presets: {', '.join(STRATEGIES)}"
            )
        strategy, overrides = STRATEGIES[first], rest
    fields: dict[str, str] = {}
    for override in overrides:
        field, equals, value = (part.strip() for part in override.partition("="))
        if not equals:
            raise ConfigError(
                f"strategy '{text}': expected field=value after the first comma, found "
                f"'{override}'; a preset can only come first"
            )
        if field not in STRATEGY_VALUES:
            raise ConfigError(
                f"strategy '{text}': unknown field '{field}'"
                f"{did_you_mean(field, STRATEGY_VALUES)}; fields: {', '.join(STRATEGY_VALUES)}"
            )
        if field in fields:
            raise ConfigError(f"strategy '{text}': field '{field}' is given twice; give it once")
        fields[field] = value
    return replace(strategy, **fields)


@dataclass(frozen=True)
class Load:
    """Put the weights in memory in one state; the first render waits for it."""

    kind: ClassVar[Literal["load"]] = "load"
    critical: ClassVar[bool] = True
    state: State

    def as_dict(self) -> dict[str, Any]:
        """Return the action for JSON."""
        return {"kind": self.kind, "state": self.state.as_dict(), "critical": self.critical}


@dataclass(frozen=True)
class Rebind:
    """Take the resident weights from one state to another, which differs from it.

    Attributes
    ----------
    render, phase
        What the rebind is for; phase is None for one that only makes ready for the next render.
    critical
        Whether the render waits for it.
    """

    kind: ClassVar[Literal["rebind"]] = "rebind"
    before: State
    after: State
    render: int
    phase: int | None
    critical: bool

    def as_dict(self) -> dict[str, Any]:
        """Return the action for JSON."""
        return {
            "kind": self.kind,
            "from": self.before.as_dict(),
            "to": self.after.as_dict(),
            "render": self.render,
            "phase": self.phase,
            "critical": self.critical,
        }


@dataclass(frozen=True)
class Denoise:
    """Run one phase of one render in the state that the phase asks for."""

    kind: ClassVar[Literal["denoise"]] = "denoise"
    critical: ClassVar[bool] = True
    state: State
    render: int
    phase: int

    def as_dict(self) -> dict[str, Any]:
        """Return the action for JSON."""
        return {
            "kind": self.kind,
            "state": self.state.as_dict(),
            "render": self.render,
            "phase": self.phase,
            "critical": self.critical,
        }


Action = Load | Rebind | Denoise


def plan(recipe: Recipe, strategy: Strategy, renders: int = 1) -> tuple[Action, ...]:
    """List what an engine does to run some renders of a recipe, from load on.

    An action that would leave the state as it is isn't in the list. With ``leave=first_phase``
    every render, the last one too, ends with a rebind that no render waits for: a server doesn't
    know which of its renders is the last. Under ``order=phase_major`` the renders of the batch
    end together, so that rebind comes once, at the batch's end, and names the last render.

    Parameters
    ----------
    recipe
        A bound recipe (see `Recipe.bind`); one that isn't bound counts every role as bound at 1.
    strategy
        Only its load, leave and order matter here.
    renders
        How many renders, one after another or as one batch.

    Raises
    ------
    ConfigError
        Fewer than one render.
    """
    if renders < 1:
        raise ConfigError(f"renders: expected 1 or more, found {renders}; ask for one at least")
    resident = _loaded_state(recipe, strategy.load)
    actions: list[Action] = [Load(resident)]
    for render, phase in _visits(len(recipe.phases), renders, strategy):
        wanted = recipe.phases[0 if phase is None else phase].state
        if wanted != resident:
            actions.append(Rebind(resident, wanted, render, phase, critical=phase is not None))
            resident = wanted
        if phase is not None:
            actions.append(Denoise(wanted, render, phase))
    return tuple(actions)


def count(actions: Iterable[Action], kind: Literal["load", "rebind", "denoise"]) -> int:
    """Return how many of the actions are of this kind."""
    return sum(action.kind == kind for action in actions)


def _loaded_state(recipe: Recipe, load: str) -> State:
    if load == "base":
        return BASE
    if load == "first_phase":
        return recipe.phases[0].state
    # later phases overwrite earlier ones, so that each role keeps the strength of its last use
    last = {role: s for phase in recipe.phases for role, s in phase.state.items()}
    return State((role.name, last[role.name]) for role in recipe.roles if role.name in last)


def _visits(phases: int, renders: int, strategy: Strategy) -> Iterator[tuple[int, int | None]]:
    """Yield (render, phase) in the order they run; phase None is a render's end, made ready."""
    ready = strategy.leave == "first_phase"
    if strategy.order == "phase_major":
        yield from ((render, phase) for phase in range(phases) for render in range(renders))
        if ready:
            yield renders - 1, None
        return
    for render in range(renders):
        yield from ((render, phase) for phase in range(phases))
        if ready:
            yield render, None
