"""Resident weights: always the bits of exactly one known state, or refused."""

import itertools
import os
import re
import shutil
import sys
import threading
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from conftest import ADAPTERS, CPU_KERNELS, bits, shard
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from lorabench import devices, loading, resident, residual, restore, sweep
from lorabench.adapter import Adapter
from lorabench.checkpoint import Checkpoint
from lorabench.cost import Work, predict_work
from lorabench.digest import digest
from lorabench.errors import (
    AdapterError,
    ConfigError,
    FileError,
    UnavailableError,
    WeightsLostError,
)
from lorabench.fuse import Term, reference_deltas, reference_fuse
from lorabench.kernels import one_nan
from lorabench.loading import read_factors
from lorabench.plan import Action, Load, Rebind
from lorabench.recipe import BASE, State
from lorabench.resident import ResidentWeights

OVERWRITE = ["reread", "host_snapshot"]
"""Restores that don't care what a broken fuse has made of a weight."""
EXACT = [*OVERWRITE, "residual", "images"]
WAYS = [
    (kernel, restore)
    for kernel in CPU_KERNELS
    for restore in EXACT
    if (kernel, restore) != ("scalar", "residual")  # it doesn't show its deltas
]
PREFIX = "model.diffusion_model."
SHAPES = {
    "a": (24, 16),
    "b": (16, 40),
    "c": (8, 8),
    "d": (40, 24),
    "e": (1, 16),
    "f": (16, 16),
    "g": (24, 24),
    "h": (8, 8),
}
TOUCHED = {"user": "abcd", "distilled": "cdef", "detailing": "bdfg"}  # and h by none
SCALES = {"user": {}, "distilled": {"lora_alpha": "2", "lora_rank": "4"}, "detailing": {}}
# quiet and signalling NaN of both signs, infinities, -0, the smallest and largest subnormals
ODD_BITS = [0x7FC0, 0x7FC1, 0x7F81, -0x5B, 0x7F80, -0x80, -0x8000, 0x0001, -0x7FFF, 0x007F]


@dataclass(frozen=True)
class Model:
    """A base of eight small weights and three adapters that touch some of them."""

    base: Checkpoint
    adapters: dict[str, Adapter]

    def resident(self, kernel="reference", restore="reread", rule="R1") -> ResidentWeights:
        return ResidentWeights(self.base, self.adapters, kernel=kernel, restore=restore, rule=rule)

    def moved(self, folder: Path) -> "Model":
        """The same with the base in a file of its own, to be damaged."""
        path = folder / "moved.safetensors"
        shutil.copy(self.base.path, path)
        return Model(Checkpoint.open(path), self.adapters)

    def expected(self, state: State, rule="R1") -> dict[str, torch.Tensor]:
        """What a state's tensors are by the reference."""
        factors = {role: read_factors(self.adapters[role]) for role in state}
        expected = {}
        for name in self.base.entries:
            terms = [Term(p, s) for r, s in state.items() for p in factors[r].get(name, ())]
            expected[name] = reference_fuse(self.base.read(name), terms, rule)
            if terms:
                one_nan(expected[name])
        return expected


def write_adapter(
    path: Path, touched: str, base: Checkpoint, std=0.2, dtype=torch.bfloat16, **metadata: str
) -> Adapter:
    g = torch.Generator().manual_seed(len(path.stem))
    tensors = {}
    for rank, module in enumerate(touched, start=1):
        out, in_ = SHAPES[module]
        tensors[f"diffusion_model.{module}.lora_A.weight"] = torch.randn(rank, in_, generator=g)
        tensors[f"diffusion_model.{module}.lora_B.weight"] = torch.randn(out, rank, generator=g)
    save_file({n: (t * std).to(dtype) for n, t in tensors.items()}, path, metadata or None)
    return Adapter.open(path, base.tensors)


