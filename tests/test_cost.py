"""Predictions are arithmetic on headers, and what a run counts is what was predicted."""

import itertools
from collections.abc import Iterator
from dataclasses import astuple, replace

import pytest
import torch

from lorabench.adapter import Adapter
from lorabench.checkpoint import Checkpoint, torch_dtype
from lorabench.cost import (
    Parts,
    Prices,
    Work,
    kept_bytes,
    predict_plan,
    predict_work,
    resident_bytes,
    touches_of,
)
from lorabench.errors import UnavailableError
from lorabench.fuse import Pair, Term, as_matrix
from lorabench.geometry import Target, TensorSpec, load_geometry
from lorabench.kernels import Scratch
from lorabench.kernels.gemm import gemm_tiles
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
from lorabench.restore import RESTORES
from lorabench.run import walk
from lorabench.synthetic import synthesize

LTX = load_geometry("ltx-2.5-22b")
BASE_BYTES, FACTOR_BYTES = 42_017_512_960, 8_899_362_816
TOUCHED, MACS = 18_977_652_736, 8_526_382_497_792
DISTILLED = State(distilled=1.0)
EXECUTABLE = ["reread", "host_snapshot", "residual", "images", "subtract"]


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
        (rebind(DISTILLED, BASE), "residual", Work(2 * MACS, fused_params=TOUCHED)),
        (rebind(DISTILLED, BASE), "images", Work()),
        (
            rebind(BASE, DISTILLED),
            "images",
            Work(2 * MACS, snapshot_bytes=2 * TOUCHED, fused_params=TOUCHED),
        ),
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


def test_an_image_is_paid_for_the_first_time_its_state_is_there():
    touches = touches_of(LTX, ["distilled"])
    made = Work(2 * MACS, snapshot_bytes=2 * TOUCHED, fused_params=TOUCHED)
    actions = [
        Load(BASE), rebind(BASE, DISTILLED), rebind(DISTILLED, BASE), rebind(BASE, DISTILLED),
        Load(DISTILLED), rebind(DISTILLED, BASE), rebind(BASE, DISTILLED),
    ]  # fmt: skip
    works = predict_plan(actions, touches, BASE_BYTES, "images")
    read = Work(file_bytes=BASE_BYTES + FACTOR_BYTES)
    assert works == (read, made, Work(), Work(), read + made, Work(), Work())


@pytest.mark.parametrize("restore", ["reread", "host_snapshot", "subtract", "residual"])
def test_where_nothing_is_remembered_a_plan_is_the_sum_of_its_actions(restore):
    touches = touches_of(LTX, ["distilled"])
    actions = [Load(BASE), rebind(BASE, DISTILLED), rebind(DISTILLED, BASE), Denoise(BASE, 0, 0)]
    assert predict_plan(actions, touches, BASE_BYTES, restore) == tuple(
        predict_work(action, touches, BASE_BYTES, restore) for action in actions
    )


HALF = State(distilled=0.5)


@pytest.mark.parametrize(
    ("restore", "states", "kept"),
    [
        ("reread", [DISTILLED], 0),
        ("subtract", [DISTILLED], 0),
        ("host_snapshot", [BASE], 2 * TOUCHED),
        ("device_snapshot", [BASE, DISTILLED], 2 * TOUCHED),
        ("images", [BASE], 0),
        ("images", [BASE, DISTILLED, BASE, DISTILLED], 2 * TOUCHED),
        ("images", [HALF, BASE, DISTILLED], 4 * TOUCHED),
        ("images", None, 2 * TOUCHED),
        ("residual", [BASE], 0),
        ("residual", [HALF, BASE, DISTILLED], round(0.65 * TOUCHED / 8)),
    ],
)
def test_what_a_restore_keeps(restore, states, kept):
    assert kept_bytes(touches_of(LTX, ["distilled"]), restore, states) == kept


def test_a_residual_is_as_big_as_its_bits_a_weight_and_an_f32_weight_is_kept_whole():
    touches = touches_of(LTX, ["distilled"])
    assert kept_bytes(touches, "residual", residual_bits=4) == TOUCHED // 2
    target = touches["distilled"][0]
    wide = replace(target, weight=replace(target.weight, dtype="F32"))
    one = {"distilled": [wide]}
    assert kept_bytes(one, "residual") == kept_bytes(one, "images") == 4 * target.weight.params


@pytest.mark.parametrize("restore", ["reread", "host_snapshot", "images"])
def test_what_stays_in_memory_is_weights_factors_scratch_and_what_is_kept(restore):
    touches = touches_of(LTX, ["distilled"])
    kept = kept_bytes(touches, restore, [BASE])
    assert resident_bytes(touches, BASE_BYTES, restore, [BASE]) == (
        BASE_BYTES + FACTOR_BYTES + kept
    )
    given = resident_bytes(touches, BASE_BYTES, restore, [BASE], factor_bytes=5)
    assert given == BASE_BYTES + 5 + kept


