"""How the rounding rules differ on the same input, and whether peers keep to theirs."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lorabench.bench.cases import Case, Result
from lorabench.check import compare
from lorabench.errors import CheckError, ConfigError
from lorabench.fuse import RULES, Pair, Term, reference_fuse
from lorabench.measure import Samples, time_once
from lorabench.peers import PEERS, get_peer
from lorabench.records import JSON, Record
from lorabench.synthetic import WEIGHT_STD

if TYPE_CHECKING:
    import pandas as pd

RULE_STRENGTHS = (1.0, 0.8, 0.25, -1.0)
RULE_RATIOS = (0.01, 0.05, 0.1, 0.3, 1.0)
"""Standard deviation of the delta at strength 1 over that of the weight."""

RULE_SIDES = {"tiny": 64, "small": 256, "laptop": 1024, "full": 1024}
"""The side of the weight in the notebooks, by size."""

ULPS = ("1", "2", "3-4", "5-8", "9-16", "more")
"""Classes of a difference: how many bf16 values further."""

_RANK = 64
_SEED = 0
_MOST = 1e6  # of a strength or ratio
_MOST_SIDE = 1 << 14  # of which all rules and peers together take some 20 GB


def rules_case(
    strengths: Sequence[float] = RULE_STRENGTHS,
    ratios: Sequence[float] = RULE_RATIOS,
    side: int = 1024,
    peers: Sequence[str] | None = None,
) -> Case:
    """Fuse one weight by every rule at each strength and ratio, and compare their bits.

    Every peer is compared with the rule that it follows, and held to it bit for bit where sums are
    exact.

    Parameters
    ----------
    side
        Of the square weight; the adapter's rank is 64, or the side if that is less.
    peers
        By name; None for those that are installed.

    Raises
    ------
    ConfigError
        No strength or no ratio, one that can't be measured, or a side that can't.
    UnavailableError
        A peer that isn't known or isn't installed.
    """
    # Products far beyond what a weight can be overflow, and say nothing of rounding.
    if (
        not strengths
        or not ratios
        or not all(abs(strength) <= _MOST for strength in strengths)
        or not all(0 < ratio <= _MOST for ratio in ratios)
        or not 1 <= side <= _MOST_SIDE
    ):
        raise ConfigError(
            f"expected strengths from -{_MOST:g} to {_MOST:g}, ratios above 0 and up to {_MOST:g}, "
            f"and a side from 1 to {_MOST_SIDE}; found {list(strengths)}, {list(ratios)}, {side}"
        )
    here = tuple(name for name, peer in PEERS.items() if peer.here) if peers is None else peers
    for name in here:
        get_peer(name)
    what = {
        "bench": "rules",
        "strengths": list(strengths),
        "ratios": list(ratios),
        "side": side,
        "rank": min(_RANK, side),
        "seed": _SEED,
        "peers": list(here),
    }
    return Case(what, _rules, (tuple(strengths), tuple(ratios), side, tuple(here)))


def _rules(
    strengths: Sequence[float], ratios: Sequence[float], side: int, peers: Sequence[str]
) -> Sequence[Result]:
    results = []
    for strength in strengths:
        for name in peers:
            _check_where_sums_are_exact(name, strength)
        for ratio in ratios:
            base, pair = _weight(side, ratio)
            results.append(_compared(base, [Term(pair, strength)], ratio, peers))
    return results


def _weight(side: int, ratio: float) -> tuple[Tensor, Pair]:
    """Make a weight and a pair whose B @ A has so much of its standard deviation."""
    generator = torch.Generator().manual_seed(_SEED)
    rank = min(_RANK, side)
    factor_std = (ratio * WEIGHT_STD / rank**0.5) ** 0.5

    def normal(std: float, *shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * std).bfloat16()

    base = normal(WEIGHT_STD, side, side)
    return base, Pair(normal(factor_std, rank, side), normal(factor_std, side, rank), 1.0)


def _compared(base: Tensor, terms: Sequence[Term], ratio: float, peers: Sequence[str]) -> Result:
    fused: dict[str, Tensor] = {}

    def fuse() -> None:
        fused.update({rule: reference_fuse(base, terms, rule) for rule in RULES})
        fused.update({name: get_peer(name).hold(base.clone(), terms).fuse() for name in peers})

    seconds = time_once(fuse, base.device)
    for name in peers:
        compare(fused[name], base, terms, where=name, rule=PEERS[name].rules["cpu"])
    compared = [*combinations(RULES, 2), *((PEERS[name].rules["cpu"], name) for name in peers)]
    pairs: list[JSON] = [
        {"first": one, "second": other, **_difference(fused[one], fused[other])}
        for one, other in compared
    ]
    return Result(
        Samples((seconds,)),
        check=f"{', '.join(peers) or 'no peer'}: as its rule where sums are exact",
        what={"strength": terms[0].strength, "ratio": ratio},
        details={"pairs": pairs},
    )


def _difference(one: Tensor, other: Tensor) -> dict[str, JSON]:
    """Tell the share of values that differ between two bf16 tensors, and by how many ulps."""
    apart = (_ordered(one) - _ordered(other)).abs()
    bounds = torch.tensor([0, 1, 2, 4, 8, 16])
    counts = torch.bincount(torch.bucketize(apart.flatten(), bounds), minlength=len(ULPS) + 1)
    shares = (counts.double() / apart.numel()).tolist()
    return {
        "differing_share": float((one != other).float().mean()),
        "ulps": dict(zip(ULPS, shares[1:], strict=True)),
    }


def _ordered(values: Tensor) -> Tensor:
    """Return numbers in the order of bf16 values, neighbours by 1 apart; both zeros are 0."""
    bits = values.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def _check_where_sums_are_exact(name: str, strength: float) -> None:
    """Hold a peer against its rule on factors whose sums no order changes.

    Raises
    ------
    CheckError
        A bit differs.
    """
    generator = torch.Generator().manual_seed(_SEED)

    def sixteenths(*shape: int) -> Tensor:
        return (torch.randint(-8, 9, shape, generator=generator) / 16).bfloat16()

    base = torch.randn(48, 64, generator=generator).bfloat16()
    terms = [Term(Pair(sixteenths(24, 64), sixteenths(48, 24), 1.0), strength)]
    rule = PEERS[name].rules["cpu"]
    expected = reference_fuse(base, terms, rule)
    found = get_peer(name).hold(base.clone(), terms).fuse()
    if wrong := int((found != expected).sum()):
        raise CheckError(
            f"peer '{name}' was expected to follow rule {rule}, and differs from it in {wrong} of "
            f"{base.numel()} values at strength {strength:g}, where sums are exact; see what its "
            f"version does"
        )


def rules_frame(found: Iterable[Record]) -> "pd.DataFrame":
    """Return a row for every compared pair of the records of a `rules_case`.

    Columns: ``strength``, ``ratio``, ``first``, ``second``, ``differing_share``, the share
    of each class of ``ULPS``, ``provenance``, ``machine``.
    """
    import pandas as pd

    rows = []
    for record in found:
        pairs = record.details["pairs"]
        assert isinstance(pairs, Sequence)
        for pair in pairs:
            assert isinstance(pair, Mapping)
            ulps = pair["ulps"]
            assert isinstance(ulps, Mapping)
            told = {k: v for k, v in pair.items() if k != "ulps"}
            cell = {name: record.case[name] for name in ("strength", "ratio")}
            where = {"provenance": record.provenance, "machine": record.environment["machine"]}
            rows.append({**cell, **told, **ulps, **where})
    return pd.DataFrame(rows)
