"""Deltas by the library's matrix product, a tile of rows at a time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from lorabench.fuse import Term
from lorabench.kernels.scratch import Scratch, product_dtype
from lorabench.kernels.tiles import Tiles

TILE = 1 << 23
"""Elements in a tile of the delta: its f32 form is 32 MiB, its bf16 form stays in a GPU's L2."""

MAX_ROWS = 1 << 13
"""Rows in a tile at most, so that its rows of B stay small however narrow the weight is."""

PANEL = 1 << 10
"""Columns of an f32 product: B's rows and a panel of A are then packed once and stay in cache."""


def tile_rows(in_: int) -> int:
    """Return the rows of a weight ``[out, in_]`` that go into one tile."""
    return max(1, min(MAX_ROWS, TILE // max(1, in_)))


def gemm_tiles(rule: str = "R1", product: torch.dtype | None = None) -> Tiles:
    """Return the tiles of the kernel ``gemm``, ``TILE`` elements each.

    ``product`` is the dtype that rules with a bf16 product take it in: bf16 (summed in f32 by the
    library) or f32 on the factors' widened bf16 values; by default the device's faster one.
    """
    return Tiles(rule, partial(_deltas, product=product), tile_rows)


def _deltas(
    terms: Sequence[Term], scratch: Scratch, rule: str, product: torch.dtype | None
) -> Iterator[Tensor]:
    shape = (len(terms[0].pair.b), terms[0].pair.a.shape[1])
    dtype = product_dtype(scratch.device) if product is None else product
    if rule == "R4":
        yield _sum_of_products(terms, scratch, shape)
        return
    delta = scratch.take("delta", shape, torch.bfloat16)
    if rule == "R1":
        first, *further = terms
        b = _rounded(first.pair.b, scratch, "b")
        scaled = scratch.take("scaled", tuple(b.shape), torch.bfloat16)
        torch.mul(b, first.factor, out=scaled)
        _rounded_product(scaled, first.pair.a, delta, scratch, dtype)
        for term in further:
            total = _scaled_product(term, scratch, "sum", shape, rounded=True)
            with scratch.span("add", nbytes=2 * total.nbytes + 2 * delta.nbytes):
                delta.copy_(total.add_(delta))
        yield delta
        return
    for term in terms:
        if rule == "R2":
            b = _rounded(term.pair.b, scratch, "b")
            _rounded_product(b, term.pair.a, delta, scratch, dtype)
            delta.mul_(term.factor)
        else:
            assert rule == "R3", rule
            delta.copy_(_scaled_product(term, scratch, "sum", shape))
        yield delta


def _sum_of_products(terms: Sequence[Term], scratch: Scratch, shape: tuple[int, int]) -> Tensor:
    """Return Σ s·(B @ A) in f32."""
    first, *further = terms
    total = _scaled_product(first, scratch, "total", shape)
    for term in further:
        total.add_(_scaled_product(term, scratch, "sum", shape))
    return total


def _rounded(factor: Tensor, scratch: Scratch, name: str) -> Tensor:
    """Return a factor's bf16 values, in scratch where that takes a conversion."""
    if factor.dtype == torch.bfloat16:
        return factor
    return scratch.take(name, tuple(factor.shape), torch.bfloat16).copy_(factor)


def _widened(factor: Tensor, scratch: Scratch, name: str) -> Tensor:
    """Return a factor's f32 values, gapless."""
    if factor.dtype == torch.float32 and factor.is_contiguous():
        return factor
    with scratch.span("copy", nbytes=factor.nbytes + 4 * factor.numel()):
        return scratch.take(name, tuple(factor.shape), torch.float32).copy_(factor)


def _rounded_product(
    b: Tensor, a: Tensor, delta: Tensor, scratch: Scratch, dtype: torch.dtype
) -> None:
    """Write rb(b @ rb(a)) of a bf16 ``b`` to ``delta``."""
    if dtype == torch.bfloat16:
        a = _rounded(a, scratch, "a")
        with _booked(b, a, delta, scratch), _f32_sums(delta.device):
            torch.mm(b, a, out=delta)
        return
    total = scratch.take("sum", tuple(delta.shape), torch.float32)
    _f32_product(b, a, total, scratch, rounded=True)
    with scratch.span("copy", nbytes=total.nbytes + delta.nbytes):
        delta.copy_(total)


def _scaled_product(
    term: Term, scratch: Scratch, name: str, shape: tuple[int, int], rounded: bool = False
) -> Tensor:
    """Return s·(B @ A) in f32, of factors that are first rounded to bf16 if the rule has it so."""
    total = scratch.take(name, shape, torch.float32)
    b = _rounded(term.pair.b, scratch, "b") if rounded else term.pair.b
    _f32_product(b, term.pair.a, total, scratch, rounded)
    return total.mul_(term.factor)


def _f32_product(b: Tensor, a: Tensor, total: Tensor, scratch: Scratch, rounded: bool) -> None:
    """Write b @ a to ``total [rows, in]``, a panel of columns at a time."""
    wide_b = _widened(b, scratch, "wide_b")
    for left in range(0, a.shape[1], PANEL):
        panel = a[:, left : left + PANEL]
        if rounded:
            panel = _rounded(panel, scratch, "a")
        wide_a = _widened(panel, scratch, "wide_a")
        part = total[:, left : left + PANEL]
        with _booked(wide_b, wide_a, part, scratch), _f32_sums(total.device):
            torch.mm(wide_b, wide_a, out=part)


def _booked(b: Tensor, a: Tensor, product: Tensor, scratch: Scratch):
    flops = 2 * product.numel() * len(a)
    return scratch.span("product", nbytes=b.nbytes + a.nbytes + product.nbytes, flops=flops)


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
