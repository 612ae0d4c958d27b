"""A base file streamed through a state into a new file, or a set of shards into a new set.

The new file has the old one's tensors, in the same places: its header is padded so that they begin
at the same byte of a disk's block, and what was read is fused where it lies and written from there.
Until all of it is on the disk it is in a hidden folder beside its place, with a journal from which
a run that was broken off goes on.
"""

import hashlib
import json
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from lorabench.adapter import Adapter, check_base
from lorabench.checkpoint import Checkpoint, check_room, told_of
from lorabench.cost import Work
from lorabench.directio import BLOCK, Writer, in_blocks
from lorabench.errors import ConfigError, FileError
from lorabench.fuse import RULES
from lorabench.header import encode_header
from lorabench.journal import journal_for, working_folder
from lorabench.kernels import Kernel
from lorabench.kernels.gemm import PANEL, TILE
from lorabench.kernels.scratch import product_dtype
from lorabench.recipe import State, bound_state
from lorabench.segments import SEGMENT_BYTES, Segment, lay_out
from lorabench.stream import get_streamed_kernel, shown

SYNC_BYTES = 1 << 30
"""Bytes between two entries of the journal: a broken run loses at most what it wrote since."""

STATE_KEY = "lorabench.state"
"""The metadata key that says in which state a file's weights are."""


@dataclass(frozen=True)
class Fused:
    """What :func:`fuse_file` wrote.

    Attributes
    ----------
    nbytes
        Of all files.
    resumed_bytes
        Of tensors that an earlier run had written before it was broken off.
    work
        What this run did.
    """

    path: Path
    nbytes: int
    resumed_bytes: int
    work: Work


def fuse_file(
    base: Checkpoint,
    adapters: Mapping[str, Adapter],
    state: State,
    out: str | Path,
    *,
    rule: str = "R1",
    overwrite: bool = False,
    segment_bytes: int = SEGMENT_BYTES,
    sync_bytes: int = SYNC_BYTES,
) -> Fused:
    """Write a base with a state fused in; the bits are those of resident weights in that state.

    Metadata are kept, and the state and its adapters added to them. The same call, made again after
    one that was broken off, goes on where that stopped. What it takes in memory doesn't depend on
    the model's size.

    Parameters
    ----------
    out
        A file whose name ends in ``.safetensors``; for a base in shards a folder, which gets shards
        and an index of the same names.
    rule
        How sums are rounded: a name in :data:`lorabench.fuse.RULES`.
    overwrite
        Replace a file that is there; a folder that holds something is never replaced.
    segment_bytes, sync_bytes
        Bytes of one segment, of which some are in memory, and between two entries of the journal.

    Raises
    ------
    ConfigError
        The state is empty or names an adapter that isn't bound, the base is fused already, or
        ``out`` can't be what it is to become.
    UnavailableError
        There is no such rule.
    FileError
        ``out`` exists, is an input, or can't be written; an input changed or can't be read.
    AdapterError
        A factor isn't finite, or a fused value overflows.
    """
    check_base(base, adapters)
    state = bound_state(state, adapters)
    used = {role: adapters[role] for role in state}
    out = Path(out)
    kernel = get_streamed_kernel("gemm", rule)
    _check_inputs(base, state)
    _check_output(base, adapters, out, overwrite)
    segments = lay_out(base, used, state, limit=segment_bytes)
    files = _new_files(base, used, state, rule, out, segments)
    total = sum(file.nbytes for file in files)
    task = _task(base, used, files, segment_bytes)
    with journal_for(out, task) as journal:
        begun = journal.resume(
            len(segments),
            lambda done: all(file.is_held(journal.new, segments, done) for file in files),
        )
        check_room(out, total - journal.held_bytes)
        written = _write(base, used, kernel, segments, files, journal.new, begun, sync_bytes)
        with closing(written):
            for number in written:
                journal.save(number)
        for inputs in (base, *(adapter.file for adapter in used.values())):
            inputs.check_unchanged()
        _check_output(base, adapters, out, overwrite)  # it may have come to be meanwhile
        _publish(base, journal.new, out)
    resumed = sum(segment.base_bytes for segment in segments[:begun])
    return Fused(out, total, resumed, sum((s.work for s in segments[begun:]), Work()))


def _check_inputs(base: Checkpoint, state: State) -> None:
    if not state:
        raise ConfigError(f"{base.path}: every strength is 0, so there is nothing to fuse; copy it")
    if STATE_KEY in base.metadata:
        raise ConfigError(
            f"{base.path}: is fused already, in state '{base.metadata[STATE_KEY]}'; give the base "
            f"that it was made from"
        )


