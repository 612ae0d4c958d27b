"""Results held against the reference, before a time is recorded for them."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lorabench.adapter import Adapter
from lorabench.checkpoint import Checkpoint
from lorabench.errors import CheckError
from lorabench.fuse import Pair, Term, as_matrix, reference_fuse, terms_of
from lorabench.loading import read_factors
from lorabench.recipe import State
from lorabench.resident import ResidentWeights

CHECKED_WEIGHTS = 3
CHECKED_ROWS = 256  # of each: the check must not be the peak of memory that is reported


def rows_to_check(adapters: Mapping[str, Adapter]) -> dict[str, range]:
    """Choose a few of the weights that adapters touch, from the smallest to the largest.

    Of each there are the first rows from the first that is touched; there are none where no adapter
    is bound.
    """
    weights = {p.weight.name: p.weight for a in adapters.values() for p in a.pairs}
    if not weights:
        return {}
    by_size = sorted(weights, key=lambda name: (weights[name].params, name))
    last = CHECKED_WEIGHTS - 1
    chosen = [by_size[round(i * (len(by_size) - 1) / last)] for i in range(last + 1)]
    tops = {
        name: min(p.top for a in adapters.values() for p in a.pairs if p.weight.name == name)
        for name in chosen
    }
    return {
        name: range(top, min(top + CHECKED_ROWS, weights[name].shape[0]))
        for name, top in tops.items()
    }


def check_rows(
    fused: Mapping[str, Tensor], base: Checkpoint, adapters: Mapping[str, Adapter], state: State
) -> str:
    """Hold the :func:`rows_to_check` of fused weights against the reference; say how it came out.

    Where sums aren't exact, two kernels may add in another order: a value may differ by an ulp, or
    by what the summation error bound allows.

    Raises
    ------
    CheckError
        A value is further off.
    """
    if not state:
        return "base state: nothing fused to compare"
    shares = [0.0]
    wanted = rows_to_check(adapters)
    pairs = {role: _pairs(adapters[role], fused) for role in state}
    for name, values in fused.items():
        rows = wanted[name]
        terms = [term.within(rows) for term in terms_of(name, state, pairs)]
        before = base.read(name)[rows.start : rows.stop]
        shares.append(compare(as_matrix(values.cpu()), as_matrix(before), terms, where=name))
    return f"{len(fused)} weights within the reference's bound, {max(shares):.1e} of values differ"


def check_against_reference(weights: ResidentWeights) -> str:
    """Hold a few resident weights against the reference, as :func:`check_rows` does."""
    fused = {
        name: weights.tensors[name][rows.start : rows.stop]
        for name, rows in rows_to_check(weights.adapters).items()
    }
    return check_rows(fused, weights.base, weights.adapters, weights.state)


def _pairs(adapter: Adapter, names: Container[str]) -> dict[str, tuple[Pair, ...]]:
    mine = tuple(pair for pair in adapter.pairs if pair.weight.name in names)
    return read_factors(replace(adapter, pairs=mine))


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
        if pair.a is not None:
            error = abs(strength * pair.scale) * len(pair.a) * 2.0**-24
            product = pair.b.float().abs() @ pair.a.float().abs()
            bound[pair.rows.start : pair.rows.stop] += error * product
    # An ulp of the delta, when its rounding falls to the other side, and one of the weight.
    size = torch.maximum(expected.float().abs(), base.float().abs())
    delta = (expected.float() - base.float()).abs() + bound
    bound += 2 * (_ulp(size) + _ulp(delta))
    if base.dtype == torch.float16:
        bound += 2 * torch.finfo(torch.float16).smallest_normal * 2.0**-10  # steps near 0
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
