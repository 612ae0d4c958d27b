"""What follows from measured parts, with sums worked out by hand."""

import pytest

from lorabench.claims import load_claims
from lorabench.cost import Parts, Prices
from lorabench.derive import (
    at_rate,
    first_tenth,
    hours,
    prices,
    published_rebinds,
    rebind_costs,
    timeline,
    walked,
)
from lorabench.errors import ConfigError
from lorabench.geometry import load_geometry
from lorabench.plan import STRATEGIES
from lorabench.recipe import load_recipe
from lorabench.records import Record

# load 1 + 2 a block, restore 10 + 20, fuse 100 + 200
PRICED = Prices(load=Parts(1, 2), restore=Parts(10, 20), fuse=Parts(100, 200))
TWO_STAGE = load_recipe("ti2vid_two_stage").bind()
HQ = load_recipe("hq_two_stage").bind()


def step(globals_seconds, block_seconds, **case):
    """A measured action of a walk under the gemm kernel and re-reading."""
    defaults = {"bench": "walk", "strategy": "s", "kernel": "gemm", "restore": "reread"}
    return Record(
        case=defaults | {"critical": True} | case,
        seconds=(globals_seconds + 2 * block_seconds,),
        check="bits",
        environment={"machine": "m"},
        commit="c",
        provenance="measured",
        details={"globals_seconds": globals_seconds, "block_seconds": block_seconds},
    )


WALK = [
    step(1.0, 2.0, action="load", state="base"),
    step(100.0, 200.0, action="rebind", before="base", state="d@1", render=0, phase=1),
    step(10.0, 20.0, action="rebind", before="d@1", state="base", render=1, phase=0),
    step(300.0, 600.0, action="rebind", before="base", state="d@1", render=1, phase=1),
    step(200.0, 400.0, action="rebind", before="base", state="d@1", render=2, phase=1),
    step(7.0, 7.0, action="rebind", before="d@1", state="d@2", render=2, phase=1),
]


def test_prices_are_the_median_of_each_part_and_leave_mixed_rebinds_out():
    assert prices(WALK, "gemm", "reread") == Prices(Parts(1, 2), Parts(10, 20), Parts(200, 400))


def test_a_part_that_was_not_measured_is_named():
    with pytest.raises(ConfigError, match="no measured restore under kernel 'gemm' and restore"):
        prices(WALK[:2], "gemm", "reread")
    with pytest.raises(ConfigError, match="no measured load under kernel 'scalar'"):
        prices(WALK, "scalar", "reread")


def test_depth_is_the_globals_once_and_each_block():
    assert PRICED.fuse.at(48) == 100 + 48 * 200


def test_a_rate_replaces_the_fuse_by_the_counted_products():
    whole = load_geometry("ltx-2.5-22b")
    slow = at_rate(PRICED, whole, 1e9)
    assert (slow.load, slow.restore) == (PRICED.load, PRICED.restore)
    assert slow.fuse.at(48) == pytest.approx(2 * whole.counts().macs / 1e9)
    assert slow.fuse.at(0) == pytest.approx(2 * whole.cut(0).counts().macs / 1e9)


def spans(frame, render):
    rows = frame[frame.render == render]
    return list(zip(rows.part, rows.start, rows.seconds, strict=True))


def test_a_timeline_lays_out_each_render_from_its_own_zero():
    frame = timeline(TWO_STAGE, STRATEGIES["as_written"], PRICED, blocks=1)
    assert spans(frame, 0) == [
        ("load", 0, 3), ("fuse", 3, 300), ("restore", 303, 30), ("denoise", 333, 0),
        ("fuse", 333, 300), ("denoise", 633, 0),
    ]  # fmt: skip
    assert spans(frame, 1) == [
        ("restore", 0, 30), ("denoise", 30, 0), ("fuse", 30, 300), ("denoise", 330, 0),
    ]  # fmt: skip
    assert list(frame.opening) == [True] * 3 + [False] * 7
    assert set(frame.provenance) == {"derived"}


