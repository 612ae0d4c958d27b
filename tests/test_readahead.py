"""Reading ahead: the files' bytes in order while the caller works, and nobody there afterwards."""

import errno
import os
import shutil
import sys
import threading
from itertools import count
from pathlib import Path

import pytest
import torch
from conftest import bits
from odd import at_most, failing, nothing_left

from lorabench import directio, readahead
from lorabench.checkpoint import Checkpoint, torch_dtype
from lorabench.errors import FileError
from lorabench.readahead import Read, ahead, read_ahead

CUDA = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
)
ERRORS = [RuntimeError("broken"), MemoryError(), KeyboardInterrupt()]


@pytest.fixture(autouse=True)
def _no_deadlock():
    with at_most(20):
        yield


@pytest.fixture(params=[24, 4096, readahead.BUFFER_BYTES])
def buffer_bytes(request, monkeypatch):
    """Buffers that tensors go through in many pieces, in a few, and whole."""
    monkeypatch.setattr(readahead, "BUFFER_BYTES", request.param)


def wanted(base: Checkpoint, device="cpu", dtype=None) -> list[Read]:
    """Every tensor of a base, into memory that holds something else."""
    return [
        Read(
            base,
            entry,
            torch.full(
                entry.spec.shape, 1, dtype=dtype or torch_dtype(entry.spec.dtype), device=device
            ),
        )
        for entry in base.entries.values()
    ]


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_each_tensor_is_given_in_the_order_asked_for_with_the_files_bits(
    either, device, buffer_bytes
):
    reads = wanted(either.base, device)[::-1]
    with nothing_left(), read_ahead(reads) as arrived:
        for read, expected in zip(arrived, reads, strict=True):
            assert read is expected
            assert torch.equal(bits(read.into.cpu()), bits(either.base.read(read.entry.spec.name)))


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_into_another_dtype_values_are_rounded_and_the_rest_keep_their_bits(
    either, device, buffer_bytes
):
    reads = wanted(either.base, device, torch.bfloat16)
    dtypes = {torch_dtype(read.entry.spec.dtype) for read in reads}
    assert {torch.bfloat16, torch.float32, torch.uint8} <= dtypes
    with nothing_left(), read_ahead(reads) as arrived:
        for read, expected in zip(arrived, reads, strict=True):
            assert read is expected
            values = either.base.read(read.entry.spec.name).bfloat16()
            assert torch.equal(bits(read.into.cpu()), bits(values)), read.entry.spec.name


def test_nothing_is_read_when_nothing_is_asked_for():
    with nothing_left(), read_ahead([]) as arrived:
        assert list(arrived) == []


def test_the_caller_may_ask_for_less_than_there_is(model):
    reads = wanted(model.base)
    with nothing_left(), read_ahead(reads) as arrived:
        assert next(arrived) is reads[0]


def test_what_comes_next_is_read_while_the_caller_works(model, monkeypatch):
    last, fill = threading.Event(), directio.Reader.fill
    end = max(entry.offset for entry in model.base.entries.values())

    def noted(self, begin: int, memory: memoryview) -> None:
        fill(self, begin, memory)
        if begin == end:
            last.set()

    monkeypatch.setattr(directio.Reader, "fill", noted)
    reads = wanted(model.base)
    with read_ahead(reads) as arrived:
        next(arrived)
        assert last.wait(10)
        assert torch.equal(bits(reads[-1].into), bits(model.base.read(reads[-1].entry.spec.name)))


def test_a_reader_is_so_many_items_ahead_and_no_more():
    begun, third = [], threading.Event()

    def items():
        for i in range(9):
            begun.append(i)
            if i == 2:
                third.set()
            yield i

    with ahead(items(), 3) as given:
        assert next(given) == 0
        assert third.wait(10)
        for i in range(1, 9):
            assert next(given) == i
            assert len(begun) <= i + 3
    assert begun == list(range(9))


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("limit", [1, 2, 9])
def test_an_error_of_the_reader_comes_after_what_it_had_given(error, limit):
    closed = []

    def items():
        try:
            yield from range(3)
            raise type(error)(*error.args)
        finally:
            closed.append(threading.current_thread().name)

    seen = []
    with pytest.raises(type(error)), nothing_left(), ahead(items(), limit) as given:
        seen.extend(given)
    assert (seen, closed) == ([0, 1, 2], ["reader"])


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("error", ERRORS)
def test_a_read_that_fails_raises_in_the_caller_and_leaves_nobody(model, error, n, dtype):
    reads, seen = wanted(model.base, dtype=dtype), []
    with failing(directio.os, "preadv", n, error), pytest.raises(type(error)), nothing_left():
        with read_ahead(reads) as arrived:
            seen.extend(arrived)
    assert seen == reads[: len(seen)]
    assert len(seen) < len(reads)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("taken", [0, 1, 5])
