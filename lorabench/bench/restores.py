"""The ways back to base bits, each measured alone, with a plain pass and a plain copy beside it.

A round walks base -> other -> state -> base, where ``other`` has 0.8 of the strengths of ``state``:
one fuse, one rebind between two fused states, and one unfuse, from the strength that was asked for.
In the same round come what these are judged by: a fuse by the kernel alone, a copy of the touched
weights from one warm memory to another, and a digest of all weights.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from time import perf_counter
from typing import NamedTuple

import torch

from lorabench.account import Account
from lorabench.adapter import Adapter
from lorabench.bench.cases import Case, Result, Subject
from lorabench.check import check_against_reference, rows_to_check
from lorabench.checkpoint import Checkpoint
from lorabench.cost import Work
from lorabench.errors import CheckError, ConfigError
from lorabench.fuse import Term, as_matrix, by_rows, reference_deltas, terms_of
from lorabench.kernels import Scratch, get_tiles
from lorabench.measure import Observer, Samples, time_once
from lorabench.recipe import BASE, State
from lorabench.records import JSON
from lorabench.resident import ResidentWeights
from lorabench.restore import RESTORES, check_restore

STRENGTHS = (0.2, 1.0, 2.0, 6.0, 20.0)
"""At which a synthetic delta, made at 0.05 of the weights' spread, has 0.01 to 1.0 of it."""

OPERATIONS = ("fuse", "rebind", "unfuse")

_MOST_STRENGTH = 1e6
_OTHER = 0.8  # of the strengths: no power of two, so that products round otherwise


def restores_on(device: str) -> tuple[str, ...]:
    """Name the restores that a device has."""
    return tuple(name for name in RESTORES if device != "cpu" or name != "device_snapshot")


def restores_case(
    subject: Subject, restore: str, strength: float = 1.0, repetitions: int = 5
) -> Case:
    """Time fuse, rebind and unfuse under a restore, and weigh what it keeps.

    Parameters
    ----------
    strength
        Of every adapter.
    repetitions
        How many rounds, after one that warms up.

    Raises
    ------
    UnavailableError
        There is no such restore on the subject's device.
    ConfigError
        A strength of 0 or one that would overflow, or no round.
    """
    check_restore(restore, torch.device(subject.device))
    if not 0 < abs(strength) <= _MOST_STRENGTH or repetitions < 1:
        raise ConfigError(
            f"restore '{restore}': expected a strength other than 0, {_MOST_STRENGTH:g} at most, "
            f"and at least one repetition, found {strength:g} and {repetitions}"
        )
    what = {
        "bench": "restores",
        **subject.what(),
        "roles": list(subject.adapters),
        "restore": restore,
        "strength": strength,
        "repetitions": repetitions,
    }
    return Case(what, _restores, (subject, restore, strength, repetitions))


def _restores(
    subject: Subject, restore: str, strength: float, repetitions: int
) -> Sequence[Result]:
    base, adapters = subject.open()
    device = torch.device(subject.device)
    state, other = (State(dict.fromkeys(adapters, s * strength)) for s in (1.0, _OTHER))
    walk: dict[str, State] = dict(zip(OPERATIONS, (other, state, BASE), strict=True))
    weights = ResidentWeights(base, adapters, restore=restore, device=device)
    loaded = _load(weights, walk)
    plain = _Plain(base, adapters, device, (other, state), exact=weights.exact)
    copy = _Copy(plain.weights, pinned=restore == "host_snapshot" and device.type == "cuda")
    timed = _Timed(device)
    with Observer() as observer:
        for _ in range(repetitions):
            timed("plain fuse", partial(plain.weights.rebind, state))
            plain.weights.rebind(BASE)
            timed("copy", copy)
            for operation, after in walk.items():
                timed(operation, partial(weights.rebind, after))
                timed("digest", partial(plain.check, weights))
    accounts = {operation: _account(weights, after) for operation, after in walk.items()}
    weighed = {
        **loaded.memory,
        **_what_residuals_need(restore, plain, state),
        "ratio": _ratio(plain, state),
        "wrong_share": plain.wrong_share(weights),
        "touched_params": copy.params,
        "idle_span_seconds": _idle_span_seconds(),
    }
    counted = {
        "copy": {"copied_bytes": copy.nbytes},
        "digest": {"digested_bytes": sum(t.nbytes for t in weights.tensors.values())},
    }
    first = dict(loaded.first)
    samples = {"load": first.pop("load"), **timed.samples}
    return [
        Result(
            Samples(tuple(seconds), tuple(first.get(name, ()))),
            check=plain.checked,
            what={"contender": name},
            counted=counted.get(name) or asdict(timed.work.get(name, loaded.work)),
            details={
                **accounts.get(name, {}),
                **(weighed if name == "load" else {}),
                "others_cores": observer.observation.others_cores,
            },
            peak_private_bytes=loaded.peak_private_bytes,
        )
        for name, seconds in samples.items()
    ]


class _Timed:
    """Takes samples by name, and counts the work of the last of each."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.samples: dict[str, list[float]] = {}
        self.work: dict[str, Work] = {}

    def __call__(self, name: str, operation: Callable[[], Work | None]) -> float:
        done: list[Work | None] = []
        seconds = time_once(lambda: done.append(operation()), self._device)
        self.samples.setdefault(name, []).append(seconds)
        if done[0] is not None:
            self.work[name] = done[0]
        return seconds


class _Loaded(NamedTuple):
    """The weights' way into memory, and one round, watched."""

    first: dict[str, list[float]]
    """Seconds of the load, and of each operation as it is done for the first time."""
    work: Work
    peak_private_bytes: int
    memory: dict[str, JSON]


