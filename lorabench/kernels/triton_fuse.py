"""Fuse rule R1 in one pass over the weights: a Triton kernel that adds in its product's epilogue.

A program multiplies one tile of B @ A, summed in f32 on the tensor cores, rounds it to bf16, adds
the weight's tile, rounds again and writes it in place. The delta never reaches memory, so a weight
is read once and written once. With several adapters there is a launch for each: the delta of a
band of rows goes from one to the next in scratch memory, small enough for a GPU's L2 cache, and
the last launch adds it.

Every launch of a shape takes the same tile, chosen by a table and not by timing, so that the bits
of a state don't change from run to run.

A width that is no multiple of 16 is right, but slow: its rows can't be copied 16 bytes at a time.

It runs on the CPU too, in Triton's interpreter (``TRITON_INTERPRET=1``): very slowly, for tests.
"""
# pyright: reportCallIssue=false
# A launch has options that are no parameters of the function.

from collections.abc import Callable, Iterator, Sequence
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from lorabench.errors import UnavailableError
from lorabench.fuse import Term
from lorabench.kernels.gemm import tile_rows
from lorabench.kernels.scratch import Scratch
from lorabench.kernels.tiles import Tiles
from lorabench.kernels.triton_block import INTERPRETED, fuse_block, tl

Kernel = Callable[[Tensor, Sequence[Term], Scratch], None]

_DTYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}


class Block(NamedTuple):
    """What one program computes, and how it is spread."""

    rows: int
    cols: int
    depth: int  # of the rank, a step of the product
    warps: int
    stages: int  # steps of the product whose factors are under way at once


# Chosen by counting, without a GPU to time them on; `make gpu-check` times a pass with each.
SQUARE = Block(128, 128, 64, warps=8, stages=3)
"""Two programs fit on a Hopper multiprocessor: one multiplies while the other waits for weights."""

WIDE = Block(128, 256, 64, warps=8, stages=3)
"""Reads a quarter less of the factors from L2, but stands alone on its multiprocessor."""

FLAT = Block(32, 128, 64, warps=4, stages=3)
"""For gate logits, which have 32 rows."""

BAND = 8
"""Rows of blocks that are walked together: their factors are then still in L2 when used again."""

_ALIGNED = 16
"""Of such a number of elements Triton knows that every row begins where 16 bytes can be copied."""

_PADDED = 1 << 25
"""Elements of B at most that are scaled for one launch: 64 MiB, many times what a launch needs."""


