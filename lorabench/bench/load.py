"""Loading into a state, beside what it does at once: a load into the base, and a pass."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median

import torch

from lorabench.account import Account
from lorabench.bench.cases import Case, Result, Subject
from lorabench.check import check_against_reference
from lorabench.cost import Work
from lorabench.directio import forget
from lorabench.errors import CheckError
from lorabench.measure import Observer, Samples, time_once
from lorabench.recipe import BASE, State
from lorabench.records import JSON
from lorabench.resident import ResidentWeights
from lorabench.restore import check_restore

PLAIN, PASS, FUSED = "plain load", "pass", "fused load"


def load_case(
    subject: Subject, rounds: int = 5, *, cold: bool = False, restore: str = "reread"
) -> Case:
    """Time in turn a load into the base, a pass over it, and a load into the state.

    All adapters are fused at strength 1. Memory was written to before, and factors are held, so the
    first round, which isn't counted, also reads those. A fused load has to leave the bits that a
    load and a pass leave; its ratio is to the longer of the two, which it can't beat where nothing
    else is shared than the processor.

    Parameters
    ----------
    cold
        Take the base out of the page cache before each load, so that it is read from the disk.
    restore
        What the loads keep on the way, and the pass.

    Raises
    ------
    UnavailableError
        There is no such restore on the subject's device.
    """
    check_restore(restore, torch.device(subject.device))
    what = {
        "bench": "load",
        **subject.what(),
        "roles": list(subject.adapters),
        "restore": restore,
        "cache": "cold" if cold else "hot",
        "rounds": rounds,
    }
    return Case(what, _load, (subject, rounds, cold, restore))


def _load(subject: Subject, rounds: int, cold: bool, restore: str) -> Sequence[Result]:
    base, adapters = subject.open()
    device = torch.device(subject.device)
    weights = ResidentWeights(base, adapters, restore=restore, device=device)
    state = State(dict.fromkeys(adapters, 1.0))
    parts: dict[str, Callable[[], Work]] = {
        PLAIN: lambda: weights.load(BASE),
        PASS: lambda: weights.rebind(state),
        FUSED: lambda: weights.load(state),
    }
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    work: dict[str, Work] = {}
    digests: dict[State, str] = {}

    def run(name: str) -> None:
        if cold and name != PASS:
            forget(base.stamps)

        def part() -> None:
            work[name] = parts[name]()

        seconds[name].append(time_once(part, device))
        found = weights.digest()
        if digests.setdefault(weights.state, found) != found:
            raise CheckError(
                f"{name}: state '{weights.state}' has other bits than before ({found}, not "
                f"{digests[weights.state]})"
            )

    with Observer() as observer:
        for _ in range(1 + rounds):
            for name in parts:
                run(name)
    check = f"digest {digests[state]} after every pass and fused load; "
    check += check_against_reference(weights)
    account = weights.account = Account(device)
    run(FUSED)
    weights.account = None
    accounted = seconds[FUSED].pop()
    seen = observer.observation
    told = _told({name: Samples(tuple(taken[1:])) for name, taken in seconds.items()}, work)
    accounts: dict[str, JSON] = {
        "account": [asdict(row) for row in account.rows()],
        "accounted_seconds": accounted,
    }
    return [
        Result(
            Samples(tuple(taken[1:]), tuple(taken[:1])),
            check=check,
            what={"contender": name},
            counted=asdict(work[name]),
            details={
                "kept_bytes": weights.kept_bytes,
                "others_cores": seen.others_cores,
                **({**told, **accounts} if name == FUSED else {}),
            },
            peak_private_bytes=seen.peak_private_bytes,
        )
        for name, taken in seconds.items()
    ]


def _told(samples: dict[str, Samples], work: dict[str, Work]) -> dict[str, JSON]:
    """Tell how a fused load compares, and which of its parts it waits for."""
    taken = {name: median(part.seconds) for name, part in samples.items()}
    return {
        "ratio": taken[FUSED] / max(taken[PLAIN], taken[PASS]),
        "in_turn_ratio": (taken[PLAIN] + taken[PASS]) / max(taken[PLAIN], taken[PASS]),
        "binds": PLAIN if taken[PLAIN] > taken[PASS] else PASS,
        "read_gb_per_s": work[PLAIN].file_bytes / taken[PLAIN] / 1e9,
        "pass_gflops_per_s": work[PASS].flops / taken[PASS] / 1e9,
    }
