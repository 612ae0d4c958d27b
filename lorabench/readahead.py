"""Reading ahead: a thread reads what comes next while the caller works on what came before.

Streams (:mod:`lorabench.stream`) and loads go through here and through :mod:`lorabench.directio`,
and differ in where bytes land. A stream's go past the page cache, through a ring of buffers. A
load's stay in the cache, since a process that is started again and a restore that rereads find them
there, and land in the tensors themselves: on a CPU that leaves nothing to copy. Only where a tensor
is on a GPU, or of another dtype than in its file, do they pass through buffers (pinned ones for a
GPU, copied on a stream of their own).
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Semaphore, Thread
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from lorabench.checkpoint import Checkpoint, torch_dtype
from lorabench.directio import Reader
from lorabench.header import Entry

T = TypeVar("T")

BUFFER_BYTES = 32 << 20
BUFFERS = 4  # one that fills, one that is copied, and two for when one of these hesitates


class Read(NamedTuple):
    """A tensor of a file, or rows of one, and where it is wanted: contiguous, of the same shape."""

    file: Checkpoint
    entry: Entry
    into: Tensor


@contextmanager
def read_ahead(reads: Sequence[Read]) -> Iterator[Iterator[Read]]:
    """Fill tensors from their files; give each read, in order, when its bytes are in place.

    The next ones are read meanwhile. Where a tensor has another dtype than in the file, values are
    rounded to it. On a GPU the caller's stream waits for the bytes, not the caller. When the block
    ends, however it does, nothing writes to the tensors any more.

    Parameters
    ----------
    reads
        All on one device.

    Raises
    ------
    FileError
        A file changed since it was opened, ended early, or can't be read. Tensors that were not
        given yet hold anything.

    Examples
    --------
    >>> reads = [Read(base, entry, tensors[name]) for name, entry in base.entries.items()]
    >>> with read_ahead(reads) as arrived:
    ...     for read in arrived:
    ...         fuse(read.into)
    """
    devices = {read.into.device for read in reads}
    assert len(devices) <= 1
    if all(_in_place(read) for read in reads):
        with ahead(_pieces(reads, None), max(1, len(reads))) as pieces:
            yield (piece.read for piece in pieces)
        return
    with (
        closing(_Buffers(devices.pop())) as buffers,
        ahead(_pieces(reads, buffers), BUFFERS) as pieces,
    ):
        yield buffers.passed_on(pieces)


@contextmanager
def ahead(items: Generator[T, None, None], limit: int) -> Iterator[Iterator[T]]:
    """Run a generator in a thread of its own; give its items in order, and what it raises.

    An item is the caller's until it asks for the next. Counting that one, the generator is at most
    ``limit`` items ahead, so that it may use as many buffers in turn. When the block ends, the
    generator is closed and the thread has ended; it isn't broken off inside an item.
    """
    assert limit > 0
    room = Semaphore(limit)
    given: SimpleQueue[tuple[T] | BaseException | None] = SimpleQueue()
    ended = Event()

    def produce() -> None:
        try:
            with closing(items):
                while room.acquire() and not ended.is_set():
                    try:
                        item = next(items)
                    except StopIteration:
                        break
                    given.put((item,))
                    del item  # the caller's now
            given.put(None)
        except BaseException as error:
            given.put(error)

    def taken() -> Iterator[T]:
        while (item := given.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item[0]
            room.release()

    thread = Thread(target=produce, name="reader", daemon=True)

    def end() -> None:
        ended.set()
        room.release()
        if thread.ident is not None:
            thread.join()

    try:
        try:
            thread.start()
            yield taken()
        finally:
            end()
    finally:
        end()  # for a Ctrl-C that broke off the first


class _Piece(NamedTuple):
    """Bytes of a read that have come: in place, or in a buffer, from value ``begin`` on."""

    read: Read
    number: int  # among all pieces
    begin: int
    values: Tensor | None  # as they are in the file
    last: bool


class _Buffers:
    """A ring of buffers on the way to tensors elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._cuda:  # what was done with the tensors before comes first
            self._cuda.wait_stream(torch.cuda.current_stream(device))
        pinned = self._cuda is not None
        self._memory = [
            torch.empty(BUFFER_BYTES, dtype=torch.uint8, device="cpu", pin_memory=pinned)
            for _ in range(BUFFERS)
        ]
        self._copied: dict[int, torch.cuda.Event] = {}

    def free(self, number: int) -> Tensor:
        """Return a piece's buffer, ``uint8 [BUFFER_BYTES]``, once its last copy has ended."""
        slot = number % BUFFERS
        if slot in self._copied:
            self._copied[slot].synchronize()
        return self._memory[slot]

    def passed_on(self, pieces: Iterator[_Piece]) -> Iterator[Read]:
        """Copy pieces to where they are wanted; give the reads that are complete."""
        for read, number, begin, values, last in pieces:
            if values is not None:
                with torch.cuda.stream(self._cuda) if self._cuda else nullcontext():
                    there = read.into.detach().reshape(-1)[begin : begin + len(values)]
                    there.copy_(values, non_blocking=True)
                    if self._cuda:
                        copied = torch.cuda.Event(blocking=True)
                        copied.record(self._cuda)
                        self._copied[number % BUFFERS] = copied
            if last:
                if self._cuda:
                    torch.cuda.current_stream(read.into.device).wait_stream(self._cuda)
                yield read

    def close(self) -> None:
        """Return when no copy is under way."""
        if self._cuda:
            self._cuda.synchronize()


def _in_place(read: Read) -> bool:
    dtype = torch_dtype(read.entry.spec.dtype)
    return read.into.device.type == "cpu" and read.into.dtype == dtype


def _pieces(reads: Sequence[Read], buffers: _Buffers | None) -> Generator[_Piece, None, None]:
    """Read, in the reader's thread."""
    readers: dict[Path, Reader] = {}
    number = 0
    with ExitStack() as stack:
        for read in reads:
            entry = read.entry
            assert read.into.shape == entry.spec.shape
            assert read.into.is_contiguous()
            if entry.file not in readers:
                stamp = read.file.stamps[entry.file]
                readers[entry.file] = Reader(entry.file, stamp, cached=True)
                stack.callback(readers[entry.file].close)
            reader = readers[entry.file]
            if buffers is None or _in_place(read):
                reader.fill(entry.offset, _bytes(read.into))
                reader.check_unchanged()
                yield _Piece(read, number, 0, None, True)
                number += 1
                continue
            dtype = torch_dtype(entry.spec.dtype)
            for begin in range(0, max(1, entry.spec.nbytes), BUFFER_BYTES):
                end = min(begin + BUFFER_BYTES, entry.spec.nbytes)
                memory = buffers.free(number)[: end - begin]
                reader.fill(entry.offset + begin, _bytes(memory))
                reader.check_unchanged()
                values, last = memory.view(dtype), end == entry.spec.nbytes
                yield _Piece(read, number, begin // dtype.itemsize, values, last)
                number += 1


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
