"""What turns a guess at bf16 weights into the weights, coded in few bits.

Where fused = rb(base + delta), the guess rb(fused - delta) has the base's bits in most elements,
and nearly always a neighbour's in the rest. A *correction* is base bits less the guess's, as 16-bit
integers. Few are not 0, those are small, and one byte codes nearly each of them.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import isnan, log2
from typing import NamedTuple

import torch
from torch import Tensor

from lorabench.fuse import Term
from lorabench.kernels import Scratch, Tiles

RAW = 0
"""The width where base bits are kept as they are."""

WIDTHS = ((0.09, 2), (0.19, 3), (0.36, 4), (1.0, 5))
"""Bits of a code's operation, by the largest share of corrected elements that they are best for.

Found by trying all on normal, uniform, Laplace and Student t weights, and on rows of unlike size.
"""

ABSOLUTE = -128
"""The excess that says to take base bits."""


class Corrections(NamedTuple):
    """The corrections of some elements, coded.

    ``data`` holds, one after another, the base bits of ``absolutes`` elements (int16), ``excesses``
    excesses (int8), and codes: one byte for each corrected element, in their order. A code's upper
    ``width`` bits are its operation, the others count the elements between this one and the one
    before. Operations are corrections of -limit to limit, where limit = 2^(width-1) - 1, and one
    that says to correct by limit + 1 and an excess. An excess of -128 says to take base bits, which
    serves for what is farther off and for guesses that are NaN. Corrections of 0 bridge what is too
    wide for one code.
    """

    width: int
    absolutes: int
    excesses: int
    data: Tensor  # uint8 [2 * absolutes + excesses + codes]

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Base bits (int16), excesses (int8) and codes (uint8), in ``data``."""
        bits, excesses, codes = self.data.tensor_split((2 * self.absolutes, self._codes_at))
        return bits.view(torch.int16), excesses.view(torch.int8), codes

    @property
    def _codes_at(self) -> int:
        return 2 * self.absolutes + self.excesses


def guess_base(fused: Tensor, delta: Tensor, guess: Tensor, scratch: Scratch) -> None:
    """Write rb(fused - delta) to ``guess``, all ``[n]`` and bf16; a delta may be f32."""
    if delta.dtype == torch.bfloat16:
        torch.sub(fused, delta, out=guess)
    else:
        wide = _take(scratch, "wide", len(fused), torch.float32)
        guess.copy_(wide.copy_(fused).sub_(delta))


def raw(base: Tensor) -> Corrections:
    """Return what gives base bits ``[n]`` of any dtype without a guess."""
    return Corrections(RAW, 0, 0, base.view(torch.uint8).clone())


def encode(base: Tensor, guess: Tensor, scratch: Scratch) -> Corrections:
    """Return what turns a guess into base bits, both bf16 ``[n]``; never more bytes than they."""
    bits, near = base.view(torch.int16), guess.view(torch.int16)
    size = len(bits)
    # Torch converts integers to bools several times faster than it compares them.
    wrong = _take(scratch, "wrong", size, torch.bool)
    wrong.copy_(torch.bitwise_xor(bits, near, out=_take(scratch, "xor", size, torch.int16)))
    # Torch's vector path gives a NaN other bits than its scalar path, so one that is right now
    # needn't be the next time. Any NaN shows in the sum.
    nan = None
    if isnan(torch.sum(guess, 0, out=_take(scratch, "total", 1, guess.dtype)[0]).item()):
        nan = torch.ne(guess, guess, out=_take(scratch, "nan", size, torch.bool))
        wrong.logical_or_(nan)
    at = _nonzero(wrong, "at", scratch)
    count = len(at)
    width = next(width for share, width in WIDTHS if count <= share * size)
    limit, gap_bits = (1 << width - 1) - 1, 8 - width

    values = _select(bits, at, "values", scratch)
    values.sub_(_select(near, at, "near", scratch))
    # As unsigned numbers, what is below -limit is above limit too.
    codes = _take(scratch, "codes", count, torch.int64).copy_(values)
    codes.add_(limit).bitwise_and_(0xFFFF).clamp_max_(2 * limit + 1)
    if nan is not None:
        codes.masked_fill_(_select(nan, at, "nan at", scratch), 2 * limit + 1)
    exceeds = torch.eq(codes, 2 * limit + 1, out=_take(scratch, "exceeds", count, torch.bool))
    which = _nonzero(exceeds, "which", scratch)
    exceeding = _select(at, which, "exceeding", scratch)
    rest = _select(values, which, "rest", scratch).sub_(limit + 1)
    excess = _take(scratch, "excess", len(which), torch.int8).copy_(rest)
    # What changes on the way to an int8 and back doesn't fit.
    back = _take(scratch, "back", len(which), torch.int16).copy_(excess)
    far = torch.ne(rest, back, out=_take(scratch, "far", len(which), torch.bool))
    if nan is not None:
        far.logical_or_(_select(nan, exceeding, "nan exceeding", scratch))
    excess.masked_fill_(far, ABSOLUTE)
    absolute = _nonzero(torch.eq(excess, ABSOLUTE, out=far), "absolute", scratch)

    # Elements between each corrected one and the one before it.
    gaps = _take(scratch, "gaps", count, torch.int64)
    gaps[:1].copy_(at[:1])
    torch.sub(at[1:], at[:-1], out=gaps[1:])
    gaps[1:].sub_(1)
    # A correction of 0 takes 2^gap_bits elements off a gap.
    places = _take(scratch, "places", count, torch.int64)
    torch.bitwise_right_shift(gaps, gap_bits, out=places).add_(1).cumsum_(0)
    codes.bitwise_left_shift_(gap_bits).bitwise_or_(gaps.bitwise_and_((1 << gap_bits) - 1))

    nbytes = 2 * len(absolute) + len(which) + (int(places[-1]) if count else 0)
    if nbytes >= base.nbytes:
        return raw(base)
    coded = Corrections(
        width,
        len(absolute),
        len(which),
        torch.empty(nbytes, dtype=torch.uint8, device=base.device),
    )
    kept_bits, kept_excess, kept_codes = coded.parts
    torch.index_select(bits, 0, _select(exceeding, absolute, "at absolute", scratch), out=kept_bits)
    kept_excess.copy_(excess)
    kept_codes.fill_((limit << gap_bits) + (1 << gap_bits) - 1)
    code_bytes = _take(scratch, "code bytes", count, torch.uint8).copy_(codes)
    kept_codes.scatter_(0, places.sub_(1), code_bytes)
    return coded