def _load(weights: ResidentWeights, walk: Mapping[str, State]) -> _Loaded:
    device = weights.device
    timed = _Timed(device)
    kept = [0]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with Observer() as observer:
        timed("load", weights.load)
        for operation, after in walk.items():
            timed(operation, partial(weights.rebind, after))
            kept.append(weights.kept_bytes)
    seen = observer.observation
    memory: dict[str, JSON] = {
        "baseline_private_bytes": seen.baseline_private_bytes,
        "kept_bytes": max(kept),
        "predicted_bytes": weights.predicted_bytes([BASE, *walk.values()]),
    }
    if device.type == "cuda":
        memory["peak_device_bytes"] = torch.cuda.max_memory_allocated(device)
    return _Loaded(timed.samples, timed.work["load"], seen.peak_private_bytes, memory)


class _Plain:
    """The same weights, re-read from the file: what bits each state has, by digest."""

    def __init__(
        self,
        base: Checkpoint,
        adapters: Mapping[str, Adapter],
        device: torch.device,
        states: Iterable[State],
        *,
        exact: bool,
    ) -> None:
        self._exact = exact
        self.weights = ResidentWeights(base, adapters, device=device)
        self.weights.load(BASE)
        self._bits = {BASE: self.weights.digest()}
        for state in states:
            self.weights.rebind(state)
            self._bits[state] = self.weights.digest()
        meant = "each state has" if exact else "no state is held to"
        self.checked = f"{check_against_reference(self.weights)}; {meant} the bits as re-read"
        self.weights.rebind(BASE)
        self.names = [name for name in self.weights.tensors if name in _touched(self.weights)]

    def check(self, weights: ResidentWeights) -> None:
        """Raise :class:`CheckError` unless weights have their state's bits, if they should."""
        found, expected = weights.digest(), self._bits[weights.state]
        if self._exact and found != expected:
            raise CheckError(
                f"state '{weights.state}' has other bits than by re-reading ({found}, not "
                f"{expected})"
            )

    def terms(self, name: str, state: State) -> list[Term]:
        """Return what a state fuses into a weight."""
        return terms_of(name, state, {role: self.weights.factors(role) for role in state})

    def wrong_share(self, weights: ResidentWeights) -> float:
        """Return the share of touched values that differ, where both are in the base state."""
        ours, theirs = weights.tensors, self.weights.tensors
        wrong = sum(int((ours[name] != theirs[name]).sum()) for name in self.names)
        return wrong / sum(theirs[name].numel() for name in self.names)


class _Copy:
    """A copy of the touched weights to memory that has been written to before."""

    def __init__(self, weights: ResidentWeights, *, pinned: bool) -> None:
        sources = [weights.tensors[name] for name in weights.tensors if name in _touched(weights)]
        self._destinations = [source.clone() for source in sources]
        self._sources = [source.cpu().pin_memory() for source in sources] if pinned else sources
        self.nbytes = sum(source.nbytes for source in sources)
        self.params = sum(source.numel() for source in sources)

    def __call__(self) -> None:
        for source, destination in zip(self._sources, self._destinations, strict=True):
            destination.copy_(source, non_blocking=True)


def _touched(weights: ResidentWeights) -> set[str]:
    return {target.weight.name for targets in weights.touches.values() for target in targets}


def _account(weights: ResidentWeights, after: State) -> dict[str, JSON]:
    """Go to a state once more, and tell where the time went."""
    weights.account = account = Account(weights.device)
    try:
        seconds = time_once(partial(weights.rebind, after), weights.device)
    finally:
        weights.account = None
    return {
        "account": [asdict(row) for row in account.rows()],
        "accounted_seconds": seconds,
    }


def _idle_span_seconds(times: int = 100_000) -> float:
    """Return what a span takes while no account is kept."""
    scratch = Scratch()
    start = perf_counter()
    for _ in range(times):
        with scratch.span("add", nbytes=1):
            pass
    return (perf_counter() - start) / times


def _what_residuals_need(restore: str, plain: _Plain, state: State) -> dict[str, JSON]:
    """Return the entropy of what subtracting would get wrong, in bits a weight."""
    if restore != "residual":
        return {}
    from lorabench.corrections import correction_entropy

    device = plain.weights.device
    touched = (
        (as_matrix(weight), plain.terms(name, state))
        for name, weight in plain.weights.tensors.items()
        if name in plain.names and weight.dtype == torch.bfloat16
    )
    entropy = correction_entropy(touched, get_tiles("gemm", device), Scratch(device))
    return {"entropy_bits": entropy.bits, "entropy_given_exponent": entropy.given_exponent}


def _ratio(plain: _Plain, state: State) -> float:
    """Return std(delta) / std(weight) over rows of a few weights."""
    deltas, values = [], []
    for name, rows in rows_to_check(plain.weights.adapters).items():
        weight = as_matrix(plain.weights.tensors[name])[rows.start : rows.stop].cpu()
        terms = [
            Term(pair.within(rows).cpu(), strength) for pair, strength in plain.terms(name, state)
        ]
        for touched, mine in by_rows(terms):
            deltas.append(reference_deltas(mine)[0].float().flatten())
            values.append(weight[touched.start : touched.stop].float().flatten())
    return float(torch.cat(deltas).std() / torch.cat(values).std())
