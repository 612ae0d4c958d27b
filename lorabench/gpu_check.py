"""Are the bits right on this GPU, and how fast is a rebind: what ``make gpu-check`` runs.

It needs torch with its Triton, safetensors and numpy, and under five minutes on an H200. On the CPU
it runs too, without the Triton kernel, so that it is known to run.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

import torch

from lorabench import records
from lorabench.adapter import Adapter
from lorabench.check import check_against_reference
from lorabench.checkpoint import Checkpoint
from lorabench.devices import find_device, free_bytes
from lorabench.errors import CheckError, LorabenchError
from lorabench.fuse import Pair, Term
from lorabench.geometry import load_geometry
from lorabench.gpu_rebind import (
    STRENGTH,
    Rates,
    Timed,
    Touched,
    measure_rates,
    time_launches,
    time_rebinds,
)
from lorabench.kernels import Kernel, Scratch, get_kernel, get_tiles
from lorabench.machine import environment, git_commit
from lorabench.recipe import BASE, State
from lorabench.records import JSON, Record
from lorabench.resident import ResidentWeights
from lorabench.restore import RESTORES
from lorabench.synthetic import synthesize

MODEL = "ltx-2.5-22b"
SECONDS = 270
"""After this many no further case is begun."""

STATES = (
    State(distilled=1.0),
    BASE,
    State(user=STRENGTH, distilled=0.5),
    State(distilled=0.25),
    BASE,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, measure, record; return 1 if something is wrong."""
    asked = _parser().parse_args(arguments)
    begun = monotonic()
    here, commit = environment(), git_commit()
    try:
        device = find_device(asked.device)
        kernels = ("gemm", "triton") if device.type == "cuda" else ("gemm",)
        _say(f"device: {_name(device)}; torch {torch.__version__}; kernels: {', '.join(kernels)}")
        for kernel in kernels:
            _say(check_goldens(asked.goldens, kernel, device))
        with TemporaryDirectory(dir=asked.folder) as folder:
            for line in check_walks(Path(folder), asked.shrink, asked.blocks, kernels, device):
                _say(line)
        depth = load_geometry(MODEL, shrink=asked.shrink).cut(asked.depth)
        touched = Touched(depth, device)
        rates = measure_rates(device, asked.square, asked.copy)
        _say(floor_text(touched, rates))
        for timed in _measured(touched, kernels, rates, asked.repetitions, begun):
            _say(timed_text(timed))
            records.append(asked.out, record(touched, timed, rates, here, commit))
    except LorabenchError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return 1
    _say(f"all right, after {monotonic() - begun:.0f} s; records are in {asked.out}")
    return 0


def check_goldens(path: Path, kernel: str, device: torch.device) -> str:
    """Fuse the upstream rule's golden inputs; say that every bit is as it has to be.

    Raises
    ------
    CheckError
        A bit isn't.
    """
    goldens = Checkpoint.open(path)
    cases = json.loads(goldens.metadata["cases"])
    for case in cases:
        read = partial(_read, goldens, case["name"], device)
        terms = [
            Term(Pair(read(f"lora{i}.A"), read(f"lora{i}.B"), 1.0), strength)
            for i, strength in enumerate(case["strengths"])
        ]
        expected = read("fused").cpu()
        ways: dict[str, Kernel] = {
            kernel: get_kernel(kernel, device),
            f"the deltas of {kernel}": get_tiles(kernel, device).fuse,
        }
        for way, fuse in ways.items():
            weight = read("base")
            fuse(weight, terms, Scratch(device))
            if not torch.equal(weight.cpu().view(torch.uint8), expected.view(torch.uint8)):
                raise CheckError(f"golden case '{case['name']}': {way} gives other bits")
    return f"goldens: {len(cases)} cases, every bit right under {kernel} and its deltas"


def _read(file: Checkpoint, case: str, device: torch.device, name: str) -> torch.Tensor:
    return file.read(f"{case}.{name}").to(device)


def check_walks(
    folder: Path, shrink: int, blocks: int, kernels: Sequence[str], device: torch.device
) -> Iterator[str]:
    """Walk through states over files under every exact restore; say that the bits are a load's.

    Raises
    ------
    CheckError
        A state's weights have other bits than when they are loaded into it.
    """
    geometry = load_geometry(MODEL, shrink=shrink).cut(blocks)
    files = synthesize(folder, geometry, ("user", "distilled"))
    base = Checkpoint.open(files.base)
    adapters = {role: Adapter.open(path, base.tensors) for role, path in files.adapters.items()}
    for kernel in kernels:
        make = partial(ResidentWeights, base, adapters, kernel=kernel, device=device)
        fresh, expected = make(restore="reread"), {}
        for state in dict.fromkeys(STATES):
            fresh.load(state)
            expected[state] = fresh.digest()
            if len(state) > 1:
                yield f"{state} under {kernel}: {check_against_reference(fresh)}"
        del fresh
        for restore in _restores(device):
            if restore == "subtract":
                continue
            weights = make(restore=restore)
            weights.load(State(distilled=0.5))
            for state in STATES:
                weights.rebind(state)
                if weights.digest() != expected[state]:
                    raise CheckError(
                        f"kernel '{kernel}', restore '{restore}': state '{state}' has other bits "
                        f"than when it is loaded"
                    )
            yield f"walk of {len(STATES)} rebinds under {kernel} and {restore}: a load's bits"


