"""Cases of measurement: run each alone, check its bits, then record its times.

A case is a module-level function and its arguments, and ``what`` names it in the records. It runs
in a process of its own, and returns results whose bits it has already checked.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from lorabench import records
from lorabench.adapter import Adapter
from lorabench.alone import alone
from lorabench.check import check_against_reference, compare
from lorabench.checkpoint import Checkpoint
from lorabench.digest import digest
from lorabench.errors import CheckError, ConfigError
from lorabench.fuse import Pair, Term
from lorabench.geometry import Geometry, from_tensors
from lorabench.kernels import Scratch, get_kernel
from lorabench.kernels.scratch import product_dtype
from lorabench.machine import environment, git_commit, machine_name
from lorabench.measure import Observer, Samples, time_boxed, time_once
from lorabench.peers import fuse_ltx_core
from lorabench.plan import Action, Denoise, Load, Strategy, plan
from lorabench.recipe import BASE, Recipe, State
from lorabench.records import JSON, Record
from lorabench.resident import ResidentWeights
from lorabench.run import perform

DISTURBED_CORES = 0.25  # what others may use of the machine before a time says little


@dataclass(frozen=True)
class Subject:
    """What is measured: a base file, adapter files by role, and the device to hold them."""

    base: Path
    adapters: Mapping[str, Path]
    device: str = "cpu"

    def open(self) -> tuple[Checkpoint, dict[str, Adapter]]:
        """Open the files by their headers."""
        base = Checkpoint.open(self.base)
        adapters = {role: Adapter.open(path, base.tensors) for role, path in self.adapters.items()}
        return base, adapters

    def geometry(self) -> Geometry:
        """Return the base's geometry, under the name that its metadata gives it."""
        base = Checkpoint.open(self.base)
        return from_tensors(base.metadata.get("geometry", self.base.name), base.tensors)

    def what(self) -> dict[str, JSON]:
        """Return the fields that say in a record what was measured."""
        geometry = self.geometry()
        base, adapters = self.open()
        return {
            "geometry": geometry.name,
            "blocks": geometry.blocks,
            "params": sum(t.params for t in geometry.tensors),
            "files": [base.identity, *(adapter.file.identity for adapter in adapters.values())],
            "device": self.device,
            "product": str(product_dtype(torch.device(self.device))).removeprefix("torch."),
        }


@dataclass(frozen=True)
class Result:
    """One checked measurement of a case."""

    samples: Samples
    check: str
    what: Mapping[str, JSON] = field(default_factory=dict)
    counted: Mapping[str, int | float] = field(default_factory=dict)
    details: Mapping[str, JSON] = field(default_factory=dict)
    peak_private_bytes: int | None = None


@dataclass(frozen=True)
class Case:
    """A function to run alone, and what its records say that it measures."""

    what: Mapping[str, JSON]
    function: Callable[..., Sequence[Result]]
    arguments: tuple[Any, ...]


def sweep(cases: Iterable[Case], path: Path) -> list[Record]:
    """Run the cases that a file has no records of from this machine; return all cases' records.

    Each case's records are appended when it ends, so a broken sweep goes on where it was.

    Raises
    ------
    CheckError
        A result's bits are wrong; nothing of that case is recorded.
    """
    cases = list(cases)
    here, commit = environment(), git_commit()
    held = records.read(path) if path.exists() else []
    held = [r for r in held if machine_name(r.environment) == machine_name(here)]
    found: list[Record] = []
    for number, case in enumerate(cases, start=1):
        ended = _last_run(held, case)
        if not ended:
            said = " ".join(
                str(case.what[k]) for k in ("bench", "recipe", "strategy") if k in case.what
            )
            _say(f"measure {number} of {len(cases)}: {said}")
            results = alone(case.function, *case.arguments)
            ended = [
                Record(
                    case={**case.what, **result.what},
                    seconds=result.samples.seconds,
                    warmup_seconds=result.samples.warmup_seconds,
                    counted=result.counted,
                    peak_private_bytes=result.peak_private_bytes,
                    check=result.check,
                    environment=here,
                    commit=commit,
                    provenance="measured",
                    details={**result.details, "results": len(results)},
                )
                for result in results
            ]
            records.append(path, *ended)
            _warn_of_noise(ended)
        found += ended
    return found


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _warn_of_noise(ended: Sequence[Record]) -> None:
    for record in ended:
        if (samples := Samples(record.seconds)).noisy:
            name = record.case.get("contender", record.case["bench"])
            _say(f"note: the samples of {name} spread over {samples.spread:.0%} of their median")
    # Weighted by time: CPU time comes in ticks, too coarse for a window of milliseconds.
    used = sum(float(r.details.get("others_cores", 0)) * sum(r.seconds) for r in ended)  # pyright: ignore[reportArgumentType]
    others = used / sum(sum(r.seconds) for r in ended)
    if others > DISTURBED_CORES:
        _say(f"note: other processes kept {others:.1f} cores busy meanwhile; measure again alone")


