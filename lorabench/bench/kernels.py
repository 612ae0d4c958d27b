"""One module under several kernels and peers, interleaved."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lorabench.bench.cases import Case, Result, Subject
from lorabench.check import compare
from lorabench.fuse import Pair, Term
from lorabench.kernels import Scratch, get_kernel
from lorabench.limits import check_plain
from lorabench.loading import read_factors
from lorabench.measure import Observer, Samples, time_once
from lorabench.peers import fuse_ltx_core

CONTENDERS = ("scalar", "ltx_core", "gemm")

KERNEL_SECONDS = {"tiny": 0.05, "small": 0.2, "laptop": 1.0, "full": 1.0}
"""The most for a sample in the notebooks, by size."""


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
    _, adapters = subject.open()
    check_plain("a kernel", adapters[role])
    return Case(what, _kernels, (subject, role, tuple(contenders), budget_seconds))


def _kernels(
    subject: Subject, role: str, contenders: Sequence[str], budget_seconds: float, rounds: int = 5
) -> Sequence[Result]:
    device = torch.device(subject.device)
    base, module, pair = heaviest(subject, role)
    scratch = Scratch(device)

    def fuse(contender: str, rows: int) -> tuple[float, Tensor]:
        weight = base[:rows].clone()
        terms = [Term(pair.within(range(rows)), 1.0)]
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
        terms = [Term(pair.within(range(n)).cpu(), 1.0)]
        share = compare(last[contender].cpu(), base[:n].cpu(), terms, where=module)
        results.append(
            Result(
                Samples(tuple(samples[contender]), (warm[contender],)),
                check="within the reference's summation bound",
                details={"differing_share": share, "others_cores": others},
                what={"contender": contender, "module": module, "rows": n},
                counted={"flops": terms[0].pair.flops},
            )
        )
    return results


def heaviest(subject: Subject, role: str) -> tuple[Tensor, str, Pair]:
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
    (pair,) = read_factors(only, subject.device)[chosen.weight.name]
    return base.read(chosen.weight.name).to(subject.device), chosen.module, pair
