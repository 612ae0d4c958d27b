"""Results held against the reference, before a time is recorded for them."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lorabench.adapter import Adapter
from lorabench.checkpoint import Checkpoint
from lorabench.errors import CheckError
from lorabench.fuse import Pair, Term, reference_fuse
from lorabench.recipe import State
from lorabench.resident import ResidentWeights

CHECKED_WEIGHTS = 3
CHECKED_ROWS = 256  # of each: the check must not be the peak of memory that is reported


def weights_to_check(adapters: Mapping[str, Adapter]) -> list[str]:
    """Name a few of the weights that adapters touch, from the smallest to the largest."""
    sizes = {p.weight.name: p.weight.params for a in adapters.values() for p in a.pairs}
    by_size = sorted(sizes, key=lambda name: (sizes[name], name))
    last = CHECKED_WEIGHTS - 1
    return list(
        dict.fromkeys(by_size[round(i * (len(by_size) - 1) / last)] for i in range(last + 1))
    )


def check_rows(
    fused: Mapping[str, Tensor], base: Checkpoint, adapters: Mapping[str, Adapter], state: State
) -> str:
    """Hold the first rows of fused weights against the reference; say how it came out.

    Where sums aren't exact, two kernels may add in another order: a value may differ by an ulp, or
    by what the summation error bound allows.

    Raises
    ------
    CheckError
        A value is further off.
    """
    if not state:
        return "base state: nothing fused to compare"
    shares = []
    pairs = {role: _pairs(adapters[role], fused) for role in state}
    for name, rows in fused.items():
        terms = [
            Term(pair._replace(b=pair.b[: len(rows)]), strength)
            for role, strength in state.items()
            if (pair := pairs[role].get(name))
        ]
        shares.append(compare(rows.cpu(), base.read(name)[: len(rows)], terms, where=name))
    return f"{len(shares)} weights within the reference's bound, {max(shares):.1e} of values differ"


def check_against_reference(weights: ResidentWeights) -> str:
    """Hold a few resident weights against the reference, as :func:`check_rows` does."""
    names = weights_to_check(weights.adapters)
    fused = {name: weights.tensors[name][:CHECKED_ROWS] for name in names}
    return check_rows(fused, weights.base, weights.adapters, weights.state)


def _pairs(adapter: Adapter, names: Container[str]) -> dict[str, Pair]:
    mine = tuple(pair for pair in adapter.pairs if pair.weight.name in names)
    return replace(adapter, pairs=mine).load()


def compare(
    fused: Tensor, base: Tensor, terms: Sequence[Term], where: str, rule: str = "R1"
) -> float:
    """Return the share of values of ``fused [out, in]`` that differ from the reference's.

    Raises
    ------
    CheckError
        One differs by more than its summation error can explain.
    """
    expected = reference_fuse(base, terms, rule)
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
