"""Segments of a base passed through memory: read, fused and given on, all three at once.

A dozen segments are in memory, whatever the model's size: being read, waiting, being fused,
waiting again, and one being given on. One thread reads; the others fuse tiles, each with its own
scratch memory and its own share of torch's threads; the caller takes the segments in order.
"""

import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from itertools import cycle
from pathlib import Path
from threading import local

import torch
from torch import Tensor

from lorabench.adapter import Adapter
from lorabench.adapter_file import few
from lorabench.checkpoint import Checkpoint, torch_dtype
from lorabench.directio import Reader, aligned_memory
from lorabench.errors import AdapterError, UnavailableError
from lorabench.fuse import Pair, Term, as_matrix
from lorabench.kernels import Kernel, Scratch, finite_if_all, get_kernel, one_nan
from lorabench.progress import progress
from lorabench.readahead import ahead
from lorabench.segments import Rows, Segment, Tile

BUFFERS = 12  # so that a disk that hesitates stops neither reader nor workers
MAX_WORKERS = 4  # each holds some 130 MB of scratch at LTX-2.5's width

STREAMED_KERNELS = ("gemm", "scalar")
"""Kernels that give a row the same bits in whichever tile; the reference wants weights whole."""


def get_streamed_kernel(name: str, rule: str = "R1") -> Kernel:
    """Return a kernel by name, for tiles on the CPU and a rounding rule.

    Raises
    ------
    UnavailableError
        No such kernel or rule, or it can't be given tiles.
    """
    kernel = get_kernel(name, torch.device("cpu"), rule)
    if name not in STREAMED_KERNELS:
        raise UnavailableError(
            f"kernel '{name}' can't be streamed: it wants a weight whole; choose from "
            f"{', '.join(STREAMED_KERNELS)}"
        )
    return kernel


