"""Predictions are arithmetic on headers, and what a run counts is what was predicted."""

import itertools
from collections.abc import Iterator
from dataclasses import astuple, replace

import pytest

from lorabench.adapter import Adapter
from lorabench.checkpoint import Checkpoint
from lorabench.cost import Parts, Prices, Work, predict_work, resident_bytes, touches_of
from lorabench.errors import UnavailableError
from lorabench.geometry import load_geometry
from lorabench.plan import (
    STRATEGIES,
    STRATEGY_VALUES,
    Action,
    Denoise,
    Load,
    Rebind,
    Strategy,
    plan,
)
from lorabench.recipe import BASE, Recipe, State, load_recipe, recipe_names
from lorabench.resident import ResidentWeights
from lorabench.run import walk
from lorabench.synthetic import synthesize

LTX = load_geometry("ltx-2.5-22b")
BASE_BYTES, FACTOR_BYTES = 42_017_512_960, 8_899_362_816
TOUCHED, MACS = 18_977_652_736, 8_526_382_497_792
DISTILLED = State(distilled=1.0)
EXECUTABLE = ["reread", "host_snapshot", "subtract"]


def rebind(before: State, after: State) -> Rebind:
    return Rebind(before, after, render=0, phase=0, critical=True)


@pytest.mark.parametrize(
    ("action", "restore", "work"),
    [
        (Load(BASE), "reread", Work(file_bytes=BASE_BYTES + FACTOR_BYTES)),
        (
            Load(DISTILLED),
            "reread",
            Work(2 * MACS, BASE_BYTES + FACTOR_BYTES, fused_params=TOUCHED),
        ),
        (
            Load(BASE),
            "host_snapshot",
            Work(file_bytes=BASE_BYTES + FACTOR_BYTES, snapshot_bytes=2 * TOUCHED),
        ),
        (rebind(DISTILLED, BASE), "reread", Work(file_bytes=2 * TOUCHED)),
        (rebind(DISTILLED, BASE), "host_snapshot", Work(snapshot_bytes=2 * TOUCHED)),
        (rebind(DISTILLED, BASE), "device_snapshot", Work(snapshot_bytes=2 * TOUCHED)),
        (rebind(DISTILLED, BASE), "subtract", Work(2 * MACS, fused_params=TOUCHED)),
        (rebind(BASE, DISTILLED), "reread", Work(2 * MACS, fused_params=TOUCHED)),
        (
            rebind(State(distilled=0.25), State(distilled=0.5)),
            "reread",
            Work(2 * MACS, 2 * TOUCHED, fused_params=TOUCHED),
        ),
        (Denoise(DISTILLED, 0, 0), "reread", Work()),
    ],
)
def test_the_work_of_the_whole_model_is_the_published_one(action, restore, work):
    touches = touches_of(LTX, ["distilled"])
    assert predict_work(action, touches, BASE_BYTES, restore) == work


def test_two_adapters_multiply_twice_and_are_added_and_restored_once():
    touches = touches_of(LTX, ["user", "distilled"])
    both = State(user=1.0, distilled=1.0)
    assert predict_work(rebind(BASE, both), touches, BASE_BYTES, "reread") == Work(
        4 * MACS, fused_params=TOUCHED
    )
    assert predict_work(rebind(both, BASE), touches, BASE_BYTES, "reread") == Work(
        file_bytes=2 * TOUCHED
    )


def test_a_bound_adapter_is_read_and_snapshot_though_the_state_lacks_it():
    touches = touches_of(LTX, ["user", "distilled"])
    assert predict_work(Load(BASE), touches, BASE_BYTES, "host_snapshot") == Work(
        file_bytes=BASE_BYTES + 2 * FACTOR_BYTES, snapshot_bytes=2 * TOUCHED
    )


def test_as_written_pays_three_passes_before_the_first_step_and_both_fixes_one_in_all():
    recipe = load_recipe("ti2vid_two_stage").bind()
    touches = touches_of(LTX, ["distilled"])

    def flops(strategy: str) -> int:
        actions = plan(recipe, STRATEGIES[strategy])
        return sum(predict_work(a, touches, BASE_BYTES, "reread").flops for a in actions)

    assert flops("as_written") == 2 * 2 * MACS  # its third pass, the undoing, reads instead
    assert flops("both_fixes") == 2 * MACS


def test_work_adds_up_field_by_field():
    assert Work(1, 2, 3, 4) + Work(10, 20, 30, 40) == Work(11, 22, 33, 44)
    assert sum([Work(1, 2, 3, 4)] * 3, Work()) == Work(3, 6, 9, 12)


@pytest.mark.parametrize(
    ("restore", "kept"),
    [("reread", 0), ("subtract", 0), ("host_snapshot", 1), ("device_snapshot", 1)],
)
def test_what_stays_in_memory_is_weights_factors_and_what_a_restore_keeps(restore, kept):
    touches = touches_of(LTX, ["distilled"])
    expected = BASE_BYTES + FACTOR_BYTES + kept * 2 * TOUCHED
    assert resident_bytes(touches, BASE_BYTES, restore) == expected


