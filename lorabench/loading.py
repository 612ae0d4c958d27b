"""Base and factors on their way from files into memory, read ahead of what is made of them."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import isfinite

import torch
from torch import Tensor

from lorabench.adapter import Adapter
from lorabench.checkpoint import Checkpoint, torch_dtype
from lorabench.errors import AdapterError
from lorabench.fuse import Pair, as_matrix, factor_dtype
from lorabench.header import Entry
from lorabench.kernels import Scratch
from lorabench.readahead import Read, read_ahead
from lorabench.sweep import numbers

_NAMED = 3  # of the modules that a warning is about


def _ignore(name: str) -> None:
    """Do nothing after a pair."""


def read_factors(
    adapter: Adapter,
    device: torch.device | str = "cpu",
    rule: str | None = None,
    scratch: Scratch | None = None,
    after_pair: Callable[[str], None] = _ignore,
) -> dict[str, tuple[Pair, ...]]:
    """Read an adapter's factors onto a device; give the pairs for each touched weight's name.

    Parameters
    ----------
    rule
        Factors are rounded to what this rule rounds them to first; None leaves them as in the file.
    scratch
        What books the time.
    after_pair
        Called with that name when all of a pair is there.

    Raises
    ------
    FileError
        The file changed since it was opened, ended early, or can't be read.
    AdapterError
        A factor holds NaN or infinity, or does when rounded.

    Warns
    -----
    UserWarning
        A factor is all zeros, so that its module adds nothing.
    """
    device = torch.device(device)
    reads: list[Read] = []
    for held in adapter.pairs:
        dtype = factor_dtype(rule, torch_dtype(held.weight.dtype)) if rule else None
        entries = [entry for entry in (held.a, held.b) if entry is not None]
        reads += [Read(adapter.file, entry, empty(entry, device, dtype)) for entry in entries]
    pairs: dict[str, tuple[Pair, ...]] = {}
    modules: list[str] = []  # of each read
    sums: list[Tensor] = []
    with arriving(reads, scratch or Scratch(device)) as arrived:
        for held in adapter.pairs:
            a = None if held.a is None else next(arrived).into
            b = next(arrived).into
            for factor in (a, b):
                if factor is not None:
                    modules.append(held.module)
                    sums.append(factor.sum())
            pair = Pair(a, as_matrix(b), held.scale, held.top)
            pairs[held.weight.name] = (*pairs.get(held.weight.name, ()), pair)
            after_pair(held.weight.name)
    _check(adapter, reads, modules, numbers(sums))
    return pairs


def _check(
    adapter: Adapter, reads: Sequence[Read], modules: Sequence[str], sums: Sequence[float]
) -> None:
    """Look closer at factors whose sum is strange: values that are not finite, or all zeros."""
    zeros: dict[str, None] = {}
    for (_, entry, factor), module, total in zip(reads, modules, sums, strict=True):
        if not isfinite(total) and (bad := int((~factor.isfinite()).sum())):
            raise AdapterError(
                f"{adapter.file.path}: tensor '{entry.spec.name}': {bad:,} of {factor.numel():,} "
                f"values are not finite; the adapter is damaged or its training diverged"
            )
        if total == 0 and factor.numel() and not factor.any():
            zeros[module] = None
    if zeros:
        names = ", ".join(f"'{module}'" for module in [*zeros][:_NAMED])
        warnings.warn(
            f"{adapter.file.path}: {len(zeros)} of {len({*modules})} modules add nothing, for a "
            f"factor of theirs is all zeros: {names}{', ...' if len(zeros) > _NAMED else ''}; was "
            f"the adapter trained?",
            stacklevel=3,
        )


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
    return [Read(base, entry, tensors[name]) for name, entry in base.entries.items()]


def _booked(reads: Iterable[Read], arrived: Iterator[Read], scratch: Scratch) -> Iterator[Read]:
    for read in reads:
        with scratch.span("read", read.entry.spec.nbytes):
            next(arrived)
        yield read
