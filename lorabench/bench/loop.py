"""The issue's loop, observed."""

from collections.abc import Sequence
from itertools import count
from time import perf_counter

import torch
from torch import Tensor

from lorabench.bench.cases import Case, Result, Subject
from lorabench.bench.kernels import heaviest
from lorabench.check import compare
from lorabench.errors import ConfigError
from lorabench.fuse import Term
from lorabench.kernels import Scratch, get_kernel
from lorabench.measure import Observer, Samples, time_boxed
from lorabench.records import JSON


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
    base, module, pair = heaviest(subject, role)
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
