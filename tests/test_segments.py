"""A pass laid out: every byte in memory once and in its place, within the bound that was set."""

import math
from functools import cache
from pathlib import Path

import pytest
from conftest import ADAPTERS
from odd import PREFIX, STATES

from lorabench.cost import Work
from lorabench.directio import BLOCK
from lorabench.kernels import gemm
from lorabench.recipe import BASE, State
from lorabench.segments import lay_out

LIMITS = [60, 4096, 20_000, 1 << 30]


@pytest.fixture(params=[700, gemm.TILE])
def tile(request, monkeypatch):
    monkeypatch.setattr(gemm, "TILE", request.param)
    return request.param


def memory_of(segment) -> bytearray:
    """A segment's memory as its reads fill it, and 0xEE where they don't."""
    memory = bytearray(b"\xee" * segment.memory_bytes)
    for read in segment.reads:
        data = whole(read.file)[read.begin - read.begin % BLOCK : read.end]
        memory[read.at : read.at + len(data)] = data
    return memory


@cache
def whole(file: Path) -> bytes:
    return file.read_bytes()


def content(checkpoint, name: str) -> bytes:
    entry = checkpoint.entries[name]
    return whole(entry.file)[entry.offset : entry.offset + entry.spec.nbytes]


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("state", [BASE, *STATES])
def test_every_byte_of_the_base_passes_once_in_the_order_of_the_files(either, tile, state, limit):
    base = either.base
    passed: dict[str, bytes] = {}
    ended = []
    for segment in lay_out(base, either.adapters, state, limit=limit):
        memory = memory_of(segment)
        for piece in segment.pieces:
            assert piece.name not in ended
            data = bytes(memory[piece.at : piece.at + piece.nbytes])
            passed[piece.name] = passed.get(piece.name, b"") + data
            if piece.last:
                ended.append(piece.name)
    files = list(base.stamps)
    entries = [entry for entry in base.entries.values() if entry.spec.nbytes]
    in_order = sorted(entries, key=lambda entry: (files.index(entry.file), entry.offset))
    assert ended == list(passed) == [entry.spec.name for entry in in_order]
    assert all(data == content(base, name) for name, data in passed.items())


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("state", STATES)
def test_every_row_of_a_touched_weight_has_its_factors_in_the_states_order(
    either, tile, state, limit
):
    pairs = {r: {p.weight.name: p for p in either.adapters[r].pairs} for r in ADAPTERS}
    tops: dict[str, int] = {}
    for segment in lay_out(either.base, either.adapters, state, limit=limit):
        memory = memory_of(segment)

        def in_memory(rows, memory=memory) -> bytes:
            return bytes(memory[rows.at : rows.at + rows.spec.nbytes])

        for weight, top, factors in segment.tiles:
            name, (rows, in_) = weight.spec.name, weight.spec.shape
            assert top == tops.get(name, 0)
            assert rows == min(gemm.tile_rows(in_), either.base.entries[name].spec.shape[0] - top)
            tops[name] = top + rows
            step = weight.spec.nbytes // rows
            assert in_memory(weight) == content(either.base, name)[top * step :][: rows * step]
            roles = [role for role in state if name in pairs[role]]
            assert [f.strength for f in factors] == [state[role] for role in roles]
            for role, (a, b, scale, _, file) in zip(roles, factors, strict=True):
                adapter, pair = either.adapters[role], pairs[role][name]
                assert (file, scale) == (adapter.file.path, pair.scale)
                assert a.spec == pair.a.spec
                assert in_memory(a) == content(adapter.file, pair.a.spec.name)
                step = b.spec.nbytes // rows
                whole_b = content(adapter.file, pair.b.spec.name)
                assert in_memory(b) == whole_b[top * step :][: rows * step]
    touched = {name for role in state for name in pairs[role]}
    whole = {n: either.base.entries[n].spec.shape[0] for n in touched}
    assert tops == {name: rows for name, rows in whole.items() if rows}


@pytest.mark.parametrize("limit", LIMITS)
def test_reads_lie_in_whole_blocks_beside_one_another_and_the_bases_first(either, tile, limit):
    for segment in lay_out(either.base, either.adapters, STATES[-1], limit=limit):
        at = 0
        for read in segment.reads:
            assert read.at == at
            assert read.at % BLOCK == 0
            assert read.first == read.at + read.begin % BLOCK
            at = read.after
            assert read.at + read.begin % BLOCK + read.end - read.begin <= at
        assert segment.memory_bytes == at
        base = segment.reads[0]
        assert {read.file for read in segment.reads[1:]}.isdisjoint(either.base.stamps)
        assert base.end - base.begin == segment.base_bytes
        assert segment.base_memory == slice(0, base.first + segment.base_bytes)


@pytest.mark.parametrize("limit", LIMITS)
def test_a_segment_is_larger_than_the_limit_only_for_one_tile(either, tile, limit):
    segments = lay_out(either.base, either.adapters, STATES[-1], limit=limit)
    for segment in segments:
        nbytes = sum(read.end - read.begin for read in segment.reads)
        assert nbytes <= limit or len(segment.tiles) == len(segment.pieces) == 1
    files = {segment.reads[0].file for segment in segments}
    assert (len(segments) == len(files)) == (limit == LIMITS[-1])


def test_only_the_tensors_asked_for_are_read_and_what_lies_between_is_not(model):
    names = [f"{PREFIX}c.weight", "scalar", f"{PREFIX}none.weight"]
    (segment,) = lay_out(model.base, model.adapters, State(user=1.0), names)
    assert [piece.name for piece in segment.pieces] == ["scalar", f"{PREFIX}c.weight"]
    own = [read for read in segment.reads if read.file == model.base.path]
    assert sum(read.end - read.begin for read in own) == segment.base_bytes == 4 + 2 * 64 * 33


@pytest.mark.parametrize("state", STATES)
def test_work_adds_up_to_what_headers_tell_and_a_again_for_each_further_segment(model, tile, state):
    def work(limit: int) -> Work:
        segments = lay_out(model.base, model.adapters, state, touched, limit=limit)
        return sum((segment.work for segment in segments), Work())

    pairs = [pair for role in state for pair in model.adapters[role].pairs]
    base_bytes = sum({p.weight.name: p.weight.nbytes for p in pairs}.values())
    touched = {pair.weight.name: pair.weight.params for pair in pairs}
    at_once = Work(
        flops=sum(2 * pair.weight.params * pair.rank for pair in pairs),
        file_bytes=base_bytes
        + sum(p.a.spec.nbytes + p.b.spec.nbytes for p in pairs if p.weight.nbytes),
        fused_params=sum(touched.values()),
    )
    assert work(1 << 30) == at_once
    again = sum(
        p.a.spec.nbytes * (math.ceil(p.weight.shape[0] / gemm.tile_rows(p.weight.shape[1])) - 1)
        for p in pairs
        if p.weight.nbytes
    )
    each = work(1)  # a segment for each tile
    assert each.file_bytes == at_once.file_bytes + again
    assert (again > 0) == (tile == 700)
    assert (each.flops, each.fused_params) == (at_once.flops, at_once.fused_params)


def test_a_base_without_bytes_has_no_segment(model):
    assert lay_out(model.base, model.adapters, BASE, ["empty"]) == []
