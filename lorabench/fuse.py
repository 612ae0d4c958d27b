"""What fusing means: pairs of factors, the rounding rule, and the readable reference.

The rule is the one of Lightricks/LTX-2 (``ltx_core/loader/fuse_loras.py`` at 1.2.0), called R1
here. With rb for rounding to bf16 (nearest, ties to even), products summed in f32, factors first
rounded to bf16, and s = strength x scale as an f32:

    first adapter     d = rb(rb(s·B) @ A)
    each further one  d = rb(d + s·(B @ A))
    weight            W = rb(d + W)

An f32 weight is rounded through bf16 as well, and widened again. Upstream has no scale; where the
scale is 1, as on every module of the shipped adapter, the rule gives upstream's bits.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Pair(NamedTuple):
    """The two factors of one adapter at one weight ``[out, in]``."""

    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]
    scale: float  # alpha / rank

    @property
    def flops(self) -> int:
        """Operations of B @ A; one multiply-accumulate is two."""
        return 2 * self.b.shape[0] * self.a.shape[0] * self.a.shape[1]


class Term(NamedTuple):
    """A pair at a strength: one summand of a state's delta."""

    pair: Pair
    strength: float

    @property
    def factor(self) -> float:
        """Strength x scale, rounded to f32 as the rule has it."""
        return torch.tensor(
            self.strength * self.pair.scale, dtype=torch.float32, device="cpu"
        ).item()


def reference_delta(terms: Sequence[Term]) -> Tensor:
    """Return the delta ``[out, in]`` of a state at one weight, in bf16."""
    first, *further = terms
    a, b = (factor.bfloat16() for factor in first.pair[:2])
    scaled = (b.float() * first.factor).bfloat16()
    delta = (scaled.float() @ a.float()).bfloat16()
    for term in further:
        a, b = (factor.bfloat16() for factor in term.pair[:2])
        delta = (delta.float() + term.factor * (b.float() @ a.float())).bfloat16()
    return delta


def reference_fuse(weight: Tensor, terms: Sequence[Term]) -> Tensor:
    """Return base bits ``[out, in]`` (bf16 or f32) with the terms' delta fused in; same dtype."""
    if not terms:
        return weight.clone()
    return (reference_delta(terms).float() + weight.float()).bfloat16().to(weight.dtype)
