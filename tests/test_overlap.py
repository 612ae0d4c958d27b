"""A rebind ahead of a forward gives what a rebind and then a forward do, or what it failed with."""

import itertools
import signal
import threading
import time
from contextlib import contextmanager
from functools import cache

import pytest
import torch
from conftest import bits
from odd import at_most
from test_resident import (
    ERRORS,
    PREFIX,
    STEPS,
    FailsAt,
    Model,
    assert_lost,
    repair,
    write_adapter,
    write_model,
)

from lorabench.errors import AdapterError, ConfigError, WeightsLostError
from lorabench.forward import Forward
from lorabench.geometry import from_tensors
from lorabench.overlap import overlapped
from lorabench.recipe import BASE, State
from lorabench.resident import ResidentWeights
from lorabench.streams import products_of

IN_PLACE = ["reread", "host_snapshot", "residual"]
TOKENS = {"video": 9, "audio": 4, "text": 2}
WALK = [
    State(user=1.0),
    State(user=0.3, distilled=-1.0),
    State(distilled=0.8, user=0.3),
    State(detailing=0.5),
    BASE,
]
NAMES = [f"{PREFIX}{module}.weight" for module in "abcdefgh"]
UNTOUCHED = NAMES[-1]
ONE, OTHER = State(user=0.8, distilled=1.0), State(distilled=0.5, detailing=1.0)


