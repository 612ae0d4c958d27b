"""Checksums of bits, in integer arithmetic, so that every device gives the same ones.

A tensor's bytes are read as little-endian 64-bit words, each mixed with its own high bits,
w = word ^ (word >> 29). With odd coefficients c[i] that repeat every ``BLOCK`` words, a block's sum
is Σ w[i]·c[i] mod 2^64, and the tensor's sum chains the blocks: h = h·P + block. The mix can be
undone and an odd coefficient is invertible mod 2^64, so any one changed word changes its block's
sum, and an odd P carries the change to the end. Without the mix, a word's top bit would count
only as odd or even, and the signs of two values could change unseen.
"""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from math import prod

import torch
from torch import Tensor

BLOCK = 1 << 18
"""Words in a block: 2 MiB, which stays in cache."""

BLOCK_BYTES = 8 * BLOCK

_P = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a checksum of names, shapes, dtypes and bits, as 32 hex digits.

    The order of the mapping doesn't matter. Tensors must be contiguous.
    """
    return combine({name: _sum_of(tensor) for name, tensor in tensors.items()})


def combine(sums: Mapping[str, "BitSum"]) -> str:
    """Return :func:`digest` of tensors from the sums of their bits."""
    total = hashlib.blake2b(digest_size=16)
    for name in sorted(sums):
        bits = sums[name]
        total.update(f"{name!r} {bits.shape} {bits.dtype} {bits.value:016x}\n".encode())
    return total.hexdigest()


class BitSum:
    """The sum of one tensor's bits, taken from its bytes as they come."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self._left = prod(self.shape) * dtype.itemsize  # bytes to come
        self._total = self._left  # two tensors of zeros differ by their size
        # Less than a block; none at the end, for any memory kept by each of a model's thousands of
        # tensors keeps glibc's heap from using again the large freed block that lies before it.
        self._pending: Tensor | None = None

    def update(self, data: Tensor) -> None:
        """Take the next bytes, ``uint8 [n]``, always on one device."""
        if not data.numel():
            return
        self._left -= data.numel()
        if self._pending is not None:
            data = torch.cat((self._pending, data))
        unit = BLOCK_BYTES if self._left else 8
        whole = data.numel() // unit * unit
        self._total = self._chain(self._total, data[:whole])
        rest = data[whole:]
        if self._left:
            self._pending = rest.clone() if rest.numel() else None
        else:
            tail = int.from_bytes(bytes(rest.tolist()), "little")
            self._total = (self._total * _P + tail) & _MASK
            self._pending = None

    @property
    def value(self) -> int:
        """The sum, once every byte was given; below 2^64."""
        assert not self._left, f"{self._left} bytes are missing"
        return self._total

    @staticmethod
    def _chain(total: int, data: Tensor) -> int:
        """Chain the sums of blocks of whole words."""
        if not data.numel():  # which would split into one empty block
            return total
        # A slice of a tensor may not begin on a word, of the memory or of the tensor.
        aligned = data.clone() if data.data_ptr() % 8 or data.storage_offset() % 8 else data
        for words in aligned.view(torch.int64).split(BLOCK):
            mixed = (words >> 29).bitwise_and_(_MASK >> 29).bitwise_xor_(words)
            block = mixed.mul_(_coefficients(words.device)[: words.numel()]).sum()
            total = (total * _P + int(block.item())) & _MASK
        return total


def _sum_of(tensor: Tensor) -> BitSum:
    bits = BitSum(tensor.shape, tensor.dtype)
    bits.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
    return bits


@cache
def _coefficients(device: torch.device) -> Tensor:
    """Return odd 64-bit numbers from splitmix64 (Steele, Lea, Flood 2014), made on the CPU."""
    import numpy as np

    with np.errstate(over="ignore"):
        z = np.arange(1, BLOCK + 1, dtype=np.uint64) * np.uint64(_P)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(z.view(np.int64)).to(device)
