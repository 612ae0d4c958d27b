"""Frames of priced plans: what a plan's bill says, laid out, and nothing lost."""

import pytest

from lorabench import priced
from lorabench.breakeven import Change
from lorabench.cost import touches_of
from lorabench.geometry import load_geometry
from lorabench.plan import STRATEGIES
from lorabench.planner import Pricings, Setting
from lorabench.rates import SIZES, Machine, Origin, Pace
from lorabench.recipe import load_recipe
from lorabench.records import Record

GEOMETRY = load_geometry("ltx-2.5-22b", shrink=16).cut(2)
BYTES = sum(tensor.nbytes for tensor in GEOMETRY.tensors)
RATES = ("copy_host", "read_warm", "load_warm", "copy_new", "encode", "decode")
KERNELS = {"scalar": 1e6, "gemm": 1e9}
MACHINE = Machine(
    name="m",
    title="M",
    device="cpu",
    memory_bytes=1 << 40,
    **dict.fromkeys(RATES, 1e9),
    kernels={name: dict.fromkeys(SIZES, Pace(rate)) for name, rate in KERNELS.items()},
    forward=dict.fromkeys(SIZES, Pace(1e9)),
    origins={"copy_host": Origin("measured", "made up")},
)  # fmt: skip
TOUCHES = touches_of(GEOMETRY, ["distilled", "user"])
PASS = 2 * sum(target.macs for target in TOUCHES["distilled"]) / 1e9  # seconds, under gemm


def advised(name, renders=10, memory=1 << 40, **only):
    setting = Setting(load_recipe(name).bind(), renders, memory, only=only)
    return priced.advise_all([setting], Pricings(MACHINE, GEOMETRY, TOUCHES))


@pytest.fixture(scope="module")
def advices():
    return {"M": [*advised("ti2vid_two_stage"), *advised("one_stage")]}


def test_what_fits_nowhere_is_left_out():
    assert advised("ti2vid_two_stage", memory=1) == []


def test_an_action_has_its_seconds_bytes_and_arithmetic(advices):
    frame = priced.actions_frame(advices).set_index(["recipe", "strategy", "action"])
    fuse = frame.loc[("ti2vid_two_stage", "both_fixes", "base → distilled@1")]
    assert fuse.seconds == pytest.approx(PASS)
    assert fuse.tflop == pytest.approx(PASS / 1e3)
    slow = frame.loc[("ti2vid_two_stage", "as_written", "base → distilled@1")]
    assert slow.seconds == pytest.approx(1000 * PASS)
    load = frame.loc[("one_stage", "both_fixes", "load base")]
    assert (load.host_gb, load.disk_gb) == (BYTES / 1e9, 0)
    assert set(frame.provenance) == {"predicted"}


def test_every_strategy_has_each_of_its_actions_once(advices):
    frame = priced.actions_frame(advices)
    assert not frame.duplicated(["machine", "recipe", "strategy", "action"]).any()
    assert {*frame.strategy} == {*STRATEGIES, priced.ADVISED}
    two_stage = frame[frame.recipe == "ti2vid_two_stage"].groupby("strategy").action.agg(list)
    assert two_stage["both_fixes"] == ["load base", "base → distilled@1", "distilled@1 → base"]
    assert two_stage["ready_for_next"][-1] == "distilled@1 → base, after the render"
    assert two_stage["runtime"] == ["load base", "phase 1 in distilled@1, unfused"]


def test_waits_are_those_of_the_first_and_of_all_renders(advices):
    waits = priced.waits_frame(advices).set_index(["recipe", "strategy"])
    plain = waits.loc[("ti2vid_two_stage", "both_fixes")]
    assert plain.first_s + 9 * plain.later_s == pytest.approx(plain.all_s)
    assert plain.later_s > PASS
    exact = [name for name in STRATEGIES if name != "subtract"]
    all_s = waits.loc["ti2vid_two_stage"].all_s
    assert all_s["advised"] <= all_s[exact].min() < all_s["as_written"]


def test_a_table_has_a_column_of_seconds_for_each_machine(advices):
    frame = priced.actions_frame({"M": advices["M"], "other": advices["M"]})
    table = priced.actions_table(frame, "M")
    assert list(table.columns[:2]) == ["M", "other"]
    assert (table.M == table.other).all()
    assert table.index.is_unique
    assert table.loc[("one_stage", "both_fixes", "load base")].host_gb == BYTES / 1e9


def test_only_adapters_at_run_time_cost_more_with_more_tokens():
    recipe = load_recipe("ti2vid_two_stage").bind()
    pricings = Pricings(MACHINE, GEOMETRY, TOUCHES)
    frame = priced.tokens_frame([recipe], pricings, [100, 10_000])
    by_way = frame.pivot(index="tokens", columns="apply", values="seconds")
    few, many = by_way.loc[100], by_way.loc[10_000]
    assert few["fused, reread"] == many["fused, reread"] > PASS
    assert few["per layer"] == many["per layer"] > 3 * PASS  # three forwards, each with copies
    assert few["runtime"] < many["runtime"]


def test_changes_are_told_in_units_of_a_person():
    told = priced.changes_frame(
        [
            Change("memory", 48.0 * 2**30, "a", "b"),
            Change("idle", 1e-5, "b", "c"),
            Change("tokens", 1234.0, "c", "d"),
        ]
    )
    assert list(told["from"]) == ["48 GiB", "any", "1,234"]
    assert list(told["it was"]) == ["a", "b", "c"]
    assert list(priced.changes_frame([]).columns) == list(told.columns)


def test_records_are_predicted_with_the_adapters_that_they_bind():
    def walk(seconds, params, **case):
        return Record(
            case={"bench": "walk", "kernel": "gemm", "restore": "reread", "params": params} | case,
            seconds=(seconds,), check="bits", environment={}, commit="c", provenance="measured",
        )  # fmt: skip

    params = sum(tensor.params for tensor in GEOMETRY.tensors)
    fuse = {"action": "rebind", "before": "base", "state": "user@1", "phases": ["base", "user@1"]}
    records = [walk(2 * PASS, params, **fuse), walk(1.0, params + 1, **fuse)]
    frame = priced.predicted_frame(records, MACHINE, [GEOMETRY])
    assert list(frame.predicted_s) == [pytest.approx(PASS)]  # of other weights there are none
    assert list(frame.error) == [pytest.approx(-0.5)]
