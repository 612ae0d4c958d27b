"""A base whose bytes lie awkwardly and adapters for it; and what must be left when a pass ends."""

import gc
import json
import os
import signal
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from conftest import bits
from safetensors.torch import save_file

from lorabench import stream
from lorabench.adapter import Adapter
from lorabench.checkpoint import Checkpoint
from lorabench.recipe import State
from lorabench.resident import ResidentWeights

# quiet and signalling NaN of both signs, infinities, -0, the smallest and largest subnormals
ODD_BITS = [0x7FC0, 0x7FC1, 0x7F81, -0x5B, 0x7F80, -0x80, -0x8000, 0x0001, -0x7FFF, 0x007F]
ODD = torch.tensor(ODD_BITS, dtype=torch.int16).view(torch.bfloat16)
PREFIX = "model.diffusion_model."
WEIGHTS = {
    "a": ((300, 50), torch.bfloat16),
    "b": ((24, 40), torch.float32),
    "c": ((64, 33), torch.bfloat16),
    "d": ((90, 70), torch.bfloat16),
    "e": ((1, 5), torch.bfloat16),
    "none": ((0, 16), torch.bfloat16),
}
TOUCHED = {
    "user": ("a", "b", "c", "none"),
    "distilled": ("b", "c", "e"),
    "detailing": ("a", "c", "e"),
}
FACTORS = {"user": torch.bfloat16, "distilled": torch.float32, "detailing": torch.float16}
STATES = [
    State(user=1.0),
    State(user=0.8, distilled=-1.0),
    State(distilled=-1.0, user=0.8),
    State(detailing=1.0, distilled=0.8, user=-1.0),
]


@dataclass(frozen=True)
class Model:
    """A base and adapters for it."""

    base: Checkpoint
    adapters: dict[str, Adapter]

    def expected(self, state: State, kernel: str = "gemm") -> dict[str, torch.Tensor]:
        """The tensors of resident weights in a state."""
        weights = ResidentWeights(self.base, self.adapters, kernel=kernel)
        weights.load(state)
        return dict(weights.tensors)

    def on(self, base: Path) -> "Model":
        """The same adapters on the same base, written otherwise."""
        return Model(Checkpoint.open(base), self.adapters)


