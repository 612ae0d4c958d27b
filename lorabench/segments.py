"""A pass over a base's file, laid out before it is read: what is in memory together, and where.

A **segment** is a run of the base's bytes with the factors that its weights need, 32 MiB or so.
Within it the unit is the **tile**: the rows of a weight that kernel ``gemm`` multiplies at a time
(:class:`lorabench.kernels.Tiles`), so that weights fused tile by tile come out of the same products
as whole ones, and have the same bits. The same pairs touch all rows of a tile.

A segment holds all that its tiles need (their rows of B, and A again where a weight goes over
several segments), so that no two segments share memory, and none waits for another's.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

from lorabench.adapter import Adapter
from lorabench.checkpoint import Checkpoint
from lorabench.cost import Work
from lorabench.directio import BLOCK, round_up
from lorabench.geometry import TensorSpec
from lorabench.header import Entry
from lorabench.kernels.gemm import tile_rows
from lorabench.pairing import PairEntry
from lorabench.recipe import State
from lorabench.rows import stretches

SEGMENT_BYTES = 32 << 20


class Read(NamedTuple):
    """Bytes ``[begin, end)`` of a file, in whole blocks from ``at`` in a segment's memory."""

    file: Path
    begin: int
    end: int
    at: int

    @property
    def first(self) -> int:
        """Where byte ``begin`` lies in the memory."""
        return self.at + self.begin % BLOCK

    @property
    def after(self) -> int:
        """Where the memory is free again."""
        return self.at + round_up(self.begin % BLOCK + self.end - self.begin)


class Piece(NamedTuple):
    """Bytes of one tensor from its byte ``begin`` on, as they lie in a segment's memory."""

    spec: TensorSpec  # of the whole tensor
    begin: int
    at: int
    nbytes: int

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.spec.name

    @property
    def last(self) -> bool:
        """Whether the tensor ends here."""
        return self.begin + self.nbytes == self.spec.nbytes


class Rows(NamedTuple):
    """Rows of a tensor, as they lie in a segment's memory; ``spec`` is theirs: always a matrix."""

    spec: TensorSpec
    at: int


class Factors(NamedTuple):
    """What one adapter adds to a tile."""

    a: Rows | None  # [rank, in]
    b: Rows  # [rows, rank], or without A the delta [rows, in]
    scale: float
    strength: float
    file: Path


class Tile(NamedTuple):
    """Rows of a touched weight, and the factors to fuse into them, in the state's order."""

    weight: Rows  # [rows, in]
    top: int  # the first row's number in the whole weight
    factors: tuple[Factors, ...]


class Segment(NamedTuple):
    """What is in memory together; the base's reads come first, one for each gapless run."""

    reads: tuple[Read, ...]
    pieces: tuple[Piece, ...]
    tiles: tuple[Tile, ...]

    @property
    def memory_bytes(self) -> int:
        """Memory that it takes, in whole blocks."""
        return self.reads[-1].after

    @property
    def base_memory(self) -> slice:
        """Where the bytes of a gapless base lie, with what shares their first block."""
        first = self.reads[0]
        return slice(first.at, first.first + first.end - first.begin)

    @property
    def base_bytes(self) -> int:
        """Bytes of the base's tensors."""
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def work(self) -> Work:
        """What passing it takes, factors that are read again included."""
        return Work(
            flops=sum(
                2 * tile.weight.spec.params * factors.a.spec.shape[0]
                for tile in self.tiles
                for factors in tile.factors
                if factors.a is not None
            ),
            file_bytes=sum(read.end - read.begin for read in self.reads),
            fused_params=sum(tile.weight.spec.params for tile in self.tiles),
        )


def lay_out(
    base: Checkpoint,
    adapters: Mapping[str, Adapter],
    state: State,
    names: Iterable[str] | None = None,
    limit: int = SEGMENT_BYTES,
) -> list[Segment]:
    """Divide a pass into a state, in the order of the files' bytes; a file's end ends a segment.

    Parameters
    ----------
    names
        The base's tensors to pass; all of them by default.
    limit
        Bytes of a segment, unless one tile is larger.
    """
    wanted = base.entries.keys() if names is None else set(names)
    files = {file: number for number, file in enumerate(base.stamps)}
    entries = sorted(
        (entry for name, entry in base.entries.items() if name in wanted and entry.spec.nbytes),
        key=lambda entry: (files[entry.file], entry.offset),
    )
    pairs: dict[str, list[_Bound]] = {}
    for role, strength in state.items():
        for pair in adapters[role].pairs:
            pairs.setdefault(pair.weight.name, []).append(_Bound(pair, strength))
    laid: list[Segment] = []
    held: list[_Part] = []
    nbytes = 0
    for entry in entries:
        for part in _parts(entry, pairs.get(entry.spec.name, ()), limit):
            full = nbytes + part.nbytes > limit
            if held and (full or held[-1].entry.file != entry.file):
                laid.append(_segment(held))
                held, nbytes = [], 0
            held.append(part)
            nbytes += part.nbytes
    return [*laid, _segment(held)] if held else laid


