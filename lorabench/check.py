"""Results held against the reference, before a time is recorded for them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lorabench.errors import CheckError
from lorabench.fuse import Pair, Term, reference_fuse
from lorabench.resident import ResidentWeights

CHECKED_WEIGHTS = 3
CHECKED_ROWS = 256  # of each: the check must not be the peak of memory that is reported


def check_against_reference(weights: ResidentWeights) -> str:
    """Hold a few fused weights, from the smallest to the largest, against the reference.

    Where sums aren't exact, two kernels may add in another order: a value may differ by an ulp, or
    by what the summation error bound allows.

    Raises
    ------
    CheckError
        A value is further off.
    """
    state = weights.state
    touched: dict[str, list[Term]] = {}
    for role, strength in state.items():
        for name, pair in weights.factors(role).items():
            touched.setdefault(name, []).append(Term(pair, strength))
    if not touched:
        return "base state: nothing fused to compare"
    by_size = sorted(touched, key=lambda name: (weights.tensors[name].numel(), name))
    chosen = dict.fromkeys(
        by_size[round(i * (len(by_size) - 1) / (CHECKED_WEIGHTS - 1))]
        for i in range(CHECKED_WEIGHTS)
    )
    shares = []
    for name in chosen:
        rows = slice(CHECKED_ROWS)
        terms = [
            Term(Pair(pair.a.cpu(), pair.b[rows].cpu(), pair.scale), strength)
            for pair, strength in touched[name]
        ]
        fused, base = weights.tensors[name][rows].cpu(), weights.base.read(name)[rows]
        shares.append(compare(fused, base, terms, where=name))
    return f"{len(shares)} weights within the reference's bound, {max(shares):.1e} of values differ"


def compare(fused: Tensor, base: Tensor, terms: Sequence[Term], where: str) -> float:
    """Return the share of values of ``fused [out, in]`` that differ from the reference's.

    Raises
    ------
    CheckError
        One differs by more than its summation error can explain.
    """
    expected = reference_fuse(base, terms)
    bound = torch.zeros(base.shape)
    for pair, strength in terms:
        rank = pair.a.shape[0]
        error = abs(strength * pair.scale) * rank * 2.0**-24
        bound += error * (pair.b.float().abs() @ pair.a.float().abs())
    # An ulp of the delta, when its rounding falls to the other side, and one of the weight.
    size = torch.maximum(expected.float().abs(), base.float().abs())
    delta = (expected.float() - base.float()).abs() + bound
    bound += 2 * (_ulp(size) + _ulp(delta))
    # What the base had of infinities and NaN stays, and can't be subtracted.
    same = (fused == expected) | (fused.isnan() & expected.isnan())
    off = (fused.float() - expected.float()).abs()
    if not bool((within := same | (off <= bound)).all()):
        worst = int((~within).int().argmax())
        raise CheckError(
            f"'{where}': value {worst} is {fused.flatten()[worst].item()}, the reference's is "
            f"{expected.flatten()[worst].item()}: further apart than summing in another order"
        )
    return float((~same).float().mean())


def _ulp(values: Tensor) -> Tensor:
    """Return the distance between neighbouring bf16 values of these sizes."""
    return torch.exp2(torch.floor(torch.log2(values.clamp_min(2.0**-126))) - 7)
