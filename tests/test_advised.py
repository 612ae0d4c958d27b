"""What advice says: its plan, folded and to scale, and what it was held against."""

import json
from dataclasses import replace

import pytest

from lorabench.advised import describe_advice
from lorabench.advised_text import advice_text
from lorabench.bill import Bill, Line, first_and_later, price_plan
from lorabench.breakeven import NOTHING, Change
from lorabench.cost import Work, touches_of
from lorabench.plan import STRATEGIES, Denoise, Load, Rebind, Strategy, plan
from lorabench.plan_text import duration, fold, gib, timeline_text
from lorabench.planner import Choice, advise
from lorabench.pricing import Cost
from lorabench.rates import SIZES, Machine, Origin, Pace
from lorabench.recipe import BASE, Phase, Recipe, Role, State
from lorabench.setting import Pricings, Setting

GIB = 2**30
ROLES = ("user", "distilled")
RECIPE = Recipe(
    "r", "", "", (Role("user", True), Role("distilled", True)),
    (Phase(State(user=1.0), 2, video_tokens=64, audio_tokens=8),
     Phase(State(user=1.0, distilled=0.5), 1, video_tokens=256, audio_tokens=8)),
)  # fmt: skip
FIGURES = (
    "memory_bytes", "copy_host", "read_warm", "load_warm", "copy_new", "encode", "decode",
    "launch_seconds", *(f"kernels.gemm.{size}" for size in SIZES),
    *(f"forward.{size}" for size in SIZES),
)  # fmt: skip
MACHINE = Machine(
    name="made-up",
    title="A machine that nobody has",
    device="cpu",
    memory_bytes=64 * GIB,
    launch_seconds=1e-6,
    read_warm=4e9,
    load_warm=2e9,
    copy_host=8e9,
    copy_new=2e9,
    encode=2e8,
    decode=2e9,
    kernels={"gemm": {size: Pace(1e11, 5e9) for size in SIZES}},
    forward={size: Pace(2e11, 1e10) for size in SIZES},
    origins={
        name: Origin("measured", "here") if name.startswith("kernels") else Origin("derived", "x")
        for name in FIGURES
    },
)
ASKED = {
    role: {"strength": 1.0, "path": None, "targets": 62, "ranks": {"14": 60, "4": 2}}
    for role in ROLES
}
CHANGES = [
    Change("renders", 3, "reread", "images"),
    Change("renders", 12, "images", "residual"),
    Change("memory", 47.5 * GIB, NOTHING, "reread"),
    Change("idle", 90.0, "reread", "reread, ready for next"),
]


@pytest.fixture(scope="module")
def pricings(geometry):
    return Pricings(MACHINE, geometry, touches_of(geometry, ROLES))


@pytest.fixture(scope="module")
def described(pricings):
    """Describe the advice for a setting, as JSON gives it back."""

    def call(**setting):
        asked = {"recipe": RECIPE, "renders": 6, "memory_bytes": GIB, **setting}
        advice = advise(Setting(**asked), pricings)
        fields = describe_advice(advice, pricings, ASKED, CHANGES)
        return json.loads(json.dumps(fields, allow_nan=False))

    return call


# The fields


def test_actions_add_up_to_the_advised_plans_totals(described):
    best = described()["advised"]
    actions = best["actions"]
    assert sum(a["seconds"] for a in actions) == pytest.approx(best["total_seconds"])
    assert sum(a["waited_seconds"] for a in actions) == pytest.approx(best["critical_seconds"])
    assert sum(best["waited_seconds"].values()) == pytest.approx(best["binding_seconds"])
    forwards = sum(a["parts"].get("forward", 0) for a in actions)
    assert best["critical_seconds"] - forwards == pytest.approx(best["binding_seconds"])
    for action in actions:
        assert sum(action["parts"].values()) == pytest.approx(action["seconds"])


