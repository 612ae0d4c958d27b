"""A process watched from outside: its window, its steps, and stacks that cost it nothing.

torch is imported nowhere here: the observed processes import this module and would wait.
"""

import os
import signal
import time
from pathlib import Path

import pytest

from lorabench import measure, outside
from lorabench.alone import alone
from lorabench.errors import LorabenchError
from lorabench.outside import Watch, parse_stacks, visible

MIB = 1 << 20


def touched(size: int) -> bytearray:
    """Memory of which every page is in use."""
    block = bytearray(size)
    block[::4096] = b"x" * len(block[::4096])
    return block


def spin(cpu_seconds: float) -> None:
    until = time.thread_time() + cpu_seconds
    while time.thread_time() < until:
        pass


def work(folder: Path) -> int:
    spin(0.2)
    with visible(folder) as tell:
        block = touched(64 * MIB)
        spin(0.2)
        tell({"half": 1})
        spin(0.2)
        tell({"half": 2, "module": "m"})
    more = touched(128 * MIB)
    spin(0.2)
    return os.getpid() + 0 * (len(block) + len(more))


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    with Watch(tmp_path_factory.mktemp("window"), interval_seconds=0.02) as watch:
        pid = alone(work, watch._folder)
    return pid, watch


def test_steps_have_their_seconds_since_the_window_opened(watched):
    _, watch = watched
    first, second = watch.steps
    assert {k: v for k, v in first.items() if k != "seconds"} == {"half": 1}
    assert {k: v for k, v in second.items() if k != "seconds"} == {"half": 2, "module": "m"}
    assert 0.2 <= first["seconds"] <= second["seconds"] - 0.2
    assert second["seconds"] <= watch.observation.seconds


def test_memory_and_cpu_time_are_those_of_the_window_and_of_nothing_around_it(watched):
    pid, watch = watched
    seen = watch.observation
    grown = seen.private_bytes[-1] - seen.baseline_private_bytes
    assert 60 * MIB < grown < 100 * MIB
    assert seen.peak_private_bytes - seen.baseline_private_bytes < 100 * MIB
    main = seen.thread_cpu[f"MainThread {pid}"] * seen.seconds
    assert main == pytest.approx(0.4, abs=0.1)
    others = [share for thread, share in seen.thread_cpu.items() if thread.startswith("other ")]
    assert all(share * seen.seconds < 0.1 for share in others)
    assert (seen.times[0], list(seen.times)) == (0.0, sorted(seen.times))
    assert seen.memory_source == measure.memory_source()


def test_every_stack_is_of_the_line_at_work_with_its_callers_after_it(watched):
    stacks = watched[1].observation.stacks
    assert sum(stacks.values()) >= 3
    assert any(stack[0].startswith(f"{__name__}:spin:") for stack in stacks)
    for stack in stacks:
        # At the window's edges its ``with`` statement may be at work.
        inner, *_ = (frame for frame in stack if not frame.startswith("contextlib:"))
        module, function, _ = inner.split(":")
        assert (module, function in ("spin", "touched", "work")) == (__name__, True)
        assert any(frame.startswith(f"{__name__}:work:") for frame in stack)
        assert any(frame.startswith("lorabench.alone:_answer:") for frame in stack)


def keep_the_lock(folder: Path) -> None:
    with visible(folder):
        sum(range(20_000_000))  # one call in C, which lets no other thread run


def test_native_code_that_keeps_the_interpreter_lock_is_seen_at_work(tmp_path):
    with Watch(tmp_path, interval_seconds=0.02) as watch:
        alone(keep_the_lock, tmp_path)
    stacks = watch.observation.stacks
    at_work = f"{__name__}:keep_the_lock:"
    assert sum(seen for stack, seen in stacks.items() if stack[0].startswith(at_work)) >= 3
    assert all(any(frame.startswith(at_work) for frame in stack) for stack in stacks)