def stream(
    segments: Sequence[Segment],
    base: Checkpoint,
    adapters: Mapping[str, Adapter],
    kernel: Kernel | None,
) -> Generator[tuple[Segment, Tensor], None, None]:
    """Read segments and fuse their tiles; give each in order, with its memory as ``uint8 [n]``.

    The memory is the caller's until it asks for the next segment. Meanwhile torch's threads are
    shared out among the workers, which for a program's other products is as if it had set fewer.

    Parameters
    ----------
    kernel
        None leaves the base's bits: reading alone.

    Raises
    ------
    FileError
        A file changed, ended early or can't be read.
    AdapterError
        A factor isn't finite, or a fused value overflows.
    """
    if not segments:
        return
    stamps = dict(base.stamps)
    for adapter in adapters.values():
        stamps |= adapter.file.stamps
    nbytes = max(segment.memory_bytes for segment in segments)
    count = min(BUFFERS, len(segments))
    ring = [torch.frombuffer(aligned_memory(nbytes), dtype=torch.uint8) for _ in range(count)]

    def read() -> Generator[tuple[Segment, Tensor, list[Future[None]]], None, None]:
        readers: dict[Path, Reader] = {}
        with ExitStack() as stack:
            for segment, memory in zip(segments, cycle(ring), strict=False):
                view = memory.numpy().data
                for file, begin, end, at in segment.reads:
                    if file not in readers:
                        readers[file] = Reader(file, stamps[file])
                        stack.callback(readers[file].close)
                    readers[file].read(begin, end, view[at:])
                tiles = segment.tiles if kernel else ()
                yield segment, memory, [pool.submit(fuse, tile, memory) for tile in tiles]

    scratch = local()
    factors = _Factors()

    def fuse(tile: Tile, memory: Tensor) -> None:
        assert kernel is not None
        if not hasattr(scratch, "mine"):
            scratch.mine = Scratch()
        _fuse(tile, memory, base, kernel, factors, scratch.mine)

    workers = min(MAX_WORKERS, torch.get_num_threads())
    with _threads(torch.get_num_threads() // workers):
        pool = ThreadPoolExecutor(workers, "worker")
        try:
            with ahead(read(), count) as filled:
                for segment, memory, fused in filled:
                    for tile in fused:
                        tile.result()
                    yield segment, memory
        finally:
            pool.shutdown(cancel_futures=True)
    factors.warn()


@contextmanager
def shown(
    segments: Sequence[Segment],
    base: Checkpoint,
    adapters: Mapping[str, Adapter],
    kernel: Kernel | None,
    label: str,
) -> Iterator[Iterator[tuple[Segment, Tensor]]]:
    """Give :func:`stream` with its progress shown under a label; it ends with the block."""
    with closing(stream(segments, base, adapters, kernel)) as streamed:
        yield progress(
            streamed,
            label=label,
            total=sum(segment.base_bytes for segment in segments),
            unit="B",
            size=lambda item: item[0].base_bytes,
        )


class _Factors:
    """Rows of adapters' factors, as tiles take them, from any number of threads."""

    def __init__(self) -> None:
        self._met: set[tuple[Path, str]] = set()
        self._live: set[tuple[Path, str]] = set()  # those that aren't all zeros

    def take(self, memory: Tensor, rows: Rows, file: Path) -> Tensor:
        """Return rows of a factor; raise :class:`AdapterError` if they aren't finite."""
        factor = _view(memory, rows)
        if bad := _not_finite(factor):
            raise AdapterError(
                f"{file}: tensor '{rows.spec.name}': {bad:,} values are not finite; the adapter is "
                f"damaged or its training diverged"
            )
        key = file, rows.spec.name
        self._met.add(key)
        if key not in self._live and factor.any():
            self._live.add(key)
        return factor

    def warn(self) -> None:
        """Warn of factors of which all rows that were taken are zeros."""
        zeros = sorted(self._met - self._live)
        for path in dict.fromkeys(path for path, _ in zeros):
            names = [name for file, name in zeros if file == path]
            warnings.warn(
                f"{path}: {len(names)} of {sum(file == path for file, _ in self._met)} factors are "
                f"all zeros, so that their modules add nothing: {few(names)}; was the adapter "
                f"trained?",
                stacklevel=3,
            )


def _fuse(
    tile: Tile,
    memory: Tensor,
    base: Checkpoint,
    kernel: Kernel,
    factors: _Factors,
    scratch: Scratch,
) -> None:
    weight = _view(memory, tile.weight)
    terms = []
    for a, b, scale, strength, file in tile.factors:
        down = None if a is None else factors.take(memory, a, file)
        terms.append(Term(Pair(down, factors.take(memory, b, file), scale), strength))
    kernel(weight, terms, scratch)
    if _not_finite(weight):
        name = tile.weight.spec.name
        before = as_matrix(base.read(name))[tile.top : tile.top + len(weight)]
        if count := int((before.isfinite() & ~weight.isfinite()).sum()):
            raise AdapterError(
                f"{base.path}: weight '{name}': {count:,} values overflow in rows {tile.top} to "
                f"{tile.top + len(weight) - 1}; lower the strength, or check the adapter"
            )
        one_nan(weight)
    if weight.data_ptr() not in _span(memory):  # fused in a copy, for being aligned
        at, nbytes = tile.weight.at, tile.weight.spec.nbytes
        memory[at : at + nbytes] = weight.reshape(-1).view(torch.uint8)


def _view(memory: Tensor, rows: Rows) -> Tensor:
    """Return rows as a tensor: in the memory, or copied where they lie askew for their dtype."""
    dtype = torch_dtype(rows.spec.dtype)
    data = memory[rows.at : rows.at + rows.spec.nbytes]
    if rows.at % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).view(rows.spec.shape)


def _span(memory: Tensor) -> range:
    return range(memory.data_ptr(), memory.data_ptr() + memory.numel())


def _not_finite(values: Tensor) -> int:
    """Count values that are NaN or infinite; one read, where there are none."""
    return 0 if finite_if_all(values).isfinite() else int((~values.isfinite()).sum())


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
