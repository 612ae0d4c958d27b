"""A plan, measured action by action."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from time import perf_counter

import torch
from torch import Tensor

from lorabench.bench.cases import Case, Result, Subject
from lorabench.check import (
    check_against_reference,
    check_rows,
    rows_to_check,
)
from lorabench.checkpoint import Checkpoint
from lorabench.devices import touch_free
from lorabench.digest import digest
from lorabench.errors import CheckError
from lorabench.geometry import Geometry
from lorabench.measure import Observer, Samples, private_bytes, time_once
from lorabench.plan import Action, Denoise, Load, Rebind, Strategy, plan
from lorabench.recipe import BASE, Recipe, State
from lorabench.records import JSON
from lorabench.resident import ResidentWeights
from lorabench.run import perform
from lorabench.streamed import StreamedWeights


def walk_case(
    subject: Subject,
    recipe: Recipe,
    strategy: Strategy,
    name: str,
    renders: int = 1,
    *,
    actions: Sequence[Action] | None = None,
    streamed: bool = False,
) -> Case:
    """Execute a plan and record every load and rebind of it, one record each.

    No forward runs, so that a rebind to be overlapped with one is carried out alone. Weights in
    memory come from the page cache, and memory that an action takes is touched before: see
    :func:`lorabench.devices.touch_free`.

    Parameters
    ----------
    recipe
        Bound to the subject's roles.
    name
        What to call the strategy.
    actions
        The plan, where it isn't the strategy's own.
    streamed
        Pass the weights from the disk in each action, rather than hold them in memory.
    """
    bound = recipe.bind(dict.fromkeys(subject.adapters, 1.0))
    what = {
        "bench": "stream" if streamed else "walk",
        **subject.what(),
        "recipe": recipe.name,
        "phases": [str(phase.state) for phase in bound.phases],
        "strategy": name,
        **asdict(strategy),
        "renders": renders,
    }
    if actions is None:
        actions = plan(bound, strategy, renders)
    else:
        what["plan"] = [json.dumps(action.as_dict()) for action in actions]
    return Case(what, _walk, (subject, recipe.name, strategy, actions, streamed))


def _walk(
    subject: Subject, recipe: str, strategy: Strategy, actions: Sequence[Action], streamed: bool
) -> Sequence[Result]:
    base, adapters = subject.open()
    files = (base, *(adapter.file for adapter in adapters.values()))
    geometry, device = subject.geometry(), torch.device(subject.device)
    how = {"kernel": strategy.kernel, "restore": strategy.restore}
    if streamed:
        weights = StreamedWeights(base, adapters, **how, keep=rows_to_check(adapters))
    else:
        weights = ResidentWeights(base, adapters, **how, device=device)
    exact = strategy.restore != "subtract"
    digests: dict[State, str] = {}
    results: list[Result] = []
    needed_bytes = 0
    if isinstance(weights, ResidentWeights):
        # Loads find in the page cache what was read once, whatever ran before.
        digests[BASE], *_ = (digest(_Streamed(file)) for file in files)
        needed_bytes = weights.predicted_bytes([*_states(actions)])
    held_bytes = private_bytes()
    for index, action in enumerate(actions):
        if isinstance(action, Denoise):
            perform(action, weights)
            continue
        touched_bytes = touch_free(device, needed_bytes - (private_bytes() - held_bytes))
        laps = Laps(geometry, device)
        work = []
        with Observer() as observer:  # of the action alone: checking takes memory too
            seconds = time_once(
                lambda: work.append(perform(action, weights, laps.start())),  # noqa: B023
                device,
            )
        seen = observer.observation
        details = {
            "touched_bytes": touched_bytes,
            "globals_seconds": laps.globals_seconds,
            "block_seconds": laps.block_seconds,
            "baseline_private_bytes": seen.baseline_private_bytes,
            "others_cores": seen.others_cores,
        }
        if weights.state == BASE and BASE not in digests and not isinstance(action, Load):
            digests[BASE] = digest(_Streamed(base))  # no load has shown the file's own bits yet
        same = digests.setdefault(weights.state, found := weights.digest()) == found
        if exact and not same:
            raise CheckError(
                f"{recipe}, action {index}: state '{weights.state}' has other bits than "
                f"before, or than the file's ({found}, not {digests[weights.state]})"
            )
        if not same and weights.state == BASE and isinstance(weights, ResidentWeights):
            details["wrong_share"] = _wrong_share(weights)
        results.append(
            Result(
                Samples((seconds,)),
                check=f"digest {found}" + ("" if same else ", not the exact one"),
                what={"index": index, "action": action.kind, **_action_fields(action)},
                counted=asdict(work[0]),
                details=details,
                peak_private_bytes=seen.peak_private_bytes,
            )
        )
    if exact:
        sums = (
            check_rows(weights.kept, base, adapters, weights.state)
            if isinstance(weights, StreamedWeights)
            else check_against_reference(weights)
        )
        results[-1] = replace(results[-1], check=f"{results[-1].check}; {sums}")
    return results


def _states(actions: Iterable[Action]) -> Iterator[State]:
    for action in actions:
        if not isinstance(action, Denoise):
            yield action.state if isinstance(action, Load) else action.after


def _action_fields(action: Load | Rebind) -> dict[str, JSON]:
    if isinstance(action, Load):
        return {"state": str(action.state), "critical": True}
    return {
        "before": str(action.before),
        "state": str(action.after),
        "render": action.render,
        "phase": action.phase,
        "critical": action.critical,
    }


class Laps:
    """Seconds between a sweep's weights, apart for the globals and for the mean block."""

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        self._geometry = geometry
        self._device = device
        self._blocks = max(1, geometry.blocks)
        self._last = 0.0
        self.globals_seconds = 0.0
        self.block_seconds = 0.0

    def start(self) -> "Laps":
        """Start the clock."""
        self._last = perf_counter()
        return self

    def __call__(self, name: str) -> None:
        """End a weight's lap, and start the next one's."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = perf_counter()
        lap, self._last = now - self._last, now
        if self._geometry.block_of(name) is None:
            self.globals_seconds += lap
        else:
            self.block_seconds += lap / self._blocks


class _Streamed(Mapping[str, Tensor]):
    """A checkpoint's tensors, each read when it is asked for."""

    def __init__(self, base: Checkpoint) -> None:
        self._base = base

    def __getitem__(self, name: str) -> Tensor:
        return self._base.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._base.entries)

    def __len__(self) -> int:
        return len(self._base.entries)


def _wrong_share(weights: ResidentWeights) -> float:
    """Return the share of touched weights that, back in the base state, don't have its bits."""
    touched = {target.weight.name for targets in weights.touches.values() for target in targets}
    wrong = sum(int((weights.base.read(n) != weights.tensors[n].cpu()).sum()) for n in touched)
    return wrong / sum(weights.tensors[n].numel() for n in touched)
