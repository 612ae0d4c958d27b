"""Aligned files: any range read as it is, any division written as it was given."""

import errno
import fcntl
import os
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from odd import failing

from lorabench import directio
from lorabench.checkpoint import _stamp
from lorabench.directio import BLOCK, Reader, Writer, aligned_memory, round_up
from lorabench.errors import FileError

CONTENT = bytes(i * 37 % 251 for i in range(5 * BLOCK + 77))
MOMENTS = [0, 1, 100, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 5 * BLOCK, len(CONTENT)]


def open_without_direct(path, flags, *args, open_file=os.open):
    """Open as a file system without direct I/O does."""
    if flags & os.O_DIRECT:
        raise OSError(errno.EINVAL, "Invalid argument")
    return open_file(path, flags, *args)


@pytest.fixture(params=["direct", "no such flag", "not on this file system"])
def access(request, monkeypatch):
    if request.param == "no such flag":
        monkeypatch.setattr(directio, "_DIRECT", 0)
    elif request.param == "not on this file system":
        monkeypatch.setattr(os, "open", open_without_direct)
    return request.param


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    return path


def opened(path: Path) -> Reader:
    return Reader(path, _stamp(path))


def read(reader: Reader, begin: int, end: int) -> bytes:
    memory = memoryview(aligned_memory(round_up(begin % BLOCK + end - begin)))
    reader.read(begin, end, memory)
    return bytes(memory[begin % BLOCK :][: end - begin])


def test_any_range_is_read_from_its_place_in_its_first_block(file, access):
    reader = opened(file)
    for begin in MOMENTS:
        for end in MOMENTS:
            if begin <= end:
                assert read(reader, begin, end) == CONTENT[begin:end]
    reader.close()


def test_a_read_that_the_system_cuts_short_goes_on(file, monkeypatch):
    whole = os.preadv
    reader = opened(file)
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: whole(fd, [into[0][:BLOCK]], at))
    assert read(reader, 5, len(CONTENT) - 3) == CONTENT[5:-3]
    reader.close()


def test_nothing_beyond_the_last_block_of_a_range_is_overwritten(file):
    memory = memoryview(aligned_memory(4 * BLOCK))
    memory[:] = b"\xee" * len(memory)
    reader = opened(file)
    reader.read(BLOCK + 5, 2 * BLOCK + 5, memory)
    reader.close()
    assert bytes(memory[2 * BLOCK :]) == b"\xee" * (2 * BLOCK)


def test_a_cached_reader_fills_memory_that_lies_anywhere(file):
    reader = Reader(file, _stamp(file), cached=True)
    assert not fcntl.fcntl(reader._fd, fcntl.F_GETFL) & os.O_DIRECT
    for begin in MOMENTS:
        for end in MOMENTS:
            if begin <= end:
                memory = bytearray(b"\xee" * (end - begin + 5))
                reader.fill(begin, memoryview(memory)[3:-2])
                assert memory == b"\xee" * 3 + CONTENT[begin:end] + b"\xee" * 2
    os.truncate(file, 100)
    with pytest.raises(FileError, match=f"^{file}: changed since it was opened"):
        reader.check_unchanged()
    with pytest.raises(FileError, match=f"^{file}: ended at byte 100; .* truncated"):
        reader.fill(50, memoryview(bytearray(200)))
    reader.close()


def test_a_file_that_is_missing_or_another_than_was_opened_is_refused(file):
    stamp = _stamp(file)
    os.utime(file, ns=(0, 0))
    with pytest.raises(FileError, match=f"^{file}: changed since it was opened"):
        Reader(file, stamp)
    with pytest.raises(FileError, match=f"^{file}2: can't be opened: No such file"):
        Reader(Path(f"{file}2"), stamp)


@pytest.mark.parametrize("left", [0, 100, BLOCK, 2 * BLOCK + 1])
def test_a_file_that_is_cut_off_while_it_is_read_is_told(file, access, left):
    reader = opened(file)
    os.truncate(file, left)
    with pytest.raises(FileError, match=f"^{file}: ended at byte {left:,}; .* truncated"):
        read(reader, 50, len(CONTENT))
    reader.close()


def test_a_read_that_the_system_fails_names_the_file(file):
    reader = opened(file)
    with (
        failing(os, "preadv", 1, OSError(errno.EIO, "Broken")),
        pytest.raises(FileError, match=f"^{file}: can't be read: Broken"),
    ):
        read(reader, 0, 9)
    reader.close()


