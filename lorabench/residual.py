"""Unfuse exactly and in place, by keeping only what a subtraction would get wrong.

An unfuse computes the delta again, subtracts it from the fused weight, and corrects what comes out
(:mod:`lorabench.corrections`): one more pass, and no second copy of the weights.

It comes out right only if the delta has the same bits as when it was fused. So base bits leave a
checksum, and what comes out is held against it before a weight is written.

An f32 weight is kept as it is: R1 rounds it through bf16, which leaves nothing of its low bits. So
is an f16 weight, for which there is no code. Of a weight of which terms touch some rows only,
nothing is kept of the others.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lorabench.corrections import RAW, Corrections, decode, encode, guess_base, raw
from lorabench.cost import Work
from lorabench.errors import UnavailableError, WeightsLostError
from lorabench.fuse import Term, touched_rows
from lorabench.kernels import Scratch, Tiles

CHUNK = {"cpu": 1 << 20, "cuda": 1 << 23}
"""Elements coded together, by device: few enough for a CPU's cache, enough for a GPU's cores."""

COLUMNS = 1 << 10
"""Words in a row of a checksum."""


class _Kept(NamedTuple):
    """What is kept of a chunk that has terms fused in."""

    checksum: bytes  # of its base bits
    corrections: Corrections


@dataclass(frozen=True)
class _Fused:
    """A weight that has terms fused in, or some of its chunks have."""

    terms: tuple[Term, ...]
    setting: Mapping[str, object]
    tiles: dict[int, dict[int, _Kept]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Open:
    """Part of a weight that may be half written, and its base bits in scratch memory."""

    name: str
    part: Tensor
    base: Tensor
    books: dict[int, dict[int, _Kept]] | dict[int, _Kept]
    key: int

    def settle(self) -> None:
        """Write base bits, and keep nothing of the part; does no harm when repeated."""
        self.part.copy_(self.base)
        self.books.pop(self.key, None)


class Residual:
    """Keep what base bits differ by from the fused weight less the delta.

    Broken off anywhere, a fuse or restore leaves books from which the next restore gives base bits:
    they are in scratch memory before a part of a weight is first written, and what is kept of it
    goes only when it has them again.

    Parameters
    ----------
    tiles
        The kernel that computes the deltas.
    scratch
        Memory on the weights' device; nothing else is allocated but what is kept.
    """

    exact = True

    def __init__(self, tiles: Tiles, scratch: Scratch) -> None:
        self._tiles = tiles
        self._scratch = scratch
        self._fused: dict[str, _Fused] = {}
        self._open: _Open | None = None

    @property
    def kept_bytes(self) -> int:
        """Bytes of the corrections and checksums."""
        return sum(
            len(kept.checksum) + kept.corrections.data.nbytes
            for fused in self._fused.values()
            for chunks in fused.tiles.values()
            for kept in chunks.values()
        )

    def keep(self, name: str, weight: Tensor) -> Work:
        """Keep nothing: the weight has base bits now, whatever became of it before."""
        if self._open is not None and self._open.name == name:
            self._open = None
        self._fused.pop(name, None)
        return Work()

    def check(self) -> None:
        """Raise if deltas may not come out as they were fused.

        Within a process that depends on how torch is set to compute. One setting must have held for
        every fuse, and hold now.

        Raises
        ------
        UnavailableError
            The setting is another one than a weight was fused under.
        """
        now = _setting(self._scratch.device)
        settings = [fused.setting for fused in self._fused.values()]
        one = all(setting == settings[0] for setting in settings)
        remedy = "set it back, or call load()" if one else "others under another; call load()"
        for name, fused in self._fused.items():
            if changed := [key for key in now if fused.setting[key] != now[key]]:
                was, is_now = (
                    ", ".join(f"{key} = {setting[key]}" for key in changed)
                    for setting in (fused.setting, now)
                )
                raise UnavailableError(
                    f"restore 'residual': weight '{name}' was fused under {was}; now it is "
                    f"{is_now}, under which its delta may come out otherwise; {remedy} "
                    "(nothing was written)"
                )

    def fuse(self, name: str, weight: Tensor, terms: Sequence[Term]) -> Work:
        """Fuse terms into base bits ``weight [out, in]``, and keep the corrections."""
        self._settle()
        assert name not in self._fused, f"'{name}' has terms fused in"
        fused = _Fused(tuple(terms), _setting(self._scratch.device))
        self._fused[name] = fused
        for index, (tile, deltas) in enumerate(self._tiles(weight, terms, self._scratch)):
            base = self._scratch.take("residual.base", tuple(tile.shape), tile.dtype)
            with self._scratch.span("copy", nbytes=2 * tile.nbytes):
                base.copy_(tile)
            self._open = _Open(name, tile, base, fused.tiles, index)
            delta = self._sum(self._added(tile, deltas), terms)
            with self._scratch.span("restore", nbytes=tile.nbytes):
                fused.tiles[index] = self._encoded(tile, delta, base)
            self._open = None
        return pass_work(weight, terms)

    def restore(self, name: str, weight: Tensor, terms: Sequence[Term]) -> Work:
        """Turn ``weight`` back to base bits, whatever terms its parts have fused in.

        Raises
        ------
        WeightsLostError
            A part's base bits don't come out. It isn't written.
        """
        self._settle()
        if (fused := self._fused.get(name)) is None:
            return Work()
        for index, (tile, deltas) in enumerate(self._tiles(weight, fused.terms, self._scratch)):
            if chunks := fused.tiles.get(index):
                guessed = any(kept.corrections.width != RAW for kept in chunks.values())
                delta = self._sum(deltas, fused.terms) if guessed else tile
                self._decode(name, tile, delta, chunks)
        del self._fused[name]
        return pass_work(weight, fused.terms)

    def _settle(self) -> None:
        """Give base bits to what may be half written."""
        if self._open is not None:
            self._open.settle()
            self._open = None

    def _added(self, tile: Tensor, deltas: Iterator[Tensor]) -> Iterator[Tensor]:
        for delta in deltas:
            self._tiles.add(tile, delta, self._scratch)
            yield delta

    def _sum(self, deltas: Iterator[Tensor], terms: Sequence[Term]) -> Tensor:
        """Return the sum of a tile's deltas: the delta itself where there is but one."""
        # R1 and R4 add the terms up themselves.
        if len(terms) == 1 or self._tiles.rule in ("R1", "R4"):
            return next(deltas)
        total = None
        for delta in deltas:
            if total is None:
                total = self._scratch.take("residual.sum", tuple(delta.shape), torch.float32)
                total.copy_(delta)
            else:
                total.add_(delta)
        assert total is not None
        return total

    def _encoded(self, tile: Tensor, delta: Tensor, base: Tensor) -> dict[int, _Kept]:
        kept = {}
        for key, (fused, subtrahend, bits) in enumerate(_chunks(tile, delta, base)):
            if tile.dtype == torch.bfloat16:
                guess = self._scratch.take("residual.guess", tuple(bits.shape), bits.dtype)
                guess_base(fused, subtrahend, guess, self._scratch)
                corrections = encode(bits, guess, self._scratch)
            else:
                corrections = raw(bits)
            kept[key] = _Kept(_checksum(bits, self._scratch), corrections)
        return kept

    def _decode(self, name: str, tile: Tensor, delta: Tensor, chunks: dict[int, _Kept]) -> None:
        """Give base bits to the chunks of a tile that don't have them."""
        for key, (fused, subtrahend) in enumerate(_chunks(tile, delta)):
            if (kept := chunks.get(key)) is None:
                continue
            base = self._scratch.take("residual.guess", tuple(fused.shape), fused.dtype)
            if kept.corrections.width != RAW:
                guess_base(fused, subtrahend, base, self._scratch)
            decode(kept.corrections, base, self._scratch)
            if _checksum(base, self._scratch) != kept.checksum:
                raise WeightsLostError(
                    f"restore 'residual': the base bits of weight '{name}' don't come out; its "
                    "factors, or how torch computes, changed since they were fused (the wrong "
                    "bits were not written); call load()"
                )
            self._open = _Open(name, fused, base, chunks, key)
            self._settle()


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cut tensors of one size into flat parts, side by side."""
    size = CHUNK[tensors[0].device.type]
    return zip(*(tensor.view(-1).split(size) for tensor in tensors), strict=True)


def _checksum(bits: Tensor, scratch: Scratch) -> bytes:
    """Return a checksum of a chunk's bits, from the sums of 64-bit words over rows and columns.

    Any three changed words or fewer change a sum. More may not, if their changes cancel out in each
    row and in each column; those of a delta that was summed in another order have no reason to.
    """
    data = bits.view(torch.uint8)
    rows = len(data) // (8 * COLUMNS)
    words = data[: 8 * COLUMNS * rows].view(torch.int64).view(rows, COLUMNS)
    sums = scratch.take("residual.sums", (rows + COLUMNS,), torch.int64)
    torch.sum(words, 1, out=sums[:rows])
    torch.sum(words, 0, out=sums[rows:])
    checksum = hashlib.blake2b(sums.cpu().numpy().data, digest_size=8)
    checksum.update(data[8 * COLUMNS * rows :].cpu().numpy().data)
    return checksum.digest()


def pass_work(weight: Tensor, terms: Sequence[Term]) -> Work:
    """Return what it takes to fuse terms into a weight, or to take their delta off again."""
    return Work(
        flops=sum(pair.flops for pair, _ in terms),
        fused_params=touched_rows(terms) * weight.shape[1],
    )


def _setting(device: torch.device) -> dict[str, object]:
    """Return what torch computes under, as far as it may change the bits of a product."""
    backends: Any = torch.backends  # makes attributes that no type checker sees
    mkldnn = backends.mkldnn
    tiny = torch.tensor(1e-40, dtype=torch.float32, device="cpu")
    setting: dict[str, object] = {
        "torch.get_num_threads()": torch.get_num_threads(),
        "torch.backends.fp32_precision": backends.fp32_precision,
        "torch.backends.mkldnn.enabled": mkldnn.enabled,
        "torch.backends.mkldnn.fp32_precision": mkldnn.fp32_precision,
        "torch.backends.mkldnn.matmul.fp32_precision": mkldnn.matmul.fp32_precision,
        "torch.are_deterministic_algorithms_enabled()": (
            torch.are_deterministic_algorithms_enabled()
        ),
        "torch.set_flush_denormal": bool(tiny * 1 == 0),
    }
    if device.type == "cuda":
        matmul = backends.cuda.matmul
        setting |= {
            "torch.backends.cuda.matmul.fp32_precision": matmul.fp32_precision,
            "torch.backends.cuda.matmul.allow_fp16_accumulation": matmul.allow_fp16_accumulation,
            "torch.backends.cuda.preferred_blas_library()": backends.cuda.preferred_blas_library(),
        }
    return setting
