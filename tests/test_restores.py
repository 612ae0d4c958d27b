"""Every restore, held to the same promises: any walk, any failure, and the memory it takes."""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import pytest
import torch
from conftest import bits
from safetensors.torch import save_file
from test_resident import Model, assert_lost, write_model
from torch.overrides import TorchFunctionMode

from lorabench import devices
from lorabench.adapter import Adapter
from lorabench.alone import alone
from lorabench.checkpoint import Checkpoint
from lorabench.cost import Work, kept_bytes
from lorabench.digest import digest
from lorabench.errors import AdapterError, ConfigError, UnavailableError, WeightsLostError
from lorabench.fuse import RULES, Pair, Term
from lorabench.geometry import load_geometry
from lorabench.kernels import Scratch, get_kernel
from lorabench.measure import Observer, private_bytes
from lorabench.recipe import BASE, State
from lorabench.resident import ResidentWeights
from lorabench.restore import RESTORES, Snapshot
from lorabench.synthetic import Files, synthesize

ON_CPU = [restore for restore in RESTORES if restore != "device_snapshot"]
EXACT = [restore for restore in ON_CPU if restore != "subtract"]
IN_PLACE = [restore for restore in EXACT if restore != "images"]
STRENGTHS = [1.0, 0.8, 0.25, -1.0, -0.3, 1e-3, -1e-30, 40.0, 1e6]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def fresh(model):
    """The digest of a state in weights that have never been in another."""

    @cache
    def fresh(state: State, kernel: str = "reference", rule: str = "R1") -> str:
        if kernel == "reference":
            return digest(model.expected(state, rule))
        weights = model.resident(kernel, rule=rule)
        weights.load(state)
        return weights.digest()

    return fresh


def random_states(model: Model, count: int, seed: int) -> Iterator[State]:
    """States of none to three adapters in any order, at strengths of either sign, no two alike."""
    rng = random.Random(seed)
    before = BASE
    while count:
        roles = rng.sample(sorted(model.adapters), rng.randint(0, 3))
        state = State((role, rng.choice(STRENGTHS)) for role in roles)
        if state != before:
            yield (before := state)
            count -= 1


@pytest.mark.parametrize("restore", EXACT)
@pytest.mark.parametrize("kernel", ["reference", "gemm"])
def test_a_walk_through_200_states_has_fresh_bits_in_each_and_the_bases_at_the_end(
    model, fresh, kernel, restore
):
    weights = model.resident(kernel, restore)
    weights.load(State(distilled=0.5))
    for state in random_states(model, 200, seed=len(kernel + restore)):
        weights.rebind(state)
        assert weights.state == state
        assert weights.digest() == fresh(state, kernel), state
    weights.rebind(BASE)
    for name, tensor in weights.tensors.items():
        assert torch.equal(bits(tensor), bits(model.base.read(name))), name


@pytest.mark.parametrize("restore", EXACT)
@pytest.mark.parametrize("kernel", ["reference", "gemm"])
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_can_be_walked_by_every_exact_restore(model, fresh, kernel, restore, rule):
    weights = model.resident(kernel, restore, rule)
    weights.load()
    for state in random_states(model, 12, seed=3):
        weights.rebind(state)
        assert weights.digest() == fresh(state, kernel, rule), state


@pytest.mark.parametrize("restore", EXACT)
def test_loading_again_in_any_state_is_a_fresh_load(model, fresh, restore):
    weights = model.resident(restore=restore)
    for state in random_states(model, 20, seed=5):
        weights.load(state)
        assert weights.digest() == fresh(state)
        weights.rebind(other := State(user=0.8, detailing=-1.0))
        assert weights.digest() == fresh(other)


class Fails(TorchFunctionMode):
    """Raises at the nth call of torch: in its place, or for Ctrl-C when it is done.

    Parameters
    ----------
    and_at
        How many calls later it raises once more: while the first failure is being undone.
    """

    def __init__(self, n: int, error: type[BaseException], and_at: int | None = None) -> None:
        super().__init__()
        self.error = error
        self.points = [n] if and_at is None else [n, n + and_at]
        self.calls = 0
        self.raised = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        due = self.calls in self.points
        if due and self.error is not KeyboardInterrupt:
            self.raised += 1
            raise self.error("broken")
        result = func(*args, **(kwargs or {}))
        if due:
            self.raised += 1
            raise self.error("broken")
        return result