@pytest.mark.parametrize("only", [{}, {"order": ["render_major"]}, {"apply": ["runtime"]}])
def test_the_first_render_and_the_later_ones_wait_for_all_there_is_to_wait_for(described, only):
    fields = described(only=only)
    for choice in (fields["advised"], *fields["named"].values()):
        first, later = choice["first_render_seconds"], choice["later_render_seconds"]
        assert first + 5 * later == pytest.approx(choice["binding_seconds"])


def test_a_single_render_has_no_later_ones(described):
    assert described(renders=1)["advised"]["later_render_seconds"] is None


def test_the_margin_is_what_the_runner_up_waits_more(described):
    fields = described()
    best, other = fields["advised"]["binding_seconds"], fields["runner_up"]["binding_seconds"]
    assert fields["runner_up"]["margin_seconds"] == pytest.approx(other - best)
    assert (1 + fields["runner_up"]["margin"]) * best == pytest.approx(other)
    differing = dict(f.split("=") for f in fields["runner_up"]["differs_in"])
    assert all(fields["runner_up"]["strategy"][f] == v for f, v in differing.items())
    assert all(fields["advised"]["strategy"][f] != v for f, v in differing.items())


def test_every_preset_is_priced_or_said_not_to_be(described):
    fields = described()
    assert {*fields["named"], *fields["not_priced"]} == {*STRATEGIES}
    assert {*fields["not_priced"]} == {n for n, s in STRATEGIES.items() if s.kernel != "gemm"}


def test_what_is_cheaper_but_too_large_is_named_with_its_memory(described):
    large = described(only={"order": ["render_major"]})
    small = described(
        only={"order": ["render_major"]}, memory_bytes=large["advised"]["device_bytes"] - 1
    )
    too_large = small["cheaper_but_too_large"]
    assert large["cheaper_but_too_large"] is None
    assert too_large["binding_seconds"] == large["advised"]["binding_seconds"]
    assert (too_large["fits"], small["advised"]["fits"]) == (False, True)
    assert too_large["binding_seconds"] < small["advised"]["binding_seconds"]


def test_beside_a_batch_stands_the_cheapest_plan_for_renders_one_by_one(described):
    together = described(only={"restore": ["reread"]})
    alone = described(only={"restore": ["reread"], "order": ["render_major"]})
    assert together["advised"]["strategy"]["order"] == "phase_major"
    found = together["cheapest_one_by_one"]
    assert found["binding_seconds"] == alone["advised"]["binding_seconds"]
    assert alone["cheapest_one_by_one"] is None


def test_a_machines_figures_keep_where_they_are_from(described):
    figures = described()["machine"]["figures"]
    origin = {"provenance": "derived", "source": "x", "ceiling": False}
    assert figures["copy_host"] == {"value": 8e9, **origin}
    assert figures["kernels.gemm.large"]["provenance"] == "measured"


# The text


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"renders": 1},
        {"batch": 2, "only": {"restore": ["reread"]}},
        {"only": {"apply": ["per_layer"]}},
        {"only": {"order": ["render_major"], "restore": ["reread"]}, "idle_seconds": 3600.0},
        {"only": {"overlap": ["first_forward"]}},
    ],
    ids=str,
)
def test_text_fits_100_columns_and_says_that_all_is_predicted(described, setting):
    text = advice_text(described(**setting))
    assert max(map(len, text.splitlines())) <= 100
    assert "every second is predicted" in text
    assert "no attention" in text


def test_text_tells_the_share_of_binding_and_which_figures_are_peaks(described):
    fields = described()
    text = " ".join(advice_text(fields).split())
    best = fields["advised"]
    share = best["binding_seconds"] / best["critical_seconds"]
    forwards = duration(best["critical_seconds"] - best["binding_seconds"])
    assert f"of all waits {share:.1%}, beside {forwards} of forwards" in text
    assert "peaks" not in text
    for name in ("copy_host", "copy_new"):
        fields["machine"]["figures"][name]["ceiling"] = True
    best["critical_seconds"] = 2000 * best["binding_seconds"]
    text = " ".join(advice_text(fields).split())
    assert "2 are peaks, so that real times are longer" in text
    assert "of all waits under 0.1%" in text
    best["critical_seconds"] = best["binding_seconds"]
    assert "of all waits" not in advice_text(fields)


