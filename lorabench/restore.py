"""The ways back to base bits, side by side.

========================  =======================================  =====  =========================
restore                   keeps                                    exact  an unfuse costs
========================  =======================================  =====  =========================
``reread``                nothing                                  yes    reading the file again
``host_snapshot``         the touched weights, in host memory      yes    a copy
``device_snapshot``       the touched weights, on the device       yes    a copy
``subtract``              nothing                                  no     one more pass
========================  =======================================  =====  =========================

Each is told every touched weight's base bits once, at load (``keep``), is asked before the first
write of a rebind whether it can serve (``check``), and then gives base bits back weight by weight.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from lorabench.checkpoint import Checkpoint
from lorabench.cost import Work
from lorabench.errors import UnavailableError
from lorabench.fuse import Term
from lorabench.kernels import Kernel, Scratch


class Restore(Protocol):
    """What :class:`~lorabench.resident.ResidentWeights` asks of a way back to base bits."""

    exact: bool

    def keep(self, name: str, weight: Tensor) -> Work:
        """Take note of a touched weight's base bits."""
        ...

    def check(self) -> None:
        """Raise if base bits couldn't be given back now; called before the first write."""
        ...

    def restore(self, name: str, weight: Tensor, terms: Sequence[Term]) -> Work:
        """Turn ``weight``, which has ``terms`` fused in, back to base bits."""
        ...


class Reread:
    """Read the base's bits from its file again, as the engine of vllm.cpp #1210 does."""

    exact = True

    def __init__(self, base: Checkpoint) -> None:
        self._base = base

    def keep(self, name: str, weight: Tensor) -> Work:
        """Keep nothing."""
        return Work()

    def check(self) -> None:
        """Raise :class:`~lorabench.errors.FileError` if the file changed or is gone."""
        self._base.check_unchanged()

    def restore(self, name: str, weight: Tensor, terms: Sequence[Term]) -> Work:
        """Read the weight."""
        self._base.read_into(name, weight)
        return Work(file_bytes=weight.nbytes)


class Snapshot:
    """Keep a copy of each touched weight on a device, and copy it back."""

    exact = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[str, Tensor] = {}

    def keep(self, name: str, weight: Tensor) -> Work:
        """Copy the weight."""
        if name not in self._kept:
            self._kept[name] = torch.empty_like(weight, device=self._device)
        self._kept[name].copy_(weight)
        return Work(snapshot_bytes=weight.nbytes)

    def check(self) -> None:
        """Memory can always be read."""

    def restore(self, name: str, weight: Tensor, terms: Sequence[Term]) -> Work:
        """Copy the weight back."""
        weight.copy_(self._kept[name])
        return Work(snapshot_bytes=weight.nbytes)


class Subtract:
    """Fuse again at the negative strength: what most engines do, and inexact.

    Rounding is symmetric, so the delta is exactly the negative of the one fused in; but the bits
    that rounding the fused weight cut off don't come back.
    """

    exact = False

    def __init__(self, kernel: Kernel, scratch: Scratch) -> None:
        self._kernel = kernel
        self._scratch = scratch

    def keep(self, name: str, weight: Tensor) -> Work:
        """Keep nothing."""
        return Work()

    def check(self) -> None:
        """Factors can always be subtracted."""

    def restore(self, name: str, weight: Tensor, terms: Sequence[Term]) -> Work:
        """Fuse the negative of the terms."""
        negative = [Term(pair, -strength) for pair, strength in terms]
        self._kernel(weight, negative, self._scratch)
        return Work(flops=sum(pair.flops for pair, _ in terms), fused_params=weight.numel())


_MAKE: dict[str, Callable[[Checkpoint, Kernel, Scratch], Restore]] = {
    "reread": lambda base, kernel, scratch: Reread(base),
    "host_snapshot": lambda base, kernel, scratch: Snapshot(torch.device("cpu")),
    "device_snapshot": lambda base, kernel, scratch: Snapshot(scratch.device),
    "subtract": lambda base, kernel, scratch: Subtract(kernel, scratch),
}


def make_restore(name: str, base: Checkpoint, kernel: Kernel, scratch: Scratch) -> Restore:
    """Make a way back to base bits by its name; ``scratch`` is on the weights' device.

    Raises
    ------
    UnavailableError
        No such way, or none on this device.
    """
    check_restore(name, scratch.device)
    return _MAKE[name](base, kernel, scratch)


def check_restore(name: str, device: torch.device) -> None:
    """Raise :class:`UnavailableError` if there is no such way on a device."""
    if name not in _MAKE:
        raise UnavailableError(
            f"restore '{name}' has no implementation in this version; choose from "
            f"{', '.join(_MAKE)}"
        )
    if name == "device_snapshot" and device.type == "cpu":
        raise UnavailableError(
            "restore 'device_snapshot' needs a device with memory of its own; on the CPU use "
            "'host_snapshot'"
        )
