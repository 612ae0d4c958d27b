"""Fuse with the library's matrix product, a tile of rows at a time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lorabench.fuse import Term
from lorabench.kernels.scratch import Scratch, product_dtype

TILE = 1 << 23
"""Elements in a tile of the delta: its f32 form is 32 MiB."""


def tile_rows(in_: int) -> int:
    """Return the rows of a weight ``[out, in_]`` that go into one product."""
    return max(1, TILE // max(1, in_))


def fuse_gemm(
    weight: Tensor, terms: Sequence[Term], scratch: Scratch, product: torch.dtype | None = None
) -> None:
    """Fuse rule R1's delta into ``weight [out, in]``, rows of ``TILE`` elements at a time.

    ``product`` is the dtype that B @ A is taken in: bf16 (summed in f32 by the library) or f32 on
    the factors' widened bf16 values; by default the device's faster one.
    """
    if not terms or not weight.numel():
        return
    if product is None:
        product = product_dtype(weight.device)
    out, in_ = weight.shape
    rows = tile_rows(in_)
    factors = []
    for i, term in enumerate(terms):
        a = _rounded(term.pair.a, scratch, f"a{i}", product)
        factors.append((a, term.pair.b, term.factor))
    with _f32_sums(weight.device):
        for top in range(0, out, rows):
            tile = weight[top : top + rows]
            delta = scratch.take("delta", (len(tile), in_), torch.bfloat16)
            for i, (a, b, factor) in enumerate(factors):
                b16 = _rounded(b[top : top + rows], scratch, "b", torch.bfloat16)
                if i == 0:
                    scaled = scratch.take("scaled", tuple(b16.shape), torch.bfloat16)
                    torch.mul(b16, factor, out=scaled)
                    _product(scaled, a, delta, scratch)
                else:
                    _add_product(b16, a, factor, delta, scratch)
            _add(tile, delta, scratch)


def _rounded(factor: Tensor, scratch: Scratch, name: str, dtype: torch.dtype) -> Tensor:
    """Return a factor's bf16 values in a dtype, in scratch where that takes a conversion."""
    if factor.dtype != torch.bfloat16:
        factor = scratch.take(name, tuple(factor.shape), torch.bfloat16).copy_(factor)
    if dtype == torch.bfloat16:
        return factor
    return scratch.take(name, tuple(factor.shape), dtype).copy_(factor)


def _product(b: Tensor, a: Tensor, delta: Tensor, scratch: Scratch) -> None:
    """Write rb(b @ a) to ``delta``."""
    if a.dtype == torch.bfloat16:
        torch.mm(b, a, out=delta)
        return
    wide = _rounded(b, scratch, "wide", a.dtype)
    delta.copy_(torch.mm(wide, a, out=scratch.take("sum", tuple(delta.shape), a.dtype)))


def _add_product(b: Tensor, a: Tensor, factor: float, delta: Tensor, scratch: Scratch) -> None:
    """Write rb(delta + factor·(b @ a)) to ``delta``: an f32 sum, rounded once."""
    wide = _rounded(b, scratch, "wide", torch.float32)
    total = scratch.take("sum", tuple(delta.shape), torch.float32)
    torch.mm(wide, _rounded(a, scratch, "wide_a", torch.float32), out=total)
    total.mul_(factor)
    delta.copy_(total.add_(delta))


def _add(tile: Tensor, delta: Tensor, scratch: Scratch) -> None:
    """Write rb(delta + tile) to ``tile``; an f32 tile is widened again."""
    tile.add_(delta)
    if tile.dtype != torch.bfloat16:
        tile.copy_(delta.copy_(tile))


@contextmanager
def _f32_sums(device: torch.device) -> Iterator[None]:
    """Keep cuBLAS from summing bf16 products in bf16, which its default allows."""
    if device.type != "cuda":
        yield
        return
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    tf32 = matmul.allow_tf32
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before
        matmul.allow_tf32 = tf32
