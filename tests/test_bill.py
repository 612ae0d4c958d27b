"""Who waits for what in a plan."""

from dataclasses import replace

import pytest
from test_pricing import CPU, GPU, pricing

from lorabench.bill import Bill, price_plan
from lorabench.plan import STRATEGIES, Denoise, Load, Rebind, Strategy, plan
from lorabench.rates import Machine, Pace
from lorabench.recipe import BASE, Phase, Recipe, Role, State

FUSED = State(distilled=1.0)
RECIPE = Recipe(
    "two_stage",
    "",
    "",
    (Role("distilled", True),),
    (
        Phase(BASE, steps=2, video_tokens=8, audio_tokens=1),
        Phase(FUSED, steps=1, video_tokens=64, audio_tokens=1),
    ),
)
LOAD = pricing().load(BASE, "host_snapshot").seconds
FORWARDS = sum(pricing().denoise(phase).seconds for phase in RECIPE.phases)
FUSE, RESTORE = 17.0, 2 * 4096 / 2048  # of distilled


def bill(
    strategy: Strategy,
    renders: int,
    machine: Machine = CPU,
    *,
    batch: int | None = None,
    idle_seconds: float = 0.0,
) -> Bill:
    actions = plan(RECIPE, strategy, renders, batch)
    return price_plan(actions, RECIPE, strategy, pricing(machine), idle_seconds=idle_seconds)


def test_every_render_waits_for_its_rebinds_and_its_forwards():
    found = bill(STRATEGIES["snapshot"], renders=3)
    assert found.binding_seconds == LOAD + 3 * FUSE + 2 * RESTORE
    assert found.critical_seconds == found.total_seconds
    assert found.critical_seconds == pytest.approx(found.binding_seconds + 3 * FORWARDS)
    assert found.idle_needed_seconds == 0


@pytest.mark.parametrize(("idle", "left"), [(0.0, 4.0), (1.0, 3.0), (4.0, 0.0), (100.0, 0.0)])
def test_making_ready_goes_on_in_the_idle_time_and_nobody_waits_after_the_last(
    idle: float, left: float
):
    found = bill(STRATEGIES["ready_for_next"], renders=3, idle_seconds=idle)
    assert found.binding_seconds == LOAD + 3 * FUSE + 2 * left
    assert found.total_seconds == pytest.approx(LOAD + 3 * (FUSE + RESTORE + FORWARDS))
    assert found.idle_needed_seconds == RESTORE
    waits = [line.waited_seconds for line in found.lines if not line.action.critical]
    assert waits == [left, left, 0.0]


def test_a_batch_waits_once():
    strategy = STRATEGIES["batched"]
    assert bill(strategy, renders=4).binding_seconds == LOAD + FUSE
    assert bill(strategy, renders=4, batch=2).binding_seconds == LOAD + 2 * FUSE + RESTORE


def test_an_image_is_paid_for_once():
    found = bill(STRATEGIES["images"], renders=3)
    seconds = [line.cost.seconds for line in found.lines if isinstance(line.action, Rebind)]
    assert seconds == [FUSE + 2 * 4096 / 128, 0.0, 0.0, 0.0, 0.0]


def test_an_overlapped_rebind_is_waited_for_as_far_as_it_is_exposed():
    machine = replace(GPU, copy_host=512.0)
    found = bill(STRATEGIES["overlapped"], renders=2, machine=machine)
    prices = pricing(machine)
    for line in found.lines:
        if isinstance(line.action, Rebind):
            assert line.action.phase is not None
            phase = RECIPE.phases[line.action.phase]
            assert line.waited_seconds == prices.exposed(line.cost, phase)
    back = next(line for line in found.lines if getattr(line.action, "after", FUSED) == BASE)
    assert back.waited_seconds < back.cost.seconds
    assert found.critical_seconds < found.total_seconds


def test_unfused_adapters_are_waited_for_in_every_forward():
    found = bill(STRATEGIES["runtime"], renders=5)
    added = pricing().denoise(RECIPE.phases[1], "runtime").parts["apply"]
    assert found.binding_seconds == pytest.approx(found.lines[0].cost.seconds + 5 * added)
    assert [type(line.action) for line in found.lines] == [Load, *[Denoise] * 10]


def test_long_forwards_drown_no_binding():
    slow = replace(CPU, forward=dict.fromkeys(CPU.forward, Pace(1e-9)))
    assert bill(STRATEGIES["snapshot"], 3, slow).binding_seconds == LOAD + 3 * FUSE + 2 * RESTORE
