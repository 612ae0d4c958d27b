"""Where the answer changes is where asking on both sides gives two answers."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from test_planner import APART, TOUCHES, TWO, recipe_of
from test_pricing import CPU, GEOMETRY, GPU

from lorabench.breakeven import NOTHING, PARAMETERS, Change, answer_map, changes, changes_of
from lorabench.errors import ConfigError, UnavailableError
from lorabench.planner import Advice, advise, label
from lorabench.rates import SIZES, Machine, Pace
from lorabench.reasons import parts_of, why
from lorabench.recipe import BASE, Phase, Recipe, Role, State
from lorabench.setting import Pricings, Setting

FAST = replace(CPU, forward=dict.fromkeys(SIZES, Pace(1e4)), launch_seconds=0.0)
"""A machine where it pays to fuse nothing for a few short renders."""

MIRROR = recipe_of({"a": 1.0}, {})
"""The costly rebind is the one that idle time can hide."""

ROOM = 1 << 20


def answer(setting: Setting, pricings: Pricings) -> str:
    try:
        return label(advise(setting, pricings).best)
    except UnavailableError:
        return NOTHING


def with_steps(setting: Setting, steps: int) -> Setting:
    phases = tuple(replace(phase, steps=steps) for phase in setting.recipe.phases)
    return replace(setting, recipe=replace(setting.recipe, phases=phases))


def with_tokens(setting: Setting, tokens: int) -> Setting:
    phases = tuple(replace(phase, video_tokens=tokens) for phase in setting.recipe.phases)
    return replace(setting, recipe=replace(setting.recipe, phases=phases))


VARIED: dict[str, Callable[[Setting, int], Setting]] = {
    "renders": lambda setting, value: replace(setting, renders=value),
    "batch": lambda setting, value: replace(setting, batch=value),
    "steps": with_steps,
    "tokens": with_tokens,
}


@pytest.mark.parametrize(
    ("parameter", "setting", "machine", "high"),
    [
        ("renders", Setting(TWO, 1, ROOM, batch=1), FAST, 300),
        ("renders", Setting(TWO, 1, ROOM, batch=3, idle_seconds=2.0), CPU, 40),
        ("batch", Setting(TWO, 12, ROOM), FAST, 12),
        ("steps", Setting(TWO, 4, ROOM, batch=1), FAST, 500),
        ("tokens", Setting(TWO, 4, ROOM, batch=1), FAST, 5000),
    ],
    ids=["renders", "batches", "batch", "steps", "tokens"],
)
def test_whole_numbers_change_exactly_where_they_are_said_to(
    parameter: str, setting: Setting, machine: Machine, high: int
):
    pricings = Pricings(machine, GEOMETRY, TOUCHES)
    found = changes_of(parameter, setting, pricings, 1, high)
    assert found, "a setting in which nothing changes tests nothing"
    for change in found:
        below, at = (VARIED[parameter](setting, int(change.at) - back) for back in (1, 0))
        assert answer(below, pricings) == change.before != change.after == answer(at, pricings)
    assert found[0].before == answer(VARIED[parameter](setting, 1), pricings)
    assert found[-1].after == answer(VARIED[parameter](setting, high), pricings)
    assert [change.after for change in found[:-1]] == [change.before for change in found[1:]]


@pytest.mark.parametrize("parameter", ["memory", "idle"])
def test_bytes_and_seconds_change_within_a_hundredth(parameter: str):
    pricings = Pricings(replace(FAST, memory_bytes=ROOM), GEOMETRY, TOUCHES)
    setting = Setting(MIRROR, 4, ROOM, batch=1, idle_seconds=1.0, only={"apply": ["resident"]})
    low, high, field = (1 << 10, ROOM, "memory_bytes") if parameter == "memory" else (
        0, 60, "idle_seconds"
    )  # fmt: skip
    found = changes_of(parameter, setting, pricings, low, high)
    assert found
    for change in found:
        at = int(change.at) if parameter == "memory" else change.at
        below = at / 1.02
        below = int(below) if parameter == "memory" else below - 2e-3
        assert answer(replace(setting, **{field: at}), pricings) == change.after
        assert answer(replace(setting, **{field: max(0, below)}), pricings) == change.before
    if parameter == "memory":
        assert found[0].before == NOTHING


def test_an_answer_that_returns_is_found_twice():
    """Batches of three: a fourth render begins a second batch, which pays for a restore."""
    pricings = Pricings(FAST, GEOMETRY, TOUCHES)
    found = changes_of("renders", Setting(TWO, 1, ROOM, batch=3), pricings, 1, 60)
    every = [answer(Setting(TWO, n, ROOM, batch=3), pricings) for n in range(1, 61)]
    told = [n + 2 for n, (one, next_) in enumerate(pairwise(every)) if one != next_]
    assert [int(change.at) for change in found] == told
    assert len(set(every)) < len(told) + 1


def test_every_parameter_is_varied_around_a_setting():
    pricings = Pricings(FAST, GEOMETRY, TOUCHES)
    found = changes(Setting(TWO, 20, 35_000, batch=4), pricings)
    assert list(dict.fromkeys(change.parameter for change in found)) == [
        parameter for parameter in PARAMETERS if parameter != "steps"
    ]
    for change in found:
        assert change.as_dict() == vars(change) | {"says": change.says}
        assert change.says.endswith(f" on: {change.after}, rather than {change.before}")


@pytest.mark.parametrize(
    ("parameter", "at", "told"),
    [
        ("renders", 1200, "from 1,200 renders on: b, rather than a"),
        ("batch", 3, "from 3 renders in a batch on"),
        ("memory", 3 << 29, "from 1.5 GiB of memory on"),
        ("idle", 90.0, "from 1.5 min idle after a render or batch on"),
        ("steps", 7, "from 7 steps in the first phase, others in proportion on"),
        ("tokens", 6144, "from 6,144 video tokens in the first phase"),
    ],
)
def test_a_change_is_told_in_words(parameter: str, at: float, told: str):
    assert Change(parameter, at, "a", "b").says.startswith(told)


def test_sound_alone_has_no_video_tokens_to_vary():
    phases = (Phase(BASE, steps=1, audio_tokens=9), Phase(State(a=1.0), steps=1, audio_tokens=9))
    setting = Setting(Recipe("sound", "", "", (Role("a", True),), phases), 4, ROOM)
    pricings = Pricings(CPU, GEOMETRY, TOUCHES)
    changes(setting, pricings)
    with pytest.raises(ConfigError, match="recipe 'sound' has no tokens to vary"):
        changes_of("tokens", setting, pricings, 1, 10)


@pytest.mark.parametrize(
    ("parameter", "low", "high", "told"),
    [
        ("rendres", 1, 9, "did you mean 'renders'"),
        ("renders", 0, 9, "expected a range upwards, found 0 to 9"),
        ("memory", 9, 1, "found 9 to 1"),
    ],
)
def test_what_is_no_range_is_refused(parameter: str, low: int, high: int, told: str):
    with pytest.raises(ConfigError, match=told):
        changes_of(parameter, Setting(TWO, 1, ROOM), Pricings(CPU, GEOMETRY, TOUCHES), low, high)


def test_a_map_has_the_answers_that_asking_one_by_one_gives():
    asked = [
        Setting(TWO, 1, ROOM, batch=2),
        Setting(APART, 1, ROOM, idle_seconds=5.0, only={"apply": ["resident"]}),
        Setting(recipe_of({"a": 1.0}), 1, ROOM),
    ]
    renders, memories = [1, 3, 40], [1 << 10, 31_000, 35_000, 60_000, ROOM]
    machine = replace(CPU, memory_bytes=40_000)  # so that the page cache goes with the memory
    rows = answer_map(asked, renders, memories, Pricings(machine, GEOMETRY, TOUCHES))
    assert len(rows) == len(asked) * len(renders) * len(memories)
    assert len({row["answer"] for row in rows}) > 4
    fresh = Pricings(machine, GEOMETRY, TOUCHES)
    for row, (setting, memory, number) in zip(
        rows, ((s, m, n) for s in asked for m in memories for n in renders), strict=True
    ):
        setting = replace(setting, renders=number, memory_bytes=memory)
        assert (row["renders"], row["memory_bytes"]) == (number, memory)
        assert row["answer"] == answer(setting, fresh)
        if row["answer"] == NOTHING:
            assert row["binding_seconds"] is row["device_bytes"] is row["host_bytes"] is None
            continue
        best = advise(setting, fresh).best
        assert row["binding_seconds"] == pytest.approx(best.bill.binding_seconds, abs=1e-7)
        assert (row["device_bytes"], row["host_bytes"]) == best.memory


def ask(setting: Setting, machine: Machine = CPU) -> Advice:
    return advise(setting, Pricings(machine, GEOMETRY, TOUCHES))


@pytest.mark.parametrize("machine", [CPU, replace(GPU, copy_host=64.0)], ids=["cpu", "cuda"])
def test_parts_add_up_to_what_is_waited_for(machine: Machine):
    advice = ask(Setting(TWO, 5, ROOM, idle_seconds=2.0), machine)
    for choice in (*advice.choices, *advice.named.values()):
        parts = parts_of(choice)
        assert sum(parts.values()) == pytest.approx(choice.bill.binding_seconds)
        assert parts["hidden"] <= 0


ONE_BY_ONE = {"order": ["render_major"], "apply": ["resident"]}


def test_why_tells_what_is_saved_against_the_runner_up():
    only = ONE_BY_ONE | {"restore": ["reread", "host_snapshot"]}
    # 4 restores of 8192 bytes at 1024 and 2048 bytes a second; a load keeps and reads at once
    machine = replace(CPU, copy_new=2048.0)
    assert why(ask(Setting(TWO, 5, ROOM, only=only), machine))[0] == (
        "'snapshot' waits 16 s less than the runner-up, 'reread': 16 s less restoring, 4 s "
        "less reading, 4 s more keeping"
    )


def test_why_tells_what_does_not_fit_and_what_is_hidden():
    only = ONE_BY_ONE | {"restore": ["host_snapshot", "images"]}
    machine = replace(CPU, memory_bytes=1)
    roomy = ask(Setting(APART, 50, ROOM, idle_seconds=2.0, only=only), machine)
    assert label(roomy.best) == "images"
    assert len(why(roomy)) == 2
    assert roomy.runner_up is not None
    limit = roomy.runner_up.memory.device_bytes
    told = why(ask(Setting(APART, 50, limit, idle_seconds=2.0, only=only), machine))
    assert told[0].startswith("'snapshot, ready for next' takes 0.0 MiB of 0.0 MiB")
    assert told[1].startswith("'images' would save ")
    # 4096 bytes back at 2048 a second, and two fuses of 12 s after them
    assert told[2] == "49 rebinds go on in 2 s of idle time each: 27 s would hide them all"
    assert told[3].startswith("the base's file comes from the disk")
