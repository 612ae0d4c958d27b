"""Passes over the targets of an adapter, by kernels of ours and by peers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from lorabench.bench.cases import Subject
from lorabench.bench.ceiling import Squares
from lorabench.check import compare
from lorabench.fuse import Term
from lorabench.kernels import KERNELS, Scratch, get_kernel
from lorabench.loading import read_factors
from lorabench.measure import time_once
from lorabench.peers import Held, Hold, get_peer
from lorabench.records import JSON

Kind: TypeAlias = tuple[int, int, int]
"""Rows, columns and rank: what a target's work depends on."""

_PIECES = 4  # of a pass, with a square product before and after each
_ROWS = 64  # of a weight, held against the reference


class Target(NamedTuple):
    """A weight of a pass, and what is fused into it."""

    name: str
    base: Tensor  # [out, in]
    term: Term

    @property
    def kind(self) -> Kind:
        """Rows, columns and rank."""
        out, in_ = self.base.shape
        return out, in_, len(self.term.pair.factors[0])

    @property
    def flops(self) -> int:
        """Operations of its product."""
        return self.term.pair.flops


def load_targets(
    subject: Subject, role: str, strength: float, names: Sequence[str] | None = None
) -> list[Target]:
    """Read an adapter's targets, or those of some names, in the order of the base's file."""
    base, adapters = subject.open()
    adapter = adapters[role]
    if names is not None:
        chosen = tuple(pair for pair in adapter.pairs if pair.weight.name in names)
        adapter = replace(adapter, pairs=chosen)
    pairs = read_factors(adapter, subject.device)
    return [
        Target(name, base.read(name).to(subject.device), Term(pair, strength))
        for name in base.entries
        for pair in pairs.get(name, ())
    ]


def one_of_each(targets: Iterable[Target]) -> list[Target]:
    """Return the first target of each kind, the one with least work first."""
    first: dict[Kind, Target] = {}
    for target in targets:
        first.setdefault(target.kind, target)
    return sorted(first.values(), key=lambda target: target.flops)


def rule_of(contender: str, device: torch.device) -> str:
    """Return the rounding rule of a kernel or a peer.

    Raises
    ------
    UnavailableError
        It isn't known, or doesn't run here.
    """
    if contender in KERNELS:
        get_kernel(contender, device)
        return "R1"
    return get_peer(contender).rules[device.type]


def _kernels_hold(name: str, device: torch.device) -> Hold:
    kernel, scratch = get_kernel(name, device), Scratch(device)

    def hold(weight: Tensor, terms: Sequence[Term]) -> Held:
        def fuse() -> Tensor:
            kernel(weight, terms, scratch)
            return weight

        return Held(fuse, None)

    return hold


class Pass(NamedTuple):
    """What was timed of a pass."""

    seconds: float
    laps: tuple[float, ...]
    """By target; on a GPU only what queueing it took."""
    ceiling: float | None = None
    """FLOP/s of the big squares that were timed beside it."""


class Agreement(NamedTuple):
    """How a pass's bits compare, at first rows of one weight of each kind."""

    weights: int
    differing_share: float
    """Most values of a weight that aren't the reference's under the same rule."""
    ours_differing_share: float
    """The same, against our kernel ``gemm`` under that rule."""