@pytest.mark.parametrize("restore", EXECUTABLE)
def test_what_stays_in_memory_is_what_resident_weights_hold(base, adapters, restore):
    weights = ResidentWeights(base, adapters, restore=restore)
    weights.load()
    held = sum(tensor.nbytes for tensor in weights.tensors.values())
    assert resident_bytes({}, held, restore) == held
    for role in adapters:
        held += sum(pair.a.nbytes + pair.b.nbytes for pair in weights.factors(role).values())
    held += sum(t.nbytes for t in getattr(weights._restore, "_kept", {}).values())
    base_bytes = sum(spec.nbytes for spec in base.tensors)
    assert resident_bytes(weights.touches, base_bytes, restore) == held


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A few globals of a shrunk LTX-2.5 and its adapters, quick enough for all plans."""
    geometry = load_geometry("ltx-2.5-22b", shrink=32).cut(0)
    parts = ("patchify_proj.", "proj_out.", "adaln_single.", "scale_shift_table")
    named = tuple(geometry.prefix + part for part in parts)
    geometry = replace(
        geometry, tensors=tuple(t for t in geometry.tensors if t.name.startswith(named))
    )
    assert geometry.counts().targets == 5
    roles = ("user", "distilled", "detailing")
    files = synthesize(tmp_path_factory.mktemp("small"), geometry, roles)
    base = Checkpoint.open(files.base)
    return geometry, base, {r: Adapter.open(p, base.tensors) for r, p in files.adapters.items()}


def bound_recipes() -> Iterator[Recipe]:
    """Every shipped recipe with its required roles, and with all."""
    for recipe in map(load_recipe, recipe_names()):
        yield recipe.bind()
        yield recipe.bind({role.name: 0.8 for role in recipe.roles})


def all_plans() -> set[tuple[tuple[str, ...], tuple[Action, ...]]]:
    """The bound roles and the actions of every recipe under every strategy, each once.

    The kernel and the restore make no difference to a plan.
    """
    fields = ("load", "leave", "order")
    points = list(itertools.product(*(STRATEGY_VALUES[field] for field in fields)))
    return {
        (tuple(role.name for role in recipe.roles), plan(recipe, strategy, renders=2))
        for recipe in bound_recipes()
        for strategy in (Strategy(**dict(zip(fields, point, strict=True))) for point in points)
    }


@pytest.mark.parametrize("restore", EXECUTABLE)
def test_every_plan_takes_the_work_that_was_predicted(small, restore):
    geometry, base, adapters = small
    base_bytes = geometry.counts().tensor_bytes
    plans = all_plans()
    assert len(plans) > 50
    for roles, actions in plans:
        touches = touches_of(geometry, roles)
        bound = {role: adapters[role] for role in roles}
        weights = ResidentWeights(base, bound, kernel="reference", restore=restore)
        done = list(walk(actions, weights))
        assert [action for action, _ in done] == list(actions)
        for action, work in done:
            assert work == predict_work(action, touches, base_bytes, restore), action


@pytest.mark.parametrize("preset", STRATEGIES)
def test_every_preset_takes_the_work_that_was_predicted_on_a_block(
    geometry, base, adapters, preset
):
    strategy = STRATEGIES[preset]
    touches = touches_of(geometry, adapters)
    base_bytes = geometry.counts().tensor_bytes
    recipe = load_recipe("hq_two_stage").bind({"user": 1.0, "distilled": 1.0})
    weights = ResidentWeights(base, adapters, kernel=strategy.kernel, restore=strategy.restore)
    for action, work in walk(plan(recipe, strategy, renders=2), weights):
        assert work == predict_work(action, touches, base_bytes, strategy.restore)


@pytest.mark.parametrize("restore", sorted({*STRATEGY_VALUES["restore"]} - {*EXECUTABLE}))
def test_the_other_restores_can_not_be_executed_here(base, restore):
    with pytest.raises(UnavailableError, match=f"'{restore}'"):
        ResidentWeights(base, restore=restore)


PRICES = Prices(load=Parts(8.0, 2.0), restore=Parts(1.0, 0.5), fuse=Parts(3.0, 1.0))


@pytest.mark.parametrize(
    ("action", "seconds"),
    [
        (Load(BASE), {"load": 8 + 48 * 2}),
        (Load(DISTILLED), {"load": 8 + 48 * 2, "fuse": 3 + 48}),
        (rebind(BASE, DISTILLED), {"fuse": 3 + 48}),
        (rebind(DISTILLED, BASE), {"restore": 1 + 24}),
        (
            rebind(DISTILLED, State(user=0.5, distilled=0.5)),
            {"restore": 1 + 24, "fuse": 2 * (3 + 48)},
        ),
        (Denoise(BASE, 0, 0), {}),
    ],
)
def test_seconds_at_a_depth_are_the_globals_once_and_each_block(action, seconds):
    assert PRICES.parts(action, blocks=48) == seconds


def test_bytes_are_those_of_the_dtypes_and_counts_are_whole():
    work = predict_work(Load(DISTILLED), touches_of(LTX, ["distilled"]), BASE_BYTES, "reread")
    assert all(type(amount) is int for amount in astuple(work))
