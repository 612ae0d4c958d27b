"""The same weights on a GPU: bits, digests and restores; `make gpu-check` asks that too."""

import pytest
import torch
from conftest import bits
from test_kernels import CASES, golden

from lorabench.digest import digest
from lorabench.fuse import Pair, Term
from lorabench.kernels import Scratch, get_kernel, get_tiles
from lorabench.recipe import BASE, State
from lorabench.resident import ResidentWeights

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

CUDA = torch.device("cuda")
KERNELS = ["gemm", "triton"]
EXACT = ["reread", "host_snapshot", "device_snapshot", "residual", "images"]


def on_the_gpu(terms):
    return [
        t._replace(pair=t.pair._replace(a=t.pair.a.to(CUDA), b=t.pair.b.to(CUDA))) for t in terms
    ]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_kernels_give_the_golden_bits_on_the_gpu(case, kernel):
    base, terms, expected = golden(case)
    for fuse in (get_kernel(kernel, CUDA), get_tiles(kernel, CUDA).fuse):
        weight = base.to(CUDA)
        fuse(weight, on_the_gpu(terms), Scratch(CUDA))
        assert torch.equal(bits(weight.cpu()), bits(expected))


@pytest.mark.parametrize(("out", "in_", "rank"), [(4096, 2048, 450), (32, 4096, 32), (77, 130, 9)])
def test_a_tile_of_the_triton_kernel_has_the_bits_of_its_one_pass(out, in_, rank):
    g = torch.Generator(CUDA).manual_seed(0)
    a, b, base = (
        torch.randn(shape, generator=g, device=CUDA).bfloat16()
        for shape in ((rank, in_), (out, rank), (out, in_))
    )
    terms = [Term(Pair(a, b, 1.0), 0.8)]
    fused = [base.clone(), base.clone()]
    get_kernel("triton", CUDA)(fused[0], terms, Scratch(CUDA))
    get_tiles("triton", CUDA).fuse(fused[1], terms, Scratch(CUDA))
    assert torch.equal(*map(bits, fused))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_pass_allocates_nothing_once_warm(kernel):
    a, b, weight = (
        torch.zeros(s, device=CUDA).bfloat16() for s in ((450, 96), (64, 450), (64, 96))
    )
    terms = [Term(Pair(a, b, 1.0), 0.8), Term(Pair(a, b, 1.0), 0.3)]
    fuse, scratch = get_kernel(kernel, CUDA), Scratch(CUDA)
    fuse(weight, terms, scratch)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    fuse(weight, terms, scratch)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_a_digest_is_the_same_on_both_devices():
    tensors = {"a": torch.randn(300, 70).bfloat16(), "b": torch.randn(5)}
    assert digest(tensors) == digest({name: t.to(CUDA) for name, t in tensors.items()})


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("restore", EXACT)
def test_any_walk_on_the_gpu_ends_in_the_bits_of_a_fresh_load(restore, kernel, base, adapters):
    weights = ResidentWeights(base, adapters, kernel=kernel, restore=restore, device=CUDA)
    weights.load(State(distilled=1.0))
    for state in (BASE, State(distilled=0.25), State(user=0.8, distilled=0.5), BASE):
        weights.rebind(state)
        fresh = ResidentWeights(base, adapters, kernel=kernel, device=CUDA)
        fresh.load(state)
        assert weights.digest() == fresh.digest()
    assert weights.digest() == digest({name: base.read(name) for name in base.entries})


def test_the_gpu_setting_that_sums_bf16_in_bf16_is_left_as_it_was(base, adapters):
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    ResidentWeights(base, adapters, device=CUDA).load(State(distilled=1.0))
    assert matmul.allow_bf16_reduced_precision_reduction == before