def _restores(device: torch.device) -> list[str]:
    return [name for name in RESTORES if name != "device_snapshot" or device.type == "cuda"]


def _measured(
    touched: Touched, kernels: Sequence[str], rates: Rates, repetitions: int, begun: float
) -> Iterator[Timed]:
    """Time what fits in memory and into the time that is left; say what doesn't."""
    device = touched.device
    yield from time_launches(touched, _ways(kernels, device), rates, repetitions)
    cases = [(restore, kernel) for restore in _restores(device) for kernel in kernels]
    for restore, kernel in cases:
        copied = touched.demand.weight_bytes if restore in ("device_snapshot", "images") else 0
        free = free_bytes(device)
        if restore == "reread":
            continue  # there is no file at this depth
        if free is not None and copied > free:
            _say(f"left out: {restore}, which takes {copied:,} bytes more; {free:,} are free")
        elif monotonic() - begun > SECONDS:
            _say(f"left out: {restore} under {kernel}; {SECONDS} s are over")
        else:
            yield from time_rebinds(touched, kernel, restore, rates, repetitions)


def _ways(kernels: Sequence[str], device: torch.device) -> dict[str, Kernel]:
    ways = {kernel: get_kernel(kernel, device) for kernel in kernels}
    if "triton" in kernels:
        from lorabench.kernels.triton_fuse import WIDE, fuse_triton

        ways["triton, wide blocks"] = partial(fuse_triton, block=WIDE)
    return ways


def floor_text(touched: Touched, rates: Rates) -> str:
    """Say what a fuse takes at least, and why."""
    demand = touched.demand
    return (
        f"{len(touched.weights)} weights of {touched.geometry.blocks} blocks: "
        f"{demand.flops / 1e12:.2f} TFLOP at {rates.flops / 1e12:.3g} TFLOP/s are "
        f"{demand.flops / rates.flops * 1e3:.1f} ms; {demand.moved_bytes / 1e9:.1f} GB at "
        f"{rates.memory / 1e12:.3g} TB/s are {demand.moved_bytes / rates.memory * 1e3:.1f} ms"
    )


def timed_text(timed: Timed) -> str:
    """Say a pass's time beside its floor."""
    median = timed.samples.median
    return (
        f"{timed.kernel:20} {timed.restore:16} {timed.action:8} {timed.launch:7} "
        f"{median * 1e3:9.2f} ms  floor {timed.floor_seconds * 1e3:8.2f} ms  "
        f"{median / timed.floor_seconds:5.2f}x  {timed.check}"
    )


def record(
    touched: Touched, timed: Timed, rates: Rates, here: Mapping[str, JSON], commit: str
) -> Record:
    """Return a pass as a record."""
    fused = timed.action != "restore" or timed.restore in ("subtract", "residual")
    demand = touched.demand
    return Record(
        case={
            "bench": "gpu_rebind",
            "geometry": touched.geometry.name,
            "blocks": touched.geometry.blocks,
            "params": sum(weight.numel() for weight in touched.weights.values()),
            "device": touched.device.type,
            "rule": "R1",
            "strength": STRENGTH,
            "kernel": timed.kernel,
            "restore": timed.restore,
            "action": timed.action,
            "launch": timed.launch,
        },
        seconds=timed.samples.seconds,
        warmup_seconds=timed.samples.warmup_seconds,
        counted={
            "flops": demand.flops if fused else 0,
            "weight_bytes": demand.weight_bytes,
            "factor_bytes": demand.factor_bytes if fused else 0,
            "kept_bytes": timed.kept_bytes,
        },
        check=timed.check,
        environment=here,
        commit=commit,
        provenance="measured",
        details={
            "floor_seconds": timed.floor_seconds,
            "over_floor": timed.samples.median / timed.floor_seconds,
            "rate_flops_per_s": rates.flops,
            "rate_memory_bytes_per_s": rates.memory,
            "rate_link_bytes_per_s": rates.link,
        },
    )


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _say(line: str) -> None:
    print(line, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lorabench.gpu_check", description=__doc__)
    add = parser.add_argument
    add("--device", default="cuda", help="cuda, or cpu for a trial")
    add("--goldens", type=Path, default=Path("tests/goldens/upstream_fuse.safetensors"))
    add("--out", type=Path, default=Path("scratch/gpu-records.jsonl"), help="file of records")
    add("--folder", type=Path, help="where 4 GB of files are written for a while")
    add("--shrink", type=int, default=1, help="what the model's width is divided by")
    add("--blocks", type=int, default=2, help="blocks of the files")
    add("--depth", type=int, default=48, help="blocks of what is measured")
    add("--repetitions", type=int, default=5)
    add("--square", type=int, default=8192, help="rows of the products that give the rate")
    add("--copy", type=int, default=1 << 32, help="bytes of the copies that give the bandwidth")
    return parser


if __name__ == "__main__":
    sys.exit(main())
