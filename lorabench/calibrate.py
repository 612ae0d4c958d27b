"""Measuring a machine's rates, in about a minute, by the engine's own ways through real weights.

Weights of the shapes that LTX-2.5 has most of, a few of each class and together larger than a
cache, go through what a rebind does to them: read, fused at two ranks, copied, coded, multiplied
(:mod:`lorabench.rounds`). The parts come in turn, round after round, so that a disturbed second
hits them all alike; the first round isn't counted. Their timings become rates in
:mod:`lorabench.separate`.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from errno import EISDIR
from os import strerror
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from time import perf_counter

import torch

from lorabench import checkpoint, devices
from lorabench.alone import alone
from lorabench.cost import Work
from lorabench.errors import FileError, LorabenchError
from lorabench.machine import environment, machine_name
from lorabench.measure import CpuUse, time_once
from lorabench.progress import progress
from lorabench.rates import SIZES, Machine, Origin, load_machine, machine_toml
from lorabench.rounds import Rounds, Step
from lorabench.separate import Rate, Timing, beside, bytes_per_second, launch_seconds, pace
from lorabench.specimens import Sizes

Timer = Callable[[Callable[[], object], torch.device], float]

_DISTURBED_CORES = 0.25  # what others may use of the machine before a rate says little


def calibrate(
    device: str, folder: str | Path, *, sizes: Sizes | None = None, show: bool = True
) -> Machine:
    """Measure this machine's rates, in a process of its own.

    Parameters
    ----------
    device
        ``cpu`` or ``cuda``: where weights live.
    folder
        On the disk that bases are read from. A file of a third of a gigabyte is there meanwhile.
    show
        Show on standard error how far it has come, and whether others disturbed it.

    Raises
    ------
    UnavailableError
        There is no such device, or too little memory.
    FileError
        The folder can't be written, or its disk has too little room.
    """
    sizes = sizes or Sizes()
    found = devices.find_device(device)
    # Beside the weights a snapshot, an image, factors at both ranks, and scratch memory.
    devices.check_room("calibrating", found, 5 * sizes.nbytes)
    folder = Path(folder)
    checkpoint.check_room(folder / "calibration.safetensors", 2 * sizes.nbytes)
    with checkpoint.told_of(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # Made here, since Ctrl-C kills the other process.
        with TemporaryDirectory(prefix="calibration-", dir=folder) as temporary:
            return alone(measured, str(found), Path(temporary), sizes, show)


def here(folder: str | Path, device: str = "cpu") -> Machine:
    """Load this machine's calibration from a folder; calibrate and store it if it isn't there.

    Raises
    ------
    LorabenchError
        The file that is there can't be read or is no machine, or as :func:`calibrate` does.
    """
    path = calibration_file(folder, device)
    if path.exists():
        return load_machine(path)
    _say(f"note: {path} isn't there yet: measuring this machine, which takes about a minute")
    machine = calibrate(device, folder)
    store(machine, path)
    return machine


def calibration_file(folder: str | Path, device: str) -> Path:
    """Return where in a folder this machine's calibration is, unless it was told otherwise."""
    return Path(folder) / "machines" / f"{_name(device)}.toml"


def check_out(path: Path, device: str, *, overwrite: bool = False) -> None:
    """Make sure that a calibration can be written, before anything is measured.

    Raises
    ------
    FileError
        A file is there that is no calibration of this machine, or the folder can't be written.
    """
    if not overwrite and path.exists():
        _check_ours(path, device)
    with checkpoint.told_of(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path.parent):
            pass
        if path.is_dir():
            raise IsADirectoryError(EISDIR, strerror(EISDIR))


def _check_ours(path: Path, device: str) -> None:
    ours = (device, _title(device), _memory_bytes(device))
    try:
        held = load_machine(path)
    except LorabenchError:
        held = None
    if (
        held is None
        or held.provenance != "measured"
        or (held.device, held.title, held.memory_bytes) != ours
    ):
        raise FileError(
            f"{path}: exists, and is no calibration of this machine ({ours[1]}, on "
            f"'{device}'); choose another name or ask to overwrite it"
        )


def store(machine: Machine, path: Path) -> None:
    """Write a machine's file, complete or not at all."""
    text = machine_toml(machine).encode()
    with checkpoint.replacing(path, len(text)) as partial:
        partial.write_bytes(text)