def write_model(folder: Path, touched=TOUCHED, modules="abcdefgh", factors=torch.bfloat16) -> Model:
    """Write the small base, with odd values in some weights, and its adapters."""
    g = torch.Generator().manual_seed(1)
    tensors = {"bias": torch.randn(8, generator=g).bfloat16()}
    for module in modules:
        weight = torch.randn(SHAPES[module], generator=g)
        tensors[f"{module}.weight"] = weight if module == "g" else weight.bfloat16()
    for module in {*"bdh"} & {*modules}:  # touched by one adapter, by all three, by none
        odd = torch.tensor(ODD_BITS, dtype=torch.int16).view(torch.bfloat16)
        tensors[f"{module}.weight"].view(-1)[: len(ODD_BITS)] = odd
    path = folder / "base.safetensors"
    save_file({PREFIX + name: tensor for name, tensor in tensors.items()}, path)
    base = Checkpoint.open(path)
    return Model(
        base,
        {
            role: write_adapter(
                folder / f"{role}.safetensors", names, base, dtype=factors, **SCALES[role]
            )
            for role, names in touched.items()
        },
    )


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def fresh(model):
    """The digest of a state, loaded fresh."""

    @cache
    def fresh(kernel: str, state: State) -> str:
        weights = model.resident(kernel)
        weights.load(state)
        return weights.digest()

    return fresh


STRENGTHS = st.sampled_from([0.0, 0.25, 0.5, 0.8, 1.0, -1.0, 2.0])
STATES = st.lists(
    st.tuples(st.sampled_from(ADAPTERS), STRENGTHS), max_size=3, unique_by=lambda pair: pair[0]
).map(State)


@settings(max_examples=60)
@given(
    way=st.sampled_from(WAYS),
    first=STATES,
    then=st.lists(st.tuples(st.sampled_from(["rebind", "rebind", "load"]), STATES), max_size=6),
)
def test_any_walk_ends_in_the_bits_of_a_fresh_load(model, fresh, way, first, then):
    kernel, restore = way
    weights = model.resident(kernel, restore)
    base_bytes = sum(spec.nbytes for spec in model.base.tensors)

    def predicted(action: Action) -> Work:
        return predict_work(action, weights.touches, base_bytes, restore, imaged=imaged)

    imaged: set[State] = set()
    assert weights.load(first) == predicted(Load(first))
    imaged = {first}
    for action, state in then:
        if action == "load":
            again = replace(predicted(Load(state)), file_bytes=base_bytes)  # factors are there
            assert weights.load(state) == again
            imaged = set()
        elif state != (before := weights.state):
            assert weights.rebind(state) == predicted(Rebind(before, state, 0, 0, True))
        imaged.add(state)
        assert weights.state == state
        assert weights.digest() == fresh(kernel, state)
    if kernel == "reference":
        for name, expected in model.expected(weights.state).items():
            assert torch.equal(bits(weights.tensors[name]), bits(expected)), name


@pytest.mark.parametrize(("kernel", "restore"), WAYS)
def test_base_bits_come_back_one_for_one(model, kernel, restore):
    weights = model.resident(kernel, restore)
    weights.load(State(user=1.0))
    for state in (State(user=0.8, detailing=1.0), State(distilled=0.5, user=-1.0), BASE):
        weights.rebind(state)
    for name, tensor in weights.tensors.items():
        assert torch.equal(bits(tensor), bits(model.base.read(name))), name


def test_a_fused_state_differs_from_the_base_where_its_adapters_touch_and_nowhere_else(model):
    weights = model.resident()
    weights.load(State(user=0.8, detailing=1.0))
    changed = {
        name.removeprefix(PREFIX).removesuffix(".weight")
        for name, tensor in weights.tensors.items()
        if not torch.equal(bits(tensor), bits(model.base.read(name)))
    }
    assert changed == set(TOUCHED["user"]) | set(TOUCHED["detailing"])


def test_the_same_holds_on_every_target_of_ltx(base, adapters):
    quarter, half = State(user=1.0, distilled=0.25), State(user=1.0, distilled=0.5)
    weights = ResidentWeights(base, adapters, restore="host_snapshot")
    digests = {}
    for state in (quarter, half, BASE):
        weights.load(state)
        digests[state] = weights.digest()
    assert len(set(digests.values())) == 3
    for state in (quarter, half, BASE, half, quarter, BASE):
        weights.rebind(state)
        assert weights.digest() == digests[state]
    assert digests[BASE] == digest({name: base.read(name) for name in base.entries})


