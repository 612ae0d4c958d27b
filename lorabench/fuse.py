"""What fusing means: pairs of factors, the rounding rules, and the readable reference.

With rb for rounding to bf16 (nearest, ties to even), products summed in f32, and s = strength x
scale as an f32, a weight W and the adapters of a state, in its order, become

    R1    d = rb(rb(s·B) @ A), for each further adapter d = rb(d + s·(B @ A)); then W = rb(d + W)
    R2    for each adapter in turn  W = rb(W + rb(s·rb(B @ A)))
    R3    for each adapter in turn  W = rb(W + rb(s·(B @ A)))
    R4    W = rb(W + Σ s·(B @ A)), rounded once

R1 and R2 multiply in bf16: factors of another dtype are rounded to it first. An f32 weight is
rounded through bf16 by R1, and widened again; the other rules leave it an f32. Upstream's R1 has
no scale; where the scale is 1, as on every module of the shipped adapter, the bits are upstream's.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

RULES: dict[str, str] = {
    "R1": "Lightricks/LTX-2 1.2.0, ltx_core/loader/fuse_loras.py",
    "R2": "PEFT on a GPU (tuners/lora/layer.py), LightX2V, FastVideo",
    "R3": "PEFT on a CPU (tuners/lora/layer.py), TensorRT-LLM, kohya pre_calculation",
    "R4": "ComfyUI full load, tt-metal host fuse, kohya merge_to, sglang default",
}
"""The rounding rules seen in the field, and who uses each."""


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
        """Strength x scale, rounded to f32 as the rules have it."""
        return torch.tensor(
            self.strength * self.pair.scale, dtype=torch.float32, device="cpu"
        ).item()


def reference_deltas(terms: Sequence[Term], rule: str = "R1") -> list[Tensor]:
    """Return what is added to a weight ``[out, in]``, one rounded sum after another.

    One delta for all terms under R1 (bf16) and R4 (f32); under R2 and R3 (bf16) one for each term.
    """
    if rule == "R1":
        return [_r1(terms)]
    if rule == "R2":
        return [
            ((pair.b.bfloat16().float() @ pair.a.bfloat16().float()).bfloat16().float() * s)
            .bfloat16()
            for pair, s in ((term.pair, term.factor) for term in terms)
        ]  # fmt: skip
    products = [term.factor * (term.pair.b.float() @ term.pair.a.float()) for term in terms]
    if rule == "R3":
        return [product.bfloat16() for product in products]
    assert rule == "R4", rule
    first, *further = products
    return [sum(further, start=first)]


def _r1(terms: Sequence[Term]) -> Tensor:
    first, *further = terms
    a, b = (factor.bfloat16() for factor in first.pair[:2])
    scaled = (b.float() * first.factor).bfloat16()
    delta = (scaled.float() @ a.float()).bfloat16()
    for term in further:
        a, b = (factor.bfloat16() for factor in term.pair[:2])
        delta = (delta.float() + term.factor * (b.float() @ a.float())).bfloat16()
    return delta


def reference_fuse(weight: Tensor, terms: Sequence[Term], rule: str = "R1") -> Tensor:
    """Return base bits ``[out, in]`` (bf16 or f32) with the terms' deltas fused in; same dtype."""
    if not terms:
        return weight.clone()
    for delta in reference_deltas(terms, rule):
        total = delta.float() + weight.float()
        if rule == "R1":
            total = total.bfloat16()
        weight = total.to(weight.dtype)
    return weight
