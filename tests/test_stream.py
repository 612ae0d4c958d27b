"""Weights streamed from disk: the bits of resident ones, in little memory, and nothing left."""

import shutil
from pathlib import Path

import pytest
import torch
from conftest import bits
from odd import (
    PREFIX,
    STATES,
    TOUCHED,
    Model,
    at_most,
    failing,
    nothing_left,
    odd_shards,
    write_adapter,
    write_raw,
    write_shards,
)
from safetensors.torch import load_file, save_file

from lorabench import directio, stream, streamed
from lorabench.adapter import Adapter
from lorabench.checkpoint import Checkpoint
from lorabench.digest import digest
from lorabench.errors import (
    AdapterError,
    ConfigError,
    FileError,
    UnavailableError,
    WeightsLostError,
)
from lorabench.kernels import gemm
from lorabench.plan import Load, Rebind, parse_strategy, plan
from lorabench.recipe import BASE, State, load_recipe
from lorabench.resident import ResidentWeights
from lorabench.run import perform
from lorabench.segments import lay_out
from lorabench.streamed import StreamedWeights


@pytest.fixture(autouse=True)
def _no_deadlock():
    with at_most(20):
        yield


@pytest.fixture
def small_segments(monkeypatch):
    """Segments of 4 KB and tiles of some rows, so that a weight goes over many."""
    monkeypatch.setattr(gemm, "TILE", 700)
    monkeypatch.setattr(streamed, "lay_out", lambda *args: lay_out(*args, limit=4096))


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def streamed_tensors(segments, model: Model, kernel="gemm") -> dict[str, torch.Tensor]:
    """What comes out of a stream, put together again."""
    content: dict[str, list[torch.Tensor]] = {}
    passed = stream.stream(
        segments, model.base, model.adapters, kernel and stream.get_streamed_kernel(kernel)
    )
    for segment, memory in passed:
        for piece in segment.pieces:
            data = memory[piece.at : piece.at + piece.nbytes].clone()
            content.setdefault(piece.name, []).append(data)
    return {name: torch.cat(parts) for name, parts in content.items()}


@pytest.mark.parametrize("kernel", stream.STREAMED_KERNELS)
@pytest.mark.parametrize("limit", [400, 4096, 1 << 30])
@pytest.mark.parametrize("tile", [700, gemm.TILE])
def test_what_streams_has_the_bits_of_resident_weights(
    model, monkeypatch, threads, kernel, limit, tile
):
    monkeypatch.setattr(gemm, "TILE", tile)
    for state in (BASE, *STATES):
        expected = model.expected(state, kernel)
        segments = lay_out(model.base, model.adapters, state, limit=limit)
        with nothing_left():
            found = streamed_tensors(segments, model, kernel)
        for name, data in found.items():
            assert torch.equal(data, bits(expected[name])), (state, name)


def test_without_a_kernel_the_bases_own_bits_stream(model):
    segments = lay_out(model.base, model.adapters, STATES[-1], limit=4096)
    for name, data in streamed_tensors(segments, model, kernel=None).items():
        assert torch.equal(data, bits(model.base.read(name))), name


def test_torchs_threads_are_shared_out_among_the_workers_and_given_back(model, threads):
    segments = lay_out(model.base, model.adapters, STATES[0], limit=4096)
    seen = []

    def kernel(weight, terms, scratch) -> None:
        seen.append(torch.get_num_threads())

    for _ in stream.stream(segments, model.base, model.adapters, kernel):
        assert torch.get_num_threads() == 1
    assert set(seen) == {1}
    assert torch.get_num_threads() == threads


def test_a_caller_that_stops_leaves_nothing(model, threads):
    segments = lay_out(model.base, model.adapters, STATES[-1], limit=4096)
    assert len(segments) > 10
    for taken in (0, 1, 5):
        with nothing_left():
            passing = stream.stream(
                segments, model.base, model.adapters, stream.get_streamed_kernel("gemm")
            )
            for _ in range(taken):
                next(passing)
            passing.close()
            del passing


def test_there_are_only_so_many_buffers_however_many_segments(model, monkeypatch):
    made = []
    own = stream.aligned_memory
    monkeypatch.setattr(stream, "BUFFERS", 3)
    monkeypatch.setattr(stream, "aligned_memory", lambda n: (made.append(n), own(n))[1])
    segments = lay_out(model.base, model.adapters, STATES[-1], limit=4096)
    streamed_tensors(segments, model)
    assert made == [max(segment.memory_bytes for segment in segments)] * 3


def test_only_kernels_that_take_tiles_and_the_one_restore_are_accepted(model):
    for kernel, message in [("reference", "can't be streamed.*gemm, scalar"), ("gem", "no kernel")]:
        with pytest.raises(UnavailableError, match=message):
            StreamedWeights(model.base, model.adapters, kernel=kernel)
    for restore in ("host_snapshot", "subtract", "images"):
        with pytest.raises(UnavailableError, match=f"restore '{restore}' .*choose 'reread'"):
            StreamedWeights(model.base, model.adapters, restore=restore)


