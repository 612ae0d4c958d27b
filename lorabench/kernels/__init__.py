"""Fuse's meaning, executed: one function a kernel, all with one signature.

A kernel takes base bits ``weight [out, in]`` (bf16 or f32, contiguous), the terms of a state at
that weight, and scratch memory; it leaves the fused bits in ``weight``. It allocates nothing but
what the scratch doesn't have yet. ``reference`` is what the others are held against.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lorabench.errors import UnavailableError
from lorabench.fuse import Term, reference_fuse
from lorabench.kernels.gemm import fuse_gemm
from lorabench.kernels.scratch import Scratch

Kernel = Callable[[Tensor, Sequence[Term], Scratch], None]


def fuse_reference(weight: Tensor, terms: Sequence[Term], scratch: Scratch) -> None:
    """Fuse by :func:`lorabench.fuse.reference_fuse`, allocating freely."""
    weight.copy_(reference_fuse(weight, terms))


def _fuse_scalar(weight: Tensor, terms: Sequence[Term], scratch: Scratch) -> None:
    # numba compiles on first use; whoever doesn't ask for this kernel doesn't wait for it.
    from lorabench.kernels.scalar import fuse_scalar

    fuse_scalar(weight, terms, scratch)


KERNELS: dict[str, Kernel] = {
    "reference": fuse_reference,
    "scalar": _fuse_scalar,
    "gemm": fuse_gemm,
}


def get_kernel(name: str, device: torch.device) -> Kernel:
    """Return a kernel by name, for weights on a device.

    Raises
    ------
    UnavailableError
        No such kernel, or it doesn't run on that device.
    """
    if name not in KERNELS:
        raise UnavailableError(f"no kernel '{name}'; choose from {', '.join(KERNELS)}")
    if name == "scalar" and device.type != "cpu":
        raise UnavailableError(f"kernel 'scalar' is a CPU loop; it can't run on '{device}'")
    return KERNELS[name]


__all__ = ["KERNELS", "Kernel", "Scratch", "fuse_reference", "get_kernel"]
