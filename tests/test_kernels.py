"""Every kernel gives the rule's bits, and the gemm kernel allocates nothing once warm."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from lorabench.checkpoint import Checkpoint
from lorabench.errors import UnavailableError
from lorabench.fuse import Pair, Term, reference_fuse
from lorabench.kernels import KERNELS, Scratch, get_kernel
from lorabench.kernels import gemm as gemm_module
from lorabench.kernels.gemm import fuse_gemm

GOLDENS = Checkpoint.open(Path(__file__).parent / "goldens" / "upstream_fuse.safetensors")
CASES = json.loads(GOLDENS.metadata["cases"])

EXECUTIONS = {
    **KERNELS,
    "gemm, product in bf16": lambda w, t, s: fuse_gemm(w, t, s, torch.bfloat16),
    "gemm, product in f32": lambda w, t, s: fuse_gemm(w, t, s, torch.float32),
}


def bits(tensor):
    return tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)


def golden(case):
    terms = [
        Term(
            Pair(*(GOLDENS.read(f"{case['name']}.lora{i}.{half}") for half in "AB"), 1.0),
            strength,
        )
        for i, strength in enumerate(case["strengths"])
    ]  # fmt: skip
    return GOLDENS.read(f"{case['name']}.base"), terms, GOLDENS.read(f"{case['name']}.fused")


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_every_kernel_gives_the_golden_bits(execution, case):
    weight, terms, expected = golden(case)
    EXECUTIONS[execution](weight, terms, Scratch())
    assert torch.equal(bits(weight), bits(expected))


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_strength_and_scale_act_as_their_product(execution):
    weight, [term], _ = golden(next(c for c in CASES if c["name"] == "one_s1"))
    by_scale, by_strength = weight.clone(), weight.clone()
    EXECUTIONS[execution](by_scale, [Term(term.pair._replace(scale=0.5), 0.8)], Scratch())
    EXECUTIONS[execution](by_strength, [Term(term.pair, 0.4)], Scratch())
    assert torch.equal(bits(by_scale), bits(by_strength))
    assert not torch.equal(bits(by_scale), bits(weight))


def exact_factors(draw_seed, out, in_, rank):
    """Small integers over a power of two, so that every sum is exact in f32."""
    g = torch.Generator().manual_seed(draw_seed)

    def values(*shape):
        return (torch.randint(-8, 9, shape, generator=g) / 16).bfloat16()

    return Pair(values(rank, in_), values(out, rank), 1.0)


@given(
    seed=st.integers(0, 2**31),
    out=st.integers(1, 40),
    in_=st.integers(1, 40),
    ranks=st.lists(st.integers(1, 12), max_size=3),
    strength=st.sampled_from([1.0, 0.5, -0.25]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    tile=st.integers(1, 200),
)
def test_kernels_agree_bit_for_bit_where_sums_are_exact(
    seed, out, in_, ranks, strength, dtype, tile
):
    g = torch.Generator().manual_seed(seed)
    base = torch.randn(out, in_, generator=g).to(dtype)
    terms = [Term(exact_factors(seed + i, out, in_, r), strength) for i, r in enumerate(ranks)]
    expected = reference_fuse(base, terms)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemm_module, "TILE", tile)
        for name, kernel in EXECUTIONS.items():
            weight = base.clone()
            kernel(weight, terms, Scratch())
            assert torch.equal(bits(weight), bits(expected)), name


def test_gemm_stays_within_its_summation_error_on_real_values():
    g = torch.Generator().manual_seed(0)
    out, in_, rank = 96, 160, 64
    a, b = torch.randn(rank, in_, generator=g), torch.randn(out, rank, generator=g)
    pair = Pair(a.bfloat16(), b.bfloat16(), 1.0)
    term = Term(pair, 0.8)
    expected = reference_fuse(torch.zeros(out, in_).bfloat16(), [term]).float()
    bound = (rank * 2.0**-24) * ((pair.b.float().abs() * 0.8) @ pair.a.float().abs())
    ulp = torch.exp2(expected.abs().clamp_min(2.0**-126).log2().floor() - 7)
    for name, kernel in EXECUTIONS.items():
        weight = torch.zeros(out, in_).bfloat16()
        kernel(weight, [term], Scratch())
        assert ((weight.float() - expected).abs() <= torch.maximum(ulp, bound)).all(), name


class NewStorage(TorchDispatchMode):
    """Collects the operations whose output lies in memory that no input had."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        known = {
            x.untyped_storage().data_ptr()
            for x in [*args, *kwargs.values()]
            if isinstance(x, torch.Tensor)
        }
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in known:
            self.made.append(str(func))
        return result


@pytest.mark.parametrize("product", [torch.bfloat16, torch.float32])
def test_gemm_allocates_nothing_once_warm(product):
    terms = [Term(exact_factors(i, 64, 48, 8), 0.5) for i in range(2)]
    terms[1] = Term(Pair(terms[1].pair.a.float(), terms[1].pair.b.float(), 1.0), 0.5)
    scratch, weight = Scratch(), torch.zeros(64, 48, dtype=torch.bfloat16)
    fuse_gemm(weight, terms, scratch, product)
    with NewStorage() as watch:
        fuse_gemm(weight, terms, scratch, product)
    assert watch.made == []


def test_an_unknown_or_impossible_kernel_raises():
    with pytest.raises(UnavailableError, match="choose from reference, scalar, gemm"):
        get_kernel("tritn", torch.device("cpu"))
    with pytest.raises(UnavailableError, match="CPU loop"):
        get_kernel("scalar", torch.device("cuda"))