@pytest.mark.parametrize(
    ("strategy", "kernel"),
    [("as_written", "gemm"), ("both_fixes", "gemm"), ("as_written", "scalar")],
)
@pytest.mark.parametrize("recipe", ["ti2vid_two_stage", "hq_two_stage"])
def test_a_plan_on_streamed_weights_has_a_resident_ones_digest_after_every_action(
    base, adapters, recipe, strategy, kernel
):
    recipe = load_recipe(recipe).bind({"user": 0.8, "distilled": 1.0})
    bound = {role.name: adapters[role.name] for role in recipe.roles}
    ours = StreamedWeights(base, bound, kernel=kernel)
    theirs = ResidentWeights(base, bound, kernel=kernel)
    base_bytes = sum(spec.nbytes for spec in base.tensors)
    states = set()
    for action in plan(recipe, parse_strategy(f"{strategy},kernel={kernel}"), renders=2):
        work, resident = perform(action, ours), perform(action, theirs)
        assert ours.state == theirs.state
        assert ours.digest() == theirs.digest(), action
        assert (work.flops, work.fused_params) == (resident.flops, resident.fused_params)
        states.add(ours.state)
        if isinstance(action, Load | Rebind):
            factors = sum(bound[role].factor_bytes for role in ours.state)
            touched = {p.weight.name: p.weight.nbytes for a in bound.values() for p in a.pairs}
            weights = base_bytes if isinstance(action, Load) else sum(touched.values())
            assert work.file_bytes == weights + factors
    assert len(states) == 2


@pytest.mark.parametrize("kernel", stream.STREAMED_KERNELS)
def test_any_walk_has_a_fresh_loads_digest(model, small_segments, threads, kernel):
    ours = StreamedWeights(model.base, model.adapters, kernel=kernel)
    walk = [BASE, *STATES, BASE, STATES[0], State(detailing=0.5)]
    for i, state in enumerate(walk):
        with nothing_left():
            ours.rebind(state) if i else ours.load(state)
        assert ours.digest() == digest(model.expected(state, kernel)), state
    ours.load(STATES[1])
    assert ours.digest() == digest(model.expected(STATES[1], kernel))


def weights_of(*roles: str) -> list[str]:
    return sorted({f"{PREFIX}{module}.weight" for role in roles for module in TOUCHED[role]})


def test_the_hook_is_called_once_for_each_tensor_that_passes(model, small_segments):
    weights, seen = StreamedWeights(model.base, model.adapters), []
    weights.load(State(user=1.0), seen.append)
    assert sorted(seen) == sorted(model.base.entries)
    for state, roles in [
        (State(user=0.5), ["user"]),
        (State(distilled=0.5), ["user", "distilled"]),
        (BASE, ["distilled"]),
    ]:
        seen.clear()
        weights.rebind(state, seen.append)
        assert sorted(seen) == weights_of(*roles)
    seen.clear()
    assert not any(vars(weights.rebind(BASE, seen.append)).values())
    assert seen == []


def test_rows_of_what_passed_are_kept_when_asked_for(model, small_segments):
    a, b, d = (f"{PREFIX}{name}.weight" for name in "abd")
    keep = {a: range(3), b: range(1, 24), d: range(88, 90)}
    weights = StreamedWeights(model.base, model.adapters, keep=keep)
    weights.load(STATES[0])
    expected = model.expected(STATES[0])
    assert weights.kept.keys() == keep.keys()
    for name, kept in weights.kept.items():  # over as many tiles as there are
        rows = keep[name]
        assert kept.dtype == expected[name].dtype
        assert torch.equal(bits(kept), bits(expected[name][rows.start : rows.stop]))
    weights.rebind(State(detailing=1.0))
    assert weights.kept.keys() == {a, b}  # d is touched by neither state
    assert torch.equal(bits(weights.kept[a]), bits(model.expected(State(detailing=1.0))[a][:3]))


def test_shards_a_file_system_without_direct_io_and_sharded_adapters_give_the_same(
    model, tmp_path, monkeypatch, small_segments
):
    sharded = model.on(write_shards(tmp_path, model.base, odd_shards(model.base)))
    for direct in (directio._DIRECT, 0):
        monkeypatch.setattr(directio, "_DIRECT", direct)
        weights = StreamedWeights(sharded.base, sharded.adapters)
        weights.load(STATES[-1])
        assert weights.digest() == digest(model.expected(STATES[-1]))


def spoilt(adapter: Adapter, base: Checkpoint, path: Path, half: str, value: float) -> Adapter:
    """An adapter with one value of its factor A or B of ``c`` replaced."""
    tensors = load_file(adapter.file.path)
    tensors[f"diffusion_model.c.lora_{half}.weight"].view(-1)[-1] = value
    save_file(tensors, path)
    return Adapter.open(path, base.tensors)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("half", "AB")
