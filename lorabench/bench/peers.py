"""A pass by our kernel and by others' code over real shapes, interleaved in one process.

Beside every pass big square products are timed, so that it is held against what the machine could
do in those same seconds. A contender's first pass, which allocates what later ones find, runs in a
fresh process each time.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import torch

from lorabench.alone import alone
from lorabench.bench.cases import Case, Result, Subject
from lorabench.bench.ceiling import Squares
from lorabench.bench.passes import (
    Agreement,
    Contender,
    Kind,
    Pass,
    Target,
    load_targets,
    one_of_each,
    rule_of,
    seconds_by_kind,
    told_by_kind,
    work_by_kind,
)
from lorabench.errors import ConfigError
from lorabench.kernels.scratch import product_dtype
from lorabench.limits import check_plain
from lorabench.measure import Observer, Samples
from lorabench.records import JSON

PASS_CONTENDERS = ("gemm", "ltx_core", "peft", "torch", "torch_f32")

PASS_SECONDS = {"tiny": 5.0, "small": 5.0, "laptop": 60.0, "full": 300.0}
"""The most for a contender's pass in the notebooks, by size."""

STRENGTH = 0.8
"""No power of two: with one, most rounding rules give the same bits."""


def peers_case(
    subject: Subject,
    role: str,
    contenders: Sequence[str] = PASS_CONTENDERS,
    threads: int = 1,
    budget_seconds: float = 60.0,
    rounds: int = 3,
) -> Case:
    """Time passes of kernels and peers in turn, over all targets of an adapter.

    Those that would take longer than the budget are timed on a sample, and all others on that
    sample too: one target of each shape and rank, from the smallest on, as far as the slowest
    contender comes within the budget. The first contender always has its whole pass.

    Parameters
    ----------
    contenders
        Names of kernels and of peers; the others are compared with the first.
    threads
        Torch's, for all of them.
    rounds
        First passes of each, in fresh processes, and passes of each after one to warm up.

    Raises
    ------
    ConfigError
        No contenders, or more threads than cores.
    UnavailableError
        A contender that isn't known, or isn't here; or the adapter holds what peers aren't given.
    """
    if not contenders:
        raise ConfigError("contenders: expected one or more, found none; name some")
    cores = os.cpu_count() or 1
    if not 1 <= threads <= cores:
        raise ConfigError(f"threads: expected 1 to {cores}, this machine's cores, found {threads}")
    for name in contenders:
        rule_of(name, torch.device(subject.device))
    _, adapters = subject.open()
    check_plain("a peer", adapters[role], dtypes=("BF16",))
    what = {
        "bench": "peers",
        **subject.what(),
        "role": role,
        "contenders": list(contenders),
        "threads": threads,
        "strength": STRENGTH,
        "budget_seconds": budget_seconds,
        "rounds": rounds,
    }
    return Case(what, _peers, (subject, role, tuple(contenders), threads, budget_seconds, rounds))


class _Mix(NamedTuple):
    """Targets that passes go over, and the contenders that do."""

    name: str
    targets: Sequence[Target]
    contenders: Sequence[str]


class _Ran(NamedTuple):
    """A contender's passes over a mix."""

    fuse: list[Pass]
    unfuse: list[Pass]  # empty where it has no way back
    agreement: Agreement
    wrong_share: float  # of the base's values, after the first way back
    others_cores: float
    warmups: int = 0  # of the passes, the first so many


def _peers(
    subject: Subject,
    role: str,
    contenders: Sequence[str],
    threads: int,
    budget_seconds: float,
    rounds: int,
) -> Sequence[Result]:
    torch.set_num_threads(threads)
    device = torch.device(subject.device)
    targets = load_targets(subject, role, STRENGTH)
    work = work_by_kind(targets)
    # In each dtype that a product could be taken in; the device's faster one is the ceiling.
    squares = {
        dtype: Squares(device, dtype, most_flops=sum(work.values()) / 4)
        for dtype in (torch.bfloat16, torch.float32)
    }
    results: list[Result] = []
    for mix in _mixes(targets, contenders, budget_seconds):
        first = _first_passes(subject, role, mix, threads, rounds)
        steady = _steady_passes(mix, rounds, squares)
        for when, ran in (("first", first), ("steady", steady)):
            for name in mix.contenders:
                results += _results(mix, when, name, ran, work)
    return results + [
        Result(
            Samples(tuple(square.seconds)),
            check="a row of the product within its summation bound",
            what={
                "contender": f"square_{str(dtype).removeprefix('torch.')}",
                "operation": "product",
                "pass": "steady",
                "mix": "square",
            },
            counted={"flops": square.flops, "side": square.side},
            details={"is_ceiling": dtype == product_dtype(device)},
        )
        for dtype, square in squares.items()
    ]


