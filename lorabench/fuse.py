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

An f16 weight is rounded to f16, and so is all that R2 and R3 round, factors included: what PEFT and
kohya do where adapter and weight have one dtype. R1 keeps its bf16 delta and adds it in one
rounding; upstream has no f16 weights, so that this is our reading of it.

A pair without A is a delta that was trained whole, or a bias's: B stands for B @ A, as if A were
the identity. A pair may touch some rows of a weight only. Then each row is fused as if it were a
weight of its own: a rule's first adapter is the first that touches the row, and a row that none
touches keeps its bits, whatever the rule.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lorabench.rows import stretches

RULES: dict[str, str] = {
    "R1": "Lightricks/LTX-2 1.2.0, ltx_core/loader/fuse_loras.py",
    "R2": "PEFT on a GPU (tuners/lora/layer.py), LightX2V, FastVideo",
    "R3": "PEFT on a CPU (tuners/lora/layer.py), TensorRT-LLM, kohya pre_calculation",
    "R4": "ComfyUI full load, tt-metal host fuse, kohya merge_to, sglang default",
}
"""The rounding rules seen in the field, and who uses each.

PEFT's are of factors in the weight's dtype. Unless told otherwise it holds them in f32, and then
adds to a bf16 weight on a CPU as R4 does.
"""


class Pair(NamedTuple):
    """What one adapter holds for rows of a weight ``[out, in]``: two factors, or a delta."""

    a: Tensor | None  # [rank, in]; None where b is the delta itself
    b: Tensor  # [rows, rank], or [rows, in]
    scale: float  # alpha / rank
    top: int = 0  # the first row of the weight that is touched

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """A and B, of a pair that is known to have both."""
        assert self.a is not None
        return self.a, self.b

    @property
    def rows(self) -> range:
        """The rows of the weight that are touched."""
        return range(self.top, self.top + len(self.b))

    @property
    def nbytes(self) -> int:
        """Bytes of what is held."""
        return self.b.nbytes + (0 if self.a is None else self.a.nbytes)

    @property
    def flops(self) -> int:
        """Operations of B @ A; one multiply-accumulate is two."""
        return 0 if self.a is None else 2 * len(self.b) * self.a.numel()

    def within(self, rows: range) -> "Pair":
        """Return what touches some rows of the weight, counted from the first of them."""
        if rows == self.rows and not self.top:
            return self
        begin = max(rows.start, self.top)
        b = self.b[begin - self.top : max(begin, rows.stop) - self.top]
        return self._replace(b=b, top=begin - rows.start)

    def cpu(self) -> "Pair":
        """Return the pair in the host's memory."""
        return self._replace(a=None if self.a is None else self.a.cpu(), b=self.b.cpu())


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

    def within(self, rows: range) -> "Term":
        """Return what touches some rows of the weight, counted from the first of them."""
        return Term(self.pair.within(rows), self.strength)


def by_rows(terms: Sequence[Term]) -> Iterator[tuple[range, list[Term]]]:
    """Cut a weight's rows where what touches them changes; rows that nothing touches are left out.

    The terms of a stretch of rows are counted from the first of them, so that they touch all of a
    weight that consists of these rows.
    """
    for rows, mine in stretches([term.pair.rows for term in terms]):
        yield rows, [terms[i].within(rows) for i in mine]


def touched_rows(terms: Sequence[Term]) -> int:
    """Count the rows of a weight that terms touch, each once."""
    return sum(len(rows) for rows, _ in stretches([term.pair.rows for term in terms]))


def as_matrix(weight: Tensor) -> Tensor:
    """View a weight as rows: itself ``[out, in]``, or a bias ``[n]`` as ``[n, 1]``."""
    return weight.unsqueeze(1) if weight.dim() == 1 else weight


def delta_dtype(rule: str, weight: torch.dtype) -> torch.dtype:
    """Return the dtype in which a rule adds a delta to a weight of a dtype."""
    if rule == "R4":
        return torch.float32
    return torch.float16 if weight == torch.float16 and rule != "R1" else torch.bfloat16


def factor_dtype(rule: str, weight: torch.dtype) -> torch.dtype | None:
    """Return the dtype that a rule rounds factors to before anything else; None for none."""
    return delta_dtype(rule, weight) if rule in ("R1", "R2") else None


def reference_deltas(
    terms: Sequence[Term], rule: str = "R1", weight: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """Return what is added to a weight ``[out, in]``, one rounded sum after another.

    One delta for all terms under R1 (bf16) and R4 (f32); under R2 and R3 (bf16, or f16 for a weight
    of that dtype) one for each term. All terms touch all rows.
    """
    if rule == "R1":
        return [_r1(terms)]
    dtype = delta_dtype(rule, weight)
    if rule == "R2":
        return [
            (_product(term.pair, dtype).to(dtype).float() * term.factor).to(dtype) for term in terms
        ]
    products = [term.factor * _product(term.pair) for term in terms]
    if rule == "R3":
        return [product.to(dtype) for product in products]
    assert rule == "R4", rule
    first, *further = products
    return [sum(further, start=first)]


def _r1(terms: Sequence[Term]) -> Tensor:
    first, *further = terms
    scaled = (first.pair.b.bfloat16().float() * first.factor).bfloat16()
    delta = _product(first.pair._replace(b=scaled), torch.bfloat16).bfloat16()
    for term in further:
        product = _product(term.pair, torch.bfloat16)
        delta = (delta.float() + term.factor * product).bfloat16()
    return delta


def _product(pair: Pair, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return B @ A in f32, of factors that are rounded to a dtype first."""
    b = pair.b.to(dtype).float()
    return b if pair.a is None else b @ pair.a.to(dtype).float()


def terms_of(
    name: str, state: Mapping[str, float], factors: Mapping[str, Mapping[str, Iterable[Pair]]]
) -> list[Term]:
    """Return what a state adds to a weight, by each adapter's pairs for each weight's name."""
    return [
        Term(pair, strength)
        for role, strength in state.items()
        for pair in factors[role].get(name, ())
    ]


def reference_fuse(weight: Tensor, terms: Sequence[Term], rule: str = "R1") -> Tensor:
    """Return base bits ``[out, in]`` with the terms' deltas fused in; same dtype (bf16, f16, f32).

    A bias comes as ``[n, 1]``: see :func:`as_matrix`.
    """
    fused = weight.clone()
    for rows, mine in by_rows(terms):
        part = weight[rows.start : rows.stop]
        for delta in reference_deltas(mine, rule, weight.dtype):
            total = delta.float() + part.float()
            if rule == "R1" and weight.dtype == torch.float32:
                total = total.bfloat16()
            part = total.to(weight.dtype)
        fused[rows.start : rows.stop] = part
    return fused
