"""A file fused into a new one, beside its two parts alone and a plain copy."""

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from lorabench.adapter import Adapter
from lorabench.bench.cases import Case, Result, Subject
from lorabench.check import check_rows, rows_to_check
from lorabench.checkpoint import Checkpoint, check_room
from lorabench.cost import Work
from lorabench.directio import Writer, forget, in_blocks
from lorabench.errors import CheckError, ConfigError, UnavailableError
from lorabench.fusedfile import fuse_file
from lorabench.measure import Observation, Observer, Samples
from lorabench.recipe import BASE, State
from lorabench.segments import Segment, lay_out
from lorabench.stream import get_streamed_kernel, shown
from lorabench.streamed import keep_rows

Rows = Mapping[str, Tensor]


def fuse_case(subject: Subject, folder: Path, rounds: int = 1) -> Case:
    """Time in turn a streamed fuse to a file, each of its two parts alone, and a copy of the base.

    The parts are reading and writing without fusing, and reading and fusing without writing. The
    copy is by ``cp``, from a base that isn't in the page cache to the disk. Each adapter is fused
    at strength 1; the files go to ``folder`` and are removed.
    """
    what = {"bench": "fuse", **subject.what(), "roles": list(subject.adapters), "rounds": rounds}
    if subject.device != "cpu":
        raise UnavailableError(f"files are fused on the CPU, not on '{subject.device}'")
    return Case(what, _fuse, (subject, folder, rounds))


class _Part(NamedTuple):
    run: Callable[[], Rows | None]  # gives the rows to check, unless they are in the file
    state: State
    counted: Mapping[str, int]


def _fuse(subject: Subject, folder: Path, rounds: int) -> Sequence[Result]:
    base, adapters = subject.open()
    if len(base.stamps) != 1:
        raise ConfigError(f"{base.path}: is in shards; measure on a base in one file")
    state = State(dict.fromkeys(adapters, 1.0))
    wanted = rows_to_check(adapters)
    segments = lay_out(base, adapters, state)
    inputs = [*base.stamps, *(file for a in adapters.values() for file in a.file.stamps)]
    out = folder / "bench-fuse.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    check_room(out, size := base.path.stat().st_size)
    work = sum((segment.work for segment in segments), Work())
    moved = {"bytes_read": work.file_bytes, "bytes_written": size}

    def copy() -> None:
        _copy(segments, base, adapters, out)

    def fuse() -> None:
        fuse_file(base, adapters, state, out)

    parts = {
        "read and write": _Part(copy, BASE, moved),
        "read and fuse": _Part(
            lambda: _pass(segments, base, adapters, wanted),
            state,
            {"bytes_read": work.file_bytes, "flops": work.flops},
        ),
        "fuse to a file": _Part(fuse, state, {**moved, "flops": work.flops}),
        "cp": _Part(lambda: _cp(base.path, out), BASE, {"bytes_read": size, "bytes_written": size}),
    }
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    seen: dict[str, list[Observation]] = {name: [] for name in parts}
    checks: dict[str, str] = {}
    try:
        for _ in range(rounds):
            for name, part in parts.items():
                forget(inputs)
                with Observer() as observer:
                    start = perf_counter()
                    rows = part.run()
                    seconds[name].append(perf_counter() - start)
                seen[name].append(observer.observation)
                rows = rows or _rows_of(Checkpoint.open(out), wanted)
                if part.state:
                    checks[name] = check_rows(rows, base, adapters, part.state)
                else:
                    checks[name] = _check_copy(rows, _rows_of(base, wanted))
                out.unlink(missing_ok=True)
    finally:
        out.unlink(missing_ok=True)
    return [
        Result(
            Samples(tuple(seconds[name])),
            check=checks[name],
            what={"contender": name},
            counted=part.counted,
            peak_private_bytes=max(s.peak_private_bytes for s in seen[name]),
            details={
                "baseline_private_bytes": min(s.baseline_private_bytes for s in seen[name]),
                "others_cores": max(s.others_cores for s in seen[name]),
            },
        )
        for name, part in parts.items()
    ]


def _copy(
    segments: Sequence[Segment], base: Checkpoint, adapters: Mapping[str, Adapter], out: Path
) -> None:
    """Copy the base through the segments' memory; factors are read and dropped."""
    with base.path.open("rb") as file:
        header = file.read(segments[0].reads[0].begin)
    with (
        Writer(out) as writer,
        shown(segments, base, adapters, None, "read and write") as passed,
    ):
        writer.write(in_blocks(header))
        for segment, memory in passed:
            writer.write(memory[segment.base_memory].numpy().data)


def _pass(
    segments: Sequence[Segment],
    base: Checkpoint,
    adapters: Mapping[str, Adapter],
    wanted: Mapping[str, range],
) -> Rows:
    """Read and fuse; keep the rows to check."""
    kept: dict[str, Tensor] = {}
    kernel = get_streamed_kernel("gemm")
    with shown(segments, base, adapters, kernel, "read and fuse") as passed:
        for segment, memory in passed:
            keep_rows(kept, segment, memory, wanted)
    return kept


def _cp(source: Path, out: Path) -> None:
    subprocess.run(["cp", source, out], check=True)
    with out.open("rb") as file:
        os.fsync(file.fileno())


def _rows_of(file: Checkpoint, wanted: Mapping[str, range]) -> dict[str, Tensor]:
    return {name: file.read(name)[rows.start : rows.stop] for name, rows in wanted.items()}


def _check_copy(rows: Rows, base: Rows) -> str:
    for name, copied in rows.items():
        if not torch.equal(copied.view(torch.uint8), base[name].view(torch.uint8)):
            raise CheckError(f"'{name}': the copy's bits aren't the base's")
    return f"{len(rows)} weights have the base's bits"
