"""Where a pass's time goes: seconds, bytes and FLOPs by operation.

Code that works says what it is about to do by opening a span (``Scratch.span``); an ``Account``
adds spans up. A span inside another isn't counted twice: seconds are a span's own, without those
of the spans opened inside it. What no span covers is in no row, so a pass's own time less the sum
of the rows is what nobody accounts for.
"""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

OPERATIONS = ("read", "copy", "product", "add", "restore", "write")
"""What a pass does: reads a file, copies between memories, multiplies factors, adds deltas, gives
base bits back (without the reads, products and adds in that), writes a file."""

_ON_THE_HOST = ("read", "write")  # a file's work, which a GPU's events don't see


@dataclass(frozen=True)
class Row:
    """One operation's share of a pass."""

    operation: str
    count: int
    nbytes: int
    """Read and written, in memory or in a file."""
    flops: int
    """One multiply-accumulate is two."""
    seconds: float


class Account:
    """Adds up spans of work, from any number of threads.

    On CUDA a span lasts between two events on the stream it was opened on, which are read when the
    rows are asked for: booking waits for nothing. Spans of files are timed by the host's clock on
    every device. Streams and threads that work at once make the rows add up to more than the pass
    took.

    Parameters
    ----------
    device
        Where the work is done.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._on_gpu = str(device).startswith("cuda")
        self._lock = threading.Lock()
        self._open = threading.local()  # .spans: of this thread, outermost first
        self._closed: list[_Span] = []

    def book(self, operation: str, nbytes: int = 0, flops: int = 0) -> AbstractContextManager[None]:
        """Return a span, open while its ``with`` block runs; it is booked however the block ends.

        Parameters
        ----------
        operation
            One of ``OPERATIONS``.
        nbytes, flops
            What it moves and what it computes: see `Row`.
        """
        assert operation in OPERATIONS, operation
        on_gpu = self._on_gpu and operation not in _ON_THE_HOST
        return _Span(self, operation, nbytes, flops, _EventClock() if on_gpu else _HostClock())

    def rows(self) -> list[Row]:
        """Return a row for each operation booked so far, in the order of ``OPERATIONS``.

        On CUDA this waits for the work to end.
        """
        with self._lock:
            closed = list(self._closed)
        found = []
        for operation in OPERATIONS:
            spans = [span for span in closed if span.operation == operation]
            if spans:
                found.append(
                    Row(
                        operation,
                        len(spans),
                        sum(span.nbytes for span in spans),
                        sum(span.flops for span in spans),
                        # Two clocks, one inside the other, may disagree by a little.
                        sum(max(0.0, span.own_seconds()) for span in spans),
                    )
                )
        return found

    def _enter(self, span: _Span) -> None:
        if not hasattr(self._open, "spans"):
            self._open.spans = []
        self._open.spans.append(span)

    def _leave(self, span: _Span) -> None:
        spans: list[_Span] = self._open.spans
        assert spans[-1] is span, "spans of one thread close in the order opposite to opening"
        spans.pop()
        if spans:
            spans[-1].inner.append(span)
        with self._lock:
            self._closed.append(span)


class _Clock(Protocol):
    def start(self) -> None: ...

    def stop(self) -> None: ...

    def seconds(self) -> float: ...


class _HostClock:
    def start(self) -> None:
        self._begin = time.perf_counter()

    def stop(self) -> None:
        self._seconds = time.perf_counter() - self._begin

    def seconds(self) -> float:
        return self._seconds


class _EventClock:
    def __init__(self) -> None:
        import torch

        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def start(self) -> None:
        self._events[0].record()

    def stop(self) -> None:
        self._events[1].record()

    def seconds(self) -> float:
        begin, end = self._events
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


class _Span:
    __slots__ = ("_account", "_clock", "flops", "inner", "nbytes", "operation")

    def __init__(
        self, account: Account, operation: str, nbytes: int, flops: int, clock: _Clock
    ) -> None:
        self._account = account
        self._clock = clock
        self.operation, self.nbytes, self.flops = operation, nbytes, flops
        self.inner: list[_Span] = []

    def __enter__(self) -> None:
        self._account._enter(self)
        self._clock.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._clock.stop()
        self._account._leave(self)

    def own_seconds(self) -> float:
        return self._clock.seconds() - sum(span._clock.seconds() for span in self.inner)
