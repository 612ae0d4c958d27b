"""Samples, clocks that time only the operation, an observer, and calls in a process of their own.

torch is imported where a test needs it: the fresh processes import this module and would wait.
"""

import functools
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import psutil
import pytest

from lorabench import measure
from lorabench.alone import alone
from lorabench.errors import AdapterError, ConfigError, LorabenchError, UnavailableError
from lorabench.measure import Observer, Samples, private_bytes, time_boxed, time_once

MIB = 1 << 20
PATIENCE_SECONDS = 60


@pytest.fixture(scope="module")
def torch():
    import torch

    return torch


@pytest.fixture(scope="module")
def cpu(torch):
    return torch.device("cpu")


def touched(size: int) -> bytearray:
    """Memory of which every page is in use: a fresh bytearray's aren't until they are written."""
    block = bytearray(size)
    block[::4096] = b"x" * len(block[::4096])
    return block


class TestSamples:
    def test_statistics_are_those_worked_out_by_hand(self):
        samples = Samples((4.0, 1.0, 3.0, 2.0, 10.0), warmup_seconds=(99.0,))
        assert samples.median == 3.0
        assert samples.min == 1.0
        assert samples.iqr == 4.0 - 2.0
        assert samples.spread == pytest.approx(2 / 3)
        assert samples.noisy

    def test_quartiles_between_samples_are_interpolated(self):
        assert Samples((1.0, 2.0, 3.0, 4.0)).iqr == pytest.approx(3.25 - 1.75)

    def test_noise_begins_above_a_tenth_of_the_median(self):
        assert not Samples((9.5, 10.0, 10.5)).noisy  # spread 0.05
        assert not Samples((15.0, 16.0, 17.5)).noisy  # 1.25 / 16
        assert Samples((9.0, 10.0, 12.0)).noisy  # 1.5 / 10

    def test_one_sample_has_no_spread_to_tell(self):
        samples = Samples((2.0,))
        assert (samples.median, samples.min) == (2.0, 2.0)
        assert math.isnan(samples.iqr)
        assert math.isnan(samples.spread)
        assert not samples.noisy

    def test_none_are_refused(self):
        with pytest.raises(ConfigError, match="at least one sample"):
            Samples(())


class TestTimeOnce:
    def test_result_is_freed_after_the_clock_has_stopped(self, cpu, monkeypatch):
        events: list[str] = []

        class Result:
            def __del__(self):
                events.append("freed")

        monkeypatch.setattr(measure.time, "perf_counter", lambda: events.append("clock") or 0.0)
        time_once(Result, cpu)
        assert events == ["clock", "clock", "freed"]

    def test_a_device_without_a_clock_is_refused(self, torch):
        with pytest.raises(UnavailableError, match="'meta'"):
            time_once(int, torch.device("meta"))

    def test_on_cuda_events_enclose_the_operation_and_the_queue_is_drained_around_them(
        self, torch, monkeypatch
    ):
        calls: list[str] = []

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                calls.append("record")

            def elapsed_time(self, end):
                calls.append("read")
                return 1500.0  # milliseconds

        class Device:
            def __init__(self, device):
                calls.append(str(device))

            __enter__ = __exit__ = lambda *_: None

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "device", Device)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
        assert time_once(lambda: calls.append("work"), torch.device("cuda:1")) == 1.5
        assert calls == ["cuda:1", "wait", "record", "work", "record", "wait", "read"]

    def test_on_cuda_queued_work_is_timed_to_its_end(self, torch):
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        a = torch.ones(4096, 4096, device="cuda")

        def products():
            for _ in range(50):
                torch.mm(a, a)

        time_once(products, a.device)
        queued_flops = 50 * 2 * 4096**3
        assert (
            queued_flops / time_once(products, a.device) < 2e15
        )  # else the queue wasn't waited for


class TestTimeBoxed:
    def test_chunks_stop_when_the_budget_is_spent(self, monkeypatch):
        clock = iter(range(0, 1000, 2))  # every chunk takes two seconds
        monkeypatch.setattr(measure.time, "perf_counter", lambda: next(clock))
        units, seconds = time_boxed(range(10), lambda chunk: 10 + chunk, budget_seconds=5)
        assert (units, seconds) == (10 + 11 + 12, 6)

    def test_first_chunk_is_done_on_any_budget(self):
        assert time_boxed([1, 2], lambda _: 7, budget_seconds=0)[0] == 7

    def test_all_chunks_are_done_within_the_budget(self):
        assert time_boxed([1, 2, 3], lambda chunk: chunk, budget_seconds=PATIENCE_SECONDS)[0] == 6

    def test_making_the_next_chunk_is_not_counted(self, monkeypatch):
        now = 0.0

        def chunks():
            nonlocal now
            for chunk in range(3):
                now += 100
                yield chunk

        def work(_):
            nonlocal now
            now += 1
            return 1

        monkeypatch.setattr(measure.time, "perf_counter", lambda: now)
        assert time_boxed(chunks(), work, budget_seconds=50) == (3, 3)

    def test_no_chunks_are_refused(self):
        with pytest.raises(ConfigError, match="chunks"):
            time_boxed([], lambda _: 1, budget_seconds=1)


