"""Another process of this machine, watched from outside: looking takes next to nothing from it.

The observed process opens a window with `visible` and tells in it how far it is; the process that
observes it samples with `Watch`. The two share a folder and the system's monotonic clock.

Memory and the CPU time of threads are read from the system. A stack is written by the observed
process's own interpreter (``faulthandler``), from a signal handler in C, when the observer's signal
reaches its main thread. Unlike a debugger's view, as by py-spy, that takes the process's consent
and a few microseconds of its time; on the other hand it takes no rights and knows its Python's
version, and it works while native code keeps the interpreter lock. Frames are Python's: compiled
code stands under the line that called it.
"""

import faulthandler
import json
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self

from lorabench.errors import LorabenchError
from lorabench.measure import CpuUse, Observation, memory_source, private_bytes

SIGNAL = signal.SIGUSR1

_TOLD, _STACKS, _WATCHED = "told.jsonl", "stacks.txt", "watched"  # in the shared folder
_PATIENCE_SECONDS = 60.0  # for an observer to look
_POLL_SECONDS = 0.001

_STACK = "Stack (most recent call first):"
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\S+) in (?P<function>.*)')


@contextmanager
def visible(folder: Path) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Open a window in which a `Watch` on this folder sees this process; give a way to tell steps.

    For the main thread, whose stack is the one that is seen. The block begins when the observer has
    looked for the first time and is left when it has looked for the last. What the block tells, a
    mapping of JSON at a time, is given the time of telling.

    Raises
    ------
    LorabenchError
        Nobody watches.
    """
    watched = folder / _WATCHED
    with (
        (folder / _TOLD).open("a", buffering=1) as told,  # each line is out at once
        (folder / _STACKS).open("ab") as stacks,
    ):

        def tell(kind: str, fields: Mapping[str, Any]) -> None:
            told.write(json.dumps((time.monotonic(), kind, fields)) + "\n")

        faulthandler.register(SIGNAL, stacks, all_threads=False)
        try:
            tell("waits", {"pid": os.getpid()})
            deadline = time.monotonic() + _PATIENCE_SECONDS
            while not watched.exists():
                if time.monotonic() > deadline:
                    raise LorabenchError(
                        f"{folder}: expected a Watch on this folder, but nobody has looked for "
                        f"{_PATIENCE_SECONDS:g} s; enter one before this process starts"
                    )
                time.sleep(_POLL_SECONDS)
            tell("begins", {})
            try:
                yield lambda fields: tell("step", fields)
            finally:
                tell("ends", {})
                while watched.exists():  # its last look; should it die, it takes this process along
                    time.sleep(_POLL_SECONDS)
        finally:
            faulthandler.unregister(SIGNAL)


class _Told(NamedTuple):
    """A line that the observed process wrote."""

    at: float  # on the monotonic clock
    kind: str  # waits, begins, step or ends
    fields: dict[str, Any]


class Watch:
    """Watch a process that this one starts in the ``with`` block, while its window is open.

    From a thread of its own: at the window's begin and end and at every interval between, private
    memory and threads; at every interval, the main thread's stack, by `SIGNAL`. A process that
    started no window, or died in it, leaves nothing to see.

    Parameters
    ----------
    folder
        An empty folder that both processes can write; the observed one opens `visible` on it.
    """

    def __init__(self, folder: Path, interval_seconds: float = 0.05) -> None:
        self._folder = folder
        self._interval = interval_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._failure: Exception | None = None
        self._told: list[_Told] = []
        self._looks: list[tuple[float, int]] = []  # time on the monotonic clock, private bytes
        self._observation: Observation | None = None

    def __enter__(self) -> Self:
        (self._folder / _TOLD).touch()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._failure is not None and (kind is None or issubclass(kind, Exception)):
            raise LorabenchError(f"watching stopped half-way: {self._failure!r}") from self._failure

    @property
    def observation(self) -> Observation:
        """What was seen of the window; there after exit."""
        if self._observation is None:
            raise LorabenchError(
                "observation: expected a window that was opened and left by the observed process, "
                "and the end of the 'with' block; found none"
            )
        return self._observation

    @property
    def steps(self) -> list[dict[str, Any]]:
        """What the process told in its window, each with its ``seconds`` since the begin."""
        start = self._at("begins")
        return [{"seconds": t.at - start, **t.fields} for t in self._told if t.kind == "step"]

    def _at(self, kind: str) -> float:
        return next(told.at for told in self._told if told.kind == kind)

    def _run(self) -> None:
        try:
            with (self._folder / _TOLD).open() as stream:
                self._watch(lambda: self._told.extend(_new_lines(stream)))
        except Exception as failure:
            self._failure = failure
        finally:
            (self._folder / _WATCHED).unlink(missing_ok=True)  # let it go on in any case

    def _watch(self, listen: Callable[[], None]) -> None:
        import psutil

        while not self._told:
            if self._stop.wait(_POLL_SECONDS):
                return
            listen()
        process = psutil.Process(self._told[0].fields["pid"])
        try:
            cpu, mine = CpuUse(process.pid), time.process_time()
            self._look(process.pid)
            (self._folder / _WATCHED).touch()
            while not self._stop.wait(self._interval):
                listen()
                cpu.update()
                self._look(process.pid)
                if self._told[-1].kind == "ends":
                    others = cpu.of_others(watching=time.process_time() - mine)
                    self._observation = self._seen(process.pid, cpu.used, others)
                    return
                process.send_signal(SIGNAL)  # by psutil, which knows a process from a later one
        except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            return  # it died; whoever started it knows more

    def _look(self, pid: int) -> None:
        self._looks.append((time.monotonic(), private_bytes(pid)))

    def _seen(self, pid: int, used: Mapping[int, float], others: float) -> Observation:
        start, end = self._at("begins"), self._at("ends")
        seconds = end - start
        return Observation(
            times=tuple(min(max(0.0, at - start), seconds) for at, _ in self._looks),
            private_bytes=tuple(found for _, found in self._looks),
            memory_source=memory_source(),
            # Python's names for its threads aren't seen from here.
            thread_cpu={
                f"{'MainThread' if thread == pid else 'other'} {thread}": cpu / seconds
                for thread, cpu in used.items()
            },
            stacks=parse_stacks((self._folder / _STACKS).read_text("utf-8", "replace")),
            others_cores=others / seconds,
        )


def _new_lines(stream: Any) -> Iterator[_Told]:
    """Read what was told since the last time, whole lines only."""
    while True:
        at = stream.tell()
        if not (line := stream.readline()).endswith("\n"):
            stream.seek(at)
            return
        yield _Told(*json.loads(line))


def parse_stacks(text: str) -> dict[tuple[str, ...], int]:
    """Count the stacks that ``faulthandler`` wrote one after another for one thread each.

    Returns
    -------
    dict
        Stack -> how often it was written. Frames are ``module:function:line``, innermost first; a
        file that is no module's stands under its name. Stacks of this module, which are of telling
        and of waiting for the observer, are left out.
    """
    _, *parts = text.split(_STACK)
    stacks = (tuple(_frames(part)) for part in parts)
    own = f"{__name__}:"
    return dict(Counter(s for s in stacks if not any(frame.startswith(own) for frame in s)))


def _frames(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if found := _FRAME.fullmatch(line):
            yield f"{_module(found['file'])}:{found['function']}:{found['line']}"


@cache
def _module(file: str) -> str:
    """Return the dotted name under which a source file is imported, by the packages around it."""
    path = Path(file)
    if path.suffix != ".py":
        return file  # "<string>" and the like
    parts = [] if path.stem == "__init__" else [path.stem]
    for folder in path.parents:
        if not (folder / "__init__.py").exists():
            break
        parts.append(folder.name)
    return ".".join(reversed(parts))
