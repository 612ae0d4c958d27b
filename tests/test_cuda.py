"""The same weights on a GPU: bits, digests and restores; `make gpu-check` runs this on one."""

import pytest
import torch
from conftest import bits
from test_kernels import CASES, golden

from lorabench.digest import digest
from lorabench.kernels import Scratch, get_kernel
from lorabench.recipe import BASE, State
from lorabench.resident import ResidentWeights

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

CUDA = torch.device("cuda")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_gemm_gives_the_golden_bits_on_the_gpu(case):
    weight, terms, expected = golden(case)
    weight = weight.to(CUDA)
    moved = [
        t._replace(pair=t.pair._replace(a=t.pair.a.to(CUDA), b=t.pair.b.to(CUDA))) for t in terms
    ]
    get_kernel("gemm", CUDA)(weight, moved, Scratch(CUDA))
    assert torch.equal(bits(weight.cpu()), bits(expected))


def test_a_digest_is_the_same_on_both_devices():
    tensors = {"a": torch.randn(300, 70).bfloat16(), "b": torch.randn(5)}
    assert digest(tensors) == digest({name: t.to(CUDA) for name, t in tensors.items()})


@pytest.mark.parametrize("restore", ["reread", "host_snapshot", "device_snapshot"])
def test_any_walk_on_the_gpu_ends_in_the_bits_of_a_fresh_load(restore, base, adapters):
    weights = ResidentWeights(base, adapters, restore=restore, device=CUDA)
    weights.load(State(distilled=1.0))
    for state in (BASE, State(distilled=0.25), State(user=0.8, distilled=0.5), BASE):
        weights.rebind(state)
        fresh = ResidentWeights(base, adapters, device=CUDA)
        fresh.load(state)
        assert weights.digest() == fresh.digest()
    assert weights.digest() == digest({name: base.read(name) for name in base.entries})


def test_the_gpu_setting_that_sums_bf16_in_bf16_is_left_as_it_was(base, adapters):
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    ResidentWeights(base, adapters, device=CUDA).load(State(distilled=1.0))
    assert matmul.allow_bf16_reduced_precision_reduction == before