def decode(coded: Corrections, guess: Tensor, scratch: Scratch) -> None:
    """Turn a guess ``[n]`` into base bits, in place; of raw ones, anything will do as a guess."""
    if coded.width == RAW:
        guess.view(torch.uint8).copy_(coded.data)
        return
    bits = guess.view(torch.int16)
    kept_bits, kept_excess, codes = coded.parts
    limit, gap_bits = (1 << coded.width - 1) - 1, 8 - coded.width
    part = _take(scratch, "part", len(codes), torch.uint8)
    at = _take(scratch, "at", len(codes), torch.int64)
    at.copy_(torch.bitwise_and(codes, (1 << gap_bits) - 1, out=part).add_(1))
    at[:1].sub_(1)
    at.cumsum_(0)
    torch.bitwise_right_shift(codes, gap_bits, out=part)
    values = _take(scratch, "values", len(codes), torch.int16).copy_(part).sub_(limit)
    bits.scatter_add_(0, at, values)
    if not coded.excesses:
        return
    # Adding 1 carries into bit ``width`` from an operation of all ones only.
    exceeds = part.add_(1).bitwise_right_shift_(coded.width).view(torch.bool)
    exceeding = _select(at, _nonzero(exceeds, "which", scratch), "exceeding", scratch)
    rest = _take(scratch, "rest", coded.excesses, torch.int16).copy_(kept_excess)
    bits.scatter_add_(0, exceeding, rest)
    if coded.absolutes:
        far = torch.eq(rest, ABSOLUTE, out=_take(scratch, "far", coded.excesses, torch.bool))
        absolute = _nonzero(far, "absolute", scratch)
        bits.scatter_(0, _select(exceeding, absolute, "at absolute", scratch), kept_bits)


class Entropy(NamedTuple):
    """The fewest bits a weight that a code of single corrections could take."""

    bits: float
    given_exponent: float
    """Where the code knows by how much the fused weight's exponent is above the guess's."""


def correction_entropy(
    weights: Iterable[tuple[Tensor, Sequence[Term]]], tiles: Tiles, scratch: Scratch
) -> Entropy:
    """Return the entropy of the corrections of weights (base bits ``[out, in]``, bf16) with terms.

    It is that of the frequencies of the corrections of all weights together. The weights aren't
    changed; of each, as much memory again is taken.
    """
    counts: Counter[tuple[int, int]] = Counter()  # of (rise of the exponent, correction)
    for base, terms in weights:
        fused = base.clone()
        for tile, deltas in tiles(fused, terms, scratch):
            kept, total = tile.clone(), torch.zeros(tile.shape, device=tile.device)
            for delta in deltas:
                tiles.add(tile, delta, scratch)
                total += delta
            guess = torch.empty_like(tile)
            guess_base(tile.view(-1), total.view(-1), guess.view(-1), scratch)
            kept, near, bits = (x.view(torch.int16).int() for x in (kept, guess, tile))
            rise = (bits >> 7 & 0xFF) - (near >> 7 & 0xFF)
            pairs = (rise << 16 | kept - near & 0xFFFF).unique(return_counts=True)
            for pair, count in zip(*(x.tolist() for x in pairs), strict=True):
                counts[pair >> 16, pair & 0xFFFF] += count
    alone, rises = Counter[int](), Counter[int]()
    for (rise, correction), count in counts.items():
        alone[correction] += count
        rises[rise] += count
    size = max(1, counts.total())
    given = _bits(counts.values()) - _bits(rises.values())
    return Entropy(_bits(alone.values()) / size, given / size)


def _bits(counts: Iterable[int]) -> float:
    """Return the information in all draws together, from how often each thing was drawn."""
    counts = list(counts)
    total = sum(counts)
    return sum(count * log2(total / count) for count in counts)


def _take(scratch: Scratch, name: str, size: int, dtype: torch.dtype) -> Tensor:
    return scratch.take(f"residual.{name}", (size,), dtype)


def _nonzero(mask: Tensor, name: str, scratch: Scratch) -> Tensor:
    """Return where a mask ``[n]`` is set, in scratch memory."""
    # An output without elements may be resized, and keeps to its memory where that is enough.
    out = _take(scratch, name, len(mask), torch.int64)[:0].view(0, 1)
    return torch.nonzero(mask, out=out).view(-1)


def _select(source: Tensor, at: Tensor, name: str, scratch: Scratch) -> Tensor:
    """Return the elements of a tensor at indices, in scratch memory."""
    return torch.index_select(source, 0, at, out=_take(scratch, name, len(at), source.dtype))