def test_a_factor_that_is_not_finite_is_refused_by_name(
    model, tmp_path, small_segments, threads, half, value
):
    bad = spoilt(model.adapters["user"], model.base, tmp_path / "bad.safetensors", half, value)
    weights = StreamedWeights(model.base, model.adapters | {"user": bad})
    weights.load(State(distilled=1.0))
    message = f"^{bad.file.path}: tensor 'diffusion_model.c.lora_{half}.weight': 1 values are not"
    with nothing_left(), pytest.raises(AdapterError, match=message):
        weights.rebind(State(user=1.0))
    assert_lost(weights)
    weights.load(State(detailing=1.0))
    assert weights.digest() == digest(model.expected(State(detailing=1.0)))


def assert_lost(weights: StreamedWeights) -> None:
    for use in (weights.digest, lambda: weights.rebind(BASE), lambda: weights.state):
        with pytest.raises(WeightsLostError, match=r"call load\(\)"):
            use()


def test_a_fused_value_that_overflows_is_told_with_its_rows(model, tmp_path, small_segments):
    # the base's own NaN and infinities, in the first rows, are no overflow
    big = spoilt(model.adapters["user"], model.base, tmp_path / "big.safetensors", "B", 3e38)
    weights = StreamedWeights(model.base, model.adapters | {"user": big})
    rows = f"rows {64 // gemm.tile_rows(33) * gemm.tile_rows(33)} to 63"
    message = f"^{model.base.path}: weight '{PREFIX}c.weight': .* values overflow in {rows};"
    with nothing_left(), pytest.raises(AdapterError, match=message):
        weights.load(State(user=100.0))
    assert_lost(weights)
    with pytest.raises(AdapterError, match="overflow"):
        ResidentWeights(model.base, model.adapters | {"user": big}).load(State(user=100.0))


def test_nothing_is_known_before_the_first_load(model):
    assert_lost(StreamedWeights(model.base, model.adapters))


def test_a_state_of_unbound_adapters_is_refused_and_the_old_one_kept(model):
    weights = StreamedWeights(model.base, {"user": model.adapters["user"]})
    weights.load(State(user=1.0))
    for use in (weights.load, weights.rebind):
        with pytest.raises(ConfigError, match="needs adapter 'distilled'"):
            use(State(distilled=1.0))
    assert weights.digest() == digest(model.expected(State(user=1.0)))


def test_an_adapter_for_another_base_is_refused(model, tmp_path):
    write_raw(tmp_path / "other.safetensors", {f"{PREFIX}c.weight": torch.zeros(8, 8)})
    with pytest.raises(AdapterError, match="another base"):
        StreamedWeights(Checkpoint.open(tmp_path / "other.safetensors"), model.adapters)


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt(), MemoryError()])
@pytest.mark.parametrize("where", ["hook", "kernel", "read"])
@pytest.mark.parametrize("n", [1, 7])
def test_a_failure_anywhere_ends_the_threads_and_loses_the_state(
    model, small_segments, threads, where, error, n
):
    weights = StreamedWeights(model.base, model.adapters)
    weights.load(BASE)

    def hook(name: str) -> None:
        hook.calls += 1
        if where == "hook" and hook.calls == min(n, 5):
            raise type(error)(*error.args)

    hook.calls = 0
    owner, name = {
        "hook": (stream, "_view"),
        "kernel": (gemm, "_deltas"),
        "read": (directio.os, "preadv"),
    }[where]
    with nothing_left():
        with failing(owner, name, 10**9 if where == "hook" else n, error):
            with pytest.raises(type(error)):
                weights.rebind(STATES[-1], hook)
    assert_lost(weights)
    weights.load(STATES[-1])
    assert weights.digest() == digest(model.expected(STATES[-1]))


@pytest.mark.parametrize("which", ["base", "user"])
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_an_input_that_changes_is_told(model, tmp_path, small_segments, which, when):
    paths = {name: tmp_path / f"{name}.safetensors" for name in ("base", "user")}
    shutil.copy(model.base.path, paths["base"])
    base = Checkpoint.open(paths["base"])
    user = write_adapter(paths["user"], "user", base)
    weights = StreamedWeights(base, {"user": user})
    weights.load(BASE)

    last = f"{PREFIX}c.weight"  # all is read by then, and nothing opened again

    def change(name: str = last) -> None:
        if name != last:
            return
        with paths[which].open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"x")

    if when == "before":
        change()
    with nothing_left(), pytest.raises(FileError, match=f"^{paths[which]}: changed"):
        weights.rebind(State(user=1.0), change if when == "meanwhile" else print)
    assert_lost(weights)


def test_a_file_that_is_cut_off_meanwhile_is_told(model, tmp_path, small_segments):
    path = tmp_path / "base.safetensors"
    shutil.copy(model.base.path, path)
    weights = StreamedWeights(Checkpoint.open(path))
    with path.open("r+b") as file, nothing_left():
        with pytest.raises(FileError, match=f"^{path}: (ended at byte|changed)"):
            weights.load(after_weight=lambda name: file.truncate(9000))
    assert_lost(weights)


def test_adapters_that_the_state_does_not_name_may_be_gone(model, tmp_path):
    user = write_adapter(tmp_path / "user.safetensors", "user", model.base)
    weights = StreamedWeights(model.base, {**model.adapters, "user": user})
    user.file.path.unlink()
    weights.load(State(distilled=1.0))
    assert weights.digest() == digest(model.expected(State(distilled=1.0)))