def look_in(folder: Path) -> None:
    with visible(folder) as tell:
        tell({})
    spin(0.1)


def test_a_window_shorter_than_the_interval_is_seen_from_begin_to_end(tmp_path):
    with Watch(tmp_path, interval_seconds=2.0) as watch:  # a stalled machine is slow to look in
        alone(look_in, tmp_path)
    seen = watch.observation
    assert 0 < seen.seconds < 2.0
    assert seen.times == (0.0, seen.seconds)
    assert len(watch.steps) == 1
    assert sum(seen.thread_cpu.values()) * seen.seconds < 0.1
    assert not seen.stacks, "waiting for the observer is no part of the window"


def die_in_the_window(folder: Path) -> None:
    with visible(folder):
        os.kill(os.getpid(), signal.SIGKILL)


def never_open(folder: Path) -> None:
    raise KeyError(folder)


@pytest.mark.parametrize(
    ("function", "error"), [(die_in_the_window, LorabenchError), (never_open, KeyError)]
)
def test_a_process_that_fails_is_told_of_by_itself_and_leaves_nothing_to_see(
    function, error, tmp_path
):
    watch = Watch(tmp_path, interval_seconds=0.02)
    with pytest.raises(error), watch:
        alone(function, tmp_path)
    with pytest.raises(LorabenchError, match="window that was opened and left"):
        _ = watch.observation


def test_watching_that_broke_is_told_of_and_lets_the_process_go_on(tmp_path, monkeypatch):
    looks = iter((MIB, MIB))
    monkeypatch.setattr(outside, "private_bytes", lambda pid: next(looks))
    with (
        pytest.raises(LorabenchError, match="stopped half-way: StopIteration"),
        Watch(tmp_path, interval_seconds=0.02),
    ):
        alone(keep_the_lock, tmp_path)


def test_a_window_that_nobody_watches_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(outside, "_PATIENCE_SECONDS", 0.05)
    with pytest.raises(LorabenchError, match="nobody has looked"), visible(tmp_path):
        pytest.fail("the block began")


def test_what_others_used_of_the_machine_leaves_out_the_process_and_its_observer(
    tmp_path, monkeypatch
):
    machine = iter([1000.0, 1000.0 + 60.0])
    monkeypatch.setattr(measure, "_busy_seconds", lambda: next(machine))
    clock = iter([5.0, 5.0 + 20.0])
    monkeypatch.setattr(outside.time, "process_time", lambda: next(clock))
    with Watch(tmp_path, interval_seconds=0.02) as watch:
        alone(keep_the_lock, tmp_path)
    seen = watch.observation
    own = sum(seen.thread_cpu.values())
    assert seen.others_cores == pytest.approx(40 / seen.seconds - own, rel=0.01)


def test_stacks_are_counted_and_their_files_told_as_modules():
    kernels = Path(outside.__file__).parent / "kernels"
    one = (
        "Stack (most recent call first):\n"
        f'  File "{kernels / "scalar.py"}", line 107 in fuse_scalar\n'
        f'  File "{kernels / "__init__.py"}", line ??? in _fuse_scalar\n'
        '  File "<string>", line 1 in <module>\n'
    )
    other = f'Stack (most recent call first):\n  File "{__file__}", line 3 in a b\n  ...\n'
    waiting = f'Stack (most recent call first):\n  File "{outside.__file__}", line 9 in visible\n'
    telling = (
        'Stack (most recent call first):\n  File "encoder.py", line 3 in encode\n'
        f'  File "{outside.__file__}", line 9 in tell\n  File "{__file__}", line 3 in work\n'
    )
    assert parse_stacks(one + other + waiting + telling + one) == {
        (
            "lorabench.kernels.scalar:fuse_scalar:107",
            "lorabench.kernels:_fuse_scalar:???",
            "<string>:<module>:1",
        ): 2,
        (f"{Path(__file__).stem}:a b:3",): 1,
    }
    assert parse_stacks("") == {}
