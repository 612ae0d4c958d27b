"""What an action reads, computes and keeps, by arithmetic on headers alone.

``Work`` is also what :class:`~lorabench.resident.ResidentWeights` counts while it executes, so that
a prediction and a run are compared number for number.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lorabench.geometry import DTYPE_BYTES, Geometry, Target
from lorabench.plan import Action, Denoise, Load
from lorabench.recipe import State
from lorabench.rows import stretches

RESIDUAL_BITS = 0.65
"""Bits that restore ``residual`` keeps of a bf16 weight where delta/weight std is 0.05.

They grow with that ratio: 0.26 at 0.01, 0.98 at 0.1, 1.75 at 0.3, 3.0 at 1, and never above 16.
"""

# Of kernel `gemm`, which can't be imported without torch: a tile's elements and its rows at most,
# the columns of an f32 product, and what an A is converted whole up to.
_TILE, _ROWS, _PANEL, _PREPARED_BYTES = 1 << 23, 1 << 13, 1 << 10, 64 << 20

_CODING_BYTES = 16
"""What coding a residual takes for each element of a chunk, about as much where few are wrong."""

_CHUNK = 1 << 20
"""Elements that are coded together on a CPU."""

Touches = Mapping[str, Sequence[Target]]
"""For each bound adapter, the weights that it touches, in which rows, and its rank there."""


@dataclass(frozen=True)
class Work:
    """What was done, or is to be done, in whole numbers."""

    flops: int = 0
    """Of the products B @ A; one multiply-accumulate is two."""
    file_bytes: int = 0
    """Read from files: base weights and adapter factors."""
    snapshot_bytes: int = 0
    """Copied to or from a snapshot in memory, or into a new image."""
    fused_params: int = 0
    """Elements that a delta was added to, each time counted; of a weight, those of some rows."""

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


def predict_plan(
    actions: Iterable[Action],
    touches: Touches,
    base_bytes: int,
    restore: str,
    *,
    factor_bytes: int | None = None,
) -> tuple[Work, ...]:
    """Return what each action of a plan takes, one after another from the first load on.

    Parameters are those of :func:`predict_work`.
    """
    works, imaged = [], set[State]()
    for action in actions:
        works.append(
            predict_work(
                action, touches, base_bytes, restore, factor_bytes=factor_bytes, imaged=imaged
            )
        )
        if isinstance(action, Load):
            imaged = {action.state}
        elif not isinstance(action, Denoise):
            imaged.add(action.after)
    return tuple(works)


def predict_work(
    action: Action,
    touches: Touches,
    base_bytes: int,
    restore: str,
    *,
    factor_bytes: int | None = None,
    imaged: Collection[State] = (),
) -> Work:
    """Return what an action takes under a way of restoring; a load is the first, factors included.

    Parameters
    ----------
    base_bytes
        Bytes of all of the base's tensors.
    restore
        A value of :attr:`lorabench.plan.Strategy.restore`.
    factor_bytes
        Bytes of all factors in their files; by default they are in bf16.
    imaged
        States that were there before, which matters to ``images`` alone: see `predict_plan`.
    """
    if isinstance(action, Denoise):
        return Work()
    if isinstance(action, Load):
        return _load_work(action.state, touches, base_bytes, restore, factor_bytes)
    if restore == "images":
        return Work() if action.after in imaged else _image_work(action.after, touches)
    return _unfuse_work(action.before, touches, restore) + _fuse_work(action.after, touches)


def resident_bytes(
    touches: Touches,
    base_bytes: int,
    restore: str,
    states: Iterable[State] | None = None,
    *,
    factor_bytes: int | None = None,
    residual_bits: float = RESIDUAL_BITS,
    f32_products: bool = False,
) -> int:
    """Return the bytes in memory while weights go through states, under kernel ``gemm`` and R1.

    They are the weights, the factors, scratch memory, and what the restore keeps. What a process
    has anyway, its interpreter and libraries, isn't counted.

    Parameters
    ----------
    base_bytes
        Bytes of all of the base's tensors.
    states
        By default one in which every adapter is fused.
    factor_bytes
        Bytes of all factors as they are held; by default in bf16.
    residual_bits
        What ``residual`` keeps of a bf16 weight.
    f32_products
        Whether the device multiplies in f32: see :func:`lorabench.kernels.scratch.product_dtype`.
    """
    states = _states(states, touches)
    if factor_bytes is None:
        factor_bytes = _bf16_factor_bytes(touches)
    scratch = _scratch_bytes(touches, restore, states, f32_products)
    kept = kept_bytes(touches, restore, states, residual_bits)
    return base_bytes + factor_bytes + scratch + kept


def kept_bytes(
    touches: Touches,
    restore: str,
    states: Iterable[State] | None = None,
    residual_bits: float = RESIDUAL_BITS,
) -> int:
    """Return the most bytes that a restore keeps while weights go through states.

    Parameters are those of :func:`resident_bytes`.
    """
    states = _states(states, touches)
    if restore.endswith("_snapshot"):
        return _weight_bytes(touches, touches)
    if restore == "images":
        return sum(_weight_bytes(state, touches) for state in {*states})
    if restore == "residual":
        return max((_residual_bytes(state, touches, residual_bits) for state in states), default=0)
    return 0


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


def _states(states: Iterable[State] | None, touches: Touches) -> list[State]:
    return [State(dict.fromkeys(touches, 1.0))] if states is None else list(states)


def _load_work(
    state: State, touches: Touches, base_bytes: int, restore: str, factor_bytes: int | None
) -> Work:
    if factor_bytes is None:
        factor_bytes = _bf16_factor_bytes(touches)
    read = Work(file_bytes=base_bytes + factor_bytes)
    if restore == "images":
        return read + _image_work(state, touches)
    if restore.endswith("_snapshot"):
        read += Work(snapshot_bytes=_weight_bytes(touches, touches))
    return read + _fuse_work(state, touches)


def _unfuse_work(state: State, touches: Touches, restore: str) -> Work:
    if restore in ("subtract", "residual"):
        return _fuse_work(state, touches)
    nbytes = _weight_bytes(state, touches)
    return Work(file_bytes=nbytes) if restore == "reread" else Work(snapshot_bytes=nbytes)


def _image_work(state: State, touches: Touches) -> Work:
    return Work(snapshot_bytes=_weight_bytes(state, touches)) + _fuse_work(state, touches)


def _fuse_work(state: State, touches: Touches) -> Work:
    return Work(
        flops=2 * sum(target.macs for role in state for target in touches[role]),
        fused_params=sum(len(rows) * targets[0].columns for rows, targets in _cut(state, touches)),
    )


def _weight_bytes(roles: Iterable[str], touches: Touches) -> int:
    return sum({t.weight.name: t.weight.nbytes for r in roles for t in touches[r]}.values())


def _bf16_factor_bytes(touches: Touches) -> int:
    return 2 * sum(target.adapter_params for targets in touches.values() for target in targets)


def _residual_bytes(state: State, touches: Touches, bits: float) -> int:
    whole = coded = 0
    for rows, (target, *_) in _cut(state, touches):
        values = len(rows) * target.columns
        if target.weight.dtype == "BF16":
            coded += values
        else:
            whole += values * DTYPE_BYTES[target.weight.dtype]
    return whole + round(coded * bits / 8)


def _cut(state: Iterable[str], touches: Touches) -> Iterator[tuple[range, list[Target]]]:
    """Cut the weights that a state touches into rows that the same pairs touch."""
    by_weight: dict[str, list[Target]] = {}
    for target in (target for role in state for target in touches[role]):
        by_weight.setdefault(target.weight.name, []).append(target)
    for targets in by_weight.values():
        for rows, mine in stretches([target.rows for target in targets]):
            yield rows, [targets[i] for i in mine]


def _scratch_bytes(
    touches: Touches, restore: str, states: Iterable[State], f32_products: bool
) -> int:
    """Return what kernel ``gemm`` takes by rule R1: of each buffer, the most that is asked for."""
    buffers: dict[str, int] = {}

    def ask(name: str, nbytes: int) -> None:
        buffers[name] = max(buffers.get(name, 0), nbytes)

    for rows, targets in (cut for state in states for cut in _cut(state, touches)):
        first, dtype, in_ = targets[0], targets[0].weight.dtype, targets[0].columns
        height = max(1, min(len(rows), _ROWS, _TILE // max(1, in_)))
        tile = height * in_
        ask("delta", 2 * tile)
        if first.rank:
            ask("scaled", 2 * height * first.rank)
        if dtype == "F32":
            ask("rounded", 2 * tile)
        if dtype == "F16":
            ask("wide tile", 4 * tile)
        if dtype != "BF16" or len(targets) > 1:
            ask("wide", 4 * tile)
        if restore == "residual":
            ask("base", DTYPE_BYTES[dtype] * tile)
            ask("coding", _CODING_BYTES * min(tile, _CHUNK))
        for number, target in enumerate(targets):
            if number:
                ask("sum", 4 * tile)
            if not target.rank or not (number or f32_products):
                continue
            if not number:
                ask("panel sum", 4 * height * min(in_, _PANEL))
            ask("wide b", 4 * height * target.rank)
            if (whole := 4 * target.rank * in_) <= _PREPARED_BYTES // len(targets):
                ask(f"wide a {number}", whole)
            else:
                ask("panel", 4 * target.rank * min(in_, _PANEL))
    return sum(buffers.values())
