"""The rounding rules against the code that they are named for, run live (`make` installs it)."""

import dataclasses
from itertools import combinations

import pytest
import torch
from conftest import bits

from lorabench import bench
from lorabench.bench import rules
from lorabench.errors import CheckError, ConfigError, UnavailableError
from lorabench.fuse import RULES, Pair, Term, reference_fuse
from lorabench.kernels import Scratch, get_kernel
from lorabench.peers import PEERS, get_peer

STRENGTHS = [1.0, 0.8, 0.25, -1.0]
HERE = [name for name, peer in PEERS.items() if peer.here]


def sixteenths(*shape, seed):
    """Values whose products and sums are exact in f32."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-8, 9, shape, generator=generator) / 16).bfloat16()


def exact_input(strength, adapters=1):
    base = torch.randn(48, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    terms = [
        Term(
            Pair(sixteenths(24, 64, seed=3 * i), sixteenths(48, 24, seed=3 * i + 1), 0.5), strength
        )
        for i in range(1, adapters + 1)
    ]
    return base, terms


def held(name, base, terms):
    pytest.importorskip(PEERS[name].package or "torch")
    return get_peer(name).hold(base, terms)


@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize("name", PEERS)
def test_a_peer_has_the_bits_of_the_rule_that_names_it_where_sums_are_exact(name, strength):
    base, terms = exact_input(strength)
    rule = PEERS[name].rules["cpu"]
    found = held(name, base.clone(), terms).fuse()
    assert torch.equal(bits(found), bits(reference_fuse(base, terms, rule)))


@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize("name", PEERS)
def test_our_kernel_under_a_peers_rule_has_the_peers_bits(name, strength):
    base, terms = exact_input(strength)
    expected = held(name, base.clone(), terms).fuse()
    kernel = get_kernel("gemm", torch.device("cpu"), PEERS[name].rules["cpu"])
    kernel(base, terms, Scratch())
    assert torch.equal(bits(base), bits(expected))


def test_peft_merges_several_adapters_one_after_another_as_r3_has_it():
    base, terms = exact_input(0.8, adapters=3)
    found = held("peft", base.clone(), terms).fuse()
    assert torch.equal(bits(found), bits(reference_fuse(base, terms, "R3")))
    at_once = base.float() + sum(t.factor * (t.pair.b.float() @ t.pair.a.float()) for t in terms)
    assert not torch.equal(found, at_once.bfloat16())


@pytest.mark.parametrize("name", ["peft", "peft_f32"])
def test_what_peft_unmerges_is_not_the_base(name):
    base, terms = exact_input(0.8)
    weight = base.clone()
    merged = held(name, weight, terms)
    merged.fuse()
    left = merged.unfuse()
    assert 0 < (left != base).float().mean() < 1
    torch.testing.assert_close(left, base, rtol=0, atol=0.1)


def test_peft_merges_anew_when_the_bases_bits_were_put_back_under_it():
    base, terms = exact_input(0.8)
    weight = base.clone()
    merged = held("peft", weight, terms)
    first = merged.fuse().clone()
    weight.copy_(base)
    assert torch.equal(bits(merged.fuse()), bits(first))


def test_rules_agree_at_a_power_of_two_but_for_the_single_rounding():
    base, terms = exact_input(0.25)
    fused = {rule: bits(reference_fuse(base, terms, rule)) for rule in RULES}
    assert torch.equal(fused["R1"], fused["R2"])
    assert torch.equal(fused["R1"], fused["R3"])
    assert not torch.equal(fused["R1"], fused["R4"])


@pytest.mark.parametrize(("one", "other"), [*combinations(RULES, 2)])
def test_every_two_rules_differ_at_another_strength(one, other):
    base, terms = exact_input(0.8)
    assert not torch.equal(reference_fuse(base, terms, one), reference_fuse(base, terms, other))


def test_an_unknown_peer_is_refused():
    with pytest.raises(UnavailableError, match="did you mean 'peft'"):
        get_peer("pefft")


def test_a_peer_that_is_not_installed_says_how_to(monkeypatch):
    missing = dataclasses.replace(PEERS["peft"], package="not_a_package_of_anyones")
    monkeypatch.setitem(PEERS, "peft", missing)
    with pytest.raises(UnavailableError, match="pip install 'peft"):
        get_peer("peft")
    assert "peft" not in bench.rules_case(side=8).what["peers"]


# The matrix


@pytest.fixture(scope="module")
def found():
    strengths, ratios = (1.0, 0.8), (0.05, 1.0)
    case = bench.rules_case(strengths, ratios, side=64)
    results = case.function(*case.arguments)
    assert [(r.what["strength"], r.what["ratio"]) for r in results] == [
        (strength, ratio) for strength in strengths for ratio in ratios
    ]
    return [
        {"strength": r.what["strength"], "ratio": r.what["ratio"], **pair}
        for r in results
        for pair in r.details["pairs"]
    ]


def test_every_pair_of_rules_and_every_peer_with_its_rule_is_compared(found):
    pairs = [(cell["first"], cell["second"]) for cell in found[: len(found) // 4]]
    peers = [(PEERS[name].rules["cpu"], name) for name in HERE]
    assert pairs == [*combinations(RULES, 2), *peers]


def test_rules_differ_more_where_the_delta_is_larger_and_less_at_powers_of_two(found):
    share = {
        (cell["strength"], cell["ratio"], cell["first"], cell["second"]): cell["differing_share"]
        for cell in found
    }
    for one, other in combinations(RULES, 2):
        assert share[0.8, 0.05, one, other] < share[0.8, 1.0, one, other]
    assert share[1.0, 1.0, "R1", "R3"] == 0 < share[0.8, 1.0, "R1", "R3"]
    assert share[1.0, 1.0, "R1", "R4"] > 0


def test_peers_have_their_rules_bits_but_for_the_order_of_sums(found):
    of_peers = [cell for cell in found if cell["second"] in HERE]
    assert len(of_peers) == 4 * len(HERE)
    assert max(cell["differing_share"] for cell in of_peers) < 0.001


def test_the_classes_of_ulps_add_up_to_the_values_that_differ(found):
    for cell in found:
        assert tuple(cell["ulps"]) == rules.ULPS
        assert sum(cell["ulps"].values()) == pytest.approx(cell["differing_share"])


def test_ulps_count_neighbours_and_cross_zero():
    one = torch.tensor([1.0, 1.0, 1.0, 0.0, 2.0**-133, 1.0, -1.0, 5.0]).bfloat16()
    further = torch.tensor([0, 1, 3, 0, 0, 300, -2, 0], dtype=torch.int16)
    other = (one.view(torch.int16) + further).view(torch.bfloat16)
    other[3], other[4] = -0.0, -(2.0**-133)
    told = rules._difference(one, other)
    assert told["differing_share"] == 5 / 8
    eighths = {name: share * 8 for name, share in told["ulps"].items()}
    assert eighths == {"1": 1, "2": 2, "3-4": 1, "5-8": 0, "9-16": 0, "more": 1}


def test_a_peer_that_leaves_its_rule_is_caught(monkeypatch):
    monkeypatch.setitem(PEERS, "torch", dataclasses.replace(PEERS["torch"], rules={"cpu": "R4"}))
    with pytest.raises(CheckError, match=r"'torch' was expected to follow rule R4, .* at strength"):
        rules._check_where_sums_are_exact("torch", 0.8)


@pytest.mark.parametrize(("strengths", "ratios"), [([], [1.0]), ([1.0], []), ([1.0], [0.1, 0.0])])
def test_a_matrix_of_nothing_is_refused(strengths, ratios):
    with pytest.raises(ConfigError, match="expected strengths from"):
        bench.rules_case(strengths, ratios)


def test_a_frame_of_the_matrix_has_a_row_for_every_pair(tmp_path):
    case = bench.rules_case((0.8,), (0.1, 1.0), side=16, peers=())
    frame = bench.rules_frame(bench.sweep([case], tmp_path / "r.jsonl"))
    assert len(frame) == 2 * 6
    assert {"strength", "ratio", "first", "second", "differing_share", *rules.ULPS} <= {*frame}
    assert set(frame.provenance) == {"measured"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"strengths": [float("nan")]},
        {"strengths": [1e300]},
        {"ratios": [float("inf")]},
        {"ratios": [-0.1]},
        {"side": 0},
        {"side": 10**7},
    ],
)
def test_what_cant_be_compared_is_refused_before_anything_runs(wrong):
    with pytest.raises(ConfigError, match="expected strengths from"):
        rules.rules_case(**wrong)
