"""Cases run alone: a function in a process of its own, so that its memory is its own."""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import signal
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from os import _exit
from typing import Any, ParamSpec, TypeVar, cast

from lorabench.errors import ConfigError, LorabenchError

P = ParamSpec("P")
R = TypeVar("R")

_GRACE_SECONDS = 10.0  # for a process that has answered to leave by itself


def alone(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function in a fresh process, so that peak memory and caches are those of this call.

    The function, its arguments and its result are pickled, so it is defined in a module, not in a
    notebook cell; a script that calls this guards its top level by ``__name__ == "__main__"``.
    Settings made at run time, torch's number of threads among them, don't travel: the function
    makes them. An exception is raised here as itself, with the other process's traceback as a note.
    The process ends with this call, also by Ctrl-C, and with this process if that is killed.

    Raises
    ------
    ConfigError
        The function or an argument can't be pickled, or can't be found from the fresh process.
    LorabenchError
        The process died before it answered; the message has its exit code or signal.
    """
    try:
        call = pickle.dumps((function, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise _not_portable(error) from error
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_answer, args=(theirs,))
    with ours:
        with theirs:
            process.start()
        answer = None
        try:
            with contextlib.suppress(EOFError, OSError):  # it died, and the pipe broke
                ours.send_bytes(call)  # as an argument of Process, a big one could hang start()
                wait([ours, process.sentinel])
                answer = ours.recv_bytes() if ours.poll() else None
            process.join(_GRACE_SECONDS)
        finally:
            process.kill()
            process.join()
            code = process.exitcode or 0
            process.close()
    if answer is None:
        name = getattr(function, "__qualname__", repr(function))
        cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        hint = "out of memory? take a smaller case" if cause == "SIGKILL" else "see what it printed"
        raise LorabenchError(f"the process of {name} died before it answered: {cause}; {hint}")
    result, error = pickle.loads(answer)
    if error is not None:
        raise error
    return cast("R", result)


def _answer(connection: Connection[Any, Any]) -> None:
    """Run in the fresh process: receive a call, answer with a pickled (result, exception)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both; the parent ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        try:
            function, args, kwargs = pickle.loads(connection.recv_bytes())
        except (ImportError, AttributeError) as error:
            raise _not_portable(error) from error
        # Plain pickles, not Connection.send: that shares tensors' memory, which ends with us.
        answer = pickle.dumps((function(*args, **kwargs), None))
    except Exception as error:
        answer = _pickled(error, f"In a process of its own:\n{traceback.format_exc()}")
    connection.send_bytes(answer)


def _pickled(error: Exception, note: str) -> bytes:
    error.add_note(note)
    try:
        answer = pickle.dumps((None, error))
        pickle.loads(answer)  # some exceptions can be written but not be made again
    except Exception:
        stand_in = LorabenchError(f"{type(error).__qualname__}: {error}")
        stand_in.add_note(note)
        answer = pickle.dumps((None, stand_in))
    return answer


def _not_portable(error: Exception) -> ConfigError:
    return ConfigError(
        f"can't call this in a process of its own ({error}); expected a function defined at the top"
        " level of a module that can be imported, and arguments that can be pickled"
    )


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    _exit(1)
