"""A rebind that goes weight by weight ahead of the forward that needs it.

A forward uses each weight once, and can begin when its first is ready: it then waits for a weight
only where the rebind isn't as far yet. The rebind runs on a thread of its own, and on CUDA on a
stream of its own. What comes of it is what a rebind and then a forward give, bit for bit. On a CPU
both share the cores, so that little time is gained. The path for CUDA was not run on a GPU.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from threading import Condition, Thread
from typing import TypeVar

import torch
from torch import Tensor

from lorabench.cost import Work
from lorabench.errors import ConfigError
from lorabench.recipe import State, bound_state
from lorabench.resident import ResidentWeights

R = TypeVar("R")

RunForward = Callable[[Mapping[str, Tensor], Callable[[str], None]], R]
"""A forward, given tensors by name and what to call with a weight's name before it is used."""


def _ignore(name: str) -> None:
    """Do nothing after a weight."""


def overlapped(
    weights: ResidentWeights,
    state: State,
    forward: RunForward[R],
    *,
    order: Iterable[str] = (),
    after_weight: Callable[[str], None] = _ignore,
) -> tuple[Work, R]:
    """Rebind weights to a state while a forward in it runs; return what each gives.

    Both have ended when this ends, whatever happens. Where the forward fails, the rebind is
    completed, as if it had come first. Ctrl-C breaks it off, and it is undone if it hasn't ended.

    Parameters
    ----------
    forward
        The function that it is given waits until a weight has the state's bits, and returns at once
        for a weight that isn't to change. Until the forward ends, ``weights`` can't be used.
    order
        The names of weights as the forward uses them: see :meth:`ResidentWeights.rebind`.
    after_weight
        Called with each weight's name when it is done, on the rebind's thread, before the forward
        may use it; if it raises, the rebind is undone.

    Raises
    ------
    ConfigError
        The restore is ``images``, or the state names an adapter that isn't bound. Nothing was
        begun.
    LorabenchError
        What :meth:`ResidentWeights.rebind` raises. The forward's next wait raises it too, and
        whatever the forward has given by then is void.
    """
    rebind = _Rebind(weights, bound_state(state, weights.adapters))
    try:
        rebind.start(tuple(order), after_weight)
        result = forward(rebind.tensors, rebind.wait_for)
    except BaseException as error:
        if not isinstance(error, Exception):
            rebind.break_off(error)
        raise
    finally:
        rebind.end()
    return rebind.work, result


class _Rebind:
    """A rebind on a thread of its own."""

    def __init__(self, weights: ResidentWeights, state: State) -> None:
        if weights.restore == "images":
            raise ConfigError(
                f"{weights.base.path}: a rebind under restore 'images' changes no weight in place, "
                f"so that no forward can run beside it; choose another restore, or rebind first"
            )
        self._weights, self._state = weights, state
        before = weights.state
        roles = () if state == before else (*before, *state)
        self._changing = {target.weight.name for role in roles for target in weights.touches[role]}
        self.tensors = weights.tensors
        self.work = Work()
        cuda = weights.device.type == "cuda"
        self._stream = torch.cuda.Stream(weights.device) if cuda else None
        self._thread: Thread | None = None
        # The rest is what the two threads tell each other, under the condition's lock.
        self._told = Condition()
        self._done: dict[str, torch.cuda.Event | None] = {}
        self._ended = False
        self._failure: BaseException | None = None
        self._broken_off: BaseException | None = None

    def start(self, order: Iterable[str], after_weight: Callable[[str], None]) -> None:
        """Begin, on CUDA after what the caller's stream has still to do with the old weights."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._thread = Thread(target=self._run, args=(order, after_weight), name="rebind")
        self._thread.start()

    def _run(self, order: Iterable[str], after_weight: Callable[[str], None]) -> None:
        def tell(name: str) -> None:
            after_weight(name)
            if self._broken_off is not None:
                raise self._broken_off
            event = None
            if self._stream is not None:
                event = torch.cuda.Event()
                event.record(self._stream)
            with self._told:
                self._done[name] = event
                self._told.notify_all()

        failure = None
        try:
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                self.work = self._weights.rebind(self._state, tell, order=order)
        except BaseException as error:
            failure = error
        with self._told:
            self._failure, self._ended = failure, True
            self._told.notify_all()

    def wait_for(self, name: str) -> None:
        """Wait until a weight has the state's bits; on CUDA the caller's stream does.

        Raises whatever the rebind failed with.
        """
        if name not in self._changing:
            return
        with self._told:
            self._told.wait_for(lambda: self._ended or name in self._done)
            if self._failure is not None:
                raise self._failure
            event = self._done[name]
        if event is not None:
            torch.cuda.current_stream(self._weights.device).wait_event(event)

    def break_off(self, error: BaseException) -> None:
        """Have the rebind fail with an error at the next weight that it is done with, if any."""
        self._broken_off = self._broken_off or error

    def end(self) -> None:
        """Wait for the rebind's end, and raise what it failed with; Ctrl-C breaks it off."""
        if self._thread is None or self._thread.ident is None:
            return  # it couldn't be started
        # Not by join alone: Python 3.11 takes a thread whose join was interrupted for ended.
        while not self._ended:
            try:
                with self._told:
                    self._told.wait_for(lambda: self._ended)
            except BaseException as error:
                self.break_off(error)
        self._thread.join()
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        if (error := self._failure or self._broken_off) is not None:
            raise error
