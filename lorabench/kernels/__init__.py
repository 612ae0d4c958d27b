"""Fuse's meaning, executed: one function a kernel, all with one signature.

A kernel takes base bits ``weight [out, in]`` (bf16, f16 or f32, contiguous; a bias as ``[n, 1]``),
the terms of a state at that weight, and scratch memory; it leaves the fused bits in ``weight``, and
rows that no term touches as they are. It allocates nothing but what the scratch doesn't have yet.
``reference`` is what the others are held against. Those that compute a delta first also show it:
see :class:`Tiles`. Some can't do all of that: see :func:`lorabench.limits.check_kernel`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lorabench.errors import UnavailableError, did_you_mean
from lorabench.fuse import RULES, Term, by_rows, reference_deltas
from lorabench.kernels.gemm import gemm_tiles
from lorabench.kernels.scratch import Scratch
from lorabench.kernels.tiles import Tiles

Kernel = Callable[[Tensor, Sequence[Term], Scratch], None]


def _fuse_scalar(weight: Tensor, terms: Sequence[Term], scratch: Scratch) -> None:
    # numba compiles on first use; whoever doesn't ask for this kernel doesn't wait for it.
    from lorabench.kernels.scalar import fuse_scalar

    fuse_scalar(weight, terms, scratch)


def _by_rows(kernel: Kernel) -> Kernel:
    """Give a kernel, whose terms have to touch all of a weight, rows that the same terms touch."""

    def fuse(weight: Tensor, terms: Sequence[Term], scratch: Scratch) -> None:
        for rows, mine in by_rows(terms):
            part = weight if len(rows) == len(weight) else weight[rows.start : rows.stop]
            kernel(part, mine, scratch)

    return fuse


def _reference_tiles(rule: str) -> Tiles:
    return Tiles(rule, lambda terms, _, dtype: iter(reference_deltas(terms, rule, dtype)))


_TILED: dict[str, Callable[[str], Tiles]] = {"reference": _reference_tiles, "gemm": gemm_tiles}

KERNELS = ("reference", "scalar", "gemm", "triton")


def get_kernel(name: str, device: torch.device, rule: str = "R1") -> Kernel:
    """Return a kernel by name, for weights on a device and a rounding rule.

    Raises
    ------
    UnavailableError
        No such kernel or rule, or the kernel doesn't have the rule or doesn't run on that device.
    """
    if name not in KERNELS:
        raise UnavailableError(
            f"no kernel '{name}'{did_you_mean(name, KERNELS)}; choose from {', '.join(KERNELS)}"
        )
    if name == "triton":
        from lorabench.kernels.triton_fuse import triton_kernel

        return _by_rows(triton_kernel(device, rule))
    if name in _TILED:
        return get_tiles(name, device, rule).fuse
    if device.type != "cpu":
        raise UnavailableError(f"kernel 'scalar' is a CPU loop; it can't run on '{device}'")
    if rule != "R1":
        raise UnavailableError(f"kernel 'scalar' has rule R1 only, {rule} was asked for")
    return _by_rows(_fuse_scalar)


def get_tiles(name: str, device: torch.device, rule: str = "R1") -> Tiles:
    """Return a kernel's tiles by its name: what it adds to a weight, before it is added.

    Raises
    ------
    UnavailableError
        No such rule, or a kernel that doesn't show its deltas.
    """
    if rule not in list(RULES):
        raise UnavailableError(
            f"no rounding rule '{rule}'{did_you_mean(rule, RULES)}; choose from {', '.join(RULES)}"
        )
    if name == "triton":
        from lorabench.kernels.triton_fuse import triton_tiles

        return triton_tiles(device, rule)
    if name not in _TILED:
        raise UnavailableError(
            f"kernel '{name}' doesn't show its deltas; choose from {', '.join(_TILED)}, triton"
        )
    return _TILED[name](rule)


def one_nan(weight: Tensor) -> None:
    """Give every NaN of a fused weight, or of the rows that were, the bits of the quiet one.

    On a CPU torch's vector path rounds a NaN to other bits than its scalar path, and which element
    is on which depends on the number of threads. For values that are known not to be finite.
    """
    weight.masked_fill_(weight.isnan(), float("nan"))


def finite_if_all(weight: Tensor) -> Tensor:
    """Return a number that isn't finite if a value of a weight isn't, by one read of it.

    It may be infinite where all values are finite but large: then they have to be looked at.
    """
    if weight.dtype != torch.float16 or not weight.numel():
        return weight.sum()
    low, high = weight.aminmax()  # an f16 sum of values like a norm's is soon infinite
    return low.float() + high.float()


__all__ = [
    "KERNELS",
    "Kernel",
    "Scratch",
    "Tiles",
    "finite_if_all",
    "get_kernel",
    "get_tiles",
    "one_nan",
]