def broken_off(change: Callable[[], object], fails: Fails) -> bool:
    """Run a change that is to fail; whether it did."""
    try:
        with fails:
            change()
    except (fails.error, WeightsLostError) as error:
        return "broken" in f"{error} {error.__cause__}"
    return False


ERRORS = [RuntimeError, MemoryError, KeyboardInterrupt]
"""Taken in turn: there are hundreds of operations, and what follows a failure is one for all."""

OLD, NEW = State(user=0.8), State(detailing=0.25, user=-1.0)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Three weights: one fused in both states, one of f32, one with odd values."""
    touched = {"user": "bc", "detailing": "cg"}
    return write_model(tmp_path_factory.mktemp("small"), touched, modules="bcg")


@pytest.fixture(scope="module")
def bits_of(small):
    """The bits of a state, fresh."""

    @cache
    def bits_of(state: State) -> dict[str, torch.Tensor]:
        weights = small.resident("gemm")
        weights.load(state)
        return {name: bits(tensor) for name, tensor in weights.tensors.items()}

    return bits_of


def same(weights: ResidentWeights, expected: Mapping[str, torch.Tensor]) -> bool:
    return all(torch.equal(bits(t), expected[name]) for name, t in weights.tensors.items())


@pytest.mark.parametrize(("old", "new"), [(OLD, NEW), (BASE, NEW), (OLD, BASE)])
@pytest.mark.parametrize("restore", ON_CPU)
def test_a_rebind_that_fails_at_any_operation_leaves_the_old_bits_or_refuses_all_use(
    small, bits_of, restore, old, new
):
    weights = small.resident("gemm", restore)
    weights.load(old)
    for n in itertools.count(1):
        fails = Fails(n, ERRORS[n % 3])
        if not broken_off(lambda: weights.rebind(new), fails):
            break
        if restore == "subtract" and weights._state is None:
            assert_lost(weights)
            weights.load(old)
        assert weights.state == old, n
        assert same(weights, bits_of(old)), n
    assert not fails.raised
    assert n > (50 if new else 0)  # as many operations failed
    assert weights.state == new
    if restore != "subtract":
        assert same(weights, bits_of(new))


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("restore", EXACT)
def test_a_second_failure_while_the_first_is_undone_leaves_the_old_bits_or_refuses_all_use(
    small, bits_of, restore, error
):
    weights = small.resident("gemm", restore)
    weights.load(OLD)
    lost = 0
    for n, later in itertools.product(range(10, 200, 17), range(1, 60, 7)):
        fails = Fails(n, error, and_at=later)
        if not broken_off(lambda: weights.rebind(NEW), fails):
            assert weights.state == NEW
        elif weights._state is None:
            lost += 1
            assert_lost(weights)
            weights.load(OLD)
        else:
            assert weights.state == OLD
        assert same(weights, bits_of(weights.state)), (n, later)
        weights.rebind(OLD)
        assert same(weights, bits_of(OLD)), (n, later)
    assert (lost > 0) == (restore != "images")


@pytest.mark.parametrize("restore", ON_CPU)
def test_a_load_that_fails_at_any_operation_refuses_all_use_and_the_next_one_mends_it(
    small, bits_of, restore
):
    weights = small.resident("gemm", restore)
    for n in itertools.count(1):
        fails = Fails(n, ERRORS[n % 3])
        if not broken_off(lambda: weights.load(OLD), fails):
            break
        if n % 4 == 0:
            if weights._state is None:
                assert_lost(weights)
                weights.load(NEW)
            assert weights.state == NEW, n  # else it failed before the first write
            assert same(weights, bits_of(NEW)), n
    assert n > 50
    assert weights.state == OLD
    assert same(weights, bits_of(OLD))


def test_an_image_is_made_once_and_then_only_switched_to(model, fresh):
    weights = model.resident(restore="images")
    weights.load()
    state, other = State(user=0.8, distilled=0.5), State(distilled=-1.0)
    assert weights.rebind(state).flops > 0
    assert weights.rebind(other).flops > 0
    weights._restore.fuse = None  # type: ignore[assignment]
    for known in (state, BASE, other, state, BASE):
        assert weights.rebind(known, lambda name: pytest.fail(name)) == Work()
        assert (weights.state, weights.digest()) == (known, fresh(known))


def test_tensors_taken_from_an_image_keep_the_bits_of_the_state_they_were_taken_in(model):
    weights = model.resident(restore="images")
    weights.load(State(user=1.0))
    taken = {}
    for state in (State(user=1.0), State(user=0.5, detailing=1.0), BASE, State(distilled=1.0)):
        weights.rebind(state)
        taken[state] = weights.tensors
    weights.load(State(distilled=0.25))
    weights.rebind(BASE)
    for state, tensors in taken.items():
        for name, expected in model.expected(state).items():
            assert torch.equal(bits(tensors[name]), bits(expected)), (state, name)


def test_an_image_holds_what_its_state_touches_and_shares_the_rest(model):
    weights = model.resident(restore="images")
    weights.load(BASE)
    base = weights.tensors
    weights.rebind(State(distilled=1.0))
    own = {n for n, t in weights.tensors.items() if t.data_ptr() != base[n].data_ptr()}
    assert own == set(weights.factors("distilled"))
    assert weights.kept_bytes == sum(base[name].nbytes for name in own)
    assert list(weights.tensors) == list(model.base.entries)


def test_a_forgotten_image_gives_its_memory_back_and_is_made_again(model, fresh):
    state = State(user=0.8)
    weights = model.resident(restore="images")
    weights.load(state)
    with pytest.raises(ConfigError, match=r"'user@0\.8' is in use; rebind to another"):
        weights.forget(state)
    weights.rebind(BASE)
    kept = weights.kept_bytes
    weights.forget(state)
    assert weights.kept_bytes < kept
    with pytest.raises(ConfigError, match=r"'user@0\.8' has no image to forget; those that have:"):
        weights.forget(state)
    assert weights.rebind(state).flops > 0
    assert weights.digest() == fresh(state)


@pytest.mark.parametrize("restore", IN_PLACE)
def test_what_is_done_in_place_has_no_image_to_forget(model, restore):
    weights = model.resident(restore=restore)
    weights.load(State(user=1.0))
    with pytest.raises(ConfigError, match="has no image to forget; those that have: none"):
        weights.forget(State(distilled=1.0))


def test_no_memory_for_an_image_is_found_before_it_is_made(model, fresh, monkeypatch):
    weights = model.resident(restore="images")
    weights.load(State(user=0.8))
    state = State(distilled=0.5)
    need = kept_bytes(weights.touches, "images", [state])
    free = need - 1
    monkeypatch.setattr(devices, "free_bytes", lambda device: free)
    with pytest.raises(
        UnavailableError, match=rf"'distilled@0\.5'.* needs {need:,} .*{free:,} are"
    ):
        weights.rebind(state)
    assert (weights.state, weights.digest()) == (State(user=0.8), fresh(State(user=0.8)))
    assert weights.rebind(BASE) == Work()  # takes none
    free = need
    weights.rebind(state)
    assert weights.digest() == fresh(state)


def test_a_snapshot_of_a_gpus_weights_is_pinned_or_refused():
    if torch.cuda.is_available():
        pytest.skip("host memory can be pinned here")
    gpu = Scratch(torch.device("cuda"))
    snapshot = Snapshot(torch.device("cpu"), get_kernel("gemm", gpu.device), gpu)
    with pytest.raises(UnavailableError, match="weight 'w': 48 bytes of host memory can't be pin"):
        snapshot.keep("w", torch.zeros(4, 6, dtype=torch.bfloat16))
    assert snapshot.kept_bytes == 0


class Books:
    """Writes down the operations that are booked."""

    def __init__(self) -> None:
        self.booked: Counter[str] = Counter()

    def book(self, operation: str, nbytes: int = 0, flops: int = 0):
        self.booked[operation] += nbytes
        return nullcontext()


@pytest.mark.parametrize("restore", ON_CPU)
def test_an_account_tells_what_was_read_restored_and_copied(model, restore):
    weights = model.resident("gemm", restore)
    base_bytes = sum(spec.nbytes for spec in model.base.tensors)
    factor_bytes = sum(adapter.factor_bytes for adapter in model.adapters.values())
    touched = kept_bytes(weights.touches, "images", [state := State(user=1.0)])
    weights.account = books = Books()
    weights.load()
    assert books.booked["read"] == base_bytes + factor_bytes
    weights.rebind(state)
    books.booked.clear()
    weights.rebind(BASE)
    assert books.booked["restore"] >= (0 if restore == "images" else touched)
    assert books.booked["read"] == (touched if restore == "reread" else 0)
    weights.account = None
    books.booked.clear()
    weights.rebind(state)
    assert not books.booked


@pytest.mark.parametrize("rule", RULES)
def test_factors_are_held_in_bf16_where_the_rule_rounds_them_to_it(tmp_path, rule):
    model = write_model(tmp_path, {"user": "ac"}, modules="ac", factors=torch.float32)
    weights = model.resident("gemm", rule=rule)
    weights.load(State(user=0.8))
    held = {f.dtype for pairs in weights.factors("user").values() for f in pairs[0].factors}
    assert held == {torch.bfloat16 if rule in ("R1", "R2") else torch.float32}
    for name, expected in model.expected(State(user=0.8), rule).items():
        got = weights.tensors[name].float()
        assert torch.allclose(got, expected.float(), rtol=2**-7, equal_nan=True), name


def test_a_factor_that_bf16_can_not_hold_is_refused(tmp_path):
    model = write_model(tmp_path, {"user": "ac"}, modules="ac", factors=torch.float32)
    file = model.adapters["user"].file
    factors = {name: file.read(name) for name in file.entries}
    factors[name := "diffusion_model.c.lora_B.weight"][0] = torch.finfo(torch.float32).max
    save_file(factors, tmp_path / "big.safetensors")
    big = Adapter.open(tmp_path / "big.safetensors", model.base.tensors)
    with pytest.raises(AdapterError, match=f"big.safetensors: tensor '{name}': 2 of 16 values are"):
        ResidentWeights(model.base, {"user": big}).load(BASE)


@pytest.fixture(scope="module")
def heavy(tmp_path_factory):
    """What a model takes besides its blocks, at half its width: 214 MB, and two small adapters."""
    geometry = replace(load_geometry("ltx-2.5-22b", shrink=2).cut(0), rank=32)
    return synthesize(tmp_path_factory.mktemp("heavy"), geometry, ("user", "distilled"))


HEAVY_STATES = [State(user=1.0), BASE, State(distilled=0.5)]


def peak_bytes(files: Files, restore: str) -> tuple[int, int, int]:
    """Walk through states; what that took at most, what was predicted, and what is kept."""
    torch.set_num_threads(1)
    base = Checkpoint.open(files.base)
    adapters = {role: Adapter.open(path, base.tensors) for role, path in files.adapters.items()}
    weights = ResidentWeights(base, adapters, restore=restore)
    # Libraries get ready at their first product.
    zeros = torch.zeros(512, 512, dtype=torch.bfloat16)
    get_kernel("gemm", weights.device)(zeros, [Term(Pair(zeros, zeros, 1.0), 1.0)], Scratch())
    before = private_bytes()
    with Observer(0.01) as observer:
        weights.load(HEAVY_STATES[0])
        for state in HEAVY_STATES[1:]:
            weights.rebind(state)
    peak = observer.observation.peak_private_bytes - before
    return peak, weights.predicted_bytes(HEAVY_STATES), weights.kept_bytes


@pytest.mark.parametrize("restore", ON_CPU)
def test_memory_at_its_peak_is_what_was_predicted(heavy, restore):
    peak, predicted, kept = alone(peak_bytes, heavy, restore)
    assert peak == pytest.approx(predicted, rel=0.05)
    assert (kept > 0) == (restore in ("host_snapshot", "residual", "images"))
