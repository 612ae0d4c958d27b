"""Each way back to base bits is measured by its own yardsticks, and its bits are checked."""

import dataclasses
import math

import pytest

from lorabench import bench, engine_figures, figures, records
from lorabench.bench import restores
from lorabench.errors import CheckError, ConfigError, UnavailableError
from lorabench.page import CARTESIAN_TRACES
from lorabench.recipe import BASE
from lorabench.resident import ResidentWeights

RESTORES = bench.restores_on("cpu")


@pytest.fixture(scope="module")
def subject(files):
    return bench.Subject(files.base, {"distilled": files.adapters["distilled"]})


@pytest.fixture(scope="module")
def measured(subject):
    """Every restore's results, taken in this process."""
    return {
        name: {r.what["contender"]: r for r in restores._restores(subject, name, 1.0, 2)}
        for name in RESTORES
    }


@pytest.fixture(scope="module")
def recorded(subject, measured):
    """The same as records."""
    return [
        records.Record(
            case={**restores.restores_case(subject, name, 1.0, 2).what, **result.what},
            seconds=result.samples.seconds,
            warmup_seconds=result.samples.warmup_seconds,
            counted=result.counted,
            details=result.details,
            peak_private_bytes=result.peak_private_bytes,
            check=result.check,
            environment={"machine": "m"},
            commit="c",
            provenance="measured",
        )
        for name, results in measured.items()
        for result in results.values()
    ]


def test_the_cpu_has_every_restore_but_the_device_snapshot():
    assert "device_snapshot" not in RESTORES
    assert {*RESTORES, "device_snapshot"} == {*bench.restores_on("cuda")}


@pytest.mark.parametrize("name", RESTORES)
def test_a_round_has_a_sample_of_each_operation_and_yardstick(name, measured):
    results = measured[name]
    assert set(results) == {"load", "plain fuse", "copy", "fuse", "rebind", "unfuse", "digest"}
    for what in ("plain fuse", "copy", "fuse", "rebind", "unfuse"):
        assert len(results[what].samples.seconds) == 2
    assert len(results["digest"].samples.seconds) == 6
    assert all(len(results[o].samples.warmup_seconds) == 1 for o in restores.OPERATIONS)


@pytest.mark.parametrize("name", RESTORES)
def test_only_subtraction_leaves_wrong_values(name, measured):
    load = measured[name]["load"]
    if name == "subtract":
        assert 0.01 < load.details["wrong_share"] < 0.5
        assert "no state is held" in load.check
    else:
        assert load.details["wrong_share"] == 0
        assert "each state has the bits as re-read" in load.check


def test_what_is_kept_is_a_copy_an_image_a_state_corrections_or_nothing(measured):
    def bits(name):
        details = measured[name]["load"].details
        return 8 * details["kept_bytes"] / details["touched_params"]

    assert bits("reread") == bits("subtract") == 0
    assert bits("host_snapshot") == pytest.approx(16)
    assert bits("images") == pytest.approx(2 * 16)  # two fused states
    assert 0 < bits("residual") < 16


def test_the_residual_is_told_beside_its_entropy(measured):
    details = measured["residual"]["load"].details
    assert 0 < details["entropy_given_exponent"] <= details["entropy_bits"] < 16
    assert "entropy_bits" not in measured["reread"]["load"].details


def test_a_strength_is_a_ratio_of_delta_to_weight(measured, subject):
    """The shared adapters are made at 0.3."""
    assert measured["reread"]["load"].details["ratio"] == pytest.approx(0.3, rel=0.1)


@pytest.mark.parametrize("name", ["reread", "residual", "subtract"])
def test_an_account_holds_the_operations_flops_and_no_more_than_its_time(name, measured):
    for operation in restores.OPERATIONS:
        result = measured[name][operation]
        booked = result.details["account"]
        assert sum(row["flops"] for row in booked) == result.counted["flops"]
        assert sum(row["seconds"] for row in booked) <= result.details["accounted_seconds"]


def test_an_account_is_off_when_it_is_not_asked_for(subject, measured):
    base, adapters = subject.open()
    assert ResidentWeights(base, adapters).account is None
    assert measured["reread"]["load"].details["idle_span_seconds"] < 1e-4


def test_other_bits_than_the_re_read_ones_are_caught(subject, monkeypatch):
    base, adapters = subject.open()
    weights = ResidentWeights(base, adapters, restore="host_snapshot")
    weights.load(BASE)
    plain = restores._Plain(base, adapters, weights.device, (), exact=True)
    plain.check(weights)
    next(iter(weights.tensors.values())).view(-1)[0] += 1
    with pytest.raises(CheckError, match="state 'base' has other bits than by re-reading"):
        plain.check(weights)