def _mixes(
    targets: Sequence[Target], contenders: Sequence[str], budget_seconds: float
) -> list[_Mix]:
    """Choose who goes over all targets, and a sample for all where some would take too long."""
    each = one_of_each(targets)
    counts = Counter(target.kind for target in targets)
    taken = {name: seconds_by_kind(name, each, budget_seconds) for name in contenders}
    whole = [
        name
        for name, seconds in taken.items()
        if name == contenders[0]
        or (
            len(seconds) == len(each)
            and sum(counts[kind] * seconds[kind] for kind in seconds) <= budget_seconds
        )
    ]
    mixes = [_Mix("whole", targets, whole)]
    if len(whole) < len(contenders):
        fewest = min(map(len, taken.values()))
        mixes.append(_Mix("sample", each[:fewest], contenders))
    return mixes


def _first_passes(
    subject: Subject, role: str, mix: _Mix, threads: int, rounds: int
) -> dict[str, _Ran]:
    names = tuple(target.name for target in mix.targets)
    rounds_of: dict[str, list[_Ran]] = {name: [] for name in mix.contenders}
    for _ in range(rounds):
        for name, ran in rounds_of.items():
            ran.append(alone(_first_pass, subject, role, names, name, threads))
    return {
        name: ran[0]._replace(
            fuse=[one for each in ran for one in each.fuse],
            unfuse=[one for each in ran for one in each.unfuse],
            others_cores=median(each.others_cores for each in ran),
        )
        for name, ran in rounds_of.items()
    }


def _first_pass(subject: Subject, role: str, names: Sequence[str], name: str, threads: int) -> _Ran:
    """Run in a fresh process."""
    torch.set_num_threads(threads)
    targets = load_targets(subject, role, STRENGTH, names)
    contender = Contender(name, targets, [target.base.clone() for target in targets])
    with Observer() as observer:
        ran = _checked(contender)
    return ran._replace(others_cores=observer.observation.others_cores)


def _steady_passes(
    mix: _Mix, rounds: int, squares: Mapping[torch.dtype, Squares]
) -> dict[str, _Ran]:
    weights = [target.base.clone() for target in mix.targets]
    contenders = [Contender(name, mix.targets, weights) for name in mix.contenders]
    ceiling = product_dtype(weights[0].device)
    ran: dict[str, _Ran] = {}
    for contender in contenders:
        contender.reset()
        ran[contender.name] = _checked(contender)
    with Observer() as observer:
        for _ in range(rounds):
            for dtype, square in squares.items():
                if dtype != ceiling:
                    square.take()
            for contender in contenders:
                contender.reset()
                ran[contender.name].fuse.append(contender.fuse(squares[ceiling]))
                if contender.unfuses:
                    ran[contender.name].unfuse.append(contender.unfuse(squares[ceiling]))
    others = observer.observation.others_cores
    return {name: one._replace(others_cores=others, warmups=1) for name, one in ran.items()}


def _checked(contender: Contender) -> _Ran:
    """Let a contender go over its targets and back, and check what comes out."""
    fuse, agreement = contender.checked_fuse()
    if not contender.unfuses:
        return _Ran([fuse], [], agreement, 0.0, 0.0)
    unfuse = contender.unfuse()
    return _Ran([fuse], [unfuse], agreement, contender.wrong_share(), 0.0)


def _results(
    mix: _Mix, when: str, name: str, ran: Mapping[str, _Ran], work: Mapping[Kind, int]
) -> list[Result]:
    """Tell a contender's passes over a mix, and apart from them its ways back."""
    mine, ours = ran[name], ran[mix.contenders[0]]
    device = mix.targets[0].base.device
    rule = rule_of(name, device)
    flops = sum(target.flops for target in mix.targets)

    def result(operation: str, passes: list[Pass], check: str, **details: JSON) -> Result:
        warmups, kept = passes[: mine.warmups], passes[mine.warmups :]
        fractions = [flops / one.seconds / one.ceiling for one in kept if one.ceiling]
        if fractions:
            details["ceiling_fraction"] = median(fractions)
        if device.type == "cpu":
            details |= told_by_kind(mix.targets, kept, work)
            if not fractions:  # in a first pass one kind pays for memory that others use
                del details["weighted_gflops_per_s"]
        return Result(
            Samples(tuple(one.seconds for one in kept), tuple(one.seconds for one in warmups)),
            check=check,
            what={
                "contender": name,
                "operation": operation,
                "pass": when,
                "mix": mix.name,
                "rule": rule,
            },
            counted={"flops": flops, "targets": len(mix.targets)},
            details={"others_cores": mine.others_cores, **details},
        )

    times_ours = median(
        one.seconds / other.seconds
        for one, other in list(zip(mine.fuse, ours.fuse, strict=True))[mine.warmups :]
    )
    agreed = mine.agreement
    fused = result(
        "fuse",
        mine.fuse,
        f"{agreed.weights} weights within the bound of {rule}",
        times_ours=times_ours,
        differing_share=agreed.differing_share,
        ours_differing_share=agreed.ours_differing_share,
    )
    if not mine.unfuse:
        return [fused]
    check = f"{mine.wrong_share:.1%} of the values aren't the base's"
    return [fused, result("unfuse", mine.unfuse, check, wrong_share=mine.wrong_share)]