def _check_output(
    base: Checkpoint, adapters: Mapping[str, Adapter], out: Path, overwrite: bool
) -> None:
    sharded = base.path.suffix == ".json"
    if sharded and (not out.name or out.suffix in (".safetensors", ".json")):
        raise ConfigError(
            f"{out}: the base {base.path} is in {len(base.stamps)} shards, and so will the output "
            f"be; give a folder's name"
        )
    if not sharded and out.suffix != ".safetensors":
        raise ConfigError(f"{out}: expected a file name that ends in .safetensors")
    working = working_folder(out)
    for inputs in (base, *(adapter.file for adapter in adapters.values())):
        for file in inputs.stamps:
            if file.absolute().is_relative_to(working.absolute()):
                raise FileError(f"{file}: lies in {working}, where {out} will be made; move it")
    with told_of(out):
        if not os.path.lexists(out):
            return
        if out.is_dir():
            if sharded and not out.is_symlink() and not any(out.iterdir()):
                return
            raise FileError(
                f"{out}: is a link to a folder or a folder that holds something; choose another "
                f"name"
            )
        for inputs in (base, *(adapter.file for adapter in adapters.values())):
            if any(out.exists() and file.exists() and out.samefile(file) for file in inputs.stamps):
                raise FileError(f"{out}: is an input; a file can't be fused into itself")
    if sharded or not overwrite:
        raise FileError(f"{out}: exists already; choose another name or ask to overwrite it")
    if not out.is_file():
        raise FileError(f"{out}: expected a file to overwrite, found a device or a link to nothing")


class _New(NamedTuple):
    """A file to be written, from one of the base's."""

    source: Path
    name: Path
    header: bytes
    shift: int  # of every tensor, whole blocks
    nbytes: int
    first: int  # of its segments; where it has none, of those after it
    end: int

    def written(self, segments: Sequence[Segment], done: int) -> int:
        """Return how many bytes of it are on the disk when so many segments are, at least."""
        if done <= self.first:
            return 0
        return segments[done].reads[0].begin + self.shift if done < self.end else self.nbytes

    def is_held(self, folder: Path, segments: Sequence[Segment], done: int) -> bool:
        """Tell whether the folder has as much of it."""
        nbytes, path = self.written(segments, done), folder / self.name
        return not nbytes or (path.is_file() and path.stat().st_size >= nbytes)


def _new_files(
    base: Checkpoint,
    adapters: Mapping[str, Adapter],
    state: State,
    rule: str,
    out: Path,
    segments: Sequence[Segment],
) -> list[_New]:
    """Lay out the new files: the old ones with other headers."""
    added = {
        STATE_KEY: str(state),
        "lorabench.adapters": json.dumps(
            [
                {"role": role, "file": adapter.file.path.name, "strength": state[role],
                 "scales": sorted({pair.scale for pair in adapter.pairs}),
                 "metadata": dict(adapter.file.metadata)}
                for role, adapter in adapters.items()
            ]
        ),
        "lorabench.rule": f"{rule}, that of {RULES[rule]}",
    }  # fmt: skip
    files = []
    first = 0
    for source, (size, *_) in base.stamps.items():
        held = Checkpoint.open(source)
        start = size - sum(spec.nbytes for spec in held.tensors)
        header = encode_header(
            out,
            [(entry.spec, entry.offset - start) for entry in held.entries.values()],
            {**held.metadata, **added},
            ends_at=start % BLOCK,
            of=BLOCK,
        )
        name = Path(out.name) if base.path == source else source.relative_to(base.path.parent)
        shift = len(header) - start
        end = first + sum(segment.reads[0].file == source for segment in segments)
        files.append(_New(source, name, header, shift, size + shift, first, end))
        first = end
    return files


def _task(
    base: Checkpoint, adapters: Mapping[str, Adapter], files: Sequence[_New], segment_bytes: int
) -> str:
    """Return a text that differs wherever the bytes to be written, or their division, may."""
    inputs = (base.identity, *(adapter.file.identity for adapter in adapters.values()))
    how = (product_dtype(torch.device("cpu")), torch.__version__, TILE, PANEL, segment_bytes)
    pairs = [
        (pair.weight.name, pair.top, pair.scale)
        for adapter in adapters.values()
        for pair in adapter.pairs
    ]
    told = repr((inputs, how, pairs, [file.header for file in files]))
    return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()


def _write(
    base: Checkpoint,
    adapters: Mapping[str, Adapter],
    kernel: Kernel,
    segments: Sequence[Segment],
    files: Sequence[_New],
    folder: Path,
    begun: int,
    sync_bytes: int,
) -> Generator[int, None, None]:
    """Write the segments from ``begun`` on; yield how many are on the disk, whenever they are."""
    label = f"fuse {base.path.name}"
    with shown(segments[begun:], base, adapters, kernel, label) as passed:
        for file in files:
            if (at := file.written(segments, begun)) == file.nbytes:
                continue
            (folder / file.name).parent.mkdir(parents=True, exist_ok=True)
            with Writer(folder / file.name, at) as writer:
                if not at:
                    writer.write(in_blocks(file.header))
                synced, syncing = writer.at, None
                for number in range(max(file.first, begun), file.end):
                    segment, memory = next(passed)
                    writer.write(memory[segment.base_memory].numpy().data)
                    if syncing and syncing[1].done():
                        syncing[1].result()
                        yield syncing[0]
                        syncing = None
                    if not syncing and writer.at - synced >= sync_bytes and number + 1 < file.end:
                        synced, syncing = writer.at, (number + 1, writer.begin_sync())
            yield file.end
        next(passed, None)


def _publish(base: Checkpoint, new: Path, out: Path) -> None:
    """Give what was written its own name, in one step."""
    if base.path.suffix == ".json":
        with (new / base.path.name).open("wb", buffering=0) as index:
            index.write(base.path.read_bytes())
            os.fsync(index.fileno())
        new.rename(out)
    else:
        (new / out.name).replace(out)