def test_the_frame_judges_each_restore_by_its_own_yardsticks(recorded):
    frame = bench.restores_frame(recorded).set_index("restore")
    assert list(frame.index) == list(RESTORES)
    assert (frame.unfuse_over_fuse > 0).all()
    assert frame.unfuse_s["images"] < frame.plain_fuse_s["images"]
    assert frame.bits["host_snapshot"] == pytest.approx(16)
    for name in ("predicted_bytes", "digest_over_pass", "bandwidth_share"):
        assert (frame[name] > 0).all(), name


def test_memory_is_judged_where_it_was_seen(recorded):
    case = [r for r in recorded if r.case["restore"] == "reread"]
    [load] = [r for r in case if r.case["contender"] == "load"]
    others = [r for r in case if r is not load]
    base, predicted = load.details["baseline_private_bytes"], load.details["predicted_bytes"]

    def judged(peak):
        [row] = bench.restores_frame(
            [dataclasses.replace(load, peak_private_bytes=peak), *others]
        ).itertuples()
        return row.measured_bytes, row.memory_error

    assert judged(base + 2 * predicted) == (2 * predicted, -0.5)
    for unseen in (base, base - 4096):
        assert math.isnan(judged(unseen)[1])


def test_ratios_are_taken_within_a_round(recorded):
    """A machine that is slow for one round is slow for both of its halves."""
    slow = [
        dataclasses.replace(r, seconds=(1.0, 10.0, 100.0) if r.case["contender"] != "unfuse" else
                            (2.0, 20.0, 200.0))
        for r in recorded
        if r.case["restore"] == "reread"
    ]  # fmt: skip
    [row] = bench.restores_frame(slow).itertuples()
    assert (row.unfuse_over_fuse, row.bandwidth_share) == (2, 0.5)


def test_accounts_add_up_to_the_operations_time_with_what_no_span_covers(recorded):
    frame = bench.accounts_frame(recorded)
    [fuse] = [r for r in recorded if (r.case["restore"], r.case["contender"]) == ("reread", "fuse")]
    rows = frame[(frame.restore == "reread") & (frame.operation == "fuse")]
    assert rows.seconds.sum() == pytest.approx(fuse.details["accounted_seconds"])
    assert {"product", "add", "other"} <= set(rows.part) <= set(figures.COLOURS)


def test_two_adapters_are_fused_and_given_back_together(files):
    pair = {name: files.adapters[name] for name in ("user", "distilled")}
    results = restores._restores(bench.Subject(files.base, pair), "residual", 1.0, 1)
    assert all(r.details.get("wrong_share", 0) == 0 for r in results)


def test_a_case_runs_alone_and_is_recorded(subject, tmp_path):
    found = bench.sweep([bench.restores_case(subject, "images", 1.0, 1)], tmp_path / "r.jsonl")
    assert {r.case["contender"] for r in found} == {"load", *restores.OPERATIONS, "plain fuse",
                                                    "copy", "digest"}  # fmt: skip
    assert {r.case["restore"] for r in found} == {"images"}


@pytest.mark.parametrize(("strength", "repetitions"), [(0.0, 1), (1.0, 0)])
def test_nothing_to_fuse_or_no_round_is_refused(strength, repetitions, subject):
    with pytest.raises(ConfigError, match="at least one repetition, found"):
        bench.restores_case(subject, "reread", strength, repetitions)


def test_a_restore_that_a_device_has_not_is_refused(subject):
    with pytest.raises(UnavailableError, match="device_snapshot"):
        bench.restores_case(subject, "device_snapshot")


def test_figures_say_the_numbers_and_use_traces_that_the_page_draws(recorded):
    frame = bench.restores_frame(recorded).assign(
        lane=RESTORES, kept_gb=lambda f: f.kept_bytes / 1e9
    )
    drawn = engine_figures.restores_figure(frame, "t")
    bits = engine_figures.bits_figure(frame[frame.restore == "residual"])
    for figure in (drawn, bits):
        assert {trace.type for trace in figure.data} <= CARTESIAN_TRACES
    for name in RESTORES:
        assert f"{name}: fuse " in drawn.layout.meta["alt"]
    assert "kept, entropy" in bits.layout.meta["alt"]


@pytest.mark.parametrize("strength", [0.0, float("nan"), 1e300])
def test_a_strength_that_cant_be_measured_is_refused(files, strength):
    with pytest.raises(ConfigError, match="expected a strength other than 0"):
        restores.restores_case(bench.Subject(files.base, files.adapters), "reread", strength)