def write_raw(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a file without sorting or padding anything, so that tensors may lie on odd bytes."""
    dtypes = {
        torch.bfloat16: "BF16", torch.float32: "F32", torch.uint8: "U8", torch.int8: "I8",
        torch.bool: "BOOL",
    }  # fmt: skip
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    data = b""
    for name, tensor in tensors.items():
        content = bits(tensor).numpy().tobytes()
        header[name] = {
            "dtype": dtypes[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_base(path: Path) -> Checkpoint:
    """Write the awkward base: odd offsets, empty tensors, scalars, NaN payloads, -0."""
    g = torch.Generator().manual_seed(1)
    tensors = {
        "bytes": torch.arange(13, dtype=torch.uint8),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 8, dtype=torch.bfloat16),
    }
    for name, (shape, dtype) in WEIGHTS.items():
        weight = torch.randn(shape, generator=g).to(dtype)
        odd = ODD[: min(len(ODD), weight.numel())]
        if name != "e":
            weight.view(-1)[: len(odd)] = odd.to(dtype)
        tensors[f"{PREFIX}{name}.weight"] = weight
        tensors[f"{name}.flags"] = torch.tensor([1, 0, 1], dtype=torch.int8)
    tensors["flag"] = torch.tensor(True)
    write_raw(path, tensors, {"format": "pt", "who": "é"})
    return Checkpoint.open(path)


def write_adapter(path: Path, role: str, base: Checkpoint, **metadata: str) -> Adapter:
    """Write an adapter of a role; its factors' dtype is the role's."""
    g = torch.Generator().manual_seed(len(role))
    tensors = {}
    for rank, module in enumerate(TOUCHED[role], start=2):
        out, in_ = WEIGHTS[module][0]
        for half, shape in (("A", (rank, in_)), ("B", (out, rank))):
            factor = 0.2 * torch.randn(shape, generator=g)
            tensors[f"diffusion_model.{module}.lora_{half}.weight"] = factor.to(FACTORS[role])
    save_file(tensors, path, metadata or None)
    return Adapter.open(path, base.tensors)


def write_model(folder: Path) -> Model:
    """Write the awkward base and an adapter for each role."""
    base = write_base(folder / "base.safetensors")
    alpha = {"distilled": {"lora_alpha": "2", "lora_rank": "4"}}
    return Model(
        base,
        {
            role: write_adapter(folder / f"{role}.safetensors", role, base, **alpha.get(role, {}))
            for role in TOUCHED
        },
    )


def write_shards(folder: Path, base: Checkpoint, shards: Mapping[str, Sequence[str]]) -> Path:
    """Write a base again in shards of given names, each with given tensors; give its index."""
    weight_map = {}
    for file, names in shards.items():
        write_raw(folder / file, {name: base.read(name) for name in names}, {"shard": file})
        weight_map |= dict.fromkeys(names, file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return index


def odd_shards(base: Checkpoint) -> dict[str, list[str]]:
    """Shards without bytes at both ends and between, one in a folder, one that nothing touches."""
    a, b, c = (f"{PREFIX}{name}.weight" for name in "abc")
    untouched, empty, none = ["scalar", "bytes"], ["empty"], [f"{PREFIX}none.weight"]
    listed = {a, b, c, *untouched, *empty, *none, "flag"}
    first = ["none.flags"]
    rest = [name for name in base.entries if name not in {*listed, *first}]
    return {
        "no-bytes.safetensors": empty,
        "1.safetensors": [*first, a],
        "deep/er/2.safetensors": [c],
        "no-bytes-either.safetensors": none,
        "untouched.safetensors": untouched,
        "3.safetensors": [*rest, b],
        "last.safetensors": ["flag"],
    }


@contextmanager
def nothing_left() -> Iterator[None]:
    """Check that no thread, open file or buffer is left, and torch's threads are as before."""
    buffers = []

    def remembered(nbytes: int):
        memory = made(nbytes)
        buffers.append(weakref.ref(memory))
        return memory

    made = stream.aligned_memory
    gc.freeze()  # only what comes from here on is collected, which is quick
    before = (set(threading.enumerate()), torch.get_num_threads(), _open_files())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "aligned_memory", remembered)
        try:
            yield
            gc.collect()
        finally:
            gc.unfreeze()
    assert (set(threading.enumerate()), torch.get_num_threads(), _open_files()) == before
    assert not [buffer for buffer in buffers if buffer() is not None]


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Break a deadlock off: waits for locks and threads end with the alarm."""

    def ring(number: int, frame: object) -> None:
        raise TimeoutError(f"still not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class FailsAt:
    """Does what a function does, but raises at its nth call."""

    def __init__(self, owner: object, name: str, n: int, error: BaseException) -> None:
        self.owner, self.name, self.n, self.error = owner, name, n, error
        self.function = getattr(owner, name)
        self.calls = 0

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.calls += 1
        if self.calls == self.n:
            raise type(self.error)(*self.error.args)  # one that nobody else keeps
        return self.function(*args, **kwargs)


@contextmanager
def failing(owner: object, name: str, n: int, error: BaseException) -> Iterator[FailsAt]:
    """Let a function of a module fail at its nth call."""
    fails = FailsAt(owner, name, n, error)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, fails)
        yield fails


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """All files below a folder, by their names in it."""
    return {
        os.path.relpath(path, folder): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def sharded(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    return model.on(write_shards(folder, model.base, odd_shards(model.base)))


@pytest.fixture(params=["file", "shards"])
def either(request, model, sharded):
    return model if request.param == "file" else sharded