def busy(cpu_seconds: float) -> None:
    until = time.thread_time() + cpu_seconds
    while time.thread_time() < until:
        pass


def cpu_seconds(seen: measure.Observation, name: str) -> list[float]:
    return [
        share * seen.seconds
        for label, share in seen.thread_cpu.items()
        if label.rpartition(" ")[0] == name
    ]


class TestObserver:
    def test_memory_taken_in_the_block_is_seen_and_what_was_there_before_is_not(self):
        before = touched(64 * MIB)
        with Observer() as observer:
            block = touched(64 * MIB)
        seen = observer.observation
        grown = seen.peak_private_bytes - seen.baseline_private_bytes
        assert 60 * MIB < grown < 100 * MIB
        assert seen.baseline_private_bytes > len(before)
        assert seen.private_bytes[-1] - seen.private_bytes[0] > 60 * MIB  # still held at exit
        assert len(block) == 64 * MIB

    def test_a_peak_that_is_over_before_the_block_ends_is_seen(self):
        with Observer(interval_seconds=0.001) as observer:
            samples_before = len(observer._times)
            block = touched(64 * MIB)
            while len(observer._times) < samples_before + 3:
                time.sleep(0.001)
            del block
        seen = observer.observation
        assert seen.peak_private_bytes - seen.private_bytes[-1] > 60 * MIB

    def test_mapped_files_are_not_private(self, torch, tmp_path):
        path = tmp_path / "weights"
        path.write_bytes(bytes(64 * MIB))
        with Observer() as observer:
            mapped = torch.from_file(str(path), size=64 * MIB, dtype=torch.uint8)
            assert mapped.max() == 0  # every page was read
        seen = observer.observation
        assert seen.peak_private_bytes - seen.baseline_private_bytes < 32 * MIB

    def test_busy_and_idle_threads_are_told_apart(self):
        over = threading.Event()
        idle = threading.Thread(target=over.wait, name="idle")
        idle.start()
        busy(0.2)  # before the block: none of it counts
        with Observer() as observer:
            busy(0.4)
        over.set()
        idle.join()
        seen = observer.observation
        [main] = cpu_seconds(seen, threading.current_thread().name)
        assert main == pytest.approx(0.4, abs=0.1)
        assert cpu_seconds(seen, "idle") == [pytest.approx(0.0, abs=0.05)]
        assert not cpu_seconds(seen, "observer"), "the sampler isn't part of what it samples"

    def test_a_thread_that_comes_and_goes_is_counted_up_to_its_last_sample(self):
        with Observer(interval_seconds=0.005) as observer:
            passing = threading.Thread(target=busy, args=(0.4,), name="passing")
            passing.start()
            passing.join()
        [seconds] = cpu_seconds(observer.observation, "passing")
        assert 0 < seconds < 0.5

    def test_stack_of_the_observed_thread_is_innermost_first(self):
        def innermost():
            while not observer._stacks:  # until it was seen here, however slow the machine
                pass

        with Observer(interval_seconds=0.001) as observer:
            innermost()
        stack = next(iter(observer.observation.stacks))
        here = "TestObserver.test_stack_of_the_observed_thread_is_innermost_first"
        module, function, line = stack[0].split(":")
        assert (module, function) == (__name__, f"{here}.<locals>.innermost")
        assert int(line) > 0
        assert stack[1].startswith(f"{__name__}:{here}:")

    def test_another_thread_than_the_main_one_can_be_observed(self):
        def work():
            with Observer(interval_seconds=0.001) as observer:
                while not observer._stacks:
                    pass
            seen.append(observer.observation)

        seen: list[measure.Observation] = []
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert next(iter(seen[0].stacks))[-1].startswith("threading:Thread._bootstrap:")

    def test_looking_keeps_nothing_of_the_observed_code_alive(self):
        class Weights:
            pass

        def hold():
            weights = Weights()
            measure._stack(threading.get_ident())
            return weakref.ref(weights)

        assert hold()() is None

    def test_entering_and_leaving_are_not_part_of_what_is_seen(self):
        for _ in range(20):
            with Observer(interval_seconds=0) as observer:
                while len(observer._times) < 5:
                    pass
            for stack in observer.observation.stacks:
                assert not any(":Observer." in line for line in stack)

    def test_code_that_raises_was_still_observed(self):
        with pytest.raises(KeyError), Observer() as observer:  # noqa: PT012 - the block is the point
            block = touched(64 * MIB)
            raise KeyError(len(block))
        seen = observer.observation
        assert seen.peak_private_bytes - seen.baseline_private_bytes > 60 * MIB

    def test_nothing_is_told_before_the_end(self):
        with Observer() as observer, pytest.raises(LorabenchError, match="after the 'with' block"):
            _ = observer.observation

    def test_sampling_that_broke_is_not_passed_over(self, monkeypatch):
        def watched():
            with Observer(interval_seconds=0.001) as observer:
                monkeypatch.setattr(measure, "_stack", lambda _: 1 / 0)
                while observer._failure is None:
                    time.sleep(0.001)

        with pytest.raises(LorabenchError, match="ZeroDivisionError"):
            watched()

    def test_observation_travels_between_processes_and_names_its_source(self):
        with Observer() as observer:
            pass
        seen = pickle.loads(pickle.dumps(observer.observation))
        assert seen == observer.observation
        assert seen.memory_source == measure.memory_source()
        assert list(seen.times) == sorted(seen.times)
        assert seen.seconds == seen.times[-1] > 0

    def test_without_rssanon_psutil_counts_and_the_observation_says_so(self, monkeypatch, tmp_path):
        monkeypatch.setattr(measure, "_STATUS", tmp_path / "missing")
        monkeypatch.setattr(measure, "memory_source", measure.memory_source.__wrapped__)
        with Observer() as observer:
            block = touched(64 * MIB)
        seen = observer.observation
        assert seen.memory_source == "uss"
        assert seen.peak_private_bytes - seen.baseline_private_bytes > 0.9 * len(block)