class Contender:
    """A kernel or a peer with the weights of some targets in hand, in memory that is in use."""

    def __init__(self, name: str, targets: Sequence[Target], weights: Sequence[Tensor]) -> None:
        self.name, self.targets, self.weights = name, targets, weights
        self.device = weights[0].device
        self.rule = rule_of(name, self.device)
        hold = _kernels_hold(name, self.device) if name in KERNELS else get_peer(name).hold
        self._held = [hold(w, [t.term]) for w, t in zip(weights, targets, strict=True)]

    @property
    def unfuses(self) -> bool:
        """Whether it has a way back."""
        return self._held[0].unfuse is not None

    def reset(self) -> None:
        """Give the weights their base bits."""
        for weight, target in zip(self.weights, self.targets, strict=True):
            weight.copy_(target.base)

    def fuse(self, squares: Squares | None = None) -> Pass:
        """Time a pass from base bits on."""
        return self._timed([held.fuse for held in self._held], squares)

    def unfuse(self, squares: Squares | None = None) -> Pass:
        """Time the way back from the last pass."""
        steps = [held.unfuse for held in self._held]
        return self._timed([step for step in steps if step is not None], squares)

    def wrong_share(self) -> float:
        """Return the share of values that don't have their base bits."""
        wrong = sum(
            int((weight.view(torch.int16) != target.base.view(torch.int16)).sum())
            for weight, target in zip(self.weights, self.targets, strict=True)
        )
        return wrong / sum(weight.numel() for weight in self.weights)

    def checked_fuse(self) -> tuple[Pass, Agreement]:
        """Time a pass, and hold the first rows of a weight of each kind against the references.

        Raises
        ------
        CheckError
            A value is further from its rule's than another order of summing explains.
        """
        rows: dict[int, Tensor] = {}
        kinds = {target.kind: i for i, target in enumerate(self.targets)}

        def keeping(i: int, fuse: Callable[[], Tensor]) -> Callable[[], object]:
            return lambda: rows.__setitem__(i, fuse()[:_ROWS].clone())

        steps: list[Callable[[], object]] = [held.fuse for held in self._held]
        for i in kinds.values():
            steps[i] = keeping(i, self._held[i].fuse)
        return self._timed(steps, None), self._agreement(rows)

    def _timed(self, steps: Sequence[Callable[[], object]], squares: Squares | None) -> Pass:
        laps = [0.0] * len(steps)

        def run(piece: range) -> None:
            last = perf_counter()
            for i in piece:
                steps[i]()
                now = perf_counter()
                laps[i], last = now - last, now

        if squares is None:
            return Pass(time_once(lambda: run(range(len(steps))), self.device), tuple(laps))
        seconds, beside = 0.0, [squares.take()]
        for piece in pieces([target.flops for target in self.targets]):
            seconds += time_once(lambda: run(piece), self.device)  # noqa: B023
            beside.append(squares.take())
        return Pass(seconds, tuple(laps), squares.flops * len(beside) / sum(beside))

    def _agreement(self, rows: Mapping[int, Tensor]) -> Agreement:
        ours = get_kernel("gemm", self.device, self.rule)
        off, off_ours = [], []
        for i, fused in rows.items():
            name, base, (pair, strength) = self.targets[i]
            base, pair = base[: len(fused)], pair.within(range(len(fused)))
            ours(mine := base.clone(), [Term(pair, strength)], Scratch(self.device))
            off_ours.append(float((fused != mine).float().mean()))
            term = Term(pair.cpu(), strength)
            off.append(compare(fused.cpu(), base.cpu(), [term], where=name, rule=self.rule))
        return Agreement(len(rows), max(off), max(off_ours))


def pieces(costs: Sequence[float]) -> list[range]:
    """Cut a sequence into a few pieces of about the same cost, none of them empty."""
    found, begin, spent = [], 0, 0.0
    for end, cost in enumerate(costs, start=1):
        spent += cost
        if spent >= sum(costs) * (len(found) + 1) / _PIECES or end == len(costs):
            found.append(range(begin, end))
            begin = end
    return found


def seconds_by_kind(name: str, each: Sequence[Target], budget_seconds: float) -> dict[Kind, float]:
    """Time a contender on one target after another, the smallest first; return what it took.

    It ends before a target that, at the rate of the last, would spend more than is left of the
    budget. The first is always tried.
    """
    found: dict[Kind, float] = {}
    rate = float("inf")
    for target in each:
        if sum(found.values()) + target.flops / rate > budget_seconds and found:
            break
        contender = Contender(name, [target], [target.base.clone()])
        seconds = contender.fuse().seconds
        found[target.kind] = seconds
        rate = target.flops / seconds
    return found


def work_by_kind(targets: Iterable[Target]) -> dict[Kind, int]:
    """Return the operations of all targets of each kind."""
    work: dict[Kind, int] = {}
    for target in targets:
        work[target.kind] = work.get(target.kind, 0) + target.flops
    return work


def told_by_kind(
    targets: Sequence[Target], passes: Sequence[Pass], work: Mapping[Kind, int]
) -> dict[str, JSON]:
    """Tell what each kind of target took, and the rate that this makes of a whole pass.

    Parameters
    ----------
    work
        Operations by kind in the whole pass. A sample has its kinds in another proportion, so
        ``weighted_gflops_per_s`` weights each kind's rate by this; it says nothing of the kinds
        that aren't in the sample, whose part is what ``work_share`` lacks to 1.
    """
    seconds: dict[Kind, float] = {}
    for i, target in enumerate(targets):
        lap = median(one.laps[i] for one in passes)
        seconds[target.kind] = seconds.get(target.kind, 0.0) + lap
    done = work_by_kind(targets)
    told = sum(work[kind] for kind in done)
    expected = sum(seconds[kind] * work[kind] / done[kind] for kind in done)
    kinds = [
        {
            "shape": list(kind[:2]),
            "rank": kind[2],
            "flops": done[kind],
            "seconds": seconds[kind],
        }
        for kind in done
    ]
    return {
        "work_share": told / sum(work.values()),
        "weighted_gflops_per_s": told / expected / 1e9,
        "kinds": kinds,
    }
