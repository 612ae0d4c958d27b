"""Checksums of bits, in integer arithmetic, so that every device gives the same ones.

A tensor's bytes are read as little-endian 64-bit words, each mixed with its own high bits,
w = word ^ (word >> 29). With odd coefficients c[i] that repeat every ``BLOCK`` words, a block's sum
is Σ w[i]·c[i] mod 2^64, and the tensor's sum chains the blocks: h = h·P + block. The mix can be
undone and an odd coefficient is invertible mod 2^64, so any one changed word changes its block's
sum, and an odd P carries the change to the end. Without the mix, a word's top bit would count
only as odd or even, and the signs of two values could change unseen.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from math import prod

import torch
from torch import Tensor

BLOCK = 1 << 18
"""Words in a block: 2 MiB, which stays in cache."""

BLOCK_BYTES = 8 * BLOCK

_CUDA_BLOCKS = 32
"""Blocks that are summed up before the host asks for the sums: 64 MiB, and as much again."""

_CPU_WORDS = 1 << 15
"""Words that go through numpy at once: they, what becomes of them and their coefficients are three
quarters of a MiB, which stays in a core's own cache."""

_SHARED_BYTES = 8 * BLOCK_BYTES
"""A tensor on the CPU of this size or more is shared out among threads, as many as torch has."""

_P = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a checksum of names, shapes, dtypes and bits, as 32 hex digits.

    The order of the mapping doesn't matter. Tensors must be contiguous.
    """
    # torch's own threads meet at a barrier after each operation; these at the end of a tensor.
    with ThreadPoolExecutor(torch.get_num_threads(), "digest") as pool:
        return combine({name: _sum_of(tensor, pool) for name, tensor in tensors.items()})


def combine(sums: Mapping[str, "BitSum"]) -> str:
    """Return :func:`digest` of tensors from the sums of their bits."""
    total = hashlib.blake2b(digest_size=16)
    for name in sorted(sums):
        bits = sums[name]
        total.update(f"{name!r} {bits.shape} {bits.dtype} {bits.value:016x}\n".encode())
    return total.hexdigest()


class BitSum:
    """The sum of one tensor's bits, taken from its bytes as they come.

    Parameters
    ----------
    pool
        Threads to share a big piece out among; by default the caller's alone does it.
    """

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, pool: ThreadPoolExecutor | None = None
    ) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self._pool = pool
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

    def _chain(self, total: int, data: Tensor) -> int:
        """Chain the sums of blocks of whole words."""
        # A slice of a tensor may not begin on a word, of the memory or of the tensor.
        aligned = data.clone() if data.data_ptr() % 8 or data.storage_offset() % 8 else data
        for block in self._sums(aligned.view(torch.int64)):
            total = (total * _P + block) & _MASK
        return total

    def _sums(self, words: Tensor) -> Iterable[int]:
        if words.device.type != "cpu":
            return _sums_on_device(words)
        if self._pool is None or words.nbytes < _SHARED_BYTES:
            return _sums_on_cpu(words)
        blocks = -(-len(words) // BLOCK)
        share = -(-blocks // torch.get_num_threads()) * BLOCK
        return (s for sums in self._pool.map(_sums_on_cpu, words.split(share)) for s in sums)


def _sum_of(tensor: Tensor, pool: ThreadPoolExecutor | None = None) -> BitSum:
    bits = BitSum(tensor.shape, tensor.dtype, pool)
    bits.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
    return bits


def _sums_on_cpu(words: Tensor) -> list[int]:
    """Return the sum of each block. In numpy: it has unsigned words, and half of torch's passes."""
    import numpy as np

    data = words.numpy().view(np.uint64)
    coefficients = _coefficients(words.device).numpy().view(np.uint64)
    mixed, shift, sums = np.empty(min(_CPU_WORDS, len(data)), np.uint64), np.uint64(29), []
    for top in range(0, len(data), BLOCK):
        block, total = data[top : top + BLOCK], 0
        for at in range(0, len(block), _CPU_WORDS):
            part = block[at : at + _CPU_WORDS]
            out = mixed[: len(part)]
            np.right_shift(part, shift, out=out)
            np.bitwise_xor(out, part, out=out)
            total += int(np.dot(out, coefficients[at : at + len(part)]))
        sums.append(total & _MASK)
    return sums


def _sums_on_device(words: Tensor) -> list[int]:
    """Return the sum of each block, many for each time that the host waits."""
    sums = []
    for some in words.split(_CUDA_BLOCKS * BLOCK):
        coefficients = _coefficients(words.device)
        # The shift is arithmetic: the mask takes off the signs that it brought in.
        mixed = (some >> 29).bitwise_and_(_MASK >> 29).bitwise_xor_(some)
        whole = len(some) // BLOCK * BLOCK
        sums += mixed[:whole].view(-1, BLOCK).mul_(coefficients).sum(1).tolist()
        if whole < len(some):
            sums.append(mixed[whole:].mul_(coefficients[: len(some) - whole]).sum().item())
    return sums


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
