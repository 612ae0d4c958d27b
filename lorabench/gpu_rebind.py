"""Rebinds at a model's full depth on a GPU, beside the least that its hardware allows.

Weights and factors are made on the device: at full depth a file would take longer to write than
all that is measured here. So what is timed are the passes of a restore over the touched weights,
without reading and without the engine's checks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lorabench.check import CHECKED_ROWS, compare
from lorabench.checkpoint import torch_dtype
from lorabench.errors import CheckError
from lorabench.fuse import Pair, Term
from lorabench.geometry import Geometry, Target
from lorabench.kernels import Kernel, Scratch, get_kernel
from lorabench.measure import Samples, time_once
from lorabench.restore import make_restore
from lorabench.synthetic import WEIGHT_STD

RATIO = 0.05
"""Standard deviation of the delta at strength 1 over that of the weight."""

STRENGTH = 0.8  # neither 1 nor another power of two, at which rounding B does nothing


@dataclass(frozen=True)
class Rates:
    """What a device does at best, as measured on it."""

    flops: float
    """bf16 products, FLOP/s: of big square matrices."""
    memory: float
    """Bytes/s that are read or written while copying on the device."""
    link: float
    """Bytes/s copied from the host's pinned memory."""


def measure_rates(device: torch.device, size: int = 8192, nbytes: int = 1 << 32) -> Rates:
    """Measure a device: products of ``size`` by ``size``, and copies of ``nbytes``."""
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    product = torch.empty_like(a)
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    host = torch.ones(nbytes // 4, dtype=torch.uint8, pin_memory=device.type == "cuda")
    arrived = copy[: len(host)]

    def best(operation: Callable[[], object]) -> float:
        return min(time_once(operation, device) for _ in range(6))

    return Rates(
        flops=2 * size**3 / best(lambda: torch.mm(a, b, out=product)),
        memory=2 * nbytes / best(lambda: copy.copy_(source)),
        link=len(host) / best(lambda: arrived.copy_(host, non_blocking=True)),
    )


@dataclass(frozen=True)
class Demand:
    """What one fuse of an adapter into all of its targets takes at least."""

    flops: int
    weight_bytes: int
    factor_bytes: int

    @classmethod
    def of(cls, geometry: Geometry) -> "Demand":
        """Count a geometry's."""
        targets = geometry.targets
        return cls(
            flops=2 * sum(target.macs for target in targets),
            weight_bytes=sum(target.weight.nbytes for target in targets),
            factor_bytes=2 * sum(target.adapter_params for target in targets),
        )

    @property
    def moved_bytes(self) -> int:
        """Bytes of weights read and written, and of factors read."""
        return 2 * self.weight_bytes + self.factor_bytes

    def seconds(self, rates: Rates) -> float:
        """Return the seconds if everything is moved once, while it is computed."""
        return max(self.flops / rates.flops, self.moved_bytes / rates.memory)


class Touched:
    """A model's touched weights and one adapter's factors, on a device.

    A weight's bits depend on its place in the geometry alone, so that they can be made again to be
    compared with.
    """

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        self.geometry = geometry
        self.demand = Demand.of(geometry)
        self.device = device
        self._random = torch.Generator(device)
        self._places = {target.weight.name: i for i, target in enumerate(geometry.targets)}
        self._targets = {target.weight.name: target for target in geometry.targets}
        self.weights = {name: self.base(name) for name in self._targets}
        self.terms = {name: [self._term(t)] for name, t in self._targets.items()}

    def base(self, name: str, into: Tensor | None = None) -> Tensor:
        """Return a weight's base bits, in memory that is given or new."""
        spec = self._targets[name].weight
        if into is None:
            into = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device=self.device)
        self._random.manual_seed(self._places[name])
        return into.normal_(0.0, WEIGHT_STD, generator=self._random)

    def reset(self) -> None:
        """Give every weight its base bits."""
        for name, weight in self.weights.items():
            self.base(name, weight)

    def _term(self, target: Target) -> Term:
        out, in_ = target.weight.shape
        std = (RATIO * WEIGHT_STD / target.rank**0.5) ** 0.5
        self._random.manual_seed(1 << 20 | self._places[target.weight.name])
        a, b = (
            torch.empty(shape, dtype=torch.bfloat16, device=self.device).normal_(
                0.0, std, generator=self._random
            )
            for shape in ((target.rank, in_), (out, target.rank))
        )
        return Term(Pair(a, b, 1.0), STRENGTH)

    def check_base(self) -> None:
        """Raise :class:`CheckError` unless every weight has its base bits."""
        for name, weight in self.weights.items():
            if not torch.equal(_bits(weight), _bits(self.base(name))):
                raise CheckError(f"'{name}': a restore left other bits than the base's")

    def wrong_share(self) -> float:
        """Return the share of values that don't have the base's bits."""
        wrong = sum(int((_bits(self.base(n)) != _bits(w)).sum()) for n, w in self.weights.items())
        return wrong / sum(weight.numel() for weight in self.weights.values())

    def check_fused(self, fused: Mapping[str, Tensor]) -> str:
        """Hold rows of the smallest, a middle and the largest weight against the reference."""
        by_size = sorted(fused, key=lambda name: fused[name].numel())
        names = dict.fromkeys((by_size[0], by_size[len(by_size) // 2], by_size[-1]))
        shares = []
        for name in names:
            rows, base = (x[:CHECKED_ROWS].cpu() for x in (fused[name], self.base(name)))
            terms = [
                Term(pair.within(range(len(rows))).cpu(), strength)
                for pair, strength in self.terms[name]
            ]
            shares.append(compare(rows, base, terms, where=name))
        return (
            f"rows of {len(shares)} weights within the reference's bound, {max(shares):.1e} of "
            f"their values differ"
        )


@dataclass(frozen=True)
class Timed:
    """One pass over all touched weights, timed and checked."""

    kernel: str
    restore: str
    action: str
    """``fuse``, ``restore``, or ``image``: fuse into a copy."""
    launch: str
    """``queued`` weight by weight, or replayed as a CUDA ``graph``."""
    samples: Samples
    check: str
    kept_bytes: int
    floor_seconds: float


def time_rebinds(
    touched: Touched, kernel: str, restore: str, rates: Rates, repetitions: int = 5
) -> Iterator[Timed]:
    """Time BASE -> fused -> BASE under a kernel and a restore.

    Raises
    ------
    CheckError
        Fused weights are outside the reference's bound, or an exact restore's bits aren't the
        base's.
    """
    scratch = Scratch(touched.device)
    touched.reset()
    if restore == "images":
        yield _time_images(touched, kernel, scratch, rates, repetitions)
        return
    # A base is needed to read it again only.
    way = make_restore(restore, None, kernel, scratch)  # pyright: ignore[reportArgumentType]
    for name, weight in touched.weights.items():
        way.keep(name, weight)
    fuse, back = (partial(_sweep, touched, step) for step in (way.fuse, way.restore))
    fuses, backs, check, kept = [], [], "", 0
    for i in range(1 + repetitions):
        if not way.exact:
            touched.reset()  # else what is wrong would grow
        fuses.append(time_once(fuse, touched.device))
        if not i:
            check, kept = touched.check_fused(touched.weights), way.kept_bytes
        backs.append(time_once(back, touched.device))
    if way.exact:
        touched.check_base()
    came_back = "all base bits" if way.exact else f"{touched.wrong_share():.2%} of the bits wrong"
    floor = touched.demand.seconds(rates)
    copied = touched.demand.weight_bytes
    back_floor = {
        "device_snapshot": 2 * copied / rates.memory,
        "host_snapshot": copied / rates.link,
    }.get(restore, floor)
    timed = partial(Timed, kernel, restore, launch="queued", kept_bytes=kept)
    yield timed("fuse", samples=_samples(fuses), check=check, floor_seconds=floor)
    yield timed("restore", samples=_samples(backs), check=came_back, floor_seconds=back_floor)


def time_launches(
    touched: Touched, ways: Mapping[str, Kernel], rates: Rates, repetitions: int = 5
) -> Iterator[Timed]:
    """Time a fuse under each kernel, launched weight by weight and replayed as one CUDA graph.

    What the graph is faster by was spent on launching.
    """
    for name, kernel in ways.items():
        scratch = Scratch(touched.device)
        launches: dict[str, Callable[[], None]] = {
            "queued": partial(_fuse_all, touched, kernel, scratch)
        }
        touched.reset()
        launches["queued"]()  # compiles, and takes what scratch it needs
        if touched.device.type == "cuda":
            launches["graph"] = _as_graph(launches["queued"])
        for launch, fuse in launches.items():
            seconds = []
            for _ in range(1 + repetitions):
                touched.reset()
                seconds.append(time_once(fuse, touched.device))
            check = touched.check_fused(touched.weights)
            floor = touched.demand.seconds(rates)
            yield Timed(name, "none", "fuse", launch, _samples(seconds), check, 0, floor)


def _time_images(
    touched: Touched, kernel: str, scratch: Scratch, rates: Rates, repetitions: int
) -> Timed:
    """Time making an image of a state; switching to it moves nothing."""
    run = get_kernel(kernel, touched.device)
    images = {name: torch.empty_like(weight) for name, weight in touched.weights.items()}

    def make() -> None:
        for name, image in images.items():
            image.copy_(touched.weights[name])
            run(image, touched.terms[name], scratch)

    seconds = [time_once(make, touched.device) for _ in range(1 + repetitions)]
    check = touched.check_fused(images)
    touched.check_base()
    floor = touched.demand.seconds(rates)  # of a pass that reads base bits, writes an image's
    kept = sum(image.nbytes for image in images.values())
    return Timed(kernel, "images", "image", "queued", _samples(seconds), check, kept, floor)


def _sweep(touched: Touched, step: Callable[[str, Tensor, Sequence[Term]], object]) -> None:
    for name, weight in touched.weights.items():
        step(name, weight, touched.terms[name])


def _fuse_all(touched: Touched, kernel: Kernel, scratch: Scratch) -> None:
    for name, weight in touched.weights.items():
        kernel(weight, touched.terms[name], scratch)


def _as_graph(work: Callable[[], None]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def _samples(seconds: Sequence[float]) -> Samples:
    first, *rest = seconds
    return Samples(tuple(rest), warmup_seconds=(first,))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)