class _Bound(NamedTuple):
    pair: PairEntry
    strength: float


class _Part(NamedTuple):
    """What goes into a segment undivided: a tile, or some bytes that no pair touches."""

    entry: Entry
    begin: int  # in the file
    end: int
    rows: range  # of the weight, if it is a tile
    pairs: Sequence[_Bound]

    @property
    def nbytes(self) -> int:
        factors = sum(
            (pair.a.spec.nbytes if pair.a else 0) + len(self.rows) * _row_bytes(pair.b)
            for pair, _ in self.pairs
        )
        return self.end - self.begin + factors


def _parts(entry: Entry, pairs: Sequence[_Bound], limit: int) -> Iterator[_Part]:
    """Divide a tensor: tiles where pairs touch it, and the bytes before, between and after them."""
    at, end = entry.offset, entry.offset + entry.spec.nbytes
    for rows, mine in stretches([bound.pair.rows for bound in pairs]):
        begin = entry.offset + rows.start * _row_bytes(entry)
        yield from _untouched(entry, at, begin, limit)
        step = tile_rows(prod(entry.spec.shape[1:]))
        for top in range(rows.start, rows.stop, step):
            tile = range(top, min(top + step, rows.stop))
            at = begin + len(tile) * _row_bytes(entry)
            yield _Part(entry, begin, at, tile, [pairs[i] for i in mine])
            begin = at
    yield from _untouched(entry, at, end, limit)


def _untouched(entry: Entry, begin: int, end: int, limit: int) -> Iterator[_Part]:
    for at in range(begin, end, limit):
        yield _Part(entry, at, min(at + limit, end), range(0), ())


def _row_bytes(entry: Entry) -> int:
    return entry.spec.nbytes // entry.spec.shape[0]


def _segment(parts: Sequence[_Part]) -> Segment:
    reads: list[Read] = []
    placed: dict[tuple[Path, int, int], int] = {}

    def place(file: Path, begin: int, end: int) -> int:
        """Return where these bytes will lie; what follows on another's end is read with it."""
        if (file, begin, end) not in placed:
            if reads and (reads[-1].file, reads[-1].end) == (file, begin):
                reads[-1] = reads[-1]._replace(end=end)
            else:
                reads.append(Read(file, begin, end, reads[-1].after if reads else 0))
            placed[file, begin, end] = reads[-1].first + begin - reads[-1].begin
        return placed[file, begin, end]

    def place_rows(entry: Entry, rows: range) -> Rows:
        name, shape, dtype = entry.spec.name, entry.spec.shape, entry.spec.dtype
        spec = TensorSpec(name, (len(rows), prod(shape[1:])), dtype)
        begin = entry.offset + rows.start * _row_bytes(entry)
        return Rows(spec, place(entry.file, begin, begin + spec.nbytes))

    pieces = []
    for part in parts:
        at = place(part.entry.file, part.begin, part.end)
        begin = part.begin - part.entry.offset
        pieces.append(Piece(part.entry.spec, begin, at, part.end - part.begin))
    tiles = []
    for part in parts:
        if part.pairs:
            factors = tuple(
                Factors(
                    place_rows(pair.a, range(pair.rank)) if pair.a else None,
                    place_rows(pair.b, _from(pair.top, part.rows)),
                    pair.scale,
                    strength,
                    pair.b.file,
                )
                for pair, strength in part.pairs
            )
            tiles.append(Tile(place_rows(part.entry, part.rows), part.rows.start, factors))
    return Segment(tuple(reads), tuple(pieces), tuple(tiles))


def _from(top: int, rows: range) -> range:
    """Count rows from another first one."""
    return range(rows.start - top, rows.stop - top)
