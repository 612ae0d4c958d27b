"""Files read and written past the page cache, in aligned blocks, through memory of our own.

A base that is streamed is read once and its fused copy written once: caching either only pushes out
what others need, and copying through the cache costs the CPU that the products want. With
``O_DIRECT`` a file's offsets, lengths and the memory must be multiples of a block, so a range is
read with the rest of its first and last block around it, and a writer carries what doesn't fill a
block to its next write. Where a file system has no direct I/O (older tmpfs), files go through the
cache; so they do where a reader is asked to, for what will be read again.
"""

import errno
import fcntl
import mmap
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from lorabench.checkpoint import Stamp, stamp_of
from lorabench.errors import FileError

BLOCK = 4096
"""Bytes that offsets, lengths and addresses are multiples of; no disk in use asks for more."""

_DIRECT = getattr(os, "O_DIRECT", 0)


def forget(files: Iterable[Path]) -> None:
    """Take files out of the page cache; what isn't on the disk yet is written first."""
    for file in files:
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def round_up(nbytes: int) -> int:
    """Return the next multiple of ``BLOCK``."""
    return -(-nbytes // BLOCK) * BLOCK


def aligned_memory(nbytes: int) -> mmap.mmap:
    """Return private zeroed memory that begins on a block, in huge pages where there are any."""
    # Python's own mmap(-1, n) is shared memory, which gets no huge pages.
    memory = mmap.mmap(-1, max(BLOCK, nbytes), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def in_blocks(data: bytes) -> memoryview:
    """Copy bytes to memory that begins on a block."""
    memory = memoryview(aligned_memory(len(data)))[: len(data)]
    memory[:] = data
    return memory


class Reader:
    """A file opened for ranges of bytes, in any order and from one thread at a time.

    Parameters
    ----------
    stamp
        What the file was when its header was read.
    cached
        Go through the page cache, which takes memory of any alignment (see :meth:`fill`) and keeps
        what was read for the next reader.

    Raises
    ------
    FileError
        The file can't be opened, or isn't the one that ``stamp`` was taken of.
    """

    def __init__(self, path: Path, stamp: Stamp, *, cached: bool = False) -> None:
        self.path = path
        self._stamp = stamp
        self._cached = cached
        try:
            self._fd = os.open(path, os.O_RDONLY) if cached else _open(path, os.O_RDONLY)
        except OSError as error:
            raise FileError(f"{path}: can't be opened: {error.strerror}") from error
        try:
            self.check_unchanged()
        except BaseException:
            os.close(self._fd)
            raise

    def check_unchanged(self) -> None:
        """Raise :class:`FileError` if the file isn't, or no longer is, what the stamp was of."""
        if stamp_of(os.fstat(self._fd)) != self._stamp:
            raise FileError(f"{self.path}: changed since it was opened; open it again")

    def read(self, begin: int, end: int, memory: memoryview) -> None:
        """Read bytes ``[begin, end)`` and what shares their blocks to the start of ``memory``.

        Byte ``begin`` lands at ``begin % BLOCK``. The memory begins on a block and holds whole
        blocks.

        Raises
        ------
        FileError
            The file ended early or can't be read.
        """
        at = begin - begin % BLOCK
        self._read(at, end, memory[: round_up(end - at)])

    def fill(self, begin: int, memory: memoryview) -> None:
        """Fill memory that lies anywhere with the bytes from ``begin`` on, through the page cache.

        Raises
        ------
        FileError
            The file ended early or can't be read.
        """
        assert self._cached
        self._read(begin, begin + len(memory), memory)

    def _read(self, at: int, end: int, left: memoryview) -> None:
        while at < end:
            try:
                count = os.preadv(self._fd, [left], at)
            except OSError as error:
                if not (error.errno == errno.EINVAL and at % BLOCK):  # else it ended in a block
                    raise FileError(f"{self.path}: can't be read: {error.strerror}") from error
                count = 0
            if not count:
                raise FileError(f"{self.path}: ended at byte {at:,}; the file was truncated")
            at, left = at + count, left[count:]

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class Writer:
    """A file written from its start to its end; closed, it ends with the last byte given.

    Parameters
    ----------
    path
        The file; it is made, or goes on from ``at``.
    at
        Bytes that an earlier writer's :meth:`sync` left.

    Raises
    ------
    FileError
        The file holds fewer.
    """

    def __init__(self, path: Path, at: int = 0) -> None:
        self._carry = aligned_memory(BLOCK)
        self._syncing = ThreadPoolExecutor(1, "sync")
        self.at = at
        """Bytes given so far."""
        self._fd = _open(path, os.O_RDWR | os.O_CREAT | (0 if at else os.O_TRUNC))
        try:
            if (size := os.fstat(self._fd).st_size) < at:
                raise FileError(f"{path}: holds {size:,} bytes, expected {at:,} to go on from")
            if at % BLOCK:
                os.preadv(self._fd, [memoryview(self._carry)], at - at % BLOCK)
        except BaseException:
            os.close(self._fd)
            raise

    def write(self, memory: memoryview) -> None:
        """Write the next bytes.

        They begin ``at % BLOCK`` bytes into ``memory``, which begins on a block; what comes before
        them there is overwritten.
        """
        held = self.at % BLOCK
        memory[:held] = memoryview(self._carry)[:held]
        whole = len(memory) - len(memory) % BLOCK
        self._write_all(memory[:whole], self.at - held)
        rest = memory[whole:]
        memoryview(self._carry)[: len(rest)] = rest
        self.at += len(memory) - held

    def begin_sync(self) -> Future[None]:
        """Begin to put all bytes given on the disk; give a future that ends when they are.

        More may be written meanwhile: waiting for a disk's own cache takes it half a second.
        """
        if held := self.at % BLOCK:
            self._write_all(memoryview(self._carry), self.at - held)
        return self._syncing.submit(os.fsync, self._fd)

    def sync(self) -> None:
        """Return when all bytes given are on the disk."""
        self.begin_sync().result()

    def _write_all(self, memory: memoryview, at: int) -> None:
        while memory:
            try:
                count = os.pwritev(self._fd, [memory], at)
            except OSError as error:
                flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
                if error.errno != errno.EINVAL or not flags & _DIRECT:
                    raise
                # A limit inside a block, or larger blocks: the cache takes it, or has a reason.
                fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~_DIRECT)
                continue
            at, memory = at + count, memory[count:]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.sync()
                os.ftruncate(self._fd, self.at)
                os.fsync(self._fd)
        finally:
            self._syncing.shutdown()
            os.close(self._fd)


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | _DIRECT, 0o666)
    except OSError:  # no direct I/O here, or a reason that shows again
        return os.open(path, flags, 0o666)
