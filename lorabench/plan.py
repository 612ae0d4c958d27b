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
    "apply": ("resident", "runtime", "per_layer"),
    "overlap": ("none", "first_forward"),
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
    apply
        Whether weights are fused before a phase, or hold the base while its forwards add each
        adapter's product to the weight's own (``runtime``: y + s·B(Ax)) or fuse each weight into
        scratch memory (``per_layer``). These two load the base and never rebind, whatever load,
        restore and leave say.
    overlap
        Whether a rebind ends before its phase, or goes weight by weight ahead of the phase's first
        forward.

    Raises
    ------
    ConfigError
        A field has a value that it can't have, or has it beside another's that it can't go with.
    """

    kernel: str = "gemm"
    load: str = "first_phase"
    restore: str = "reread"
    leave: str = "last_phase"
    order: str = "render_major"
    apply: str = "resident"
    overlap: str = "none"

    def __post_init__(self) -> None:
        problems = [
            f"{field}={value!r}: expected {', '.join(STRATEGY_VALUES[field])}"
            f"{did_you_mean(str(value), STRATEGY_VALUES[field])}"
            for field, value in dataclasses.asdict(self).items()
            if value not in STRATEGY_VALUES[field]
        ]
        if self.overlap != "none" and (self.apply != "resident" or self.restore == "images"):
            problems.append(
                f"overlap={self.overlap} goes with rebinds in place: expected apply=resident and "
                f"another restore than images, found apply={self.apply}, restore={self.restore}"
            )
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
    "residual": replace(_BOTH_FIXES, restore="residual"),
    "images": replace(_BOTH_FIXES, restore="images"),
    "overlapped": replace(_SNAPSHOT, overlap="first_forward"),
    "runtime": replace(_BOTH_FIXES, load="base", apply="runtime"),
    "per_layer": replace(_BOTH_FIXES, load="base", apply="per_layer"),
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
    "residual": "both_fixes with what a subtraction gets wrong kept, in some 0.65 bits a weight",
    "images": "both_fixes with a copy of the touched weights kept for each state",
    "overlapped": "snapshot, each rebind going weight by weight ahead of its phase's first forward",
    "runtime": "nothing fused: each forward adds s·B(Ax)",
    "per_layer": "nothing kept fused: each forward fuses each weight into scratch memory",
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
    overlapped
        Whether it goes ahead of the first forward of the denoise that follows it.
    """

    kind: ClassVar[Literal["rebind"]] = "rebind"
    before: State
    after: State
    render: int
    phase: int | None
    critical: bool
    overlapped: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return the action for JSON."""
        return {
            "kind": self.kind,
            "from": self.before.as_dict(),
            "to": self.after.as_dict(),
            "render": self.render,
            "phase": self.phase,
            "critical": self.critical,
            "overlapped": self.overlapped,
        }


@dataclass(frozen=True)
class Denoise:
    """Run one phase of one render in the state that the phase asks for.

    Unless ``apply`` is ``resident``, the weights hold the base, and forwards bring the state.
    """

    kind: ClassVar[Literal["denoise"]] = "denoise"
    critical: ClassVar[bool] = True
    state: State
    render: int
    phase: int
    apply: str = "resident"

    def as_dict(self) -> dict[str, Any]:
        """Return the action for JSON."""
        return {
            "kind": self.kind,
            "state": self.state.as_dict(),
            "render": self.render,
            "phase": self.phase,
            "critical": self.critical,
            "apply": self.apply,
        }


Action = Load | Rebind | Denoise


def plan(
    recipe: Recipe, strategy: Strategy, renders: int = 1, batch: int | None = None
) -> tuple[Action, ...]:
    """List what an engine does to run some renders of a recipe, from load on.

    An action that would leave the state as it is isn't in the list. With ``leave=first_phase``
    every render, the last one too, ends with a rebind that no render waits for: a server doesn't
    know which of its renders is the last. Under ``order=phase_major`` the renders of the batch
    end together, so that rebind comes once, at the batch's end, and names the last render. Where
    nothing is fused (``apply``), there is a load of the base and the denoising, in the same order.

    Parameters
    ----------
    recipe
        A bound recipe (see `Recipe.bind`); one that isn't bound counts every role as bound at 1.
    strategy
        Its kernel and restore don't matter here.
    renders
        How many renders.
    batch
        How many of them go through a phase together under ``order=phase_major``; all by default.

    Raises
    ------
    ConfigError
        Fewer than one render, or than one in a batch.
    """
    for name, number in (("renders", renders), ("batch", batch)):
        if number is not None and number < 1:
            raise ConfigError(f"{name}: expected 1 or more, found {number}; ask for one at least")
    fuses = strategy.apply == "resident"
    resident = loaded_state(recipe, strategy.load) if fuses else BASE
    actions: list[Action] = [Load(resident)]
    for render, phase in visits(len(recipe.phases), renders, strategy.order, batch):
        if phase is None and strategy.leave == "last_phase":
            continue
        wanted = recipe.phases[0 if phase is None else phase].state
        if fuses and wanted != resident:
            critical = phase is not None
            overlapped = critical and strategy.overlap != "none"
            actions.append(Rebind(resident, wanted, render, phase, critical, overlapped))
            resident = wanted
        if phase is not None:
            actions.append(Denoise(wanted, render, phase, strategy.apply))
    return tuple(actions)


def count(actions: Iterable[Action], kind: Literal["load", "rebind", "denoise"]) -> int:
    """Return how many of the actions are of this kind."""
    return sum(action.kind == kind for action in actions)


def loaded_state(recipe: Recipe, load: str) -> State:
    """Return the state that loading leaves, by a strategy's ``load``."""
    if load == "base":
        return BASE
    if load == "first_phase":
        return recipe.phases[0].state
    # later phases overwrite earlier ones, so that each role keeps the strength of its last use
    last = {role: s for phase in recipe.phases for role, s in phase.state.items()}
    return State((role.name, last[role.name]) for role in recipe.roles if role.name in last)


def visits(
    phases: int, renders: int, order: str, batch: int | None = None
) -> Iterator[tuple[int, int | None]]:
    """Give (render, phase) in the order they run; phase None is where a render or batch ends.

    A batch's end names its last render.
    """
    together = 1 if order == "render_major" else batch or renders
    for first in range(0, renders, together):
        some = range(first, min(first + together, renders))
        yield from ((render, phase) for phase in range(phases) for render in some)
        yield some[-1], None