def test_text_tells_along_each_parameter_from_where_on_another_plan_is_the_answer(described):
    lines = [" ".join(line.split()) for line in advice_text(described()).splitlines()]
    assert "- renders: 'reread', from 3 on 'images', from 12 on 'residual'" in lines
    assert "- memory: nothing fits, from 47.5 GiB on 'reread'" in lines
    assert "- idle: 'reread', from 1.5 min on 'reread, ready for next'" in lines


def test_text_tells_that_the_answer_changes_nowhere(described):
    assert "nowhere near what was asked" in advice_text(described() | {"changes": []})


def test_text_tells_the_machine_and_where_its_figures_are_from(described):
    text = " ".join(advice_text(described()).split())
    assert "made-up: A machine that nobody has, weights on cpu" in text
    assert "11 derived, 3 measured; --json has the source of each" in text


def test_every_named_strategy_has_a_row_that_says_whether_it_may_be(described):
    setting = {"memory_bytes": 24 << 20, "only": {"restore": ["reread", "host_snapshot"]}}
    fields = described(**setting)
    rows = {line.split()[0]: line for line in advice_text(fields).splitlines() if line.split()}
    assert all(name in rows for name in fields["named"])
    assert rows["both_fixes"].endswith("yes")
    assert rows["images"].endswith("ruled out") or rows["images"].endswith("too large")
    assert rows["subtract"].endswith("ruled out")
    unbound = advice_text(described(memory_bytes=GIB))
    assert "not exact" in next(line for line in unbound.splitlines() if "subtract " in line)


def test_text_tells_why_in_full(described):
    fields = described()
    text = " ".join(advice_text(fields).split())
    assert fields["why"]
    for sentence in fields["why"]:
        assert f"- {sentence}" in text


def test_a_margin_above_the_whole_is_told_as_times(described):
    fields = described()
    fields["runner_up"] |= {"margin": 122.878}
    assert "124 times as long" in " ".join(advice_text(fields).split())


# The plan, folded


def priced(strategy, pricings, renders, batch=None, idle=0.0):
    bound = RECIPE.bind(dict.fromkeys(ROLES, 1.0))
    actions = plan(bound, strategy, renders, batch)
    bill = price_plan(actions, bound, strategy, pricings.of(bound, "gemm"), idle_seconds=idle)
    choice = Choice(strategy, actions, bill, None, False)
    from lorabench.advised import _actions

    return _actions(choice.bill)


def told(groups):
    return [
        (group.times, list(group.renders), [(row.action["kind"], row.count) for row in group.rows])
        for group in groups
    ]


def test_renders_that_do_the_same_are_told_once(pricings):
    actions = priced(Strategy(load="first_phase"), pricings, 5)
    visit = [("rebind", 1), ("denoise", 1)]
    assert told(fold(actions, together=1)) == [
        (1, [0], [("load", 1), ("denoise", 1), *visit]),
        (4, [1, 2, 3, 4], visit + visit),
    ]


def test_batches_that_do_the_same_are_told_once_and_a_shorter_last_one_by_itself(pricings):
    strategy = Strategy(load="first_phase", order="phase_major")
    actions = priced(strategy, pricings, 7, batch=2)
    visit = [("rebind", 1), ("denoise", 2)]
    assert told(fold(actions, together=2)) == [
        (1, [0, 1], [("load", 1), ("denoise", 2), *visit]),
        (2, [2, 3, 4, 5], visit + visit),
        (1, [6], [("rebind", 1), ("denoise", 1)] * 2),
    ]


