"""Weights in memory, always in exactly one known adapter state."""

from collections.abc import Callable, Mapping
from threading import RLock
from types import MappingProxyType

import torch
from torch import Tensor

from lorabench.adapter import Adapter, check_base
from lorabench.checkpoint import Checkpoint, torch_dtype
from lorabench.cost import Touches, Work, resident_bytes
from lorabench.digest import digest
from lorabench.errors import AdapterError, ConfigError, UnavailableError, WeightsLostError
from lorabench.fuse import Pair, Term
from lorabench.kernels import Scratch, get_kernel
from lorabench.machine import available_bytes
from lorabench.recipe import BASE, State, bound_state
from lorabench.restore import make_restore


def _ignore(name: str) -> None:
    """Do nothing after a weight."""


class ResidentWeights:
    """A base's weights on a device, fused with the adapters of one :class:`State`.

    The weights of a state are always fused from the base's own bits, so with an exact restore they
    don't depend on the states that came before. A rebind that fails leaves the old bits and the
    old state; where that can't be, every use raises :class:`WeightsLostError` until the next load.

    Parameters
    ----------
    base
        The opened checkpoint.
    adapters
        Opened adapters by the names that states use.
    kernel, restore
        How a pass is computed and how base bits come back; names as in
        :class:`lorabench.plan.Strategy`.
    device
        Where the weights live.

    Raises
    ------
    UnavailableError
        A kernel, restore or device that isn't available here.
    """

    def __init__(
        self,
        base: Checkpoint,
        adapters: Mapping[str, Adapter] = MappingProxyType({}),
        *,
        kernel: str = "gemm",
        restore: str = "reread",
        device: torch.device | str = "cpu",
    ) -> None:
        self.device = _device(device)
        self.base = base
        self.adapters = MappingProxyType(dict(adapters))
        check_base(base, self.adapters)
        self._lock = RLock()
        self._scratch = Scratch(self.device)
        self._kernel = get_kernel(kernel, self.device)
        self._restore_name = restore
        self._restore = make_restore(restore, base, self._kernel, self._scratch)
        self._tensors: dict[str, Tensor] = {}
        self._factors: dict[str, dict[str, Pair]] = {}
        self._state: State | None = None
        self._lost = "nothing is loaded yet"

    def __repr__(self) -> str:
        state = "not loaded" if self._state is None else str(self._state)
        return f"ResidentWeights({self.base.path}, {state}, on {self.device})"

    @property
    def state(self) -> State:
        """The state that the weights are in."""
        if self._state is None:
            raise WeightsLostError(f"the weights are in no known state: {self._lost}; call load()")
        return self._state

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Every tensor by name. A rebind changes them in place, so views of them stay valid."""
        _ = self.state
        return MappingProxyType(self._tensors)

    @property
    def touches(self) -> Touches:
        """For each adapter, the weights that it touches and its rank there."""
        return {role: adapter.targets for role, adapter in self.adapters.items()}

    def factors(self, role: str) -> Mapping[str, Pair]:
        """Return an adapter's loaded pairs, by the names of the weights that they touch."""
        _ = self.state
        return MappingProxyType(self._factors[role])

    def digest(self) -> str:
        """Return a checksum of all bits, the same on every device."""
        return digest(self.tensors)

    def load(self, state: State = BASE, after_weight: Callable[[str], None] = _ignore) -> Work:
        """Read base and factors, and fuse a state; also the way back from lost weights.

        ``after_weight`` is called with a tensor's name when its factors are read, and again when it
        is loaded and fused.

        Raises
        ------
        ConfigError
            The state names an adapter that isn't bound.
        UnavailableError
            The weights don't fit in memory.
        FileError, AdapterError
            A file can't be read, a factor isn't finite, or a fused weight overflows.
        """
        return self._sweep(lambda: self._load(bound_state(state, self.adapters), after_weight))

    def _load(self, state: State, after_weight: Callable[[str], None]) -> Work:
        if not self._tensors:
            self._check_fits()
        self.base.check_unchanged()
        self._state, self._lost = None, "a load is under way, or did not finish"
        work = Work()
        for role, adapter in self.adapters.items():
            if role not in self._factors:
                self._factors[role] = adapter.load(self.device, after_weight)
                work += Work(file_bytes=adapter.factor_bytes)
        sums: dict[str, Tensor] = {}
        touched = {name for factors in self._factors.values() for name in factors}
        for name, entry in self.base.entries.items():
            if name not in self._tensors:
                self._tensors[name] = torch.empty(
                    entry.spec.shape, dtype=torch_dtype(entry.spec.dtype), device=self.device
                )
            tensor = self._tensors[name]
            self.base.read_into(name, tensor)
            work += Work(file_bytes=tensor.nbytes)
            if name in touched:
                work += self._restore.keep(name, tensor)
                work += self._fuse(name, state, sums)
            after_weight(name)
        self._check_finite(sums, state)
        self._state = state
        return work

    def rebind(self, state: State, after_weight: Callable[[str], None] = _ignore) -> Work:
        """Bring the weights to another state in one sweep over the weights that either touches.

        Parameters
        ----------
        after_weight
            Called with each weight's name when it is done; if it raises, the rebind is undone.

        Raises
        ------
        ConfigError
            The state names an adapter that isn't bound. Nothing has changed.
        FileError
            The base can't be read again. Nothing has changed, or everything is undone.
        AdapterError
            A fused weight overflows. Everything is undone.
        WeightsLostError
            The weights were lost before, or the rebind failed and couldn't be undone.
        """
        return self._sweep(lambda: self._rebind(bound_state(state, self.adapters), after_weight))

    def _rebind(self, state: State, after_weight: Callable[[str], None]) -> Work:
        before = self.state
        if state == before:
            return Work()
        self._restore.check()
        names = self._touched(before) | self._touched(state)
        begun: list[str] = []
        sums: dict[str, Tensor] = {}
        work = Work()
        try:
            self._state, self._lost = None, "a rebind is under way, or was broken off"
            for name in (n for n in self.base.entries if n in names):
                begun.append(name)
                if terms := self._terms(name, before):
                    work += self._restore.restore(name, self._tensors[name], terms)
                work += self._fuse(name, state, sums)
                after_weight(name)
            self._check_finite(sums, state)
            self._state = state
        except BaseException as error:
            self._undo(begun, before, error)
            raise
        return work

    def _undo(self, begun: list[str], before: State, cause: BaseException) -> None:
        """Bring back the old bits and state after a failed rebind, or leave the weights lost."""
        if not self._restore.exact:
            self._lost = (
                f"a rebind failed, and restore '{self._restore_name}' can't undo it "
                f"({type(cause).__name__}: {cause})"
            )
            return
        try:
            for name in begun:
                self._restore.restore(name, self._tensors[name], self._terms(name, before))
                self._fuse(name, before, {})
        except BaseException as error:
            self._lost = f"a rebind failed, and undoing it failed too ({error})"
            raise WeightsLostError(f"{self._lost}; call load()") from cause
        self._state = before

    def _fuse(self, name: str, state: State, sums: dict[str, Tensor]) -> Work:
        terms = self._terms(name, state)
        if not terms:
            return Work()
        weight = self._tensors[name]
        self._kernel(weight, terms, self._scratch)
        # One read of a weight that is still in cache; a value that isn't finite makes the sum so.
        sums[name] = weight.sum()
        return Work(flops=sum(t.pair.flops for t in terms), fused_params=weight.numel())

    def _check_finite(self, sums: Mapping[str, Tensor], state: State) -> None:
        """Raise if fusing made a value infinite or NaN where the base's was finite."""
        for name, total in sums.items():
            if total.isfinite():
                continue
            was_finite = self.base.read(name).isfinite()
            overflown = was_finite & ~self._tensors[name].cpu().isfinite()
            if count := int(overflown.sum()):
                raise AdapterError(
                    f"{self.base.path}: weight '{name}': {count:,} values overflow in state "
                    f"'{state}'; lower the strength, or check the adapter"
                )

    def _terms(self, name: str, state: State) -> list[Term]:
        return [
            Term(self._factors[role][name], strength)
            for role, strength in state.items()
            if name in self._factors[role]
        ]

    def _touched(self, state: State) -> set[str]:
        return {name for role in state for name in self._factors[role]}

    def _sweep(self, sweep: Callable[[], Work]) -> Work:
        """Run a load or rebind alone: other threads wait, and a hook's own is refused."""
        # What a lock knows of its owner can't be left behind by a Ctrl-C, as a flag could.
        if self._lock._is_owned():  # pyright: ignore[reportAttributeAccessIssue]
            raise ConfigError(
                "a load or rebind of these weights is under way, and this was called from its "
                "hook; wait for its end (nothing was changed by this call)"
            )
        with self._lock:
            return sweep()

    def _check_fits(self) -> None:
        base_bytes = sum(spec.nbytes for spec in self.base.tensors)
        need = resident_bytes(self.touches, base_bytes, self._restore_name)
        have = _available_bytes(self.device)
        if have is not None and need > have:
            raise UnavailableError(
                f"{self.base.path}: needs {need:,} bytes of memory on '{self.device}' with restore "
                f"'{self._restore_name}', {have:,} are free; use fewer blocks or another restore"
            )


def _device(device: torch.device | str) -> torch.device:
    """Return a device by its name, if there is one."""
    try:
        found = torch.device(device)
    except RuntimeError:
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise UnavailableError(f"device '{device}' is not supported; choose 'cpu' or 'cuda'")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise UnavailableError(
            f"device '{device}' was asked for, but torch {torch.__version__} finds "
            f"{torch.cuda.device_count() or 'no'} CUDA GPU"
        )
    return found


def _available_bytes(device: torch.device) -> int | None:
    """Return free memory on a device; None where the system doesn't say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_bytes()
