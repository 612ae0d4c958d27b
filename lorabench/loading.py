"""Base and factors on their way from files into memory, read ahead of what is made of them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lorabench.adapter import Adapter
from lorabench.checkpoint import Checkpoint, torch_dtype
from lorabench.errors import AdapterError
from lorabench.fuse import Pair
from lorabench.header import Entry
from lorabench.kernels import Scratch
from lorabench.readahead import Read, read_ahead
from lorabench.sweep import not_finite


def read_factors(
    adapter: Adapter,
    device: torch.device,
    dtype: torch.dtype | None,
    scratch: Scratch,
    after_pair: Callable[[str], None],
) -> dict[str, Pair]:
    """Read an adapter's factors onto a device; give a pair for each touched weight's name.

    Parameters
    ----------
    dtype
        What the factors are rounded to; None leaves them as they are in the file.
    after_pair
        Called with that name when both factors are there.

    Raises
    ------
    FileError
        The file changed since it was opened, ended early, or can't be read.
    AdapterError
        A factor holds NaN or infinity, or does when rounded.
    """
    reads = [
        Read(adapter.file, factor.spec.name, empty(factor, device, dtype))
        for pair in adapter.pairs
        for factor in (pair.a, pair.b)
    ]
    pairs: dict[str, Pair] = {}
    sums: dict[str, Tensor] = {}
    with arriving(reads, scratch) as arrived:
        for entry in adapter.pairs:
            a, b = next(arrived), next(arrived)
            sums |= {factor.name: factor.into.sum() for factor in (a, b)}
            pairs[entry.weight.name] = Pair(a.into, b.into, adapter.scale)
            after_pair(entry.weight.name)
    for name in not_finite(sums):
        factor = next(read.into for read in reads if read.name == name)
        if bad := int((~factor.isfinite()).sum()):
            raise AdapterError(
                f"{adapter.file.path}: tensor '{name}': {bad:,} of {factor.numel():,} values are "
                f"not finite; the adapter is damaged or its training diverged"
            )
    return pairs


@contextmanager
def arriving(reads: Sequence[Read], scratch: Scratch) -> Iterator[Iterator[Read]]:
    """Read ahead, and book what is waited for: see :func:`lorabench.readahead.read_ahead`."""
    with read_ahead(reads) as arrived:
        yield _booked(reads, arrived, scratch)


def empty(entry: Entry, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return memory for a file's tensor; it isn't touched yet."""
    return torch.empty(
        entry.spec.shape, dtype=dtype or torch_dtype(entry.spec.dtype), device=device
    )


def base_reads(base: Checkpoint, tensors: dict[str, Tensor], device: torch.device) -> list[Read]:
    """Return a read of each of a base's tensors, into the memory that it has or is given now."""
    for name, entry in base.entries.items():
        if name not in tensors:
            tensors[name] = empty(entry, device)
    return [Read(base, name, tensors[name]) for name in base.entries]


def _booked(reads: Iterable[Read], arrived: Iterator[Read], scratch: Scratch) -> Iterator[Read]:
    for read in reads:
        with scratch.span("read", read.file.entries[read.name].spec.nbytes):
            next(arrived)
        yield read