def test_a_file_that_ends_inside_a_block_is_told_as_such_where_the_system_minds(file):
    reader, whole = opened(file), os.preadv

    def preadv(fd, into, at):
        if at % BLOCK:
            raise OSError(errno.EINVAL, "Invalid argument")
        return min(whole(fd, into, at), 100)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", preadv)
        with pytest.raises(FileError, match=f"^{file}: ended at byte 100; .* truncated"):
            read(reader, 0, 200)
    reader.close()


def give(writer: Writer, data: bytes) -> None:
    """Give the next bytes, with other bytes in the memory before them."""
    held = writer.at % BLOCK
    memory = memoryview(aligned_memory(held + len(data)))[: held + len(data)]
    memory[:held] = b"\xee" * held
    memory[held:] = data
    writer.write(memory)


DIVISIONS = st.lists(st.sampled_from(MOMENTS[1:-1]) | st.integers(0, len(CONTENT)), max_size=6).map(
    sorted
)


@settings(max_examples=60)
@given(cuts=DIVISIONS, synced=st.sets(st.integers(0, 6)), length=st.sampled_from(MOMENTS))
def test_a_file_is_what_was_given_in_any_division(tmp_path_factory, cuts, synced, length):
    path = tmp_path_factory.mktemp("written") / "file"
    cuts = [0, *(cut for cut in cuts if cut <= length), length]
    with Writer(path) as writer:
        for i, (begin, end) in enumerate(pairwise(cuts)):
            give(writer, CONTENT[begin:end])
            assert writer.at == end
            if i in synced:
                writer.sync()
                assert path.read_bytes()[:end] == CONTENT[:end]
    assert path.read_bytes() == CONTENT[:length]


class Broken(Exception):
    """Breaks a writer off."""


@pytest.mark.parametrize("at", MOMENTS)
def test_a_writer_goes_on_from_what_another_synced(tmp_path, access, at):
    path = tmp_path / "file"
    with suppress(Broken), Writer(path) as writer:
        give(writer, CONTENT[:at])
        writer.sync()
        give(writer, b"\xdd" * 3 * BLOCK)
        raise Broken
    with Writer(path, at) as writer:
        give(writer, CONTENT[at:])
    assert path.read_bytes() == CONTENT


def test_a_writer_that_begins_anew_leaves_nothing_of_what_was_there(file):
    with Writer(file) as writer:
        give(writer, b"new")
    assert file.read_bytes() == b"new"


def test_a_writer_does_not_go_on_from_more_than_there_is(file):
    for at in (len(CONTENT) + 1, 9 * BLOCK):
        with pytest.raises(FileError, match=f"^{file}: holds 20,557 bytes, expected {at:,}"):
            Writer(file, at)
    assert file.read_bytes() == CONTENT


def test_a_write_that_the_system_cuts_short_goes_on(tmp_path, monkeypatch):
    whole = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, data, at: whole(fd, [data[0][:BLOCK]], at))
    with Writer(tmp_path / "file") as writer:
        give(writer, CONTENT)
    assert (tmp_path / "file").read_bytes() == CONTENT


@pytest.mark.parametrize("name", ["pwritev", "ftruncate", "fsync"])
def test_a_writer_that_fails_closes_its_file(tmp_path, monkeypatch, name):
    closed, close = [], os.close
    monkeypatch.setattr(os, "close", lambda fd: (closed.append(fd), close(fd)))
    with failing(os, name, 1, OSError(errno.EIO, "Broken")), pytest.raises(OSError, match="Broken"):
        with Writer(tmp_path / "file") as writer:
            give(writer, CONTENT)
    assert closed == [writer._fd]


def test_files_go_past_the_page_cache_where_the_file_system_lets_them(file, tmp_path):
    try:
        os.close(os.open(file, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system has no direct I/O")
    reader = opened(file)
    with Writer(tmp_path / "other") as writer:
        for fd in (reader._fd, writer._fd):
            assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
    reader.close()


def test_memory_begins_on_a_block_and_is_zero():
    import ctypes

    memory = aligned_memory(3 * BLOCK + 1)
    assert ctypes.addressof(ctypes.c_char.from_buffer(memory)) % BLOCK == 0
    assert memory[:] == bytes(3 * BLOCK + 1)