def _last_run(held: Sequence[Record], case: Case) -> list[Record]:
    """Return the records of the case's last run; nothing, if a kill left only some of them."""
    mine = [record for record in held if _is_of(record, case)]
    results = mine[-1].details.get("results") if mine else 0
    return mine[-results:] if isinstance(results, int) and 0 < results <= len(mine) else []


def _is_of(record: Record, case: Case) -> bool:
    mine = {name: value for name, value in record.case.items() if name in case.what}
    return records.key(mine) == records.key(case.what)


# A plan, action by action


def walk_case(
    subject: Subject, recipe: Recipe, strategy: Strategy, name: str, renders: int = 1
) -> Case:
    """Execute a plan and record every load and rebind of it, one record each.

    ``recipe`` is bound to the subject's roles; ``name`` is what to call the strategy.
    """
    bound = recipe.bind(dict.fromkeys(subject.adapters, 1.0))
    what = {
        "bench": "walk",
        **subject.what(),
        "recipe": recipe.name,
        "phases": [str(phase.state) for phase in bound.phases],
        "strategy": name,
        **asdict(strategy),
        "renders": renders,
    }
    return Case(what, _walk, (subject, bound, strategy, renders))


def _walk(subject: Subject, recipe: Recipe, strategy: Strategy, renders: int) -> Sequence[Result]:
    base, adapters = subject.open()
    geometry = subject.geometry()
    weights = ResidentWeights(
        base, adapters, kernel=strategy.kernel, restore=strategy.restore, device=subject.device
    )
    exact = strategy.restore != "subtract"
    digests: dict[State, str] = {}
    results: list[Result] = []
    for index, action in enumerate(plan(recipe, strategy, renders)):
        laps = _Laps(geometry, weights.device)
        work = []
        with Observer() as observer:  # of the action alone: checking takes memory too
            seconds = time_once(
                lambda: work.append(perform(action, weights, laps.start())),  # noqa: B023
                weights.device,
            )
        if isinstance(action, Denoise):
            continue
        seen = observer.observation
        details = {
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
                f"{recipe.name}, action {index}: state '{weights.state}' has other bits than "
                f"the last time ({found}, not {digests[weights.state]})"
            )
        if not same and weights.state == BASE:
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
        sums = check_against_reference(weights)
        results[-1] = replace(results[-1], check=f"{results[-1].check}; {sums}")
    return results


def _action_fields(action: Action) -> dict[str, JSON]:
    if isinstance(action, Load):
        return {"state": str(action.state), "critical": True}
    assert not isinstance(action, Denoise)
    return {
        "before": str(action.before),
        "state": str(action.after),
        "render": action.render,
        "phase": action.phase,
        "critical": action.critical,
    }


class _Laps:
    """Seconds between a sweep's weights, apart for the globals and for the mean block."""

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        self._geometry = geometry
        self._device = device
        self._blocks = max(1, geometry.blocks)
        self._last = 0.0
        self.globals_seconds = 0.0
        self.block_seconds = 0.0

    def start(self) -> "_Laps":
        """Start the clock."""
        self._last = perf_counter()
        return self

    def __call__(self, name: str) -> None:
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


# One module under several kernels, interleaved

CONTENDERS = ("scalar", "ltx_core", "gemm")

KERNEL_SECONDS = {"tiny": 0.05, "laptop": 1.0, "full": 1.0}
LOOP_SECONDS = {"tiny": 1.0, "laptop": 20.0, "full": 60.0}
"""How long the notebooks measure, by size: the most for a sample, and the window of the loop."""


def kernels_case(
    subject: Subject, role: str, contenders: Sequence[str] = CONTENDERS, budget_seconds: float = 1.0
) -> Case:
    """Time kernels and peers in turn on the weight shape that has most of a pass's work.

    A contender that would take longer than the budget on a whole weight gets its first rows.
    """
    what = {
        "bench": "kernels",
        **subject.what(),
        "role": role,
        "contenders": list(contenders),
        "budget_seconds": budget_seconds,
    }
    return Case(what, _kernels, (subject, role, tuple(contenders), budget_seconds))


