"""Passes of ours and of peers: what is timed, what is checked, and what a sample stands for."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from lorabench import bench, records
from lorabench.bench import passes, peers
from lorabench.bench.ceiling import SIDE, Squares
from lorabench.bench.passes import Contender, Pass, Target
from lorabench.errors import CheckError, ConfigError, UnavailableError
from lorabench.fuse import Pair, Term, reference_fuse
from lorabench.peers import PEERS, Held

CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def subject(files):
    return bench.Subject(files.base, {"distilled": files.adapters["distilled"]})


@pytest.fixture(scope="session")
def found(subject, tmp_path_factory):
    """One round of ours and PEFT, each in a fresh process first, then in one."""
    case = bench.peers_case(subject, "distilled", ("gemm", "peft"), budget_seconds=600, rounds=1)
    return bench.sweep([case], tmp_path_factory.mktemp("peers") / "r.jsonl")


def target(out, in_, rank, name="m", seed=0, strength=0.8):
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(s, generator=generator).bfloat16() / 8 for s in ((rank, in_), (out, rank)))
    base = torch.randn(out, in_, generator=generator).bfloat16()
    return Target(name, base, Term(Pair(a, b, 1.0), strength))


TARGETS = [target(8, 16, 4, "small"), target(32, 16, 4, "large"), target(8, 16, 4, "small too")]


def test_first_and_steady_passes_and_ways_back_are_recorded_apart(found):
    told = [tuple(r.case[k] for k in ("contender", "operation", "pass", "mix")) for r in found]
    assert told == [
        *(
            (*who, when, "whole")
            for when in ("first", "steady")
            for who in (("gemm", "fuse"), ("peft", "fuse"), ("peft", "unfuse"))
        ),
        ("square_bfloat16", "product", "steady", "square"),
        ("square_float32", "product", "steady", "square"),
    ]
    assert {r.case["threads"] for r in found} == {1}
    for record in found[:6]:
        warmups = 1 if record.case["pass"] == "steady" else 0
        assert (len(record.seconds), len(record.warmup_seconds)) == (1, warmups)


def test_a_pass_goes_over_every_target(found, adapters):
    flops = 2 * sum(t.macs for t in adapters["distilled"].targets)
    assert {r.counted["flops"] for r in found[:6]} == {flops}
    for record in found[:6]:
        assert record.details["work_share"] == 1
        kinds = record.details["kinds"]
        assert sum(kind["flops"] for kind in kinds) == flops
        assert 0 < sum(kind["seconds"] for kind in kinds) <= record.seconds[0]


def test_a_pass_is_compared_with_ours_and_a_steady_one_with_the_ceiling(found):
    gemm, peft, _, steady_gemm, steady_peft, way_back, *squares = found
    for mine, ours in ((gemm, gemm), (peft, gemm), (steady_peft, steady_gemm)):
        ratio = mine.seconds[0] / ours.seconds[0]
        assert mine.details["times_ours"] == pytest.approx(ratio)
    assert "times_ours" not in way_back.details
    assert "ceiling_fraction" not in gemm.details
    assert steady_gemm.details["ceiling_fraction"] > 0
    [ceiling] = [square for square in squares if square.details["is_ceiling"]]
    assert ceiling.case["contender"] == f"square_{steady_gemm.case['product']}"
    # around each piece of each steady pass and of each way back
    assert len(ceiling.seconds) == 3 * (passes._PIECES + 1)


def test_what_a_contender_computes_is_held_against_its_own_rule(found):
    assert [r.case["rule"] for r in found[:6]] == ["R1", "R3", "R3"] * 2
    for record in found[:6]:
        if record.case["operation"] == "fuse":
            assert f"within the bound of {record.case['rule']}" in record.check
            assert record.details["differing_share"] < 0.05
            assert record.details["ours_differing_share"] < 0.05


def test_the_way_back_tells_what_it_loses(found):
    for record in found[:6]:
        if record.case["operation"] == "unfuse":
            assert 0 < record.details["wrong_share"] < 1
            assert "of the values aren't the base's" in record.check


def test_records_become_a_frame(found):
    frame = records.to_frame(found)
    assert {"contender", "pass", "mix", "threads", "weighted_gflops_per_s"} <= {*frame}


# Who goes over what


def mixes(monkeypatch, budget, *seconds_a_flop):
    """Choose mixes for contenders a, b, c that are so fast."""
    pace = dict(zip("abc", seconds_a_flop, strict=False))

    class Paced:
        def __init__(self, name, targets, weights):
            self.seconds = pace[name] * sum(t.flops for t in targets)

        def fuse(self):
            return Pass(self.seconds, ())

    monkeypatch.setattr(passes, "Contender", Paced)
    return peers._mixes(TARGETS, tuple(pace), budget)


SMALL, LARGE = (t.flops for t in TARGETS[:2])
WHOLE = 2 * SMALL + LARGE


def test_all_go_over_the_whole_if_they_come_within_the_budget(monkeypatch):
    [whole] = mixes(monkeypatch, WHOLE, 1.0, 0.5)
    assert whole == ("whole", TARGETS, ["a", "b"])


def test_a_slow_contender_sets_the_sample_for_all(monkeypatch):
    whole, sample = mixes(monkeypatch, WHOLE, 0.1, 1.0, 2.0)
    assert whole == ("whole", TARGETS, ["a", "b"])
    assert sample == ("sample", TARGETS[:1], ("a", "b", "c"))


def test_one_that_could_do_each_kind_once_but_not_all_has_the_sample(monkeypatch):
    _, sample = mixes(monkeypatch, WHOLE - SMALL, 0.1, 1.0)
    assert [t.name for t in sample.targets] == ["small", "large"]


def test_the_first_contender_has_its_whole_pass_whatever_it_takes(monkeypatch):
    whole, sample = mixes(monkeypatch, 1.0, 1e9, 1e9)
    assert whole.contenders == ["a"]
    assert sample.targets == TARGETS[:1]


def test_a_samples_rate_is_weighted_by_the_work_that_its_kinds_have_in_the_whole():
    work = passes.work_by_kind(TARGETS)
    assert work == {(8, 16, 4): 2 * SMALL, (32, 16, 4): LARGE}
    told = passes.told_by_kind(TARGETS[:2], [Pass(3.0, (1.0, 2.0)), Pass(9.0, (3.0, 6.0))], work)
    # 2 s for a small one and 4 s for the large one, the medians; there are two small ones
    assert told["weighted_gflops_per_s"] == pytest.approx(WHOLE / (2 * 2.0 + 4.0) / 1e9)
    assert told["work_share"] == 1
    part = passes.told_by_kind(TARGETS[:1], [Pass(1.0, (1.0,))], work)
    assert part["work_share"] == 2 * SMALL / WHOLE
    assert part["weighted_gflops_per_s"] == pytest.approx(SMALL / 1e9)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=50))
def test_a_pass_is_cut_into_pieces_that_cover_it_once(costs):
    cut = passes.pieces(costs)
    assert [i for piece in cut for i in piece] == list(range(len(costs)))
    assert all(cut)
    assert len(cut) <= passes._PIECES
    share, largest = sum(costs) / passes._PIECES, max(costs)
    assert all(sum(costs[i] for i in piece) < share + largest + 1 for piece in cut)


# What is wrong is not timed


@pytest.mark.parametrize("name", ["gemm", "reference", *PEERS])
def test_every_contender_starts_from_base_bits_and_ends_at_its_rule(name):
    if name in PEERS and not PEERS[name].here:
        pytest.skip(f"{name} isn't installed")
    one = target(8, 16, 4)
    contender = Contender(name, [one], [weight := one.base.clone()])
    contender.checked_fuse()
    contender.reset()
    assert torch.equal(weight, one.base)
    ended, agreement = contender.checked_fuse()
    assert ended.seconds > 0
    assert agreement.weights == 1
    assert agreement.ours_differing_share < 0.1


def test_a_contender_that_fuses_something_else_is_caught(monkeypatch):
    def fuses_twice(weight, terms):
        def fuse():
            for _ in range(2):
                weight.copy_(reference_fuse(weight, terms))
            return weight

        return Held(fuse, None)

    monkeypatch.setitem(PEERS, "torch", PEERS["torch"].__class__(fuses_twice, {"cpu": "R2"}))
    one = target(8, 16, 4)
    with pytest.raises(CheckError, match="'m': value"):
        Contender("torch", [one], [one.base.clone()]).checked_fuse()


def test_wrong_values_after_a_way_back_are_counted_by_their_bits():
    one = target(8, 16, 4)
    contender = Contender("gemm", [one], [weight := one.base.clone()])
    assert contender.wrong_share() == 0
    weight[0, 0], weight[1] = -weight[0, 0], math.nan
    assert contender.wrong_share() == 17 / 128


def test_squares_are_no_larger_than_asked_and_checked():
    squares = Squares(CPU, torch.float32, most_flops=2 * 512**3)
    assert squares.side == 512 <= SIDE["cpu"]
    taken = squares.take()
    assert squares.seconds == [taken]
    squares._out.zero_()
    with pytest.raises(CheckError, match=r"512 in torch\.float32 is wrong"):
        squares._check()


def test_a_base_that_peers_cannot_fuse_is_refused(tmp_path):
    save_file({"m.weight": torch.zeros(4, 4)}, tmp_path / "base.safetensors")
    factors = {f"m.lora_{half}.weight": torch.zeros(4, 4).bfloat16() for half in "AB"}
    metadata = {"lora_rank": "4", "lora_alpha": "4"}
    save_file(factors, tmp_path / "user.safetensors", metadata=metadata)
    subject = bench.Subject(tmp_path / "base.safetensors", {"user": tmp_path / "user.safetensors"})
    with pytest.raises(UnavailableError, match=r"in BF16: .*'m\.weight' which is F32"):
        bench.peers_case(subject, "user", ("gemm",))


def test_contenders_that_are_not_known_or_none_are_refused_before_anything_runs(subject):
    with pytest.raises(ConfigError, match="one or more"):
        bench.peers_case(subject, "distilled", ())
    with pytest.raises(UnavailableError, match="no peer 'ltx'"):
        bench.peers_case(subject, "distilled", ("gemm", "ltx"))


def test_other_threads_and_budgets_are_other_cases(subject):
    ways = [(1, 60.0), (2, 60.0), (1, 30.0)]
    cases = [bench.peers_case(subject, "distilled", ("gemm",), *way) for way in ways]
    assert len({records.key(case.what) for case in cases}) == len(ways)


@pytest.mark.parametrize("threads", [0, 100_000])
def test_more_threads_than_cores_are_refused(files, threads):
    subject = bench.Subject(files.base, files.adapters)
    with pytest.raises(ConfigError, match=f"this machine's cores, found {threads}"):
        bench.peers_case(subject, "distilled", threads=threads)