def child_peak(size: int) -> tuple[int, int, int]:
    with Observer() as observer:
        touched(size)[0] = 1
        block = touched(size)
    seen = observer.observation
    return seen.baseline_private_bytes, seen.peak_private_bytes - len(block), os.getpid()


def fail(error: Exception) -> None:
    raise error


class Unrepeatable(Exception):
    def __init__(self, key: str, *, found: int) -> None:
        super().__init__(f"{key}: found {found}")


def fail_unrepeatably() -> None:
    raise Unrepeatable("rank", found=7)


def end_by(signal_number: int) -> None:
    os.kill(os.getpid(), signal_number)


def interrupt_itself() -> str:
    end_by(signal.SIGINT)
    return "undisturbed"


def tell_and_sleep(path: Path) -> None:
    path.with_suffix(".part").write_text(str(os.getpid()))
    path.with_suffix(".part").rename(path)
    time.sleep(10 * PATIENCE_SECONDS)


def echo(*args: object, **kwargs: object) -> tuple[object, ...]:
    return args, kwargs


class TestAlone:
    def test_memory_of_the_caller_is_not_that_of_the_call(self):
        mine = touched(512 * MIB)
        before = private_bytes()
        baseline, _, process = alone(child_peak, 64 * MIB)
        assert process != os.getpid()
        assert baseline < len(mine) < before
        assert private_bytes() - before < 32 * MIB

    def test_arguments_and_results_arrive(self):
        block = bytes(4 * MIB)
        assert alone(echo, 1, block, name="x") == ((1, block), {"name": "x"})

    def test_a_tensor_outlives_the_process_that_made_it(self, torch):
        assert torch.equal(alone(torch.arange, 100_000), torch.arange(100_000))

    def test_an_exception_is_itself_here_and_says_where_it_came_from(self):
        with pytest.raises(AdapterError, match="rank 7") as caught:
            alone(fail, AdapterError("rank 7 of key 'a'"))
        assert str(caught.value) == "rank 7 of key 'a'"
        [note] = caught.value.__notes__
        assert "in fail\n    raise error" in note
        with pytest.raises(MemoryError):
            alone(fail, MemoryError())

    def test_an_exception_that_can_not_travel_is_told_as_text(self):
        with pytest.raises(LorabenchError, match="found 7") as caught:
            alone(fail_unrepeatably)
        assert str(caught.value) == "Unrepeatable: rank: found 7"
        assert "in fail_unrepeatably" in caught.value.__notes__[0]

    def test_a_result_that_can_not_travel_is_an_error(self):
        with pytest.raises(TypeError, match="pickle"):
            alone(threading.Lock)

    def test_a_killed_process_is_told_with_its_signal(self):
        with pytest.raises(LorabenchError, match=r"end_by died .* SIGKILL; out of memory"):
            alone(end_by, signal.SIGKILL)

    def test_a_process_that_leaves_is_told_with_its_exit_code(self):
        with pytest.raises(LorabenchError, match=r"_exit died .* exit code 3"):
            alone(os._exit, 3)

    def test_ctrl_c_is_left_to_the_caller(self):
        assert alone(interrupt_itself) == "undisturbed"

    @pytest.mark.parametrize(
        "call", [lambda: 1, functools.partial(echo, threading.Lock())], ids=["lambda", "argument"]
    )
    def test_what_can_not_be_pickled_is_refused(self, call):
        with pytest.raises(ConfigError, match="top level of a module"):
            alone(call)

    def test_no_process_is_left_behind(self):
        def cases() -> list[psutil.Process]:
            children = psutil.Process().children(recursive=True)
            return [child for child in children if "spawn_main" in " ".join(child.cmdline())]

        assert alone(os.getpid)
        assert not cases()
        with pytest.raises(ValueError, match="x"):
            alone(fail, ValueError("x"))
        assert not cases()