def test_folding_loses_no_action_and_no_second(pricings):
    for name, strategy in STRATEGIES.items():
        actions = priced(replace(strategy, kernel="gemm"), pricings, 7, batch=3, idle=1e-3)
        groups = fold(actions, together=3 if strategy.order == "phase_major" else 1)
        folded = [(g.times * r.count, r.action["seconds"]) for g in groups for r in g.rows]
        assert sum(count for count, _ in folded) == len(actions), name
        seconds = sum(count * seconds for count, seconds in folded)
        assert seconds == pytest.approx(sum(a["seconds"] for a in actions)), name


# The timeline


def action(kind, seconds, waited=None, **fields):
    parts = {"forward" if kind == "denoise" else "fuse": seconds}
    state = {"state": {"user": 1.0}} if kind != "rebind" else {"to": {"user": 1.0}}
    common = {"kind": kind, "render": 0, "phase": 0, "critical": True, "apply": "resident"}
    waited = seconds if waited is None else waited
    return common | state | {"seconds": seconds, "waited_seconds": waited, "parts": parts} | fields


def bars(text):
    return [line[37:78].rstrip() for line in text.splitlines()[2:]]


def test_bars_are_to_scale_one_after_another_and_a_denoise_is_a_mark():
    actions = [action("load", 3.0), action("denoise", 9000.0), action("rebind", 1.0)]
    drawn = bars(timeline_text(fold(actions, 1)))
    assert drawn == ["█" * 30, " " * 30 + "▸", " " * 30 + "█" * 10]


def test_what_nobody_waits_for_is_shaded_and_takes_no_place_in_the_render():
    hidden = action("rebind", 2.0, 0.0, critical=False)
    ahead = action("rebind", 4.0, 1.0, overlapped=True)
    drawn = bars(timeline_text(fold([action("load", 4.0), ahead, hidden], 1)))
    assert drawn == ["█" * 20, " " * 20 + "█" * 5 + "░" * 15, " " * 25 + "░" * 10]


def test_unfused_adapters_are_drawn_as_waited_for_and_forwards_are_not():
    unfused = action("denoise", 0.0, 44.0, apply="runtime")
    unfused |= {"parts": {"forward": 40.0, "apply": 4.0}, "seconds": 44.0}
    drawn = bars(timeline_text(fold([action("load", 4.0), unfused], 1)))
    assert drawn == ["█" * 20, " " * 20 + "█" * 20 + "▸"]


def test_a_plan_that_takes_no_time_has_a_timeline():
    assert "0 s" in timeline_text(fold([action("load", 0.0)], 1))


# First and later renders


def line(made, waited, **parts):
    return Line(made, Cost(Work(), parts), waited)


def test_the_first_render_of_a_batch_waits_for_what_its_batch_does_before_it_ends():
    state = State(user=1.0)
    bill = Bill(
        (
            line(Load(BASE), 5.0),
            line(Denoise(BASE, 0, 0), 100.0, forward=100.0),
            line(Denoise(BASE, 1, 0), 100.0, forward=100.0),
            line(Rebind(BASE, state, 0, 1, True), 2.0),
            line(Denoise(state, 0, 1), 103.0, forward=100.0, apply=3.0),
            line(Denoise(state, 1, 1), 103.0, forward=100.0, apply=3.0),
        )
    )
    assert first_and_later(bill, 2, 2) == (10.0, 3.0)
    assert first_and_later(bill, 2, 1) == (10.0, None)


# Amounts


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.0, "0 s"), (2e-5, "20 us"), (0.045, "45 ms"), (1.25, "1.25 s"), (59.0, "59 s"),
        (200.0, "3.33 min"), (7560.0, "2.1 h"), (200000.0, "2.31 d"), (9e7, "1042 d"),
    ],
)  # fmt: skip
def test_seconds_are_told_in_the_unit_that_a_person_would(seconds, said):
    assert duration(seconds) == said


def test_memory_is_told_in_the_unit_it_is_asked_in():
    assert gib(64 * GIB) == "64.0 GiB"
    assert gib(3 << 20) == "3.0 MiB"
