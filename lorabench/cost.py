"""What an action reads, computes and keeps, by arithmetic on headers alone.

``Work`` is also what :class:`~lorabench.resident.ResidentWeights` counts while it executes, so that
a prediction and a run are compared number for number.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lorabench.geometry import Geometry, Target
from lorabench.plan import Action, Denoise, Load
from lorabench.recipe import State

Touches = Mapping[str, Sequence[Target]]
"""For each bound adapter, the weights that it touches and its rank there."""


@dataclass(frozen=True)
class Work:
    """What was done, or is to be done, in whole numbers."""

    flops: int = 0
    """Of the products B @ A; one multiply-accumulate is two."""
    file_bytes: int = 0
    """Read from files: base weights and adapter factors."""
    snapshot_bytes: int = 0
    """Copied to or from a snapshot in memory."""
    fused_params: int = 0
    """Weights' elements that a delta was added to, each time counted."""

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.flops + other.flops,
            self.file_bytes + other.file_bytes,
            self.snapshot_bytes + other.snapshot_bytes,
            self.fused_params + other.fused_params,
        )


def touches_of(geometry: Geometry, roles: Iterable[str]) -> Touches:
    """Let every role's adapter touch every target of a geometry, at the geometry's rank."""
    return dict.fromkeys(roles, geometry.targets)


def predict_work(action: Action, touches: Touches, base_bytes: int, restore: str) -> Work:
    """Return what an action takes under a way of restoring; a load is the first, factors included.

    Parameters
    ----------
    base_bytes
        Bytes of all of the base's tensors.
    restore
        A value of :attr:`lorabench.plan.Strategy.restore`: ``reread``, ``host_snapshot``,
        ``device_snapshot`` or ``subtract``.
    """
    if isinstance(action, Denoise):
        return Work()
    if isinstance(action, Load):
        return _load_work(action.state, touches, base_bytes, restore)
    return _unfuse_work(action.before, touches, restore) + _fuse_work(action.after, touches)


def resident_bytes(touches: Touches, base_bytes: int, restore: str) -> int:
    """Return the bytes that stay in memory: weights, factors (bf16) and what the restore keeps."""
    factors = 2 * sum(target.adapter_params for ts in touches.values() for target in ts)
    kept = _weight_bytes(touches, touches) if restore.endswith("_snapshot") else 0
    return base_bytes + factors + kept


@dataclass(frozen=True)
class Parts:
    """Seconds of one sweep over a model, apart for what a cut shares and for what it repeats."""

    globals_seconds: float
    block_seconds: float

    def at(self, blocks: int) -> float:
        """Return the seconds at a depth: the globals once, and each block."""
        return self.globals_seconds + blocks * self.block_seconds


@dataclass(frozen=True)
class Prices:
    """What the parts of an action take on one machine, under one kernel and restore.

    A load, a restore and a fuse follow one another within an action, so their times add up.
    """

    load: Parts  # into the base, with the factors
    restore: Parts  # base bits back where one adapter touches everything
    fuse: Parts  # one adapter on everything

    def parts(self, action: Action, blocks: int) -> dict[str, float]:
        """Predict the seconds of an action's parts at a depth: ``load``, ``restore``, ``fuse``.

        Strength makes no difference, and each adapter of a state adds one fuse.
        """
        if isinstance(action, Denoise):
            return {}
        seconds = {}
        if isinstance(action, Load):
            state = action.state
            seconds["load"] = self.load.at(blocks)
        else:
            state = action.after
            if action.before:
                seconds["restore"] = self.restore.at(blocks)
        if state:
            seconds["fuse"] = len(state) * self.fuse.at(blocks)
        return seconds


def _load_work(state: State, touches: Touches, base_bytes: int, restore: str) -> Work:
    factors = 2 * sum(target.adapter_params for ts in touches.values() for target in ts)
    kept = _weight_bytes(touches, touches) if restore.endswith("_snapshot") else 0
    read = Work(file_bytes=base_bytes + factors, snapshot_bytes=kept)
    return read + _fuse_work(state, touches)


def _unfuse_work(state: State, touches: Touches, restore: str) -> Work:
    if restore == "subtract":
        return _fuse_work(state, touches)
    nbytes = _weight_bytes(state, touches)
    return Work(file_bytes=nbytes) if restore == "reread" else Work(snapshot_bytes=nbytes)


def _fuse_work(state: State, touches: Touches) -> Work:
    targets = [target for role in state for target in touches[role]]
    touched = {target.weight.name: target.weight.params for target in targets}
    return Work(flops=2 * sum(t.macs for t in targets), fused_params=sum(touched.values()))


def _weight_bytes(roles: Iterable[str], touches: Touches) -> int:
    return sum({t.weight.name: t.weight.nbytes for r in roles for t in touches[r]}.values())
