"""Every kernel gives the rule's bits, and the gemm kernel allocates nothing once warm."""

import json
from contextlib import nullcontext, suppress
from itertools import islice
from pathlib import Path

import pytest
import torch
from conftest import CPU_KERNELS, check_executions
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from lorabench.checkpoint import Checkpoint
from lorabench.errors import UnavailableError
from lorabench.fuse import RULES, Pair, Term, reference_deltas, reference_fuse
from lorabench.kernels import Scratch, get_kernel, get_tiles, one_nan
from lorabench.kernels import gemm as gemm_module
from lorabench.kernels.gemm import gemm_tiles

GOLDENS = Checkpoint.open(Path(__file__).parent / "goldens" / "upstream_fuse.safetensors")
CASES = json.loads(GOLDENS.metadata["cases"])

CPU = torch.device("cpu")
EXECUTIONS = {
    **{name: get_kernel(name, CPU) for name in CPU_KERNELS},
    "gemm, product in bf16": gemm_tiles(product=torch.bfloat16).fuse,
    "gemm, product in f32": gemm_tiles(product=torch.float32).fuse,
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


def exact_factors(draw_seed, out, in_, rank, dtype=torch.bfloat16):
    """Small integers over a power of two, so that every sum is exact in f32."""
    g = torch.Generator().manual_seed(draw_seed)

    def values(*shape):
        # In f32 the larger ones have a bit more than bf16 can hold, and are rounded by some rules.
        return (torch.randint(-8, 9, shape, generator=g) / 16 + 2.0**-9).to(dtype)

    return Pair(values(rank, in_), values(out, rank), 1.0)


@given(
    seed=st.integers(0, 2**31),
    out=st.integers(1, 40),
    in_=st.integers(1, 40),
    ranks=st.lists(st.integers(1, 12), max_size=3),
    strength=st.sampled_from([1.0, 0.5, -0.25]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    factors=st.sampled_from([torch.bfloat16, torch.float32]),
    tile=st.integers(1, 200),
    panel=st.integers(1, 50),
    prepared_bytes=st.sampled_from([0, 1 << 20]),
)
def test_kernels_agree_bit_for_bit_where_sums_are_exact(
    seed, out, in_, ranks, strength, dtype, factors, tile, panel, prepared_bytes
):
    g = torch.Generator().manual_seed(seed)
    base = torch.randn(out, in_, generator=g).to(dtype)
    terms = [
        Term(exact_factors(seed + i, out, in_, r, factors), strength) for i, r in enumerate(ranks)
    ]
    check_executions(base, terms, tile=tile, panel=panel, prepared_bytes=prepared_bytes)


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


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("product", [torch.bfloat16, torch.float32])
def test_gemm_allocates_nothing_once_warm(product, rule):
    terms = [Term(exact_factors(i, 64, 48, 8), 0.5) for i in range(2)]
    terms[1] = Term(Pair(terms[1].pair.a.float(), terms[1].pair.b.float(), 1.0), 0.5)
    scratch, weight = Scratch(), torch.zeros(64, 48, dtype=torch.bfloat16)
    fuse = gemm_tiles(rule, product).fuse
    fuse(weight, terms, scratch)
    with NewStorage() as watch:
        fuse(weight, terms, scratch)
    assert watch.made == []


@pytest.mark.parametrize(("out", "in_"), [(4096, 4096), (4096, 16384), (400_000, 8), (1, 1 << 22)])
def test_scratch_stays_below_256_mib_whatever_the_shape(out, in_):
    """At LTX-2.5's rank, with several adapters, one of them in f32."""
    rank = 450

    def factors(dtype):  # no memory of their own: one row, or one value, again and again
        a = torch.zeros(1, dtype=dtype).expand(rank, in_)
        return Pair(a, torch.zeros(1, dtype=dtype).expand(out, rank), 1.0)

    terms = [Term(factors(dtype), 0.8) for dtype in (torch.bfloat16, torch.float32)]
    weight = torch.zeros(1, dtype=torch.bfloat16).expand(out, in_)
    scratch = Scratch()
    for _, deltas in islice(gemm_tiles()(weight, terms, scratch), 1):
        for _ in deltas:
            pass
    assert 0 < scratch.nbytes <= 256 << 20


def test_rules_round_where_they_say():
    """One value by hand: B@A = 1 + 2^-8 exactly, s = 0.8, W = 1."""
    a = torch.tensor([[1.0], [2.0**-8]]).bfloat16()
    term = Term(Pair(a, torch.ones(1, 2).bfloat16(), 1.0), 0.8)
    s = torch.tensor(0.8)
    rb = lambda x: torch.as_tensor(x).bfloat16().float()  # noqa: E731
    product = torch.tensor(1 + 2.0**-8)
    by_hand = {
        "R1": rb(rb(rb(s) * product) + 1),
        "R2": rb(rb(s * rb(product)) + 1),
        "R3": rb(rb(s * product) + 1),
        "R4": rb(s * product + 1),
    }
    for rule, expected in by_hand.items():
        fused = reference_fuse(torch.ones(1, 1).bfloat16(), [term], rule)
        assert fused.item() == expected.item(), rule


def test_rules_differ_by_rounding_alone_and_where_it_is_once_least():
    g = torch.Generator().manual_seed(1)
    base = torch.randn(64, 64, generator=g).bfloat16()
    pair = Pair(*(torch.randn(8, 64, generator=g).bfloat16() * 0.1,
                  torch.randn(64, 8, generator=g).bfloat16() * 0.1), 1.0)  # fmt: skip
    terms = [Term(pair, 0.8), Term(pair, 0.3)]
    exact = base.double() + sum(
        (t.strength * (t.pair.b.double() @ t.pair.a.double()) for t in terms),
        start=torch.zeros(64, 64).double(),
    )
    errors = {
        rule: (reference_fuse(base, terms, rule).double() - exact).abs().mean() for rule in RULES
    }
    assert min(errors, key=lambda rule: errors[rule]) == "R4"
    assert max(errors.values()) < 4 * errors["R4"]


@pytest.mark.parametrize("rule", RULES)
def test_f32_weights_are_rounded_by_r1_only(rule):
    base = torch.full((2, 2), 1 + 2.0**-20)
    pair = Pair(torch.ones(1, 2).bfloat16(), torch.ones(2, 1).bfloat16(), 1.0)
    fused = reference_fuse(base, [Term(pair, 1.0)], rule)
    assert fused.dtype == torch.float32
    assert fused[0, 0].item() == (2.0 if rule == "R1" else 2 + 2.0**-20)


def test_reference_deltas_are_as_many_as_the_rule_has():
    terms = [Term(exact_factors(i, 4, 4, 2), 0.5) for i in range(3)]
    counts = {rule: len(reference_deltas(terms, rule)) for rule in RULES}
    assert counts == {"R1": 1, "R2": 3, "R3": 3, "R4": 1}


@given(payloads=st.lists(st.integers(1, 0x7F), min_size=1, max_size=20), sign=st.booleans())
def test_one_nan_leaves_one_kind_of_nan_and_all_else(payloads, sign):
    high = 0xFF80 if sign else 0x7F80
    raw = torch.tensor([0x3F80, 0xFF80, 0x8000, *(high | p for p in payloads)], dtype=torch.int32)
    weight = raw.to(torch.int16).view(torch.bfloat16)
    one_nan(weight)
    assert [b & 0xFFFF for b in bits(weight).tolist()] == [
        0x3F80, 0xFF80, 0x8000, *[0x7FC0] * len(payloads)
    ]  # fmt: skip


class Recorder:
    def __init__(self):
        self.booked = []

    def book(self, operation, nbytes, flops):
        self.booked.append((operation, nbytes, flops))
        return nullcontext()


def test_a_pass_books_what_it_does():
    scratch = Scratch()
    scratch.account = recorder = Recorder()
    terms = [Term(exact_factors(0, 64, 48, 8), 0.5)]
    gemm_tiles(product=torch.float32).fuse(torch.zeros(64, 48).bfloat16(), terms, scratch)
    operations = {operation for operation, _, _ in recorder.booked}
    assert operations == {"copy", "product", "add"}
    assert sum(flops for _, _, flops in recorder.booked) == terms[0].pair.flops
    assert all(nbytes > 0 for _, nbytes, _ in recorder.booked)
    scratch.account = None
    assert scratch.span("add") is scratch.span("copy"), "off, nothing is made"


def test_an_unknown_or_impossible_kernel_raises():
    with pytest.raises(UnavailableError, match="choose from reference, scalar, gemm, triton"):
        get_kernel("gem", CPU)
    with pytest.raises(UnavailableError, match="CPU loop"):
        get_kernel("scalar", torch.device("cuda"))
    with pytest.raises(UnavailableError, match="has rule R1 only"):
        get_kernel("scalar", CPU, "R4")
    with pytest.raises(UnavailableError, match="no rounding rule 'r1'; choose from R1, R2, R3, R4"):
        get_kernel("gemm", CPU, "r1")
    with pytest.raises(UnavailableError, match="'scalar' doesn't show its deltas"):
        get_tiles("scalar", CPU)


@pytest.mark.parametrize("reduced", [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("precision", ["tf32", "ieee", "none"])
def test_settings_of_cuda_products_are_left_as_found(reduced, precision):
    """They can be set without a GPU."""
    matmul = torch.backends.cuda.matmul

    def settings():
        return (
            matmul.fp32_precision,
            matmul.allow_bf16_reduced_precision_reduction,
            matmul.allow_bf16_reduced_precision_reduction_split_k,
        )

    before = settings()
    try:
        matmul.allow_bf16_reduced_precision_reduction = reduced
        matmul.fp32_precision = precision
        found = settings()
        with suppress(KeyboardInterrupt), gemm_module._f32_sums(torch.device("cuda")):
            assert settings()[:2] == ("ieee", False)
            raise KeyboardInterrupt
        assert settings() == found
    finally:
        matmul.fp32_precision, *pair = before
        matmul.allow_bf16_reduced_precision_reduction = tuple(pair)
