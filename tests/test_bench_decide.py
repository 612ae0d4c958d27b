"""Advised and named plans, carried out side by side: what is run, and how it is told."""

import pytest

from lorabench import bench
from lorabench.bench.decide import decide_cases, decision_frame
from lorabench.cost import touches_of
from lorabench.plan import STRATEGIES, plan
from lorabench.planner import advise
from lorabench.rates import SIZES, Machine, Pace
from lorabench.recipe import load_recipe
from lorabench.records import Record
from lorabench.setting import Pricings, Setting

MACHINE = Machine(
    name="made up",
    title="Where copying is cheap and multiplying isn't",
    device="cpu",
    memory_bytes=1 << 40,
    read_cold=1e9,
    read_warm=1e9,
    load_warm=1e9,
    copy_host=1e10,
    copy_new=1e10,
    encode=1e9,
    decode=1e9,
    kernels={"gemm": dict.fromkeys(SIZES, Pace(1e9))},
    forward=dict.fromkeys(SIZES, Pace(1e9)),
    origins={},
)


@pytest.fixture
def subject(files):
    return bench.Subject(files.base, {"distilled": files.adapters["distilled"]})


@pytest.fixture
def pricings(geometry):
    return Pricings(MACHINE, geometry, touches_of(geometry, ["distilled"]))


def advised(name, pricings, renders=2, **setting):
    recipe = load_recipe(name).bind()
    asked = Setting(recipe, renders, MACHINE.memory_bytes, **setting)
    return recipe, advise(asked, pricings).best


def test_every_named_strategy_of_the_kernel_and_the_advised_one_are_covered_once(subject, pricings):
    names = ("ti2vid_two_stage", "a2vid_two_stage", "dfr")
    cases = decide_cases(subject, {name: advised(name, pricings) for name in names})
    covered = [one for case in cases for one in case.what["covers"]]
    named = [name for name, strategy in STRATEGIES.items() if strategy.kernel == "gemm"]
    assert sorted(covered) == sorted(f"{r} {s}" for r in names for s in ("advised", *named))
    # The two pipelines ask for the same states, so that no plan is carried out twice.
    for case in cases:
        recipes = {one.split()[0] for one in case.what["covers"]}
        assert "dfr" in recipes or recipes == {"ti2vid_two_stage", "a2vid_two_stage"}


def test_rounds_go_through_all_in_turn(subject, pricings):
    once = decide_cases(subject, {"dfr": advised("dfr", pricings)})
    twice = decide_cases(subject, {"dfr": advised("dfr", pricings)}, rounds=2)
    assert [case.what["round"] for case in twice] == [0] * len(once) + [1] * len(once)


def test_the_advised_plan_itself_is_carried_out(subject, pricings, tmp_path):
    recipe, choice = advised("ti2vid_two_stage", pricings, batch=1)
    assert choice.strategy.restore == "images"
    [case] = [
        case
        for case in decide_cases(subject, {"ti2vid_two_stage": (recipe, choice)})
        if "ti2vid_two_stage advised" in case.what["covers"]
    ]
    found = bench.sweep([case], tmp_path / "r.jsonl")
    expected = [a for a in choice.actions if a.kind != "denoise"]
    assert [(r.case["action"], r.case["state"]) for r in found] == [
        (a.kind, str(a.after if a.kind == "rebind" else a.state)) for a in expected
    ]
    frame = decision_frame(found)
    row = frame[frame.strategy == "advised"].iloc[0]
    assert row.rebinds == len(expected) - 1
    assert row.binding_s == pytest.approx(sum(r.seconds[0] for r in found))


def walked(covers, number, *actions, apply="resident"):
    return [
        Record(
            case={
                "bench": "walk",
                "covers": covers,
                "round": number,
                "apply": apply,
                "action": action,
                "critical": critical,
            },
            seconds=(seconds,),
            check="said so",
            environment={},
            commit="unknown",
            provenance="measured",
        )
        for action, seconds, critical in actions
    ]


def test_a_strategy_costs_what_renders_wait_in_the_median_round():
    load, fuse = ("load", 1.0, True), ("rebind", 4.0, True)
    ready = ("rebind", 2.0, False)
    records = [
        *walked(["r both_fixes", "r advised"], 0, load, fuse),
        *walked(["r both_fixes", "r advised"], 1, load, ("rebind", 8.0, True)),
        *walked(["r both_fixes", "r advised"], 2, load, ("rebind", 5.0, True)),
        # No idle time is assumed: the first is waited for by the render after it, the last by none.
        *walked(["r ready"], 0, load, fuse, ready, fuse, ready),
        *walked(["r runtime"], 0, load, apply="runtime"),
    ]
    frame = decision_frame(records, lambda recipe, apply: {"runtime": 30.0}[apply])
    told = {row.strategy: (row.load_s, row.rebinds_s, row.apply_s) for row in frame.itertuples()}
    assert told == {
        "both_fixes": (1, 5, 0),
        "advised": (1, 5, 0),
        "ready": (1, 10, 0),
        "runtime": (1, 0, 30),
    }
    assert dict(zip(frame.strategy, frame.over_best, strict=True)) == pytest.approx(
        {"both_fixes": 1, "advised": 1, "ready": 11 / 6, "runtime": 31 / 6}
    )


def test_a_plan_that_is_a_strategys_own_is_the_same_case(subject):
    recipe = load_recipe("ti2vid_two_stage").bind()
    strategy = STRATEGIES["snapshot"]
    mine = bench.walk_case(
        subject, recipe, strategy, "snapshot", 2, actions=plan(recipe, strategy, 2)
    )
    assert {**mine.what, "plan": None} == {
        **bench.walk_case(subject, recipe, strategy, "snapshot", 2).what,
        "plan": None,
    }


def test_recipes_without_an_adapter_are_carried_out_too(files, pricings, tmp_path):
    subject = bench.Subject(files.base, {})
    found = bench.sweep(
        decide_cases(subject, {"one_stage": advised("one_stage", pricings)}), tmp_path / "r.jsonl"
    )
    assert {r.case["action"] for r in found} == {"load"}
    exact = [r for r in found if r.case["restore"] != "subtract"]
    assert all("nothing fused to compare" in r.check for r in exact)
    frame = decision_frame(found)
    assert len(frame) == 12
