"""The rounds of a calibration: weights of real shapes through each of the engine's ways.

A round is a list of steps. Each is one operation of the engine on the weights of a class, and finds
what the steps before it left; between a fuse and the next, weights are read again, as in a rebind.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lorabench.cost import Work
from lorabench.devices import touch_free
from lorabench.directio import forget
from lorabench.errors import UnavailableError
from lorabench.forward import multiply
from lorabench.kernels import Scratch, get_kernel
from lorabench.loading import arriving, empty
from lorabench.measure import time_once
from lorabench.readahead import Read
from lorabench.recipe import BASE, State
from lorabench.restore import Restore, make_restore
from lorabench.specimens import LESS, RATIO, TINY, Sizes, Specimens
from lorabench.sweep import Sweep


class Step(NamedTuple):
    """A part of a round: its figure's name, what is timed on which weights, and what comes before.

    A pace's figure has two steps; their names end in ``more`` and ``less`` FLOP.
    """

    name: str
    what: str
    weights: Sequence[str]
    run: Callable[[], Work]
    before: Callable[[], object] = lambda: None


class Rounds:
    """The weights, and the steps of a round over them.

    Parameters
    ----------
    folder
        Where the base's file goes, and stays.
    """

    def __init__(self, device: torch.device, folder: Path, sizes: Sizes) -> None:
        self.sizes = sizes
        self.new: list[Tensor] = []
        """Memory that a step took; whoever runs it frees that when the clock has stopped."""
        self.weights = Specimens(device, folder, sizes)
        self._device = device
        self._scratch = Scratch(device)
        self._groups, self._tensors = self.weights.groups, self.weights.tensors
        self._plain = {kernel: self._restore("reread", kernel) for kernel in _kernels(device)}
        self._residual = self._restore("residual")
        self._snapshots = {"copy_host": self._kept("host_snapshot")}
        if device.type == "cuda":
            self._snapshots["copy_device"] = self._kept("device_snapshot")
        firsts = [self._groups[size][0] for size in sizes.shapes]
        self._rows = {name: self._few_rows(name) for name in firsts if "scalar" in self._plain}

    @property
    def kernels(self) -> list[str]:
        """Those that run on the device."""
        return list(self._plain)

    def steps(self) -> Iterator[Step]:
        """Give the steps of a round, in order."""
        yield from self._reads()
        for kernel in self._plain:
            if kernel == "scalar":
                yield from self._loops()
                continue
            for role in ("more", "less"):
                yield from self._fuses(kernel, role)
                if kernel == "gemm" and role == "less":
                    yield self._launches()
                    yield self._loads()
                yield self._reread()
        yield from self._copies()
        yield from self._codings()
        for size in self.sizes.shapes:
            for role, tokens in zip(("more", "less"), self.sizes.tokens, strict=True):
                yield self._forward(size, role, tokens)

    def _reads(self) -> Iterator[Step]:
        every, names = list(self.weights.base.entries), self._groups["large"]
        yield Step(
            "read_cold",
            f"reading {len(every)} weights after their file was taken out of the page cache",
            every,  # so that whatever reads a weight after this finds it in the page cache
            lambda: self._read(every, new=False),
            lambda: forget(self.weights.base.stamps),
        )
        what = f"loading {len(names)} weights from the page cache into new memory"
        yield Step("load_warm", what, names, lambda: self._read(names, new=True), self._touch)

    def _loads(self) -> Step:
        names = self._groups["large"]
        ranks = self.weights.ranks(names, "less")
        what = f"loading {len(names)} weights from the page cache, fused at rank {ranks} meanwhile"
        return Step("load_beside", what, names, lambda: self._loaded(names), self._touch)

    def _reread(self) -> Step:
        names, plain = list(self.weights.base.entries), self._plain["gemm"]
        what = f"restore 'reread' of {len(names)} weights from the page cache"
        return Step("read_warm", what, names, lambda: self._unfused(names, plain))

    def _fuses(self, kernel: str, role: str) -> Iterator[Step]:
        for size in self.sizes.shapes:
            names = self._groups[size]
            yield Step(
                f"kernels.{kernel}.{size}.{role}",
                f"fusing {len(names)} weights at rank {self.weights.ranks(names, role)}",
                names,
                lambda names=names: self._fused(names, role, self._plain[kernel]),
            )

    def _launches(self) -> Step:
        out, in_ = TINY
        what = f"fusing {len(self._groups['tiny'])} weights of {out}x{in_} at rank 1"
        plain = self._plain["gemm"]
        return Step(
            "launch_seconds",
            what,
            self._groups["tiny"],
            lambda: self._fused(self._groups["tiny"], "less", plain),
        )

    def _loops(self) -> Iterator[Step]:
        """Give the scalar loop's steps: of each class one weight, and of that the first rows."""
        for size in self.sizes.shapes:
            name = self._groups[size][0]
            rows, in_ = self._rows[name], self._tensors[name].shape[1]
            for role in ("more", "less"):
                yield Step(
                    f"kernels.scalar.{size}.{role}",
                    f"fusing {rows} rows of {in_} at rank {self.weights.ranks([name], role)}",
                    [name],
                    lambda name=name, rows=rows, role=role: self._looped(name, rows, role),
                )

    def _copies(self) -> Iterator[Step]:
        names = self._groups["large"]
        what = f"copying {len(names)} weights into new memory"
        yield Step("copy_new", what, names, lambda: self._imaged(names), self._touch)
        for name, restore in self._snapshots.items():
            where = "host" if name == "copy_host" else "device"
            yield Step(
                name,
                f"restore '{where}_snapshot' of {len(names)} weights",
                names,
                lambda restore=restore: self._unfused(names, restore),
            )

    def _codings(self) -> Iterator[Step]:
        names, plain, residual = self.weights.coded, self._plain["gemm"], self._residual
        told = f"{len(names)} weights at rank {self.weights.ranks(names, 'less')}"
        # At a small rank little of the time is the product's, whose noise would cover the coding's.
        yield Step("plain", f"fusing {told}", names, lambda: self._fused(names, "less", plain))
        yield Step(
            "encode",
            f"fusing {told} under 'residual' at delta/weight {RATIO}",
            names,
            lambda: self._fused(names, "less", residual),
            lambda: self._unfused(names, plain),
        )
        what = f"restore 'residual' of {told} at delta/weight {RATIO}"
        yield Step("decode", what, names, lambda: self._unfused(names, residual))

    def _forward(self, size: str, role: str, tokens: int) -> Step:
        weights = [self._tensors[name] for name in self._groups[size]]
        widths = {weight.shape[1] for weight in weights}
        inputs = {in_: self.weights.values((tokens, in_)).to(self._device) for in_ in widths}
        work = Work(
            flops=2 * tokens * sum(weight.numel() for weight in weights),
            fused_params=sum(weight.numel() for weight in weights),
        )

        def run() -> Work:
            for weight in weights:
                shape = (tokens, len(weight))
                out = self._scratch.take("calibrate.out", shape, torch.bfloat16)
                multiply(inputs[weight.shape[1]], weight, out, self._scratch)
            return work

        what = f"products of {tokens} tokens with {len(weights)} weights"
        return Step(f"forward.{size}.{role}", what, self._groups[size], run)

    def _touch(self) -> None:
        touch_free(self._device, sum(self._tensors[n].nbytes for n in self._groups["large"]))

    def _fused(self, names: Iterable[str], role: str, restore: Restore) -> Work:
        state = State({role: 1.0})
        sweep = Sweep(state, self._tensors, self.weights.factors, restore, self._scratch)
        return sum(map(sweep.fuse, names), Work())

    def _unfused(self, names: Iterable[str], restore: Restore) -> Work:
        sweep = Sweep(BASE, self._tensors, self.weights.factors, restore, self._scratch)
        return sum((sweep.unfuse(name, LESS) for name in names), Work())

    def _looped(self, name: str, rows: int, role: str) -> Work:
        [pair] = self.weights.factors[role][name]
        tensors = {name: self._tensors[name][:rows]}
        factors = {role: {name: (pair.within(range(rows)),)}}
        state, restore = State({role: 1.0}), self._plain["scalar"]
        return Sweep(state, tensors, factors, restore, self._scratch).fuse(name)

    def _few_rows(self, name: str) -> int:
        """Return how many rows of a weight the scalar loop does in a sample's time."""
        self._looped(name, 1, "more")  # compiles
        seconds = time_once(lambda: self._looped(name, 1, "more"), self._device)
        return max(1, min(int(self.sizes.sample_seconds / seconds), len(self._tensors[name])))

    def _read(self, names: Sequence[str], *, new: bool) -> Work:
        with arriving(self._reads_of(names, new=new), self._scratch) as arrived:
            return Work(file_bytes=sum(read.entry.spec.nbytes for read in arrived))

    def _loaded(self, names: Sequence[str]) -> Work:
        reads = self._reads_of(names, new=True)
        tensors = {read.entry.spec.name: read.into for read in reads}
        sweep = Sweep(LESS, tensors, self.weights.factors, self._plain["gemm"], self._scratch)
        work = Work()
        with arriving(reads, self._scratch) as arrived:
            for read in arrived:
                work += Work(file_bytes=read.entry.spec.nbytes) + sweep.fuse(read.entry.spec.name)
        return work

    def _reads_of(self, names: Iterable[str], *, new: bool) -> list[Read]:
        reads = []
        for name in names:
            entry = self.weights.base.entries[name]
            into = empty(entry, self._device) if new else self._tensors[name]
            reads.append(Read(self.weights.base, entry, into))
        if new:
            self.new += [read.into for read in reads]
        return reads

    def _imaged(self, names: Iterable[str]) -> Work:
        images = [self._tensors[name].clone() for name in names]
        self.new += images
        return Work(snapshot_bytes=sum(image.nbytes for image in images))

    def _restore(self, name: str, kernel: str = "gemm") -> Restore:
        return make_restore(name, self.weights.base, kernel, self._scratch)

    def _kept(self, name: str) -> Restore:
        restore = self._restore(name)
        for weight in self._groups["large"]:
            restore.keep(weight, self._tensors[weight])
        return restore


def _kernels(device: torch.device) -> list[str]:
    found = ["gemm"]
    for name in ("scalar", "triton"):
        try:
            get_kernel(name, device)
        except UnavailableError:
            continue
        found.append(name)
    return found
