"""Weights in memory, always in exactly one known adapter state."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import RLock
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import Tensor

from lorabench.adapter import Adapter, check_base
from lorabench.checkpoint import Checkpoint
from lorabench.cost import Touches, Work, kept_bytes, resident_bytes
from lorabench.devices import check_room, find_device
from lorabench.digest import digest
from lorabench.errors import ConfigError, WeightsLostError
from lorabench.fuse import Pair, factor_dtype
from lorabench.kernels import Scratch
from lorabench.kernels.scratch import Books, product_dtype
from lorabench.limits import check_kernel
from lorabench.loading import arriving, base_reads, read_factors
from lorabench.recipe import BASE, State, bound_state
from lorabench.restore import make_restore
from lorabench.sweep import Sweep

R = TypeVar("R")


def _ignore(name: str) -> None:
    """Do nothing after a weight."""


class ResidentWeights:
    """A base's weights on a device, fused with the adapters of one :class:`State`.

    The weights of a state are always fused from the base's own bits, so with an exact restore they
    don't depend on the states that came before. A rebind that fails leaves the old bits and the
    old state; where that can't be, every use raises :class:`WeightsLostError` until the next load.

    Under restore ``images`` the base's weights stay as they are, and each state has the weights
    that it touches in memory of its own, made when it is first asked for and kept until the next
    load or :meth:`forget`. A rebind to a state that has an image writes nothing.

    Parameters
    ----------
    base
        The opened checkpoint.
    adapters
        Opened adapters by the names that states use.
    kernel, restore
        How a pass is computed and how base bits come back; names as in
        :class:`lorabench.plan.Strategy`.
    rule
        The rounding rule, as in :data:`lorabench.fuse.RULES`.
    device
        Where the weights live.

    Raises
    ------
    UnavailableError
        A kernel, restore, rule or device that isn't available here, or a kernel that can't do what
        an adapter holds.
    """

    def __init__(
        self,
        base: Checkpoint,
        adapters: Mapping[str, Adapter] = MappingProxyType({}),
        *,
        kernel: str = "gemm",
        restore: str = "reread",
        rule: str = "R1",
        device: torch.device | str = "cpu",
    ) -> None:
        self.device = find_device(device)
        self.base = base
        self.adapters = MappingProxyType(dict(adapters))
        check_base(base, self.adapters)
        self._lock = RLock()
        self.kernel, self.restore, self.rule = kernel, restore, rule
        self._scratch = Scratch(self.device)
        self._restore = make_restore(restore, base, kernel, self._scratch, rule)
        check_kernel(kernel, self.adapters)
        self._imaged = restore == "images"
        self._tensors: dict[str, Tensor] = {}
        self._factors: dict[str, dict[str, tuple[Pair, ...]]] = {}
        # What each state's adapters touch, where that has memory of its own.
        self._images: dict[State, dict[str, Tensor]] = {}
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
        """Every tensor by name, in the state at hand.

        A rebind changes tensors in place, so that views of them stay valid and show the new state.
        Under restore ``images`` it changes none: what was taken from this mapping keeps the bits of
        the state that it was taken in, and the new state's tensors are in the mapping asked for
        anew. Nobody but this object may write to them: under ``images`` what is written stays.
        """
        image = self._images.get(self.state)
        return MappingProxyType(self._tensors | image if image else self._tensors)

    @property
    def touches(self) -> Touches:
        """For each adapter, the weights that it touches, in which rows, and its rank there."""
        return {role: adapter.targets for role, adapter in self.adapters.items()}

    @property
    def kept_bytes(self) -> int:
        """Bytes held beside weights, factors and scratch memory, for changing the state."""
        images = (w.nbytes for image in self._images.values() for w in image.values())
        return self._restore.kept_bytes + sum(images)

    @property
    def exact(self) -> bool:
        """Whether base bits come back one for one; a failed rebind can then be undone."""
        return self._restore.exact

    def predicted_bytes(self, states: Sequence[State]) -> int:
        """Predict the memory that going through states takes: see `lorabench.cost`."""
        rounded = factor_dtype(self.rule, torch.bfloat16) is not None  # so 2 bytes each
        return resident_bytes(
            self.touches,
            sum(spec.nbytes for spec in self.base.tensors),
            self.restore,
            states,
            factor_bytes=None if rounded else sum(a.factor_bytes for a in self.adapters.values()),
            f32_products=not rounded or product_dtype(self.device) == torch.float32,
        )

    @property
    def account(self) -> Books | None:
        """What books the operations of loads and rebinds from now on; by default nothing does."""
        return self._scratch.account

    @account.setter
    def account(self, account: Books | None) -> None:
        self._scratch.account = account

    def factors(self, role: str) -> Mapping[str, tuple[Pair, ...]]:
        """Return an adapter's loaded pairs, by the names of the weights that they touch.

        They are in the dtype that the rule rounds them to first, if it does.

        Raises
        ------
        ConfigError
            No adapter of that name is bound.
        """
        _ = self.state
        if role not in self._factors:
            bound = ", ".join(self._factors) or "none"
            raise ConfigError(f"no adapter '{role}' is bound; those that are: {bound}")
        return MappingProxyType(self._factors[role])

    def digest(self) -> str:
        """Return a checksum of all bits, the same on every device.

        A load or rebind that another thread has begun is waited for.
        """
        with self._lock:
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
        return self._alone(lambda: self._load(bound_state(state, self.adapters), after_weight))

    def _load(self, state: State, after_weight: Callable[[str], None]) -> Work:
        self._check_fits(state)
        self.base.check_unchanged()
        self._state, self._lost = None, "a load is under way, or did not finish"
        self._images.clear()
        work = Work()
        for role, adapter in self.adapters.items():
            if role not in self._factors:
                self._factors[role] = read_factors(
                    adapter, self.device, self.rule, self._scratch, after_weight
                )
                work += Work(file_bytes=adapter.factor_bytes)
        touched = {*self._touched(self.adapters)}
        sweep = self._sweep(state)
        reads = base_reads(self.base, self._tensors, self.device)
        with arriving(reads, self._scratch) as arrived:
            for read in arrived:
                name = read.entry.spec.name
                work += Work(file_bytes=read.into.nbytes)
                if name in touched:
                    work += sweep.keep(name)
                    work += sweep.fuse(name)
                after_weight(name)
        self._finish(sweep)
        return work

    def rebind(
        self,
        state: State,
        after_weight: Callable[[str], None] = _ignore,
        *,
        order: Iterable[str] = (),
    ) -> Work:
        """Bring the weights to another state in one sweep over the weights that either touches.

        Parameters
        ----------
        after_weight
            Called with each weight's name when it is done; if it raises, the rebind is undone.
            Under restore ``images`` that is each weight of an image that is made.
        order
            Names of the weights to begin with, as they come; the others follow in the file's order.
            Names that neither state touches are passed over.

        Raises
        ------
        ConfigError
            The state names an adapter that isn't bound. Nothing has changed.
        UnavailableError
            There is no memory for a new image. Nothing has changed.
        FileError
            The base can't be read again. Nothing has changed, or everything is undone.
        AdapterError
            A fused weight overflows. Everything is undone.
        WeightsLostError
            The weights were lost before, or the rebind failed and couldn't be undone.
        """
        return self._alone(
            lambda: self._rebind(bound_state(state, self.adapters), after_weight, order)
        )

    def _rebind(
        self, state: State, after_weight: Callable[[str], None], order: Iterable[str]
    ) -> Work:
        before = self.state
        if state == before:
            return Work()
        if self._imaged:
            return self._show(state, after_weight, order)
        self._restore.check()
        sweep = self._sweep(state)
        touched = {*self._touched(before)}
        begun: list[str] = []
        work = Work()
        try:
            self._state, self._lost = None, "a rebind is under way, or was broken off"
            for name in self._touched([*before, *state], order):
                begun.append(name)
                if name in touched:
                    work += sweep.unfuse(name, before)
                work += sweep.fuse(name)
                after_weight(name)
            self._finish(sweep)
        except BaseException as error:
            self._undo(begun, before, error)
            raise
        return work

    def _undo(self, begun: list[str], before: State, cause: BaseException) -> None:
        """Bring back the old bits and state after a failed rebind, or leave the weights lost."""
        if not self._restore.exact:
            self._lost = (
                f"a rebind failed, and restore '{self.restore}' can't undo it "
                f"({type(cause).__name__}: {cause})"
            )
            return
        try:
            sweep = self._sweep(before)
            for name in begun:
                sweep.unfuse(name, before)
                sweep.fuse(name)
        except BaseException as error:
            self._lost = f"a rebind failed, and undoing it failed too ({error})"
            raise WeightsLostError(f"{self._lost}; call load()") from cause
        self._state = before

    def _show(
        self, state: State, after_weight: Callable[[str], None], order: Iterable[str]
    ) -> Work:
        """Switch to a state's image, made now if there is none; nothing that is in use changes."""
        work = Work()
        if state not in self._images:
            image_bytes = kept_bytes(self.touches, self.restore, [state])
            check_room(f"{self.base.path}: the image of '{state}'", self.device, image_bytes)
            sweep = self._sweep(state)
            for name in self._touched(state, order):
                work += sweep.fuse(name)
                after_weight(name)
            self._finish(sweep)
        self._state = state
        return work

    def _finish(self, sweep: Sweep) -> None:
        """Take on the state that a sweep has come to."""
        sweep.check_finite(self.base)
        if sweep.image is not None:
            self._images[sweep.state] = sweep.image
        self._state = sweep.state

    def forget(self, state: State) -> None:
        """Drop a state's image; whoever took tensors from it keeps them as they are.

        Raises
        ------
        ConfigError
            The weights are in that state, or it has no image.
        """
        self._alone(lambda: self._forget(bound_state(state, self.adapters)))

    def _forget(self, state: State) -> None:
        if state not in self._images:
            images = ", ".join(f"'{s}'" for s in self._images) or "none"
            raise ConfigError(f"state '{state}' has no image to forget; those that have: {images}")
        if state == self._state:
            raise ConfigError(f"state '{state}' is in use; rebind to another before forgetting it")
        del self._images[state]

    def _sweep(self, state: State) -> Sweep:
        image = {} if self._imaged else None
        return Sweep(state, self._tensors, self._factors, self._restore, self._scratch, image)

    def _touched(self, roles: Iterable[str], order: Iterable[str] = ()) -> list[str]:
        """Name the weights that adapters touch, by an order and then in the file's."""
        names = {pair.weight.name for role in roles for pair in self.adapters[role].pairs}
        return [name for name in dict.fromkeys((*order, *self.base.entries)) if name in names]

    def _alone(self, change: Callable[[], R]) -> R:
        """Run a load or rebind alone: other threads wait, and a hook's own is refused."""
        # What a lock knows of its owner can't be left behind by a Ctrl-C, as a flag could.
        if self._lock._is_owned():  # pyright: ignore[reportAttributeAccessIssue]
            raise ConfigError(
                "a load or rebind of these weights is under way, and this was called from its "
                "hook; wait for its end (nothing was changed by this call)"
            )
        with self._lock:
            return change()

    def _check_fits(self, state: State) -> None:
        """Raise unless there is memory for loading a state, beside what is held already."""
        pairs = (p for factors in self._factors.values() for ps in factors.values() for p in ps)
        held = (*self._tensors.values(), *pairs, self._scratch)
        held_bytes = sum(one.nbytes for one in held) + self.kept_bytes
        needs = {self.device: self.predicted_bytes([state]) - held_bytes}
        if self.restore == "host_snapshot" and self.device.type != "cpu":
            kept = kept_bytes(self.touches, self.restore, [state]) - self.kept_bytes
            needs = {self.device: needs[self.device] - kept, torch.device("cpu"): kept}
        for device, nbytes in needs.items():
            what = f"{self.base.path}: state '{state}' with restore '{self.restore}'"
            check_room(what, device, nbytes)
