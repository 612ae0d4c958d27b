"""A pass over a weight, tile by tile: the deltas, and how one is added."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lorabench.fuse import Term, by_rows
from lorabench.kernels.scratch import Scratch

Deltas = Callable[[Sequence[Term], Scratch, torch.dtype], Iterator[Tensor]]
Prepare = Callable[[Sequence[Term], Scratch, torch.dtype], Sequence[Term]]


def _as_they_are(terms: Sequence[Term], scratch: Scratch, dtype: torch.dtype) -> Sequence[Term]:
    return terms


@dataclass(frozen=True)
class Tiles:
    """A way to compute deltas, a tile of whole rows at a time; fusing is adding them.

    Attributes
    ----------
    rule
        The rounding rule, as in :data:`lorabench.fuse.RULES`.
    deltas
        Gives the deltas ``[rows, in]`` of terms whose B has ``rows`` rows, for a weight of a dtype,
        to be added one after another; each is in scratch memory, and gone when the next is asked
        for.
    rows
        The rows of a tile of a weight that is ``in`` wide; None leaves rows together that the same
        terms touch.
    prepare
        What is done once to the terms of a weight of a dtype, so that no tile has to do it again.
    """

    rule: str
    deltas: Deltas
    rows: Callable[[int], int] | None = None
    prepare: Prepare = _as_they_are

    def __call__(
        self, weight: Tensor, terms: Sequence[Term], scratch: Scratch
    ) -> Iterator[tuple[Tensor, Iterator[Tensor]]]:
        """Walk a weight ``[out, in]``: each tile, a view of it, with the deltas to be added.

        The same terms touch all rows of a tile; rows that none touches are in no tile. The deltas
        don't depend on the weight's values.
        """
        if not weight.numel():
            return
        for rows, mine in by_rows(terms):
            step = len(rows) if self.rows is None else self.rows(weight.shape[1])
            mine = self.prepare(mine, scratch, weight.dtype)
            for top in range(0, len(rows), step):
                part = range(top, min(top + step, len(rows)))
                tile = weight[rows.start + part.start : rows.start + part.stop]
                yield tile, self.deltas([t.within(part) for t in mine], scratch, weight.dtype)

    def add(self, tile: Tensor, delta: Tensor, scratch: Scratch) -> None:
        """Write tile + delta, rounded to the tile's dtype, to ``tile``; an f32 tile by R1 to bf16.

        A delta is what ``deltas`` gives for a weight of the tile's dtype.
        """
        shape = tuple(tile.shape)
        with scratch.span("add", nbytes=2 * tile.nbytes + delta.nbytes):
            if tile.dtype == delta.dtype:
                tile.add_(delta)
                return
            # Operands of two dtypes would have torch allocate a copy of one.
            if delta.dtype != torch.float32:
                delta = scratch.take("wide", shape, torch.float32).copy_(delta)
            if tile.dtype != torch.float32:
                tile.copy_(scratch.take("wide tile", shape, torch.float32).copy_(tile).add_(delta))
                return
            tile.add_(delta)
            if self.rule == "R1":
                tile.copy_(scratch.take("rounded", shape, torch.bfloat16).copy_(tile))

    def fuse(self, weight: Tensor, terms: Sequence[Term], scratch: Scratch) -> None:
        """Fuse the terms into base bits ``weight [out, in]``, in place."""
        for tile, deltas in self(weight, terms, scratch):
            for delta in deltas:
                self.add(tile, delta, scratch)