def fuse_triton(
    weight: Tensor,
    terms: Sequence[Term],
    scratch: Scratch,
    *,
    dtype: torch.dtype = torch.bfloat16,
    block: Block | None = None,
) -> None:
    """Fuse rule R1's delta into base bits ``weight [out, in]``, in place.

    The terms have both factors, and touch all rows.

    Parameters
    ----------
    dtype
        What factors, delta and sum are rounded to. The rule has bf16; with another the interpreter
        runs the instructions that a GPU runs.
    block
        In the place of the table's.
    """
    if not terms or not weight.numel():
        return
    *before, last = terms
    rows = tile_rows(weight.shape[1]) if before else max(1, _PADDED // _padded(last.pair.b))
    for top in range(0, len(weight), rows):
        part = range(top, min(top + rows, len(weight)))
        *mine_before, mine = [term.within(part) for term in terms]
        delta = _delta(mine_before, scratch, dtype, block) if before else None
        _launch(mine, scratch, weight[top : part.stop], delta, not before, dtype, block)


def triton_kernel(device: torch.device, rule: str = "R1") -> Kernel:
    """Return :func:`fuse_triton`, where it can run.

    Raises
    ------
    UnavailableError
        Another rule than R1, or weights on the CPU without the interpreter.
    """
    _check(device, rule)
    return fuse_triton


def triton_tiles(device: torch.device, rule: str = "R1") -> Tiles:
    """Return the deltas of :func:`fuse_triton` by themselves, a tile of rows at a time.

    Raises
    ------
    UnavailableError
        As :func:`triton_kernel`.
    """
    _check(device, rule)
    return Tiles(rule, _deltas, tile_rows)


def _check(device: torch.device, rule: str) -> None:
    if rule != "R1":
        raise UnavailableError(f"kernel 'triton' has rule R1 only, {rule} was asked for")
    if device.type != "cuda" and not INTERPRETED:
        raise UnavailableError(
            f"kernel 'triton' runs on a CUDA GPU; on '{device}' only in Triton's interpreter, for "
            f"tests (start with TRITON_INTERPRET=1)"
        )


def _deltas(terms: Sequence[Term], scratch: Scratch, weight: torch.dtype) -> Iterator[Tensor]:
    yield _delta(terms, scratch, torch.bfloat16, None)


def _delta(
    terms: Sequence[Term], scratch: Scratch, dtype: torch.dtype, block: Block | None
) -> Tensor:
    """Return the terms' delta ``[rows, in]``, in scratch."""
    a, b = terms[0].pair.factors
    delta = scratch.take("delta", (len(b), a.shape[1]), dtype)
    for i, term in enumerate(terms):
        _launch(term, scratch, None, delta, i == 0, dtype, block)
    return delta


def _launch(
    term: Term,
    scratch: Scratch,
    weight: Tensor | None,
    delta: Tensor | None,
    first: bool,
    dtype: torch.dtype,
    block: Block | None,
) -> None:
    """Add a term: to the delta, and the delta to the weight if there is one."""
    target = delta if weight is None else weight
    assert target is not None
    out, in_ = target.shape
    b = _ready_b(term, first, scratch, dtype)
    a = _ready_a(term.pair.factors[0], scratch, dtype)
    block = block or (FLAT if out <= 2 * FLAT.rows else SQUARE)
    rank = len(a)
    left = rank % block.depth
    moved = b.nbytes + a.nbytes + sum(2 * t.nbytes for t in (weight, delta) if t is not None)
    with (
        scratch.span("product", nbytes=moved, flops=term.pair.flops),
        torch.cuda.device_of(target),
    ):
        fuse_block[(ceil(out / block.rows) * ceil(in_ / block.cols),)](
            weight, delta, b, a, term.factor, out, in_, rank, b.stride(0), a.stride(0),
            FIRST=first,
            LAST=weight is not None,
            EDGE=bool(out % block.rows or in_ % block.cols),
            DTYPE=_DTYPES[dtype],
            BITWISE=INTERPRETED and dtype == torch.bfloat16,
            ROWS=block.rows,
            COLS=block.cols,
            DEPTH=block.depth,
            TAIL=max(16, 1 << (left - 1).bit_length()) if left else 0,
            BAND=BAND,
            num_warps=block.warps,
            num_stages=block.stages,
            enable_fp_fusion=False,  # s·(B @ A) is rounded to f32 before it is added
        )  # fmt: skip


def _ready_b(term: Term, first: bool, scratch: Scratch, dtype: torch.dtype) -> Tensor:
    """Return the rows of B rounded, and scaled for the first term, each on a 16-byte line."""
    b = term.pair.b
    factor = term.factor if first else 1.0
    out, rank = b.shape
    if b.dtype == dtype and factor == 1 and b.stride(1) == 1 and b.stride(0) % _ALIGNED == 0:
        return b
    # Rows of rank 450 begin at 4 bytes, and would be copied 4 bytes at a time.
    padded = scratch.take("padded", (out, _padded(b)), dtype)[:, :rank]
    if b.dtype != dtype or factor == 1:
        b = padded.copy_(b)
    return padded if factor == 1 else torch.mul(b, factor, out=padded)


def _padded(b: Tensor) -> int:
    """Return the rank up to which a row is filled, so that the next begins at 16 bytes."""
    return ceil(b.shape[1] / _ALIGNED) * _ALIGNED


def _ready_a(a: Tensor, scratch: Scratch, dtype: torch.dtype) -> Tensor:
    """Return A rounded, each row gapless."""
    if a.dtype == dtype and a.stride(1) == 1:
        return a
    return scratch.take("rounded_a", tuple(a.shape), dtype).copy_(a)