def test_two_fused_strengths_are_two_states(model, fresh):
    weights = model.resident()
    weights.load(State(distilled=0.25))
    before = weights.tensors[f"{PREFIX}c.weight"].clone()
    work = weights.rebind(State(distilled=0.5))
    assert work.flops > 0
    assert not torch.equal(bits(weights.tensors[f"{PREFIX}c.weight"]), bits(before))
    assert weights.digest() == fresh("reference", State(distilled=0.5))


def test_the_order_of_adapters_is_part_of_the_state(model, fresh):
    one, other = State(user=0.8, distilled=0.8), State(distilled=0.8, user=0.8)
    weights = model.resident()
    weights.load(one)
    weights.rebind(other)
    assert (weights.state, weights.digest()) == (other, fresh("reference", other))
    assert weights.digest() != fresh("reference", one)


def test_a_rebind_to_the_state_at_hand_does_nothing(model):
    weights = model.resident()
    weights.load(State(user=1.0))
    weights._restore.restore = weights._restore.fuse = None  # type: ignore[assignment]
    assert not any(vars(weights.rebind(State(user=1.0, distilled=0.0))).values())


def test_strength_zero_is_the_base(model, fresh):
    weights = model.resident()
    weights.load(State(user=0.0))
    assert (weights.state, weights.digest()) == (BASE, fresh("reference", BASE))


def test_subtracting_comes_back_close_but_not_exact_and_says_so(model):
    assert all(model.resident(restore=r)._restore.exact for r in EXACT)
    weights = model.resident(restore="subtract")
    assert not weights._restore.exact
    weights.load(BASE)
    weights.rebind(State(user=0.8))
    fused = {name: tensor.double() for name, tensor in weights.tensors.items()}
    weights.rebind(BASE)
    differing = 0
    for name, back in weights.tensors.items():
        base = model.base.read(name)
        differing += int((bits(back) != bits(base)).sum())
        # two roundings to bf16, of the fused weight and of the difference
        bound = 2.0**-8 * (fused[name].abs() + back.double().abs())
        finite = base.isfinite()
        assert ((back.double() - base.double()).abs() <= bound)[finite].all(), name
    assert differing > 0


def test_subtracting_takes_off_exactly_the_delta_that_was_added(model):
    state = State(user=0.8, distilled=0.5, detailing=-1.0)
    weights = model.resident(restore="subtract")
    weights.load(state)
    factors = {role: weights.factors(role) for role in state}
    expected = {}
    for name, fused in weights.tensors.items():
        terms = [Term(p, s) for r, s in state.items() for p in factors[r].get(name, ())]
        expected[name] = fused.clone()
        if terms:
            (delta,) = reference_deltas(terms)
            back = (fused.float() - delta.float()).bfloat16()
            expected[name] = back.to(fused.dtype)
    weights.rebind(BASE)
    for name, back in weights.tensors.items():
        if back.isfinite().all():
            assert torch.equal(bits(back), bits(expected[name])), name


class FailsAt:
    """Does a function's work, spoils it and raises: at the nth call, or at each from it on."""

    def __init__(self, function, n, error, *, and_after=False):
        self.function, self.n, self.error, self.and_after = function, n, error, and_after
        self.calls, self.raised = 0, False

    def __call__(self, *args):
        self.calls += 1
        result = self.function(*args)
        if self.calls == self.n or (self.and_after and self.calls > self.n):
            for weight in args:
                if isinstance(weight, torch.Tensor):
                    weight.view(-1)[::2] = 3
            self.raised = True
            raise self.error("broken")
        return result


def rebind_failing(weights, state, n, where, error, **kwargs):
    """Rebind with a failure at the nth call of something; give the failing function."""
    if where == "after_weight":
        failing = FailsAt(lambda name: None, n, error, **kwargs)
        weights.rebind(state, failing)
    else:
        failing = FailsAt(getattr(weights._restore, where), n, error, **kwargs)
        setattr(weights._restore, where, failing)
        weights.rebind(state)
    return failing


def repair(weights):
    """Take the failing function out again."""
    for where in ("fuse", "restore"):
        if isinstance(failing := getattr(weights._restore, where), FailsAt):
            setattr(weights._restore, where, failing.function)


