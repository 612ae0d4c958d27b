"""Weights too big for memory, passed through a plan's states one after another."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from lorabench.adapter import Adapter, check_base
from lorabench.checkpoint import Checkpoint, torch_dtype
from lorabench.cost import Work
from lorabench.digest import BitSum, combine
from lorabench.errors import UnavailableError, WeightsLostError
from lorabench.limits import check_kernel
from lorabench.recipe import BASE, State, bound_state
from lorabench.segments import Segment, lay_out
from lorabench.stream import get_streamed_kernel, shown


def _ignore(name: str) -> None:
    """Do nothing after a weight."""


def check_streamed(kernel: str, restore: str) -> None:
    """Raise :class:`UnavailableError` unless weights can be streamed in this way."""
    get_streamed_kernel(kernel)
    if restore != "reread":
        raise UnavailableError(
            f"restore '{restore}' needs weights that stay in memory; streamed weights are read "
            f"again, so choose 'reread'"
        )


class StreamedWeights:
    """A base's weights in one state after another, of which only sums are kept.

    Each load and rebind is done in full, from the disk: what a resident rebind would touch is read,
    fused, summed up bit by bit, and dropped. So a plan runs in 1 GB or so, whatever the model's
    size, and a state's digest is that of :class:`~lorabench.resident.ResidentWeights`.

    Parameters
    ----------
    base, adapters, kernel
        As for resident weights; ``reread`` is the only restore, for nothing else keeps nothing.
    keep
        Rows to keep of each weight that the last sweep passed, by name, to be checked.

    Raises
    ------
    UnavailableError
        A kernel that can't be given tiles or do what an adapter holds, or a restore other than
        ``reread``.
    """

    def __init__(
        self,
        base: Checkpoint,
        adapters: Mapping[str, Adapter] = MappingProxyType({}),
        *,
        kernel: str = "gemm",
        restore: str = "reread",
        keep: Mapping[str, range] = MappingProxyType({}),
    ) -> None:
        check_streamed(kernel, restore)
        self.base = base
        self.adapters = MappingProxyType(dict(adapters))
        check_base(base, self.adapters)
        self.kept: dict[str, Tensor] = {}
        self._keep = keep
        check_kernel(kernel, self.adapters)
        self._kernel = get_streamed_kernel(kernel)
        self._sums: dict[str, BitSum] = {}
        self._state: State | None = None

    @property
    def state(self) -> State:
        """The state that the last load or rebind went through to."""
        if self._state is None:
            raise WeightsLostError("no load or rebind has come to its end; call load()")
        return self._state

    def digest(self) -> str:
        """Return a checksum of all bits in this state."""
        _ = self.state
        return combine(self._sums)

    def load(self, state: State = BASE, after_weight: Callable[[str], None] = _ignore) -> Work:
        """Pass every tensor into a state.

        ``after_weight`` is called with a tensor's name when all of it has passed.

        Raises
        ------
        ConfigError
            The state names an adapter that isn't bound.
        FileError, AdapterError
            A file can't be read, a factor isn't finite, or a fused weight overflows.
        """
        return self._sweep(self.base.entries, bound_state(state, self.adapters), after_weight)

    def rebind(self, state: State, after_weight: Callable[[str], None] = _ignore) -> Work:
        """Pass the weights that the state before or the new one touches.

        Raises
        ------
        ConfigError, FileError, AdapterError
            As for a load.
        WeightsLostError
            Nothing was loaded, or the last load or rebind failed.
        """
        before, state = self.state, bound_state(state, self.adapters)
        if state == before:
            return Work()
        touched = {p.weight.name for role in (*before, *state) for p in self.adapters[role].pairs}
        return self._sweep(touched, state, after_weight)

    def _sweep(
        self, names: Iterable[str], state: State, after_weight: Callable[[str], None]
    ) -> Work:
        self._state = None
        self.kept = {}
        names = list(names)
        segments = lay_out(self.base, self.adapters, state, names)
        for name in names:
            spec = self.base.entries[name].spec
            self._sums[name] = BitSum(spec.shape, torch_dtype(spec.dtype))
            if not spec.nbytes:
                after_weight(name)
        label = f"pass into {state}"
        with shown(segments, self.base, self.adapters, self._kernel, label) as passed:
            for segment, memory in passed:
                self._take(segment, memory, after_weight)
        for inputs in (self.base, *(self.adapters[role].file for role in state)):
            inputs.check_unchanged()
        self._state = state
        return sum((segment.work for segment in segments), Work())

    def _take(self, segment: Segment, memory: Tensor, after_weight: Callable[[str], None]) -> None:
        for piece in segment.pieces:
            self._sums[piece.name].update(memory[piece.at : piece.at + piece.nbytes])
            if piece.last:
                after_weight(piece.name)
        keep_rows(self.kept, segment, memory, self._keep)


def keep_rows(
    kept: dict[str, Tensor], segment: Segment, memory: Tensor, wanted: Mapping[str, range]
) -> None:
    """Copy what a segment has of the rows that are wanted, by name, to ``kept``."""
    for spec, begin, at, nbytes in segment.pieces:
        if (rows := wanted.get(spec.name)) is None:
            continue
        row_bytes = spec.nbytes // spec.shape[0]
        if spec.name not in kept:
            shape = (len(rows), *spec.shape[1:])
            kept[spec.name] = torch.empty(shape, dtype=torch_dtype(spec.dtype))
        first, end = (row * row_bytes for row in (rows.start, rows.stop))
        first, end = max(first, begin), min(end, begin + nbytes)
        if first < end:
            there = kept[spec.name].view(-1).view(torch.uint8)
            there = there[first - rows.start * row_bytes : end - rows.start * row_bytes]
            there.copy_(memory[at + first - begin : at + end - begin])
