"""The issue's pass, run by its loop in a process of its own and observed from outside it."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lorabench.adapter import Adapter
from lorabench.alone import alone
from lorabench.bench.cases import Case, Result, Subject
from lorabench.check import compare
from lorabench.checkpoint import Checkpoint, torch_dtype
from lorabench.errors import ConfigError
from lorabench.fuse import Pair, Term
from lorabench.kernels import Scratch, get_kernel
from lorabench.limits import check_plain
from lorabench.loading import read_factors
from lorabench.measure import Samples, time_boxed
from lorabench.outside import Watch, visible
from lorabench.pairing import PairEntry

LOOP_SECONDS = {"tiny": 0.2, "small": 5.0, "laptop": 20.0, "full": 60.0}
"""How long the notebooks watch the loop, by size, before its pass is broken off."""

WHOLE_PASS = {"tiny": "tiny", "small": "small", "laptop": "small", "full": "small"}
"""The size whose pass the notebooks let run to its end, by the size that they work on."""

_RATE = 5e8  # FLOP/s of the loop, roughly and on any machine: to choose how fine to look
_LOOKS = 500  # about as many samples, and as many steps, as a record keeps of a long pass


def loop_case(
    subject: Subject, role: str, budget_seconds: float | None, widen: bool = True
) -> Case:
    """Run a pass by the scalar loop as mudler/vllm.cpp #1210 saw it, and watch it from outside.

    An adapter's weights are walked as a fuse at load does, in the base's order in its file: each is
    read, and fused by rows.

    Parameters
    ----------
    budget_seconds
        After how long the pass is broken off; None for a pass that runs to its end.
    widen
        Whether weights are widened to f32 as the loop reaches them, and kept, as that host path
        does; otherwise they are fused as they are, and not kept.
    """
    what = {
        "bench": "loop",
        **subject.what(),
        "role": role,
        "budget_seconds": budget_seconds,
        "widen": widen,
    }
    _, adapters = subject.open()
    check_plain("the scalar loop", adapters[role])
    if subject.device != "cpu":
        raise ConfigError(f"the scalar loop runs on the CPU, not on '{subject.device}'")
    return Case(what, _loop, (subject, role, budget_seconds, widen))


class _Ended(NamedTuple):
    """What the process that ran the pass knows of it."""

    seconds: float
    flops: int
    widened_bytes: int
    modules: tuple[str, str]  # the first and the last that it came to
    differing_share: float


def _loop(
    subject: Subject, role: str, budget_seconds: float | None, widen: bool
) -> Sequence[Result]:
    _, adapters = subject.open()
    pass_flops = 2 * sum(target.macs for target in adapters[role].targets)
    budget = math.inf if budget_seconds is None else budget_seconds
    look_seconds = min(budget, pass_flops / _RATE) / _LOOKS
    chunk_flops = round(_RATE * max(0.1, look_seconds))
    with TemporaryDirectory() as name:
        folder = Path(name)
        with Watch(folder, interval_seconds=max(0.02, look_seconds)) as watch:
            ended = alone(_pass, subject, role, budget, widen, chunk_flops, folder)
        seen, steps = watch.observation, watch.steps
    first, last = ended.modules
    return [
        Result(
            Samples((ended.seconds,)),
            check="rows of its first and last weight within the reference's summation bound",
            what={"module": first if first == last else f"{first} to {last}"},
            counted={
                "flops": ended.flops,
                "pass_flops": pass_flops,
                "widened_bytes": ended.widened_bytes,
            },
            peak_private_bytes=seen.peak_private_bytes,
            details={
                "differing_share": ended.differing_share,
                "others_cores": seen.others_cores,
                "progress": steps,
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


def _pass(
    subject: Subject, role: str, budget: float, widen: bool, chunk_flops: int, folder: Path
) -> _Ended:
    """Run in the observed process."""
    torch.set_num_threads(1)  # as the host path has it, conversions included
    base, adapters = subject.open()
    walked = _Pass(base, adapters[role], widen)
    chunks = list(_chunks(walked.pairs, chunk_flops))
    with visible(folder) as tell:
        flops, seconds = time_boxed(chunks, partial(walked.fuse, tell), budget)
    first, last = walked.first, walked.last
    assert first is not None
    assert last is not None
    return _Ended(
        seconds,
        flops,
        widened_bytes=sum(rows.nbytes for rows in walked.widened),
        modules=(first.chunk.pair.module, last.chunk.pair.module),
        differing_share=max(fused.check(base) for fused in (first, last)),
    )


class _Chunk(NamedTuple):
    """Some rows of a weight."""

    pair: PairEntry
    rows: slice


def _chunks(pairs: Sequence[PairEntry], chunk_flops: int) -> Iterator[_Chunk]:
    for pair in pairs:
        out, in_ = pair.weight.shape
        rows = max(1, chunk_flops // (2 * pair.rank * in_))
        for start in range(0, out, rows):
            yield _Chunk(pair, slice(start, min(start + rows, out)))


class _Fused(NamedTuple):
    """A chunk, what was fused into it, and what came out."""

    chunk: _Chunk
    term: Term  # B's rows are the chunk's
    rows: Tensor

    def check(self, base: Checkpoint) -> float:
        """Hold the rows against the reference; return the share of values that differ."""
        pair, rows = self.chunk
        bits = base.read(pair.weight.name)[rows]
        return compare(self.rows.to(bits.dtype), bits, [self.term], where=pair.module)


class _Pass:
    """A pass under way: the weight that it is at, and what it keeps."""

    def __init__(self, base: Checkpoint, adapter: Adapter, widen: bool) -> None:
        self._base, self._adapter, self._widen = base, adapter, widen
        self._kernel, self._scratch = get_kernel("scalar", torch.device("cpu")), Scratch()
        by_weight = {pair.weight.name: pair for pair in adapter.pairs}
        self.pairs = [by_weight[name] for name in base.entries if name in by_weight]
        # An engine maps its file; here is memory of the window's begin, in use before it grows.
        largest = max(pair.weight.nbytes for pair in self.pairs)
        self._buffer = torch.empty(largest, dtype=torch.uint8).fill_(1)
        self.widened: list[Tensor] = []
        self.first: _Fused | None = None
        self.last: _Fused | None = None
        self._flops = self._weights = 0
        self._compile()

    def fuse(self, tell: Callable[[Mapping[str, Any]], None], chunk: _Chunk) -> int:
        """Fuse rows of a weight, which is read with the first of them; return the operations."""
        if chunk.rows.start == 0:
            self._read(chunk.pair)
        rows = self._weight[chunk.rows]
        if self._widen:
            rows = rows.to(torch.float32, copy=True)
            self.widened.append(rows)
        term = Term(self._factors._replace(b=self._factors.b[chunk.rows]), 1.0)
        self._kernel(rows, [term], self._scratch)
        self.last = _Fused(chunk, term, rows)
        if self.first is None:
            self.first = self.last._replace(rows=rows.clone())  # its memory may be read into
        self._flops += term.pair.flops
        self._weights += rows.numel()
        tell({"flops": self._flops, "weights": self._weights, "module": chunk.pair.module})
        return term.pair.flops

    def _read(self, entry: PairEntry) -> None:
        spec = entry.weight
        self._weight = self._buffer[: spec.nbytes].view(torch_dtype(spec.dtype)).view(spec.shape)
        self._base.read_into(spec.name, self._weight)
        (self._factors,) = read_factors(replace(self._adapter, pairs=(entry,)))[spec.name]

    def _compile(self) -> None:
        """Make the kernel's code for each dtype that it will meet."""
        held = {torch_dtype(pair.weight.dtype) for pair in self.pairs}
        one = torch.zeros(1, 1)
        for dtype in {torch.float32} if self._widen else held:
            self._kernel(one.to(dtype), [Term(Pair(one, one, 1.0), 1.0)], self._scratch)
