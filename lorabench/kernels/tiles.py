"""A pass over a weight, tile by tile: the deltas, and how one is added."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lorabench.fuse import Term
from lorabench.kernels.scratch import Scratch

Deltas = Callable[[Sequence[Term], Scratch], Iterator[Tensor]]
Prepare = Callable[[Sequence[Term], Scratch], Sequence[Term]]


def _as_they_are(terms: Sequence[Term], scratch: Scratch) -> Sequence[Term]:
    return terms


@dataclass(frozen=True)
class Tiles:
    """A way to compute deltas, a tile of whole rows at a time; fusing is adding them.

    Attributes
    ----------
    rule
        The rounding rule, as in :data:`lorabench.fuse.RULES`.
    deltas
        Gives the deltas ``[rows, in]`` of terms whose B has ``rows`` rows, to be added one after
        another; each is in scratch memory, and gone when the next is asked for.
    rows
        The rows of a tile of a weight that is ``in`` wide; None makes a weight one tile.
    prepare
        What is done once to the terms of a weight, so that no tile has to do it again.
    """

    rule: str
    deltas: Deltas
    rows: Callable[[int], int] | None = None
    prepare: Prepare = _as_they_are

    def __call__(
        self, weight: Tensor, terms: Sequence[Term], scratch: Scratch
    ) -> Iterator[tuple[Tensor, Iterator[Tensor]]]:
        """Walk a weight ``[out, in]``: each tile, a view of it, with the deltas to be added.

        The deltas don't depend on the weight's values.
        """
        if not terms or not weight.numel():
            return
        out, in_ = weight.shape
        step = out if self.rows is None else self.rows(in_)
        terms = self.prepare(terms, scratch)
        for top in range(0, out, step):
            mine = [
                Term(pair._replace(b=pair.b[top : top + step]), strength)
                for pair, strength in terms
            ]
            yield weight[top : top + step], self.deltas(mine, scratch)

    def add(self, tile: Tensor, delta: Tensor, scratch: Scratch) -> None:
        """Write rb(tile + delta) to ``tile``; an f32 tile is rounded to bf16 by R1 only."""
        shape = tuple(tile.shape)
        with scratch.span("add", nbytes=2 * tile.nbytes + delta.nbytes):
            if tile.dtype == delta.dtype:
                tile.add_(delta)
                return
            # Operands of two dtypes would have torch allocate a copy of one.
            wide = scratch.take("wide", shape, torch.float32)
            if tile.dtype == torch.bfloat16:
                tile.copy_(wide.copy_(tile).add_(delta))
                return
            tile.add_(wide.copy_(delta))
            if self.rule == "R1":
                tile.copy_(scratch.take("rounded", shape, torch.bfloat16).copy_(tile))

    def fuse(self, weight: Tensor, terms: Sequence[Term], scratch: Scratch) -> None:
        """Fuse the terms into base bits ``weight [out, in]``, in place."""
        for tile, deltas in self(weight, terms, scratch):
            for delta in deltas:
                self.add(tile, delta, scratch)
