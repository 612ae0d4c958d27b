"""Measuring: clocks, CUDA events, private memory, and what each thread does.

Raw samples are kept and statistics derived from them, as in psf/pyperf ``_bench.py`` and in the
``Measurement`` of ``torch.utils.benchmark``.
"""

from __future__ import annotations

import functools
import math
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

from lorabench.errors import ConfigError, LorabenchError, UnavailableError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

NOISY_SPREAD = 0.10  # pyperf's threshold: the spread in which a result is called unstable

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Samples:
    """Raw durations of one operation, in the order in which they were taken; warm-ups apart."""

    seconds: tuple[float, ...]
    warmup_seconds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.seconds:
            raise ConfigError("seconds: expected at least one sample, found none; measure again")

    @property
    def min(self) -> float:
        """The shortest sample, in seconds."""
        return min(self.seconds)

    @property
    def median(self) -> float:
        """The middle sample, in seconds."""
        return statistics.median(self.seconds)

    @property
    def iqr(self) -> float:
        """The interquartile range in seconds, quartiles interpolated as numpy does; nan for one."""
        if len(self.seconds) < 2:
            return math.nan
        lower, _, upper = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return upper - lower

    @property
    def spread(self) -> float:
        """The interquartile range as a share of the median; nan where one sample can't tell."""
        return self.iqr / self.median if self.median else math.nan

    @property
    def noisy(self) -> bool:
        """Whether the spread is above a tenth of the median, so that the median says little."""
        return self.spread > NOISY_SPREAD