ERRORS = [RuntimeError, MemoryError, KeyboardInterrupt]
STEPS = [
    # from, to, calls of after_weight, of the fuse, of the restore
    (State(user=0.8, distilled=1.0), State(distilled=0.5, detailing=1.0), 7, 6, 6),
    (BASE, State(user=0.8, detailing=1.0), 6, 6, 0),
    (State(user=0.8, detailing=1.0), BASE, 6, 0, 6),
]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("restore", [*OVERWRITE, "subtract"])
@pytest.mark.parametrize("where", ["after_weight", "fuse", "restore"])
def test_a_failure_at_any_weight_leaves_the_old_bits_or_refuses_all_use(
    model, fresh, where, restore, error
):
    weights = model.resident(restore=restore)
    for old, new, *calls in STEPS:
        weights.load(old)
        for n in itertools.count(1):
            if n > calls[["after_weight", "fuse", "restore"].index(where)]:
                break
            with pytest.raises(error, match="broken"):
                rebind_failing(weights, new, n, where, error)
            repair(weights)
            if restore == "subtract":
                assert_lost(weights)
                weights.load(old)
            assert weights.state == old
            assert weights.digest() == fresh("reference", old)
        # there was no further weight to fail at
        assert not rebind_failing(weights, new, n, where, error).raised
        repair(weights)
        if restore != "subtract":
            assert (weights.state, weights.digest()) == (new, fresh("reference", new))


def assert_lost(weights):
    """Every use of the weights is refused, with what to do."""
    for use in (
        lambda: weights.state,
        lambda: weights.tensors,
        weights.digest,
        lambda: weights.rebind(BASE),
        lambda: weights.factors("user"),
    ):
        with pytest.raises(WeightsLostError, match=r"call load\(\)"):
            use()


@pytest.mark.parametrize("restore", OVERWRITE)
@pytest.mark.parametrize("where", ["fuse", "restore"])
@pytest.mark.parametrize("error", ERRORS)
def test_weights_whose_undoing_fails_are_lost_until_they_are_loaded_again(
    model, fresh, restore, where, error
):
    old, new, *_ = STEPS[0]
    weights = model.resident(restore=restore)
    weights.load(old)
    for n in range(2, 7):  # undoing the first weight, g, takes no fuse: the old state lacks it
        with pytest.raises(WeightsLostError, match="undoing it failed too") as raised:
            rebind_failing(weights, new, n, where, error, and_after=True)
        repair(weights)
        assert isinstance(raised.value.__cause__, error)
        assert_lost(weights)
        weights.load(old)
        assert (weights.state, weights.digest()) == (old, fresh("reference", old))


# Not _alone: a signal is looked for after a call, so inside its "with" or after its end.
INTERRUPTED = {
    resident.__file__: ("rebind", "_rebind", "_show", "_sweep", "_touched", "_finish"),
    sweep.__file__: None,
    restore.__file__: None,
    residual.__file__: None,
}


@pytest.mark.parametrize("restore", EXACT)
def test_ctrl_c_at_any_line_of_a_rebind_leaves_one_known_state(model, fresh, restore):
    old, new = State(user=0.8, distilled=1.0), State(distilled=0.5)
    known = {old: fresh("reference", old), new: fresh("reference", new)}
    weights = model.resident(restore=restore)
    weights.load(old)
    undoing = False

    def trace(frame, event, argument):
        nonlocal left, undoing
        code = frame.f_code
        inside = INTERRUPTED.get(code.co_filename, ())
        if undoing or (inside is not None and code.co_name not in inside):
            undoing = undoing or code.co_name == "_undo"
            return None
        if event == "line":
            if (left := left - 1) == 0:
                raise KeyboardInterrupt
        return trace

    outer = sys.gettrace()
    for n in itertools.count(1):
        left, undoing = n, False
        sys.settrace(trace)
        try:
            weights.rebind(new)
            break
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(outer)
        assert weights.digest() == known[weights.state], f"line {n}"
        weights.rebind(old)
        if restore == "images" and new in weights._images:
            weights.forget(new)
    assert n > 100  # as many lines were interrupted
    assert (weights.state, weights.digest()) == (new, known[new])


def test_nothing_may_be_used_before_the_first_load(model):
    assert_lost(model.resident())


