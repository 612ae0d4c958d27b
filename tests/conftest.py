"""Small real files that the tests share: a shrunk LTX-2.5 with adapters, written once."""

import json
import os
import pickle
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import settings
from safetensors.torch import save_file

from lorabench.adapter import Adapter
from lorabench.checkpoint import Checkpoint
from lorabench.fuse import RULES, reference_fuse
from lorabench.geometry import load_geometry
from lorabench.kernels import KERNELS, Scratch, gemm, get_kernel
from lorabench.synthetic import synthesize

# A loaded machine is slow, and slow is no failure.
settings.register_profile("lorabench", deadline=None)
settings.load_profile("lorabench")

pytest_plugins = ["odd"]  # its fixtures: the awkward base, in a file and in shards

ADAPTERS = ("user", "distilled", "detailing")

CPU_KERNELS = [name for name in KERNELS if name != "triton"]

LONGEST_FILES = ("test_notebooks.py", "test_triton.py")


def pytest_configure():
    """Hear Ctrl-C, as tests and the processes that they start are to, when run in the background.

    There a shell has it ignored, which processes hand down.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """Begin with the files that take longest: one begun last leaves the other workers idle."""
    items.sort(key=lambda item: item.path.name not in LONGEST_FILES)


@pytest.fixture(scope="session", autouse=True)
def _few_busy_threads():
    """Keep torch from starting threads for products that are too small for them.

    Processes that tests start have as many as ever, but those that wait for work sleep: OpenMP has
    them spin, and where test processes share the cores that is most of what small products take.
    """
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(scope="session")
def geometry():
    """One block of LTX-2.5 at a 32nd of its width: 62 targets."""
    return load_geometry("ltx-2.5-22b", shrink=32).cut(1)


@pytest.fixture(scope="session")
def files(geometry, tmp_path_factory):
    return synthesize(tmp_path_factory.mktemp("weights"), geometry, ADAPTERS, seed=7, ratio=0.3)


@pytest.fixture(scope="session")
def base(files):
    return Checkpoint.open(files.base)


@pytest.fixture(scope="session")
def adapters(files, base):
    return {name: Adapter.open(path, base.tensors) for name, path in files.adapters.items()}


def shard(checkpoint: Checkpoint, folder: Path, shards: int) -> Path:
    """Write a checkpoint again as shards, by the safetensors library; give its index."""
    names = list(checkpoint.entries)
    weight_map = {}
    for i in range(shards):
        part = names[i::shards]
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        save_file({n: checkpoint.read(n) for n in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


class Ended(NamedTuple):
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def json(self):
        """What is on stdout, read as JSON."""
        return json.loads(self.out)


@contextmanager
def cases_run_here() -> Iterator[None]:
    """Have sweeps call their cases in this process; what goes in and out is pickled all the same.

    For tests of what becomes of results: a process that imports torch takes two seconds to start.
    """
    threads = torch.get_num_threads()

    def call(function, *arguments):
        function, arguments = pickle.loads(pickle.dumps((function, arguments)))
        return pickle.loads(pickle.dumps(function(*arguments)))

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lorabench.bench.cases.alone", call)
            yield
    finally:
        torch.set_num_threads(threads)


@pytest.fixture
def _cases_run_here():
    with cases_run_here():
        yield


def check_executions(base, terms, *, tile, panel, prepared_bytes) -> None:
    """Hold every way of fusing against the reference, bit for bit, with tiles of a few elements."""
    cpu = torch.device("cpu")
    executions = {
        ("R1", name): get_kernel(name, cpu)
        for name in CPU_KERNELS
        if name != "scalar" or base.dtype != torch.float16
    }
    for rule in RULES:
        for product in (torch.bfloat16, torch.float32):
            executions[rule, f"gemm, {product}"] = gemm.gemm_tiles(rule, product).fuse
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemm, "TILE", tile)
        patch.setattr(gemm, "MAX_ROWS", 7)
        patch.setattr(gemm, "PANEL", panel)
        patch.setattr(gemm, "PREPARED_BYTES", prepared_bytes)
        for (rule, name), kernel in executions.items():
            weight = base.clone()
            kernel(weight, terms, Scratch())
            assert torch.equal(bits(weight), bits(reference_fuse(base, terms, rule))), (rule, name)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's bits as integers, so that NaN equals NaN and -0 differs from 0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
