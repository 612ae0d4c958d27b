"""Checksums of bits, in integer arithmetic, so that every device gives the same ones.

A tensor's bytes are read as little-endian 64-bit words, each mixed with its own high bits,
w = word ^ (word >> 29). With odd coefficients c[i] that repeat every ``BLOCK`` words, a block's sum
is Σ w[i]·c[i] mod 2^64, and the tensor's sum chains the blocks: h = h·P + block. The mix can be
undone and an odd coefficient is invertible mod 2^64, so any one changed word changes its block's
sum, and an odd P carries the change to the end. Without the mix, a word's top bit would count
only as odd or even, and the signs of two values could change unseen.
"""

import hashlib
from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

BLOCK = 1 << 18
"""Words in a block: 2 MiB, which stays in cache."""

_P = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a checksum of names, shapes, dtypes and bits, as 32 hex digits.

    The order of the mapping doesn't matter. Tensors must be contiguous.
    """
    total = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        line = f"{name!r} {tuple(tensor.shape)} {tensor.dtype} {_sum_bits(tensor):016x}\n"
        total.update(line.encode())
    return total.hexdigest()


def _sum_bits(tensor: Tensor) -> int:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    total = data.numel()  # two tensors of zeros differ by their size
    if whole:
        # A tensor that is a slice of another may not begin on a word.
        aligned = data[:whole] if data.data_ptr() % 8 == 0 else data[:whole].clone()
        for words in aligned.view(torch.int64).split(BLOCK):
            mixed = (words >> 29).bitwise_and_(_MASK >> 29).bitwise_xor_(words)
            block = mixed.mul_(_coefficients(words.device)[: words.numel()]).sum()
            total = (total * _P + int(block.item())) & _MASK
    tail = int.from_bytes(bytes(data[whole:].tolist()), "little")
    return (total * _P + tail) & _MASK


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