@pytest.mark.parametrize("error", ERRORS)
def test_a_load_that_breaks_off_leaves_nothing_to_use_and_the_next_one_mends_it(
    model, fresh, error
):
    state = State(user=0.8, detailing=1.0)
    for n in range(1, 22):  # twelve pairs of factors, then nine tensors
        weights = model.resident()
        with pytest.raises(error, match="broken"):
            weights.load(state, FailsAt(lambda name: None, n, error))
        assert_lost(weights)
        weights.load(state)
        assert (weights.state, weights.digest()) == (state, fresh("reference", state))
    failing = FailsAt(lambda name: None, 22, error)
    model.resident().load(state, failing)
    assert not failing.raised


def touch(path: Path) -> None:
    os.utime(path, ns=(0, 0))


def truncate(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.truncate(1000)


def replace_by_other_weights(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    other = path.with_name("other")
    other.write_bytes(data)
    os.utime(other, ns=(1, 1))
    other.replace(path)


DAMAGES = [touch, truncate, replace_by_other_weights, Path.unlink]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("old", [BASE, State(user=0.8)])
def test_a_base_that_changed_on_disk_is_found_before_the_first_write(
    model, fresh, tmp_path, damage, old
):
    moved = model.moved(tmp_path)
    weights = moved.resident(restore="reread")
    weights.load(old)
    damage(moved.base.path)
    touched = []
    for use in (lambda: weights.rebind(State(distilled=0.5), touched.append), weights.load):
        with pytest.raises(FileError, match=f"^{moved.base.path}: "):
            use()
        assert not touched
        assert (weights.state, weights.digest()) == (old, fresh("reference", old))


def test_a_snapshot_needs_the_base_no_more_after_the_load(base, adapters, files, tmp_path):
    path = tmp_path / "base.safetensors"
    shutil.copy(files.base, path)
    weights = ResidentWeights(Checkpoint.open(path), adapters, restore="host_snapshot")
    weights.load(State(user=1.0))
    path.unlink()
    weights.rebind(BASE)
    assert weights.digest() == digest({name: base.read(name) for name in base.entries})


def test_a_base_that_vanishes_in_the_middle_of_a_rebind_loses_the_weights(model, tmp_path):
    moved = model.moved(tmp_path)
    weights = moved.resident(restore="reread")
    weights.load(State(user=0.8))

    def vanish(name: str) -> None:
        moved.base.path.unlink(missing_ok=True)

    with pytest.raises(WeightsLostError, match="undoing it failed too"):
        weights.rebind(State(distilled=0.5), vanish)
    assert_lost(weights)
    with pytest.raises(FileError):
        weights.load()


@pytest.mark.parametrize(("kernel", "restore"), WAYS)
@pytest.mark.parametrize(
    ("module", "std", "strength"),
    [
        ("c", 3, 1e38),
        ("c", 3, -1e38),
        ("c", 1e30, 1.0),
        ("c", 0.2, 1e300),
        ("b", 3, 1e38),  # holds NaN and infinities already
        ("g", 3, 1e38),  # f32
        ("g", 0.2, sys.float_info.max),
    ],
)
def test_a_fused_value_that_overflows_undoes_the_rebind(
    model, fresh, tmp_path, kernel, restore, module, std, strength
):
    big = write_adapter(tmp_path / "big.safetensors", module, model.base, std)
    weights = Model(model.base, {**model.adapters, "big": big}).resident(kernel, restore)
    old, new = State(user=0.8, distilled=0.5), State(user=0.8, big=strength)
    weights.load(old)
    message = (
        rf"weight '{PREFIX}{module}\.weight': [\d,]+ values overflow in state 'user@0.8 \+ big"
    )
    with pytest.raises(AdapterError, match=message):
        weights.rebind(new)
    assert (weights.state, weights.digest()) == (old, fresh(kernel, old))
    with pytest.raises(AdapterError, match=message):
        weights.load(new)
    assert_lost(weights)


def test_values_that_were_not_finite_in_the_base_are_no_overflow(model):
    weights = model.resident()
    weights.load(State(user=1.0, detailing=1.0))
    assert not weights.tensors[f"{PREFIX}b.weight"].isfinite().all()


@pytest.mark.parametrize("restore", [restore for restore in EXACT if restore != "images"])
def test_views_handed_out_stay_valid(model, restore):
    weights = model.resident(restore=restore)
    weights.load(BASE)
    view, row = weights.tensors[f"{PREFIX}a.weight"], weights.tensors[f"{PREFIX}a.weight"][3]
    for change in (weights.rebind, weights.load, weights.rebind):
        for state in (State(user=1.0), BASE):
            change(state)
            expected = model.expected(state)[f"{PREFIX}a.weight"]
            assert torch.equal(view, expected)
            assert torch.equal(row, expected[3])


def test_tensors_can_not_be_replaced_through_the_mapping(model):
    weights = model.resident()
    weights.load()
    with pytest.raises(TypeError):
        weights.tensors["new"] = torch.zeros(1)  # type: ignore[index]


def test_a_state_of_an_adapter_that_is_not_bound_changes_nothing(model, fresh):
    weights = model.resident()
    unbound = State(user=1.0, distiled=0.5)
    with pytest.raises(ConfigError, match="needs adapter 'distiled'; bound are: 'user', 'dist"):
        weights.load(unbound)
    weights.load(State(user=1.0))
    for change in (weights.rebind, weights.load):
        with pytest.raises(ConfigError, match="'distiled'"):
            change(unbound)
        assert weights.state == State(user=1.0)
        assert weights.digest() == fresh("reference", State(user=1.0))


@pytest.mark.parametrize("shards", [2, 4])
def test_a_sharded_base_gives_the_single_files_bits(model, fresh, tmp_path, shards):
    index = shard(model.base, tmp_path, shards)
    weights = Model(Checkpoint.open(index), model.adapters).resident()
    weights.load(State(user=0.8))
    assert weights.digest() == fresh("reference", State(user=0.8))
    for state in (State(user=0.8, distilled=0.5), BASE):
        weights.rebind(state)
        assert weights.digest() == fresh("reference", state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": "tritn"}, "no kernel 'tritn'"),
        ({"restore": "rereed"}, "no restore 'rereed'.*'reread'.*choose from reread, host_snapsho"),
        ({"restore": "residual", "kernel": "scalar"}, "kernel 'scalar' doesn't show its deltas"),
        ({"rule": "R5"}, "no rounding rule 'R5'"),
        ({"restore": "device_snapshot"}, "on the CPU use 'host_snapshot'"),
        ({"device": "cpuu"}, "device 'cpuu'"),
        ({"device": "meta"}, "device 'meta'"),
    ],
)
def test_what_is_not_available_is_refused_by_name(model, options, message):
    with pytest.raises(UnavailableError, match=message):
        ResidentWeights(model.base, model.adapters, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_is_refused_where_there_is_none(model):
    with pytest.raises(UnavailableError, match=r"device 'cuda' .* no CUDA GPU"):
        ResidentWeights(model.base, model.adapters, device="cuda")


@pytest.mark.parametrize("restore", [*EXACT, "subtract"])
def test_too_little_memory_is_found_before_anything_is_read(model, monkeypatch, restore):
    weights = model.resident(restore=restore)
    state = State(user=1.0)
    need = weights.predicted_bytes([state])
    monkeypatch.setattr(devices, "free_bytes", lambda device: need - 1)
    monkeypatch.setattr(loading, "read_ahead", lambda reads: pytest.fail("read"))
    with pytest.raises(UnavailableError, match=f"needs {need:,} bytes .*{need - 1:,} are free"):
        weights.load(state)
    assert_lost(weights)
    monkeypatch.undo()
    monkeypatch.setattr(devices, "free_bytes", lambda device: need)
    weights.load(state)


@pytest.mark.parametrize("restore", EXACT)
def test_what_is_loaded_already_is_not_asked_for_again(model, monkeypatch, restore):
    weights = model.resident("gemm", restore=restore)
    weights.load(State(user=1.0))
    monkeypatch.setattr(devices, "free_bytes", lambda device: 0)
    weights.load(State(user=0.5))


def test_a_system_that_does_not_tell_its_memory_is_trusted(model, monkeypatch):
    monkeypatch.setattr(devices, "free_bytes", lambda device: None)
    model.resident().load()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/meminfo")
def test_free_memory_is_less_than_the_machines():
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = devices.free_bytes(torch.device("cpu"))
    assert free is not None
    assert 0 < free < total


def test_an_adapter_opened_against_another_base_is_refused(model, base, adapters):
    with pytest.raises(AdapterError, match=r"adapter 'distilled' was opened against another base"):
        ResidentWeights(model.base, {"distilled": adapters["distilled"]})


@pytest.mark.parametrize("inner", ["load", "rebind"])
@pytest.mark.parametrize("outer", ["load", "rebind"])
def test_a_sweep_within_a_sweep_is_refused_and_changes_nothing(model, fresh, outer, inner):
    weights = model.resident()
    weights.load(State(user=1.0))
    refused = []

    def hook(name):
        with pytest.raises((ConfigError, WeightsLostError)):
            getattr(weights, inner)(BASE)
        refused.append(name)

    getattr(weights, outer)(State(distilled=1.0), hook)
    assert refused
    assert weights.digest() == fresh("reference", State(distilled=1.0))
    weights.rebind(BASE)  # and the way is free again


def test_a_second_threads_rebind_waits_for_the_first(model, fresh):
    weights = model.resident()
    weights.load(BASE)
    second = threading.Thread(target=weights.rebind, args=(State(user=1.0),))

    def hook(name):
        if not second.is_alive() and second.ident is None:
            second.start()

    weights.rebind(State(distilled=1.0), hook)
    second.join()
    assert weights.state == State(user=1.0)
    assert weights.digest() == fresh("reference", State(user=1.0))


def test_a_state_given_as_a_mapping_is_copied(model, fresh):
    weights = model.resident()
    weights.load(BASE)
    asked = {"user": 1.0}
    weights.rebind(asked)
    asked["user"] = 0.5
    assert weights.state == State(user=1.0)
    with pytest.raises(ConfigError, match="expected a State"):
        weights.rebind("user")


def test_a_base_replaced_by_one_of_the_same_size_and_time_is_noticed(model, tmp_path):
    moved = model.moved(tmp_path)
    weights = moved.resident()
    weights.load(State(user=1.0))
    path = moved.base.path
    times = path.stat()
    other = tmp_path / "other"
    other.write_bytes(path.read_bytes()[:-1] + b"\x01")
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    other.replace(path)
    with pytest.raises(FileError, match="changed since it was opened"):
        weights.rebind(BASE)
    assert weights.state == State(user=1.0)


def test_a_default_device_of_the_caller_does_not_lead_astray(model, fresh):
    weights = model.resident(kernel="gemm")
    torch.set_default_device("meta")
    try:
        weights.load(State(distilled=0.5))
    finally:
        torch.set_default_device(None)
    assert weights.digest() == fresh("gemm", State(distilled=0.5))


def test_a_second_load_counts_what_it_reads_and_no_factors_again(model):
    weights = model.resident()
    factors = sum(adapter.factor_bytes for adapter in model.adapters.values())
    assert weights.load(BASE).file_bytes - weights.load(BASE).file_bytes == factors


def test_a_digest_waits_for_a_rebind_that_another_thread_has_begun(base, adapters):
    """It is that of one state, never of weights on their way."""
    weights = ResidentWeights(base, adapters)
    weights.load()
    begun, asked = threading.Event(), threading.Event()
    found = []

    def ask():
        begun.wait()
        asked.set()
        found.append(weights.digest())

    def hook(name):
        begun.set()
        asked.wait()

    thread = threading.Thread(target=ask)
    thread.start()
    weights.rebind(State(distilled=1.0), hook)
    thread.join()
    assert found == [weights.digest()]


def test_the_factors_of_an_adapter_that_isnt_bound_are_refused(base, adapters):
    weights = ResidentWeights(base, adapters)
    weights.load()
    with pytest.raises(ConfigError, match="no adapter 'typo' is bound; those that are: user"):
        weights.factors("typo")


@pytest.mark.parametrize("field", ["kernel", "restore", "rule"])
@pytest.mark.parametrize("wrong", [None, 3, []])
def test_what_is_no_name_is_refused_as_an_unknown_name_is(base, field, wrong):
    with pytest.raises(UnavailableError, match=re.escape(f"'{wrong}'")):
        ResidentWeights(base, **{field: wrong})
