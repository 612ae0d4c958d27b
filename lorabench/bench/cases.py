"""Cases of measurement: run each alone, check its bits, then record its times.

A case is a module-level function and its arguments, and ``what`` names it in the records. It runs
in a process of its own, and returns results whose bits it has already checked.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lorabench import records
from lorabench.adapter import Adapter
from lorabench.alone import alone
from lorabench.checkpoint import Checkpoint
from lorabench.geometry import Geometry, from_tensors
from lorabench.kernels.scratch import product_dtype
from lorabench.machine import environment, git_commit, machine_name
from lorabench.measure import Samples
from lorabench.records import JSON, Record

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