def _kernels(
    subject: Subject, role: str, contenders: Sequence[str], budget_seconds: float, rounds: int = 5
) -> Sequence[Result]:
    device = torch.device(subject.device)
    base, module, pair = _heaviest(subject, role)
    scratch = Scratch(device)

    def fuse(contender: str, rows: int) -> tuple[float, Tensor]:
        weight = base[:rows].clone()
        terms = [Term(pair._replace(b=pair.b[:rows]), 1.0)]
        fused = [weight]
        if contender == "ltx_core":
            seconds = time_once(lambda: fused.__setitem__(0, fuse_ltx_core(weight, terms)), device)
        else:
            kernel = get_kernel(contender, device)
            seconds = time_once(lambda: kernel(weight, terms, scratch), device)
        return seconds, fused[0]

    rows, warm = {}, {}
    for contender in contenders:
        fuse(contender, 8)  # compiles
        rows[contender], seconds = 8, 0.0
        while True:
            seconds, _ = fuse(contender, rows[contender])
            if rows[contender] == len(base) or 2 * seconds > budget_seconds:
                break
            rows[contender] = min(2 * rows[contender], len(base))
        warm[contender] = seconds
    samples: dict[str, list[float]] = {contender: [] for contender in contenders}
    last: dict[str, Tensor] = {}
    with Observer() as observer:
        for _ in range(rounds):
            for contender in contenders:
                seconds, last[contender] = fuse(contender, rows[contender])
                samples[contender].append(seconds)
    others = observer.observation.others_cores
    results = []
    for contender in contenders:
        n = rows[contender]
        terms = [Term(Pair(pair.a.cpu(), pair.b[:n].cpu(), pair.scale), 1.0)]
        share = compare(last[contender].cpu(), base[:n].cpu(), terms, where=module)
        results.append(
            Result(
                Samples(tuple(samples[contender]), (warm[contender],)),
                check="within the reference's summation bound",
                details={"differing_share": share, "others_cores": others},
                what={"contender": contender, "module": module, "rows": n},
                counted={"flops": 2 * n * pair.a.shape[0] * pair.a.shape[1]},
            )
        )
    return results


def _heaviest(subject: Subject, role: str) -> tuple[Tensor, str, Pair]:
    """Return a weight of the shape and rank that has most of a pass's work, and its pair."""
    base, adapters = subject.open()
    macs: dict[tuple[Any, ...], int] = {}
    for target in adapters[role].targets:
        kind = (target.weight.shape, target.rank)
        macs[kind] = macs.get(kind, 0) + target.macs
    heaviest = max(macs, key=lambda kind: macs[kind])
    *_, chosen = (t for t in adapters[role].targets if (t.weight.shape, t.rank) == heaviest)
    only = replace(
        adapters[role], pairs=tuple(p for p in adapters[role].pairs if p.module == chosen.module)
    )
    pair = only.load(subject.device)[chosen.weight.name]
    return base.read(chosen.weight.name).to(subject.device), chosen.module, pair


# The loop, observed


def loop_case(subject: Subject, role: str, budget_seconds: float) -> Case:
    """Run the scalar loop for a while as mudler/vllm.cpp #1210 saw it, and watch the process.

    The weights are widened to f32 as the loop reaches them, and kept, as that host path does.
    """
    what = {"bench": "loop", **subject.what(), "role": role, "budget_seconds": budget_seconds}
    if subject.device != "cpu":
        raise ConfigError(f"the scalar loop runs on the CPU, not on '{subject.device}'")
    return Case(what, _loop, (subject, role, budget_seconds))


def _loop(subject: Subject, role: str, budget_seconds: float) -> Sequence[Result]:
    torch.set_num_threads(1)  # as the host path has it, conversions included
    base, module, pair = _heaviest(subject, role)
    kernel, scratch = get_kernel("scalar", torch.device("cpu")), Scratch()
    rows = max(1, round(1e8 / (2 * pair.a.numel())))  # about 0.2 s a chunk
    widened: list[Tensor] = []
    done: list[dict[str, JSON]] = []
    kernel(base[:1].float(), [Term(pair._replace(b=pair.b[:1]), 1.0)], scratch)  # compiles

    def work(top: int) -> int:
        at = slice(top % len(base), top % len(base) + rows)
        widened.append(base[at].float())
        part = pair._replace(b=pair.b[at])
        kernel(widened[-1], [Term(part, 1.0)], scratch)
        total = part.flops + (done[-1]["flops"] if done else 0)  # type: ignore[operator]
        done.append({"seconds": perf_counter() - start, "flops": total})
        return part.flops

    with Observer(interval_seconds=0.1) as observer:
        start = perf_counter()
        flops, seconds = time_boxed(count(0, rows), work, budget_seconds)
    seen = observer.observation
    first = [Term(pair._replace(b=pair.b[:rows]), 1.0)]
    share = compare(widened[0].bfloat16(), base[:rows], first, where=module)
    return [
        Result(
            Samples((seconds,)),
            check=f"first {rows} rows within the reference's summation bound",
            what={"module": module, "rank": pair.a.shape[0]},
            counted={"flops": flops, "widened_bytes": sum(w.nbytes for w in widened)},
            peak_private_bytes=seen.peak_private_bytes,
            details={
                "differing_share": share,
                "others_cores": seen.others_cores,
                "progress": done,
                "memory": [
                    {"seconds": t, "private_bytes": b}
                    for t, b in zip(seen.times, seen.private_bytes, strict=True)
                ],
                "threads": dict(seen.thread_cpu),
                "stacks": [
                    {"frames": list(stack), "samples": n}
                    for stack, n in sorted(seen.stacks.items(), key=lambda s: -s[1])
                ],
            },
        )
    ]
