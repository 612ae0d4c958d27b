"""The ways back to base bits, side by side.

========================  =======================================  =====  =========================
restore                   keeps                                    exact  an unfuse costs
========================  =======================================  =====  =========================
``reread``                nothing                                  yes    reading the file again
``host_snapshot``         the touched weights, in host memory      yes    a copy
``device_snapshot``       the touched weights, on the device       yes    a copy
``residual``              what a subtraction would get wrong       yes    one more pass
``images``                each state's touched weights             yes    nothing
``subtract``              nothing                                  no     one more pass
========================  =======================================  =====  =========================

Each is told every touched weight's base bits once, at load (``keep``), is asked before the first
write of a rebind whether it can serve (``check``), and then fuses terms into base bits and gives
base bits back, weight by weight. A weight comes as ``[out, in]``, a bias as ``[n, 1]``.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lorabench.checkpoint import Checkpoint
from lorabench.cost import Work
from lorabench.errors import UnavailableError, did_you_mean
from lorabench.fuse import Term
from lorabench.kernels import Kernel, Scratch, get_kernel, get_tiles
from lorabench.residual import Residual, pass_work


class Restore(Protocol):
    """What :class:`~lorabench.resident.ResidentWeights` asks of a way back to base bits."""

    exact: bool

    @property
    def kept_bytes(self) -> int:
        """Bytes of memory that it holds now."""
        ...

    def keep(self, name: str, weight: Tensor) -> Work:
        """Take note of a touched weight's base bits; whatever was fused into it before is gone."""
        ...

    def check(self) -> None:
        """Raise if base bits couldn't be given back now; called before the first write."""
        ...

    def fuse(self, name: str, weight: Tensor, terms: Sequence[Term]) -> Work:
        """Fuse terms into a weight that has base bits."""
        ...

    def restore(self, name: str, weight: Tensor, terms: Sequence[Term]) -> Work:
        """Turn ``weight``, which has ``terms`` fused in, back to base bits.

        An exact way does so too where a fuse or restore of the weight was broken off.
        """
        ...


class _ByKernel:
    """A way that fuses by the kernel alone, and keeps nothing unless it says so."""

    exact = True

    def __init__(self, kernel: Kernel, scratch: Scratch) -> None:
        self._kernel = kernel
        self._scratch = scratch

    @property
    def kept_bytes(self) -> int:
        """Bytes of memory that it holds now."""
        return 0

    def keep(self, name: str, weight: Tensor) -> Work:
        """Keep nothing."""
        return Work()

    def check(self) -> None:
        """Nothing can be missing."""

    def fuse(self, name: str, weight: Tensor, terms: Sequence[Term]) -> Work:
        """Run the kernel."""
        self._kernel(weight, terms, self._scratch)
        return pass_work(weight, terms)


class Reread(_ByKernel):
    """Read the base's bits from its file again, as the engine of vllm.cpp #1210 does."""

    def __init__(self, base: Checkpoint, kernel: Kernel, scratch: Scratch) -> None:
        super().__init__(kernel, scratch)
        self._base = base

    def check(self) -> None:
        """Raise :class:`~lorabench.errors.FileError` if the file changed or is gone."""
        self._base.check_unchanged()

    def restore(self, name: str, weight: Tensor, terms: Sequence[Term]) -> Work:
        """Read the weight."""
        with self._scratch.span("read", weight.nbytes):
            self._base.read_into(name, weight.view(self._base.entries[name].spec.shape))
        return Work(file_bytes=weight.nbytes)