def time_once(operation: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that one call takes, work that it left queued on a GPU included.

    On CUDA the time between two events on the current stream: an operation that uses streams of its
    own joins them to that one. The result is freed after the clock has stopped, because returning a
    gigabyte to the system takes longer than many an operation.

    Raises
    ------
    UnavailableError
        The device isn't a CPU or a CUDA device that this machine has.
    """
    if device.type == "cpu":
        start = time.perf_counter()
        _result = operation()
        return time.perf_counter() - start

    import torch

    if device.type != "cuda" or not torch.cuda.is_available():
        raise UnavailableError(f"device '{device}' isn't here to be timed; expected cpu or cuda")
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()  # what was queued before isn't ours to count
        begin.record()
        _result = operation()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3


def time_boxed(
    chunks: Iterable[T], work: Callable[[T], int], budget_seconds: float
) -> tuple[int, float]:
    """Work through chunks until the budget is spent; return the units done and the seconds.

    For what would take hours: ``work`` does one chunk on the CPU and returns its count of units.
    Only the time inside it counts. The first chunk is always done, and every begun one finished.

    Raises
    ------
    ConfigError
        There are no chunks.
    """
    units, seconds, empty = 0, 0.0, True
    for chunk in chunks:
        empty = False
        start = time.perf_counter()
        units += work(chunk)
        seconds += time.perf_counter() - start
        if seconds >= budget_seconds:
            break
    if empty:
        raise ConfigError("chunks: expected at least one to time, found none")
    return units, seconds


@functools.cache
def memory_source() -> str:
    """Return which count `private_bytes` gives: Linux's ``RssAnon``, elsewhere psutil's ``uss``."""
    return "RssAnon" if _STATUS.exists() and "RssAnon:" in _STATUS.read_text() else "uss"


def private_bytes(pid: int | None = None) -> int:
    """Return the memory in use that is a process's own: no mapped files, no shared pages.

    Parameters
    ----------
    pid
        Of which process; by default of this one.

    Raises
    ------
    ProcessLookupError
        The process has ended, as far as Linux tells.
    """
    if memory_source() == "RssAnon":
        status = _STATUS if pid is None else Path(f"/proc/{pid}/status")
        for row in status.read_text().splitlines():
            if row.startswith("RssAnon:"):
                return int(row.split()[1]) * 1024
        raise ProcessLookupError(f"process {pid} has ended: its status tells of no memory")
    import psutil

    return int(psutil.Process(pid).memory_full_info().uss)


class CpuUse:
    """CPU time used from here on by each thread of a process, and by the rest of the machine.

    Ticks of 10 ms on Linux. ``used`` is by the system's id of a thread, as of the last `update`.
    """

    def __init__(self, pid: int | None = None) -> None:
        import psutil

        self._process = psutil.Process(pid)
        self._busy = _busy_seconds()
        self._totals: dict[int, float] = {}
        self.used: dict[int, float] = {}
        self.update()
        self.used = dict.fromkeys(self._totals, 0.0)  # what came before isn't ours

    def update(self) -> None:
        """Add up what each thread has used since the last time."""
        for thread, user, system in self._process.threads():
            total, last = user + system, self._totals.get(thread, 0.0)
            # A total that fell belongs to a new thread, to which the system gave an old one's id.
            used = total - last if total >= last else total
            self.used[thread] = self.used.get(thread, 0.0) + used
            self._totals[thread] = total

    def of_others(self, watching: float = 0.0) -> float:
        """Return what neither the process nor the seconds spent on ``watching`` it account for."""
        return max(0.0, _busy_seconds() - self._busy - sum(self.used.values()) - watching)


@dataclass(frozen=True)
class Observation:
    """What an `Observer`, or a :class:`lorabench.outside.Watch`, saw between entry and exit.

    Parameters
    ----------
    times
        Seconds since entry of every memory sample; the last is the length of the window.
    private_bytes
        Private memory at those times.
    memory_source
        ``RssAnon`` or ``uss``: see `memory_source`.
    thread_cpu
        Every thread seen but the sampler, as ``"<name> <id>"`` (``native <id>`` if Python didn't
        start it): its CPU time as a share of one core over the window. Ticks of 10 ms on Linux.
    stacks
        Samples of the observed thread: stack -> how often it was seen. Frames are
        ``module:function:line``, innermost first.
    others_cores
        Cores that other processes kept busy, on average over the window: how far the times taken
        meanwhile were disturbed.
    """

    times: tuple[float, ...]
    private_bytes: tuple[int, ...]
    memory_source: str
    thread_cpu: Mapping[str, float]
    stacks: Mapping[tuple[str, ...], int]
    others_cores: float

    @property
    def seconds(self) -> float:
        """The length of the window."""
        return self.times[-1]

    @property
    def baseline_private_bytes(self) -> int:
        """Private memory at entry."""
        return self.private_bytes[0]

    @property
    def peak_private_bytes(self) -> int:
        """The largest sample of private memory; a peak shorter than the interval can be missed."""
        return max(self.private_bytes)


class Observer:
    """Watch this process from a thread of its own while the ``with`` block runs.

    Memory is sampled at entry, at exit and at every interval between; the stack is that of the
    thread that entered. Sampling needs the interpreter lock: code that releases it (torch's
    operators, numba with ``nogil``) is seen at work, under the Python line that called it; native
    code that keeps it delays the next sample until it returns. Threads that come and go between two
    samples aren't seen.
    """

    def __init__(self, interval_seconds: float = 0.05) -> None:
        self._interval = interval_seconds
        self._stop = threading.Event()
        self._sampler = threading.Thread(target=self._watch, name="observer", daemon=True)
        self._failure: Exception | None = None
        self._times: list[float] = []
        self._bytes: list[int] = []
        self._names: dict[int, str] = {}
        self._stacks: Counter[tuple[str, ...]] = Counter()
        self._observation: Observation | None = None

    def __enter__(self) -> Self:
        self._observed = threading.get_ident()
        self._cpu = CpuUse()
        self._start = time.perf_counter()
        self._sample()
        self._sampler.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        self._sampler.join()
        self._sample()
        seconds = self._times[-1]
        self._observation = Observation(
            times=tuple(self._times),
            private_bytes=tuple(self._bytes),
            memory_source=memory_source(),
            thread_cpu={
                f"{self._names.get(thread, 'native')} {thread}": used / seconds
                for thread, used in self._cpu.used.items()
                if thread != self._sampler.native_id
            },
            stacks=dict(self._stacks),
            others_cores=self._cpu.of_others() / seconds,
        )
        if self._failure is not None and kind is None:
            raise LorabenchError(f"sampling stopped half-way: {self._failure!r}") from self._failure

    @property
    def observation(self) -> Observation:
        """What was seen; there after exit, also when the block raised."""
        if self._observation is None:
            raise LorabenchError("observation: read it after the 'with' block has ended")
        return self._observation

    def _watch(self) -> None:
        try:
            while not self._stop.wait(self._interval):
                stack = _stack(self._observed)
                # Not yet, or no longer, in the block: the thread waits for this one.
                if not any(line.startswith(f"{__name__}:Observer.__") for line in stack):
                    self._stacks[stack] += 1
                self._sample()
        except Exception as failure:
            self._failure = failure

    def _sample(self) -> None:
        self._times.append(time.perf_counter() - self._start)
        self._bytes.append(private_bytes())
        self._names |= {t.native_id: t.name for t in threading.enumerate() if t.native_id}
        self._cpu.update()


def _busy_seconds() -> float:
    """Return the CPU time that all processes of the machine have used."""
    import psutil

    times = psutil.cpu_times()._asdict()
    # Time of virtual machines is in user and nice already. Stolen time counts: others had it.
    idle = ("idle", "iowait", "guest", "guest_nice")
    return sum(seconds for name, seconds in times.items() if name not in idle)


def _stack(thread: int) -> tuple[str, ...]:
    # Frames stay inside this function: one kept would keep the observed code's tensors alive.
    frame = sys._current_frames().get(thread)
    lines: list[str] = []
    while frame is not None:
        module = frame.f_globals.get("__name__", "?")
        lines.append(f"{module}:{frame.f_code.co_qualname}:{frame.f_lineno}")
        frame = frame.f_back
    return tuple(lines)
