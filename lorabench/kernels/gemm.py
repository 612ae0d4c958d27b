"""Deltas by the library's matrix product, a tile of rows at a time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from lorabench.fuse import Term, delta_dtype, factor_dtype
from lorabench.kernels.scratch import Scratch, product_dtype
from lorabench.kernels.tiles import Tiles

TILE = 1 << 23
"""Elements in a tile of the delta: its f32 form is 32 MiB, its bf16 form stays in a GPU's L2."""

MAX_ROWS = 1 << 13
"""Rows in a tile at most, so that its rows of B stay small however narrow the weight is."""

PANEL = 1 << 10
"""Columns of an f32 product on a CPU: the product then stays in cache until it is rounded."""

PREPARED_BYTES = 64 << 20
"""What the A of a weight's terms may take converted to f32; larger ones go panel by panel."""


def tile_rows(in_: int) -> int:
    """Return the rows of a weight ``[out, in_]`` that go into one tile."""
    return max(1, min(MAX_ROWS, TILE // max(1, in_)))


def gemm_tiles(rule: str = "R1", product: torch.dtype | None = None) -> Tiles:
    """Return the tiles of the kernel ``gemm``, ``TILE`` elements each.

    ``product`` is the dtype that a product which is rounded at once is taken in: bf16 (summed in
    f32 by the library) or f32 on the factors' widened bf16 values; by default the device's faster.
    """

    def products(terms: Sequence[Term], scratch: Scratch, weight: torch.dtype) -> _Products:
        dtype = product_dtype(scratch.device) if product is None else product
        rounded = delta_dtype(rule, weight)
        if rounded == torch.float16:
            dtype = torch.float32  # of which no library rounds partial sums
        factors = factor_dtype(rule, weight)
        return _Products(rule, factors, dtype, rounded, scratch, PREPARED_BYTES // len(terms))

    def deltas(terms: Sequence[Term], scratch: Scratch, weight: torch.dtype) -> Iterator[Tensor]:
        return _deltas(products(terms, scratch, weight), terms)

    def prepare(terms: Sequence[Term], scratch: Scratch, weight: torch.dtype) -> list[Term]:
        return _prepare(products(terms, scratch, weight), terms)

    return Tiles(rule, deltas, tile_rows, prepare)


def _deltas(products: "_Products", terms: Sequence[Term]) -> Iterator[Tensor]:
    scratch, rule = products.scratch, products.rule
    first, *further = terms
    b, a = first.pair.b, first.pair.a
    shape = (len(b), b.shape[1] if a is None else a.shape[1])
    if rule == "R4":
        total = products.scaled(first, scratch.take("total", shape, torch.float32))
        for term in further:
            total.add_(products.scaled(term, scratch.take("sum", shape, torch.float32)))
        yield total
        return
    delta = scratch.take("delta", shape, products.delta)
    if rule == "R1":
        b = products.converted(b, "b", torch.bfloat16)
        if a is None:
            torch.mul(b, first.factor, out=delta)
        else:
            scaled = scratch.take("scaled", tuple(b.shape), torch.bfloat16)
            products.rounded(torch.mul(b, first.factor, out=scaled), a, delta)
        for term in further:
            total = products.scaled(term, scratch.take("sum", shape, torch.float32))
            with scratch.span("add", nbytes=2 * total.nbytes + 2 * delta.nbytes):
                # Operands of two dtypes would have torch allocate a copy of one.
                wide = scratch.take("wide", shape, torch.float32).copy_(delta)
                delta.copy_(total.add_(wide))
        yield delta
        return
    for term in terms:
        if rule == "R2":
            b = products.converted(term.pair.b, "b", products.delta)
            if term.pair.a is None:
                delta.copy_(b)
            else:
                products.rounded(b, term.pair.a, delta)
            delta.mul_(term.factor)
        else:
            assert rule == "R3", rule
            delta.copy_(products.scaled(term, scratch.take("sum", shape, torch.float32)))
        yield delta


def _prepare(products: "_Products", terms: Sequence[Term]) -> list[Term]:
    """Convert each A once for all tiles of a weight, unless it is too large to be kept."""
    prepared = []
    for i, term in enumerate(terms):
        a = term.pair.a
        if a is not None and products.prepares(a):
            rounded = products.rule == "R2" or (products.rule == "R1" and i == 0)
            a = products.converted(a, f"a{i}", products.dtype if rounded else torch.float32)
        prepared.append(term._replace(pair=term.pair._replace(a=a)))
    return prepared


class _Products(NamedTuple):
    """Products of factors in scratch memory, as a rule has them."""

    rule: str
    factors: torch.dtype | None  # that factors are rounded to first
    dtype: torch.dtype  # of products that are rounded at once
    delta: torch.dtype  # that they are rounded to
    scratch: Scratch
    prepared_bytes: int  # that one A may take in f32

    def prepares(self, a: Tensor) -> bool:
        """Return whether an A is converted once for all tiles of a weight."""
        return 4 * a.numel() <= self.prepared_bytes

    def rounded(self, b: Tensor, a: Tensor, delta: Tensor) -> None:
        """Write b @ a of a rounded ``b`` to ``delta``, rounded."""
        for left, b_, panel in self._panels(b, a, self.dtype):
            part = delta[:, left : left + panel.shape[1]]
            if self.dtype == self.delta:
                self._multiply(b_, panel, part)
                continue
            # Gapless, and still in cache when it is rounded.
            total = self.scratch.take("panel sum", tuple(part.shape), torch.float32)
            self._multiply(b_, panel, total)
            with self.scratch.span("copy", nbytes=total.nbytes + part.nbytes):
                part.copy_(total)

    def scaled(self, term: Term, total: Tensor) -> Tensor:
        """Write s·(B @ A) to an f32 ``total``, and return it."""
        if term.pair.a is None:
            b = term.pair.b
            if self.factors is not None:
                b = self.converted(b, "b", self.factors)
            return total.copy_(b).mul_(term.factor)
        for left, b, panel in self._panels(term.pair.b, term.pair.a, torch.float32):
            self._multiply(b, panel, total[:, left : left + panel.shape[1]])
        return total.mul_(term.factor)

    def converted(self, factor: Tensor, name: str, dtype: torch.dtype) -> Tensor:
        """Return a factor in a dtype, by way of the one that the rule rounds it to."""
        if self.factors is not None and factor.dtype != self.factors:
            rounded = self.scratch.take(f"{name}.rounded", tuple(factor.shape), self.factors)
            factor = rounded.copy_(factor)
        if factor.dtype == dtype:
            return factor
        with self.scratch.span("copy", nbytes=factor.nbytes + dtype.itemsize * factor.numel()):
            return self.scratch.take(name, tuple(factor.shape), dtype).copy_(factor)

    def _panels(
        self, b: Tensor, a: Tensor, dtype: torch.dtype
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Give b and columns of a, from which on, in a dtype; all at once where that is no slower.

        That is on a GPU, and on a CPU in bf16; an A that is too large to be prepared comes apart.
        """
        b = self.converted(b, "wide_b", dtype)
        prepared = self.prepares(a)
        in_ = a.shape[1]
        whole = prepared and (dtype == torch.bfloat16 or a.device.type == "cuda")
        for left in range(0, in_, in_ if whole else PANEL):
            panel = a if whole else a[:, left : left + PANEL]
            yield left, b, panel if prepared else self.converted(panel, "panel", dtype)

    def _multiply(self, b: Tensor, a: Tensor, product: Tensor) -> None:
        nbytes = b.nbytes + a.nbytes + product.nbytes
        flops = 2 * product.numel() * len(a)
        with self.scratch.span("product", nbytes, flops), _f32_sums(product.device):
            torch.mm(b, a, out=product)


@contextmanager
def _f32_sums(device: torch.device) -> Iterator[None]:
    """Keep cuBLAS from summing bf16 products in bf16, which its default allows, and from TF32."""
    if device.type != "cuda":
        yield
        return
    matmul = torch.backends.cuda.matmul
    reduced = (
        matmul.allow_bf16_reduced_precision_reduction,
        getattr(matmul, "allow_bf16_reduced_precision_reduction_split_k", True),
    )
    precision = matmul.fp32_precision
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction = reduced
        matmul.fp32_precision = precision