class Snapshot(_ByKernel):
    """Keep a copy of each touched weight on a device, and copy it back.

    Copies between a GPU and the host are queued and not waited for: the host's memory is pinned,
    and nobody but the GPU reads it.
    """

    def __init__(self, device: torch.device, kernel: Kernel, scratch: Scratch) -> None:
        super().__init__(kernel, scratch)
        self._device = device
        self._pinned = device.type == "cpu" and scratch.device.type == "cuda"
        self._kept: dict[str, Tensor] = {}

    @property
    def kept_bytes(self) -> int:
        """Bytes of the copies."""
        return sum(copy.nbytes for copy in self._kept.values())

    def keep(self, name: str, weight: Tensor) -> Work:
        """Copy the weight.

        Raises
        ------
        UnavailableError
            The host's memory can't be pinned; copies from memory that isn't are several times
            slower, and would be waited for.
        """
        if name not in self._kept:
            self._kept[name] = self._empty_like(name, weight)
        with self._scratch.span("copy", weight.nbytes):
            self._kept[name].copy_(weight, non_blocking=self._pinned)
        return Work(snapshot_bytes=weight.nbytes)

    def restore(self, name: str, weight: Tensor, terms: Sequence[Term]) -> Work:
        """Copy the weight back."""
        weight.copy_(self._kept[name], non_blocking=self._pinned)
        return Work(snapshot_bytes=weight.nbytes)

    def _empty_like(self, name: str, weight: Tensor) -> Tensor:
        try:
            return torch.empty_like(weight, device=self._device, pin_memory=self._pinned)
        except RuntimeError as error:
            if not self._pinned:
                raise
            raise UnavailableError(
                f"restore 'host_snapshot': weight '{name}': {weight.nbytes:,} bytes of host memory "
                f"can't be pinned ({error}); {self.kept_bytes:,} are pinned already; raise the "
                f"limit on locked memory, or choose 'device_snapshot' or 'residual'"
            ) from error


class Images(_ByKernel):
    """Leave the base's bits where they are.

    Each state is fused in memory of its own, into copies of the weights that
    :class:`~lorabench.resident.ResidentWeights` makes and keeps.
    """

    def restore(self, name: str, weight: Tensor, terms: Sequence[Term]) -> Work:
        """Do nothing: the weight has base bits."""
        return Work()


class Subtract(_ByKernel):
    """Fuse again at the negative strength: what most engines do, and inexact.

    Rounding is symmetric, so the delta is exactly the negative of the one fused in; but the bits
    that rounding the fused weight cut off don't come back.
    """

    exact = False

    def restore(self, name: str, weight: Tensor, terms: Sequence[Term]) -> Work:
        """Fuse the negative of the terms."""
        negative = [Term(pair, -strength) for pair, strength in terms]
        self._kernel(weight, negative, self._scratch)
        return pass_work(weight, terms)


RESTORES = ("reread", "host_snapshot", "device_snapshot", "residual", "images", "subtract")


def make_restore(
    name: str, base: Checkpoint, kernel: str, scratch: Scratch, rule: str = "R1"
) -> Restore:
    """Make a way back to base bits by its name; ``scratch`` is on the weights' device.

    Raises
    ------
    UnavailableError
        No such way, kernel or rule, or none on this device.
    """
    check_restore(name, scratch.device)
    run = get_kernel(kernel, scratch.device, rule)
    match name:
        case "reread":
            return Reread(base, run, scratch)
        case "host_snapshot":
            return Snapshot(torch.device("cpu"), run, scratch)
        case "device_snapshot":
            return Snapshot(scratch.device, run, scratch)
        case "residual":
            return Residual(get_tiles(kernel, scratch.device, rule), scratch)
        case "images":
            return Images(run, scratch)
        case _:
            return Subtract(run, scratch)


def check_restore(name: str, device: torch.device) -> None:
    """Raise :class:`UnavailableError` if there is no such way on a device."""
    if name not in RESTORES:
        raise UnavailableError(
            f"no restore '{name}'{did_you_mean(name, RESTORES)}; choose from {', '.join(RESTORES)}"
        )
    if name == "device_snapshot" and device.type == "cpu":
        raise UnavailableError(
            "restore 'device_snapshot' needs a device with memory of its own; on the CPU use "
            "'host_snapshot'"
        )