@pytest.mark.parametrize("error", ERRORS)
def test_a_caller_that_breaks_off_is_alone_with_the_tensors(model, error, taken, dtype):
    reads = wanted(model.base, dtype=dtype)

    def break_off() -> None:
        with read_ahead(reads) as arrived:
            for _ in range(taken):
                next(arrived)
            raise error

    with pytest.raises(type(error)), nothing_left():
        break_off()
    for read in reads:
        read.into.zero_()
    assert not any(bool(read.into.any()) for read in reads)


def endless(model) -> None:
    """Take two of a generator that doesn't end by itself."""

    def items():
        yield from count()

    with ahead(items(), 2) as given:
        assert (next(given), next(given)) == (0, 1)


def through_buffers(model) -> None:
    with read_ahead(wanted(model.base, dtype=torch.float64)) as arrived:
        assert len(list(arrived)) == len(model.base.entries)


@pytest.mark.parametrize("use", [endless, through_buffers])
def test_ctrl_c_at_any_line_leaves_no_reader(model, use):
    left = 0

    def trace(frame, event, arg):
        nonlocal left
        if frame.f_code.co_filename != readahead.__file__:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    outer = sys.gettrace()
    for n in count(1):
        left, broken = n, False
        with nothing_left():
            try:
                sys.settrace(trace)
                use(model)
            except KeyboardInterrupt:
                broken = True
            finally:
                sys.settrace(outer)
        if not broken:
            break
    assert n > 20  # as many lines were interrupted


def copied(model, folder: Path) -> Checkpoint:
    return Checkpoint.open(shutil.copy(model.base.path, folder / "base.safetensors"))


def assert_refused(base: Checkpoint, message: str) -> None:
    reads = wanted(base)
    with nothing_left(), pytest.raises(FileError, match=f"^{base.path}: {message}"):
        with read_ahead(reads) as arrived:
            next(arrived)


def test_a_file_that_changes_or_is_gone_is_told(model, tmp_path):
    base = copied(model, tmp_path)
    os.utime(base.path, ns=(0, 0))
    assert_refused(base, "changed since it was opened")
    base.path.unlink()
    assert_refused(base, "can't be opened: No such file")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: os.utime(path, ns=(0, 0)), "changed since it was opened"),
        (lambda path: os.truncate(path, 0), "ended at byte"),
    ],
)
def test_a_file_that_changes_while_it_is_read_is_told(
    model, tmp_path, monkeypatch, change, message
):
    base, fill = copied(model, tmp_path), directio.Reader.fill

    def fill_changed(self, begin: int, memory: memoryview) -> None:
        change(base.path)
        fill(self, begin, memory)

    monkeypatch.setattr(directio.Reader, "fill", fill_changed)
    assert_refused(base, message)


def test_a_disk_that_fails_is_told_with_the_file(model):
    broken = OSError(errno.EIO, "Broken")
    with (
        failing(directio.os, "preadv", 1, broken),
        pytest.raises(FileError, match=f"^{model.base.path}: can't be read: Broken"),
        read_ahead(wanted(model.base)) as arrived,
    ):
        next(arrived)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_callers_settings_of_torch_do_not_lead_the_reader_astray(model, dtype):
    with torch.inference_mode():
        reads = wanted(model.base, dtype=dtype)
        torch.set_default_device("meta")
        try:
            with read_ahead(reads) as arrived:
                list(arrived)
        finally:
            torch.set_default_device(None)
        for read in reads:
            expected = model.base.read(read.entry.spec.name).to(read.into.dtype)
            assert torch.equal(bits(read.into), bits(expected))
