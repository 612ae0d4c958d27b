"""Loading into a state, measured beside its two parts; no time is asserted here."""

import pytest

from lorabench import bench, records
from lorabench.bench import load
from lorabench.bench.load import FUSED, PASS, PLAIN, load_case
from lorabench.checkpoint import Checkpoint
from lorabench.errors import CheckError, UnavailableError
from lorabench.measure import Samples
from lorabench.resident import ResidentWeights


@pytest.fixture
def subject(files):
    return bench.Subject(files.base, {"user": files.adapters["user"]})


def test_three_records_tell_what_a_fused_load_takes_beside_its_parts(subject, tmp_path):
    found = bench.sweep([load_case(subject, 2, restore="host_snapshot")], tmp_path / "r.jsonl")
    assert [r.case["contender"] for r in found] == [PLAIN, PASS, FUSED]
    assert {(r.case["cache"], r.case["restore"]) for r in found} == {("hot", "host_snapshot")}
    assert {(len(r.seconds), len(r.warmup_seconds)) for r in found} == {(2, 1)}
    plain, one, fused = (r.counted for r in found)
    base_bytes = sum(spec.nbytes for spec in Checkpoint.open(subject.base).tensors)
    assert plain["file_bytes"] == fused["file_bytes"] == base_bytes
    assert (plain["flops"], one["file_bytes"]) == (0, 0)
    assert one["flops"] == fused["flops"] > 0
    touched = 2 * one["fused_params"]
    assert plain["snapshot_bytes"] == fused["snapshot_bytes"] == touched
    details = found[-1].details
    assert details["kept_bytes"] == touched
    longer = max(plain_and_pass := [sum(r.seconds) / 2 for r in found[:2]])
    assert details["ratio"] == pytest.approx(sum(found[2].seconds) / 2 / longer)
    assert details["in_turn_ratio"] == pytest.approx(sum(plain_and_pass) / longer)
    read = next(row for row in details["account"] if row["operation"] == "read")
    assert read["nbytes"] == base_bytes
    assert all("; 3 weights within the reference's bound" in r.check for r in found)


@pytest.mark.parametrize("plain", [1.0, 3.0])
def test_what_binds_is_the_longer_part(plain):
    samples = {name: Samples((s,)) for name, s in ((PLAIN, plain), (PASS, 2.0), (FUSED, 3.3))}
    told = load._told(samples, dict.fromkeys(samples, load.Work(flops=8 * 10**9)))
    assert told["binds"] == (PASS if plain < 2 else PLAIN)
    assert told["ratio"] == pytest.approx(3.3 / max(plain, 2))
    assert told["pass_gflops_per_s"] == 4


@pytest.mark.parametrize("cold", [True, False])
def test_a_cold_load_finds_nothing_in_the_page_cache(subject, monkeypatch, cold):
    dropped = []
    monkeypatch.setattr(load, "forget", lambda files: dropped.append(list(files)))
    load._load(subject, 1, cold, "reread")
    # two loads a round, a round that warms up, and the load that is accounted
    assert dropped == [[subject.base]] * (5 if cold else 0)
    assert load_case(subject, cold=cold).what["cache"] == ("cold" if cold else "hot")


def test_a_load_with_other_bits_than_load_and_pass_is_found(subject, monkeypatch):
    own = ResidentWeights.load

    def spoilt(self, state=load.BASE):
        work = own(self, state)
        if state:
            next(iter(self.tensors.values())).view(-1)[0] += 1
        return work

    monkeypatch.setattr(ResidentWeights, "load", spoilt)
    with pytest.raises(CheckError, match=f"{FUSED}: state 'user@1' has other bits than before"):
        load._load(subject, 1, False, "reread")


def test_hot_and_cold_loads_and_other_restores_are_other_cases(subject):
    cases = [
        load_case(subject, cold=cold, restore=restore).what
        for cold in (False, True)
        for restore in ("reread", "host_snapshot")
    ]
    assert len({records.key(what) for what in cases}) == 4


def test_a_restore_that_is_not_there_is_refused_before_anything_runs(subject):
    with pytest.raises(UnavailableError, match="restore 'device_snapshot'"):
        load_case(subject, restore="device_snapshot")