def test_a_rebind_between_two_fused_states_restores_and_fuses():
    frame = timeline(HQ, STRATEGIES["both_fixes"], PRICED, blocks=1)
    assert spans(frame, 1)[:2] == [("restore", 0, 30), ("fuse", 30, 300)]


def test_a_rebind_that_no_render_waits_for_is_told_apart():
    frame = timeline(TWO_STAGE, STRATEGIES["ready_for_next"], PRICED, blocks=1)
    assert spans(frame, 1)[-1] == ("hidden rebind", 300, 30)
    assert not frame.critical.iloc[-1]


def test_walked_gives_the_measured_seconds_under_the_same_names():
    frame = walked(WALK[:4])
    assert list(frame.part) == ["load", "fuse", "restore", "fuse"]
    assert list(frame.seconds) == [5, 500, 50, 1500]
    assert list(frame.label) == ["file → base", "base → d@1", "d@1 → base", "base → d@1"]
    assert list(frame.opening) == [True, False, False, False]


def test_rebind_costs_lists_each_distinct_rebind_once():
    frame = rebind_costs([TWO_STAGE, HQ], {"way": (STRATEGIES["both_fixes"], PRICED)}, blocks=1)
    assert list(zip(frame.recipe, frame.rebind, frame.seconds, strict=True)) == [
        ("ti2vid_two_stage", "base → distilled@1", 300),
        ("ti2vid_two_stage", "distilled@1 → base", 30),
        ("hq_two_stage", "distilled@0.25 → distilled@0.5", 330),
        ("hq_two_stage", "distilled@0.5 → distilled@0.25", 330),
    ]


def scalar_pass(flops=1000, **case):
    """A pass of 1000 operations: the first tenth takes 2 s, the other nine 3 s each."""
    return Record(
        case={"bench": "loop"} | case,
        seconds=(29.0,),
        counted={"flops": flops, "pass_flops": 1000},
        check="bits",
        environment={"machine": "m"},
        commit="c",
        provenance="measured",
        details={
            "progress": [
                {"seconds": 1.5, "flops": 60},
                {"seconds": 2.0, "flops": 100},
                {"seconds": 5.0, "flops": 200},
                {"seconds": 29.0, "flops": flops},
            ]
        },
    )


def test_a_pass_is_predicted_from_its_first_tenth_and_held_against_its_time():
    found = first_tenth(scalar_pass())
    assert (found.flops_per_second, found.predicted_seconds, found.seconds) == (50, 20, 29)
    assert found.error == pytest.approx(20 / 29 - 1)


@pytest.mark.parametrize("record", [scalar_pass(flops=999), scalar_pass(bench="kernels")])
def test_only_a_pass_that_ran_to_its_end_tells_how_good_its_first_tenth_was(record):
    with pytest.raises(ConfigError, match="expected a scalar pass that ran to its end"):
        first_tenth(record)


@pytest.mark.parametrize(("error", "factor"), [(0.0, 1.0), (0.25, 1.25), (-0.5, 2.0), (-0.2, 1.25)])
def test_hours_lie_between_bounds_that_hold_the_prediction_corrected_either_way(error, factor):
    low, expected, high = hours(7200e9, 1e9, error)
    assert expected == pytest.approx(2)
    assert (low, high) == (pytest.approx(2 / factor), pytest.approx(2 * factor))
    corrected = expected / (1 + error)
    assert low <= corrected * (1 + 1e-9)
    assert corrected <= high * (1 + 1e-9)


def test_what_others_published_stands_beside_the_same_rebind():
    frame = published_rebinds(load_claims()).set_index("machine").seconds
    assert frame["sglang, on a machine of its own"] == 18.5
    assert set(published_rebinds(load_claims()).provenance) == {"published"}
    rebinds = rebind_costs([TWO_STAGE], {"w": (STRATEGIES["both_fixes"], PRICED)}, 48)
    assert {*published_rebinds(load_claims()).rebind} <= {*rebinds.rebind}