@pytest.fixture(autouse=True)
def _ends_and_leaves_no_thread():
    before = {*threading.enumerate()}
    with at_most(60):
        yield
    assert {*threading.enumerate()} == before


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A base of eight weights and three adapters."""
    return write_model(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def digest_of(small):
    """The digest of a state, loaded afresh."""
    return cache(lambda state: resident(small, "reread", state).digest())


def resident(small, restore, state):
    weights = small.resident("gemm", restore)
    weights.load(state)
    return weights


def take(names=NAMES):
    """A forward that copies each weight when it may."""

    def forward(tensors, wait_for):
        taken = {}
        for name in names:
            wait_for(name)
            taken[name] = tensors[name].clone()
        return taken

    return forward


def assert_state(weights, taken, state, digest_of):
    assert (weights.state, weights.digest()) == (state, digest_of(state))
    for name, weight in taken.items():
        assert torch.equal(bits(weight), bits(weights.tensors[name])), name


def slowly(name):
    time.sleep(0.005)


# The bits


@pytest.mark.parametrize("turn", [1, -1, None], ids=["forward", "backward", "as in the file"])
@pytest.mark.parametrize("restore", IN_PLACE)
def test_it_gives_the_bits_and_the_work_of_a_rebind_and_then_a_forward(
    base, adapters, restore, turn
):
    geometry = from_tensors(base.metadata["geometry"], base.tensors)
    after, ahead = (ResidentWeights(base, adapters, restore=restore) for _ in range(2))
    for weights in (after, ahead):
        weights.load(BASE)
    forwards = [Forward(w, products_of(geometry, w.touches)) for w in (after, ahead)]
    order = forwards[1].order[::turn] if turn else ()
    for state in WALK:
        ys = [{}, {}]

        def keep(name, y, held):
            held[name] = y.clone()

        rebound = after.rebind(state)
        ran = forwards[0].run(state, TOKENS, after_product=lambda n, y: keep(n, y, ys[0]))  # noqa: B023
        found = overlapped(
            ahead,
            state,
            lambda tensors, wait_for: forwards[1].run(
                state,  # noqa: B023
                TOKENS,
                tensors=tensors,
                before_weight=wait_for,
                after_product=lambda n, y: keep(n, y, ys[1]),  # noqa: B023
            ),
            order=order,
        )
        assert found == (rebound, ran)
        assert (ahead.state, ahead.digest()) == (after.state, after.digest())
        assert ys[0].keys() == ys[1].keys()
        for name, y in ys[0].items():
            assert torch.equal(bits(y), bits(ys[1][name])), name


@pytest.mark.parametrize("restore", IN_PLACE)
@pytest.mark.parametrize("order", [NAMES, NAMES[::-1], ()], ids=["same", "opposite", "none"])
def test_a_forward_waits_for_each_weight_however_slow_the_rebind(small, digest_of, restore, order):
    weights = resident(small, restore, ONE)
    _, taken = overlapped(weights, OTHER, take(), order=order, after_weight=slowly)
    assert_state(weights, taken, OTHER, digest_of)


def test_a_forward_begins_before_the_rebind_has_ended_and_goes_on_where_nothing_changes(
    small, digest_of
):
    """The second weight is held back until the forward has used the first, and an untouched one."""
    weights = resident(small, "host_snapshot", BASE)
    used, done = threading.Event(), []

    def held_back(name):
        done.append(name)
        if len(done) == 2:
            used.wait(10)

    def forward(tensors, wait_for):
        wait_for(NAMES[3])
        wait_for(UNTOUCHED)
        assert weights._state is None  # the rebind is under way
        used.set()
        return take()(tensors, wait_for)

    order = [UNTOUCHED, NAMES[3], "no weight at all", NAMES[1]]
    _, taken = overlapped(weights, OTHER, forward, order=order, after_weight=held_back)
    assert done[:2] == [NAMES[3], NAMES[1]]
    assert_state(weights, taken, OTHER, digest_of)


def test_a_rebind_to_the_state_at_hand_holds_nothing_back(small, digest_of):
    weights = resident(small, "reread", ONE)
    work, taken = overlapped(weights, ONE, take())
    assert not any(vars(work).values())
    assert_state(weights, taken, ONE, digest_of)


# The order of a rebind


@pytest.mark.parametrize("restore", [*IN_PLACE, "images"])
def test_a_rebind_begins_with_the_weights_that_it_is_told_and_goes_on_in_the_files_order(
    small,
    digest_of,
    restore,
):
    weights, swept = resident(small, restore, BASE), []
    weights.rebind(OTHER, swept.append, order=[NAMES[6], UNTOUCHED, NAMES[2], NAMES[6], "nothing"])
    rest = [n for n in small.base.entries if n in (NAMES[1], NAMES[3], NAMES[4], NAMES[5])]
    assert swept == [NAMES[6], NAMES[2], *rest]
    assert (weights.state, weights.digest()) == (OTHER, digest_of(OTHER))


@pytest.mark.parametrize("restore", IN_PLACE)
def test_a_failure_in_any_order_leaves_the_old_bits(small, digest_of, restore):
    weights = resident(small, restore, ONE)
    for n in range(1, 8):
        with pytest.raises(RuntimeError, match="broken"):
            weights.rebind(OTHER, FailsAt(lambda name: None, n, RuntimeError), order=NAMES[::-1])
        assert (weights.state, weights.digest()) == (ONE, digest_of(ONE))


# Failures of the rebind


@contextmanager
def fails_at(weights, where, n, error):
    """Let something of a rebind fail at its nth call; give its hook and what fails."""
    if where == "after_weight":
        failing = FailsAt(lambda name: None, n, error)
        yield failing, failing
        return
    failing = FailsAt(getattr(weights._restore, where), n, error)
    setattr(weights._restore, where, failing)
    yield slowly, failing
    repair(weights)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("restore", ["reread", "host_snapshot"])
@pytest.mark.parametrize("where", ["after_weight", "fuse", "restore"])
def test_a_rebind_that_fails_at_any_weight_stops_the_forward_and_is_undone(
    small,
    digest_of,
    where,
    restore,
    error,
):
    weights = resident(small, restore, BASE)
    for old, new, *calls in STEPS:
        weights.rebind(old)
        for n in itertools.count(1):
            with fails_at(weights, where, n, error) as (hook, failing):
                if n > calls[["after_weight", "fuse", "restore"].index(where)]:
                    _, taken = overlapped(weights, new, take(), order=NAMES, after_weight=hook)
                    assert not failing.raised  # there was no further weight to fail at
                    break
                with pytest.raises(error, match="broken"):
                    overlapped(weights, new, take(), order=NAMES, after_weight=hook)
            assert (weights.state, weights.digest()) == (old, digest_of(old))
        assert_state(weights, taken, new, digest_of)


def test_a_forward_is_stopped_at_its_next_weight_with_what_the_rebind_failed_with(small, digest_of):
    weights, seen = resident(small, "host_snapshot", BASE), []

    def forward(tensors, wait_for):
        for name in NAMES:
            try:
                wait_for(name)
            except AdapterError as error:
                seen.append((name, str(error)))
                raise
        pytest.fail("it was not stopped")

    hook = FailsAt(slowly, 3, AdapterError)
    with pytest.raises(AdapterError, match="broken"):
        overlapped(weights, State(user=1.0), forward, order=NAMES, after_weight=hook)
    assert seen == [(NAMES[2], "broken")]
    assert (weights.state, weights.digest()) == (BASE, digest_of(BASE))


def test_an_error_of_the_rebind_is_raised_though_the_forward_has_ended_or_hides_it(
    small, digest_of
):
    weights = resident(small, "host_snapshot", BASE)

    def never_waits(tensors, wait_for):
        return None

    def hides(tensors, wait_for):
        try:
            take()(tensors, wait_for)
        except AdapterError as error:
            raise ValueError("something else") from error

    for forward in (never_waits, hides):
        hook = FailsAt(slowly, 3, AdapterError)
        with pytest.raises(AdapterError, match="broken"):
            overlapped(weights, State(user=1.0), forward, after_weight=hook)
        assert (weights.state, weights.digest()) == (BASE, digest_of(BASE))


@pytest.mark.parametrize("restore", IN_PLACE)
def test_an_overflow_that_is_found_at_the_end_voids_the_forward(
    small, digest_of, tmp_path, restore
):
    big = write_adapter(tmp_path / "big.safetensors", "c", small.base, 3)
    weights = Model(small.base, {**small.adapters, "big": big}).resident("gemm", restore)
    weights.load(ONE)
    with pytest.raises(AdapterError, match="values overflow in state 'big"):
        overlapped(weights, State(big=1e38), take())
    assert (weights.state, weights.digest()) == (ONE, digest_of(ONE))


def test_weights_that_can_not_be_brought_back_are_lost(small):
    weights = resident(small, "subtract", BASE)
    with pytest.raises(RuntimeError, match="broken"):
        overlapped(weights, ONE, take(), after_weight=FailsAt(slowly, 3, RuntimeError))
    assert_lost(weights)
    weights = resident(small, "host_snapshot", ONE)
    weights._restore.restore = FailsAt(weights._restore.restore, 2, RuntimeError, and_after=True)
    with pytest.raises(WeightsLostError, match="undoing it failed too"):
        overlapped(weights, BASE, take())
    assert_lost(weights)


# Failures of the forward


def fails_after(n, error):
    def forward(tensors, wait_for):
        take(NAMES[:n])(tensors, wait_for)
        raise error("the forward's own")

    return forward


@pytest.mark.parametrize("restore", [*IN_PLACE, "subtract"])
@pytest.mark.parametrize("n", range(9))
def test_the_rebind_is_completed_where_the_forward_fails(small, digest_of, restore, n):
    """As if it had come first."""
    weights = resident(small, restore, BASE)
    with pytest.raises(ValueError, match="the forward's own"):
        overlapped(weights, OTHER, fails_after(n, ValueError), order=NAMES, after_weight=slowly)
    assert (weights.state, weights.digest()) == (OTHER, digest_of(OTHER))


@pytest.mark.parametrize("restore", IN_PLACE)
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("n", range(7))
def test_the_rebind_is_undone_where_the_forward_is_interrupted(small, digest_of, restore, error, n):
    weights = resident(small, restore, ONE)
    interrupted, done = threading.Event(), []
    timer = threading.Timer(0.02, interrupted.set)

    def hook(name):  # the interrupt comes before the rebind's end
        done.append(name)
        if len(done) > n:
            interrupted.wait(10)

    def forward(tensors, wait_for):
        for name in [name for name in small.base.entries if name in NAMES[:7]][:n]:
            wait_for(name)
        timer.start()
        raise error("the user's")

    with pytest.raises(error, match="the user's"):
        overlapped(weights, OTHER, forward, after_weight=hook)
    timer.join()
    assert len(done) <= n + 1
    assert (weights.state, weights.digest()) == (ONE, digest_of(ONE))


@contextmanager
def ctrl_c(seconds):
    """Interrupt this thread after a while, as the terminal does."""
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    main = threading.get_ident()
    timer = threading.Timer(seconds, signal.pthread_kill, (main, signal.SIGUSR1))
    timer.start()
    try:
        yield
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    "forward",
    [take(), lambda tensors, wait_for: None],
    ids=["for a weight", "for the rebind's end"],
)
def test_ctrl_c_while_it_waits_undoes_the_rebind(small, digest_of, forward):
    weights = resident(small, "host_snapshot", ONE)
    with ctrl_c(0.1), pytest.raises(KeyboardInterrupt):
        overlapped(weights, OTHER, forward, after_weight=lambda name: time.sleep(0.05))
    assert (weights.state, weights.digest()) == (ONE, digest_of(ONE))


def test_a_thread_that_can_not_be_started_is_told_of(small, monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    weights = resident(small, "reread", ONE)
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start"):
        overlapped(weights, OTHER, take())
    assert weights.state == ONE


# What is refused


def test_images_are_refused_as_a_rebind_to_one_changes_nothing_in_place(small, digest_of):
    weights = resident(small, "images", ONE)
    with pytest.raises(ConfigError, match="restore 'images' changes no weight in place"):
        overlapped(weights, OTHER, take())
    assert (weights.state, weights.digest()) == (ONE, digest_of(ONE))


def test_a_state_of_an_adapter_that_is_not_bound_begins_nothing(small):
    weights = resident(small, "reread", ONE)
    with pytest.raises(ConfigError, match="'usr'"):
        overlapped(weights, State(usr=1.0), lambda tensors, wait_for: pytest.fail("begun"))
    assert weights.state == ONE


def test_weights_that_were_never_loaded_are_refused(small):
    with pytest.raises(WeightsLostError, match=r"call load\(\)"):
        overlapped(small.resident("gemm"), ONE, take())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("restore", [*IN_PLACE, "device_snapshot"])
def test_it_gives_the_same_bits_on_a_stream_of_its_own(base, adapters, restore):
    geometry = from_tensors(base.metadata["geometry"], base.tensors)
    after, ahead = (
        ResidentWeights(base, adapters, restore=restore, device="cuda") for _ in range(2)
    )
    for weights in (after, ahead):
        weights.load(BASE)
    forward = Forward(ahead, products_of(geometry, ahead.touches))
    for state in WALK:
        found = {}
        after.rebind(state)
        overlapped(
            ahead,
            state,
            lambda tensors, wait_for: forward.run(
                state,  # noqa: B023
                TOKENS,
                tensors=tensors,
                before_weight=wait_for,
                after_product=lambda name, y: found.update({name: y.clone()}),  # noqa: B023
            ),
            order=forward.order,
        )
        assert ahead.digest() == after.digest()
        expected = {}
        Forward(after, products_of(geometry, after.touches)).run(
            state,
            TOKENS,
            after_product=lambda name, y: expected.update({name: y.clone()}),  # noqa: B023
        )
        for name, y in expected.items():
            assert torch.equal(bits(y.cpu()), bits(found[name].cpu())), name
