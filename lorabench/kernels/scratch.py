"""Working memory that passes share, so that a pass after the first allocates nothing."""

import platform
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from math import prod
from typing import Protocol

import torch
from torch import Tensor


class Books(Protocol):
    """What keeps account of where a pass's time goes: see :class:`lorabench.account.Account`."""

    def book(self, operation: str, nbytes: int, flops: int) -> AbstractContextManager[object]:
        """Return a block whose seconds are an operation's."""
        ...


_OFF = nullcontext()


class Scratch:
    """Named flat buffers on one device, each grown to the largest request so far.

    Fresh memory costs page faults on every touch: up to 2.5 times a pass's own time on a CPU.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.account: Books | None = None
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor with undefined content; a later take of the name reuses it."""
        size = prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(size, dtype=dtype, device=self.device)
            self._buffers[name, dtype] = buffer
        return buffer[:size].view(shape)

    def span(
        self, operation: str, nbytes: int = 0, flops: int = 0
    ) -> AbstractContextManager[object]:
        """Return a block that is booked as an operation, if account is kept; else an empty one.

        Operations are read, copy, product, add, restore and write; ``nbytes`` counts what is read
        from memory and what is written to it.
        """
        return _OFF if self.account is None else self.account.book(operation, nbytes, flops)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.nbytes for buffer in self._buffers.values())


@cache
def product_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which B @ A is fastest on a device; the sums are f32 either way.

    bf16 on a GPU and on CPUs with bf16 instructions. On other CPUs torch multiplies bf16 matrices
    in a scalar loop of its own, some 200 times slower than the f32 product of the widened factors.
    """
    if device.type != "cpu":
        return torch.bfloat16
    has_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if platform.machine().lower() in ("x86_64", "amd64"):
        has_bf16 = has_bf16 and torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if has_bf16 else torch.float32