def wait_until(true) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@pytest.fixture
def surroundings() -> dict[str, str]:
    """What a fresh interpreter needs to import the package and this module."""
    folders = [str(Path(measure.__file__).parents[1]), str(Path(__file__).parent)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(folders)}


class TestAloneFromOtherParents:
    """A parent started by ``python -c``, ended from outside; by ``-m``; and a Jupyter kernel."""

    @pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "killed"])
    def test_the_call_ends_with_its_caller(self, ending, tmp_path, surroundings):
        path = tmp_path / "process"
        code = (
            "import pathlib, sys, test_measure;"
            "test_measure.alone(test_measure.tell_and_sleep, pathlib.Path(sys.argv[1]))"
        )
        parent = subprocess.Popen(
            [sys.executable, "-c", code, str(path)],
            env=surroundings,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        with parent:
            wait_until(path.exists)
            child = int(path.read_text())
            assert psutil.pid_exists(child)
            if ending == signal.SIGINT:
                os.killpg(parent.pid, ending)  # a terminal interrupts the whole group
            else:
                parent.send_signal(ending)
            try:
                _, errors = parent.communicate(timeout=PATIENCE_SECONDS)
            finally:
                parent.kill()
        wait_until(lambda: not psutil.pid_exists(child))
        assert ("KeyboardInterrupt" in errors) == (ending == signal.SIGINT)

    def test_from_a_module_run_as_main_its_own_functions_can_be_called(
        self, tmp_path, surroundings
    ):
        (tmp_path / "sweep.py").write_text(
            "import os\n"
            "from lorabench.alone import alone\n"
            "def case(): return os.getpid()\n"
            "if __name__ == '__main__': print(alone(case) != os.getpid())\n"
        )
        done = subprocess.run(
            [sys.executable, "-m", "sweep"],
            cwd=tmp_path,
            env=surroundings,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == "True\n"

    def test_from_a_notebook(self, monkeypatch, tmp_path, surroundings):
        import nbclient
        import nbformat

        monkeypatch.setenv("PYTHONPATH", surroundings["PYTHONPATH"])
        monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
        cells = [
            "import os, test_measure as t",
            "assert t.alone(os.getpid) != os.getpid()",
            "try: t.alone(t.fail, t.ConfigError())\nexcept t.ConfigError as e: assert e.__notes__",
            "def of_a_cell(): return 1",
            "try: t.alone(of_a_cell)\nexcept t.ConfigError as e: print(e)",
        ]
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
        nbclient.NotebookClient(notebook, timeout=PATIENCE_SECONDS, kernel_name="python3").execute()
        assert "top level of a module" in notebook.cells[-1].outputs[0].text


def test_what_other_processes_used_of_the_machine_is_told_in_cores(monkeypatch):
    machine = iter([1000.0, 1000.0 + 60.0])  # a minute of CPU time in a window of a moment
    monkeypatch.setattr(measure, "_busy_seconds", lambda: next(machine))
    with Observer() as observer:
        touched(8 * MIB)
    seen = observer.observation
    own = sum(seen.thread_cpu.values())
    assert seen.others_cores == pytest.approx(60.0 / seen.seconds - own, rel=0.05)


def test_a_process_that_has_the_machine_to_itself_saw_no_others(monkeypatch):
    monkeypatch.setattr(measure, "_busy_seconds", lambda: 1000.0)
    with Observer() as observer:
        touched(8 * MIB)
    assert observer.observation.others_cores == 0