def meta_scratch(touches, states, product) -> int:
    """What the kernel takes for a pass into each state, found without memory or work."""
    device = torch.device("meta")
    scratch = Scratch(device)
    tiles = gemm_tiles("R1", product)
    for state in states:
        for weight in {t.weight for targets in touches.values() for t in targets}:
            terms = [
                Term(meta_pair(target), strength)
                for role, strength in state.items()
                for target in touches[role]
                if target.weight == weight
            ]
            dtype = torch_dtype(weight.dtype)
            values = torch.empty(weight.shape, dtype=dtype, device=device)
            tiles.fuse(as_matrix(values), terms, scratch)
    return scratch.nbytes


def meta_pair(target: Target) -> Pair:
    """A pair without memory; without factors where the rank is 0."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    rows, rank, in_ = len(target.rows), target.rank, target.columns
    a = empty(rank, in_) if rank else None
    return Pair(a, empty(rows, rank or in_), 1.0, target.rows.start)


@pytest.mark.parametrize("product", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "states", [[DISTILLED], [State(user=1.0, distilled=1.0)], [State(user=1.0), HALF]]
)
def test_the_scratch_that_is_predicted_is_what_the_kernel_takes(product, states):
    geometry = LTX.cut(1)
    touches = {
        "distilled": geometry.targets,
        "user": replace(geometry, rank=700).targets[::2],
    }
    target = touches["user"][1]
    wide = replace(target.weight, name="wide", dtype="F32")
    touches["user"] = (*touches["user"], replace(target, weight=wide))
    predicted = resident_bytes(
        touches, 0, "reread", states, factor_bytes=0, f32_products=product == torch.float32
    )
    assert predicted == meta_scratch(touches, states, product)
    assert 0 < predicted <= 256 << 20


@pytest.mark.parametrize("product", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize(
    "touched",  # at which rank, and which rows
    [
        [(32, range(0, 3000)), (8, range(1000, 1024))],
        [(0, None), (32, range(5))],
        [(32, range(5)), (0, range(4, 6))],
        [(0, None)],
    ],
)
def test_the_scratch_of_rows_and_deltas_is_predicted_as_well(product, dtype, touched):
    weight, bias = TensorSpec("w", (4096, 4096), dtype), TensorSpec("b", (9000,), dtype)
    touches = {f"r{i}": [Target("w", weight, *touch)] for i, touch in enumerate(touched)}
    touches["r0"].append(Target("b", bias, 0))
    states = [State(dict.fromkeys(touches, 1.0))]
    f32 = product == torch.float32
    predicted = resident_bytes(touches, 0, "reread", states, factor_bytes=0, f32_products=f32)
    assert predicted == meta_scratch(touches, states, product)


def test_rows_are_counted_once_however_many_adapters_touch_them():
    """By hand: rows 0 to 5 and 3 to 7 of 4 columns, one of the two a delta without factors."""
    weight = TensorSpec("w", (10, 4), "F16")
    one, other = Target("w", weight, 2, range(0, 6)), Target("w", weight, 0, range(3, 8))
    assert (one.macs, one.adapter_params) == (6 * 4 * 2, 2 * (6 + 4))
    assert (other.macs, other.adapter_params) == (0, 5 * 4)
    bias = Target("b", TensorSpec("b", (7,), "F32"), 0)
    assert (bias.macs, bias.adapter_params) == (0, 7)
    touches = {"one": [one], "other": [other, bias]}
    both = State(one=1.0, other=1.0)
    assert predict_work(rebind(BASE, both), touches, 80, "reread") == Work(
        flops=2 * 48, fused_params=8 * 4 + 7
    )
    assert kept_bytes(touches, "residual", [both]) == 2 * 8 * 4 + 4 * 7
    assert kept_bytes(touches, "images", [both]) == 2 * 40 + 4 * 7


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
        works = predict_plan(actions, touches, base_bytes, restore)
        for (action, work), predicted in zip(done, works, strict=True):
            assert work == predicted, action


@pytest.mark.parametrize("preset", STRATEGIES)
def test_every_preset_takes_the_work_that_was_predicted_on_a_block(
    geometry, base, adapters, preset
):
    strategy = STRATEGIES[preset]
    touches = touches_of(geometry, adapters)
    base_bytes = geometry.counts().tensor_bytes
    recipe = load_recipe("hq_two_stage").bind({"user": 1.0, "distilled": 1.0})
    weights = ResidentWeights(base, adapters, kernel=strategy.kernel, restore=strategy.restore)
    actions = plan(recipe, strategy, renders=2)
    works = predict_plan(actions, touches, base_bytes, strategy.restore)
    assert works == tuple(work for _, work in walk(actions, weights))


def test_every_restore_that_a_plan_may_name_is_there_and_but_one_on_the_cpu(base):
    assert STRATEGY_VALUES["restore"] == RESTORES
    for restore in {*RESTORES} - {*EXECUTABLE}:
        with pytest.raises(UnavailableError, match=f"'{restore}' needs a device"):
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