def measured(
    device: str, folder: Path, sizes: Sizes, show: bool, timer: Timer = time_once
) -> Machine:
    """Measure in this process, with files in a folder that the caller removes."""
    found = torch.device(device)
    rounds = Rounds(found, folder, sizes)
    book = _Book(timer, found)
    shown = progress if show else _unshown

    def go(steps: Sequence[Step], label: str) -> None:
        for step in shown(steps, label=label, unit="step"):
            book.take(step)
            rounds.new.clear()

    steps = [*rounds.steps()]
    start = perf_counter()
    go(steps, "calibrate: warm up")
    book.seconds.clear()
    begun = perf_counter()
    least, most = sizes.rounds
    count = max(least, min(most, int(sizes.seconds / (begun - start))))
    use = CpuUse()
    go(steps * count, "calibrate")
    use.update()
    others = use.of_others() / (perf_counter() - begun)
    if show and others > _DISTURBED_CORES:
        _say(f"note: other processes kept {others:.1f} cores busy meanwhile; calibrate again alone")
    return machine_of(found, book.timings, rounds.kernels)


class _Book:
    """What steps took, by their names."""

    def __init__(self, timer: Timer, device: torch.device) -> None:
        self._timer, self._device = timer, device
        self._steps: dict[str, tuple[Step, Work]] = {}
        self.seconds: dict[str, list[float]] = {}

    def take(self, step: Step) -> None:
        """Do a step, and time it."""
        step.before()
        done: list[Work] = []
        seconds = self._timer(lambda: done.append(step.run()), self._device)
        self.seconds.setdefault(step.name, []).append(seconds)
        self._steps[step.name] = step, done[0]

    @property
    def timings(self) -> dict[str, Timing]:
        """The samples, with what was done for each."""
        return {
            name: Timing(
                step.what,
                tuple(self.seconds[name]),
                len(step.weights),
                work.flops,
                work.fused_params,
                work.file_bytes + work.snapshot_bytes,
            )
            for name, (step, work) in self._steps.items()
        }


def machine_of(device: torch.device, timings: dict[str, Timing], kernels: Iterable[str]) -> Machine:
    """Make this machine of what was timed."""
    told = {"launch_seconds": launch_seconds(timings["launch_seconds"])}
    for name in ("read_cold", "read_warm", "load_warm", "copy_host", "copy_device", "copy_new"):
        if name in timings:
            told[name] = bytes_per_second(timings[name])
    for name in ("encode", "decode"):
        told[name] = beside(timings[name], timings["plain"], timings[name].params)
    loaded, fused = timings["load_beside"], timings["kernels.gemm.large.less"]
    told["load_beside"] = beside(loaded, fused, loaded.nbytes)
    system = Origin("measured", "what the system tells")
    told["memory_bytes"] = Rate(_memory_bytes(device.type), system)
    if device.type == "cuda":
        told["host_bytes"] = Rate(_memory_bytes("cpu"), system)
    origins = {name: rate.origin for name, rate in told.items()}
    paces = {}
    for group in (*(f"kernels.{kernel}" for kernel in kernels), "forward"):
        paces[group] = {}
        for size in SIZES:
            more, less = (timings[f"{group}.{size}.{role}"] for role in ("more", "less"))
            found, origin = pace(more, less, told["launch_seconds"].value)
            paces[group][size], origins[f"{group}.{size}"] = found, origin
    figures = {name: rate.value for name, rate in told.items()}
    return Machine(
        name=_name(device.type),
        title=_title(device.type),
        device=device.type,
        kernels={kernel: paces[f"kernels.{kernel}"] for kernel in kernels},
        forward=paces["forward"],
        origins=origins,
        **figures,  # pyright: ignore[reportArgumentType] - bytes are whole numbers
    )


def _name(device: str) -> str:
    """Return this machine's label; a CPU's has ``-cpu`` where the label tells of a GPU."""
    found = environment()
    apart = device == "cpu" and found["cuda_device"] is not None
    return machine_name(found) + ("-cpu" if apart else "")


def _title(device: str) -> str:
    return str(environment()["cpu" if device == "cpu" else "cuda_device"])


def _memory_bytes(device: str) -> int:
    if device == "cpu":
        return int(environment()["memory_bytes"])
    return int(torch.cuda.get_device_properties(torch.device(device)).total_memory)


def _unshown(steps: Iterable[Step], *, label: str, unit: str) -> Iterable[Step]:
    return steps


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
