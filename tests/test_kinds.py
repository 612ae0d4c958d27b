"""What adapters hold beside two factors for a whole bf16 weight: deltas, biases, rows, f16."""

import pytest
import torch
from conftest import CPU_KERNELS, bits, check_executions
from hypothesis import given
from hypothesis import strategies as st
from test_kernels import NewStorage

from lorabench.fuse import RULES, Pair, Term, reference_fuse, touched_rows
from lorabench.kernels import Scratch, finite_if_all, get_kernel
from lorabench.kernels.gemm import gemm_tiles

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def rounded(value, dtype):
    """A number as the nearest value of a dtype, in f32 again."""
    return torch.as_tensor(value, dtype=torch.float32).to(dtype).float()


def whole(value, dtype=torch.float32, scale=1.0):
    """A delta of one value, without factors."""
    return Pair(None, torch.tensor([[value]], dtype=dtype), scale)


# The meaning, by hand. 1 + 2^-9 is halfway between two bf16, so rb is 1; f16 and f32 hold it.

BETWEEN = 1 + 2.0**-9
S = rounded(0.8, torch.float32)


@pytest.mark.parametrize(
    ("rule", "dtype", "by_hand"),
    [
        ("R1", torch.bfloat16, lambda rb, rn: rb(rb(S * rb(BETWEEN)) + 1)),
        ("R2", torch.bfloat16, lambda rb, rn: rb(rb(S * rb(BETWEEN)) + 1)),
        ("R3", torch.bfloat16, lambda rb, rn: rb(rb(S * BETWEEN) + 1)),
        ("R4", torch.bfloat16, lambda rb, rn: rb(S * BETWEEN + 1)),
        ("R1", torch.float32, lambda rb, rn: rb(rb(S * rb(BETWEEN)) + 1)),
        ("R3", torch.float32, lambda rb, rn: rb(S * BETWEEN) + 1),
        ("R4", torch.float32, lambda rb, rn: S * BETWEEN + 1),
        ("R1", torch.float16, lambda rb, rn: rn(rb(S * rb(BETWEEN)) + 1)),
        ("R2", torch.float16, lambda rb, rn: rn(rn(S * rn(BETWEEN)) + 1)),
        ("R3", torch.float16, lambda rb, rn: rn(rn(S * BETWEEN) + 1)),
        ("R4", torch.float16, lambda rb, rn: rn(S * BETWEEN + 1)),
    ],
)
def test_a_delta_without_factors_is_rounded_as_a_product_with_the_identity(rule, dtype, by_hand):
    expected = by_hand(lambda x: rounded(x, torch.bfloat16), lambda x: rounded(x, torch.float16))
    term = Term(whole(BETWEEN), 0.8)
    found = reference_fuse(torch.ones(1, 1).to(dtype), [term], rule)
    assert found.dtype == dtype
    assert found.item() == expected.item()
    identity = Pair(torch.ones(1, 1), term.pair.b, 1.0)
    by_factors = reference_fuse(torch.ones(1, 1).to(dtype), [Term(identity, 0.8)], rule)
    assert torch.equal(bits(found), bits(by_factors))


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("R1", lambda r, s, t, w: r(r(r(s * 3) + t * 5) + w)),
        ("R2", lambda r, s, t, w: r(r(w + r(s * 3)) + r(t * 5))),
        ("R3", lambda r, s, t, w: r(r(w + r(s * 3)) + r(t * 5))),
        ("R4", lambda r, s, t, w: r(w + (s * 3 + t * 5))),
    ],
)
def test_a_second_delta_is_added_as_the_rule_adds_a_further_adapter(rule, expected):
    terms = [Term(whole(3.0), 0.3), Term(whole(5.0, scale=0.5), 0.7)]
    s, t, w = (rounded(x, torch.float32) for x in (0.3, 0.7 * 0.5, 0.1))
    r = lambda x: rounded(x, torch.bfloat16)  # noqa: E731
    found = reference_fuse(torch.full((1, 1), 0.1).bfloat16(), terms, rule)
    assert found.item() == expected(r, s, t, r(w)).item()


def test_an_f16_weight_keeps_the_bits_that_bf16_lacks():
    """R1's delta has 8 bits, its sum 11; upstream's rule for f32 would leave 8 of them."""
    weight = torch.tensor([[1 + 2.0**-10]]).half()
    found = reference_fuse(weight, [Term(whole(2.0**-3), 1.0)], "R1")
    assert found.item() == 1 + 2.0**-3 + 2.0**-10


@pytest.mark.parametrize("strength", [1.0, 0.8, -0.25])
def test_peft_merges_f16_on_the_cpu_as_r3_has_it(strength):
    """Run live: factors and weight in f16, two adapters one after another."""
    from lorabench.peers import get_peer

    g = torch.Generator().manual_seed(3)

    def values(*shape):
        return (torch.randint(-8, 9, shape, generator=g) / 16).half()

    base = torch.randn(48, 64, generator=g).half()
    terms = [Term(Pair(values(24, 64), values(48, 24), 0.5), s) for s in (strength, 0.3)]
    found = get_peer("peft").hold(base.clone(), terms).fuse()
    assert torch.equal(bits(found), bits(reference_fuse(base, terms, "R3")))
    in_bf16 = [Term(p._replace(b=p.b.bfloat16(), a=p.a.bfloat16()), s) for p, s in terms]
    assert not torch.equal(found, reference_fuse(base.bfloat16(), in_bf16, "R3").half())


# Rows


def test_rows_of_unequal_ranges_get_their_own_pair_and_the_gap_keeps_its_bits():
    """q has 2 rows, k has 1, then a row that nothing touches, v has 2."""
    weight = torch.tensor([[1.0], [1.0], [1.0], [-0.0], [1.0], [1.0]]).bfloat16()
    ones = torch.ones(1, 1).bfloat16()
    q = Pair(ones, torch.tensor([[1.0], [2.0]]).bfloat16(), 1.0)
    k = Pair(ones, torch.tensor([[4.0]]).bfloat16(), 0.5, top=2)
    v = Pair(None, torch.tensor([[8.0], [16.0]]).bfloat16(), 1.0, top=4)
    terms = [Term(pair, 1.0) for pair in (v, q, k)]
    assert touched_rows(terms) == 5
    for rule in RULES:
        found = reference_fuse(weight, terms, rule)
        assert found.flatten().tolist() == [2, 3, 3, 0, 9, 17]
        assert found[3].signbit().item()


@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_first_is_the_first_that_touches_the_row(kernel):
    """R1 rounds 0.8·B, 0.80078, for the first adapter; a further one's product is 0.8·9 in f32."""
    a, b = torch.full((1, 1), 9.0).bfloat16(), torch.ones(2, 1).bfloat16()
    terms = [Term(Pair(a, b[:1], 1.0), 0.8), Term(Pair(a, b, 1.0), 0.8)]
    weight = torch.zeros(2, 1).bfloat16()
    get_kernel(kernel, CPU)(weight, terms, Scratch())
    assert weight.flatten().tolist() == [14.4375, 7.21875]
    assert rounded(S * 9, torch.bfloat16) == 7.1875
    assert rounded(7.21875 + S * 9, torch.bfloat16) == 14.4375


# Kernels


def exact(g, rows, in_, rank, dtype):
    """A pair whose sums are exact in f32; without factors for rank 0."""

    def values(*shape):
        return (torch.randint(-8, 9, shape, generator=g) / 16 + 2.0**-9).to(dtype)

    return Pair(values(rank, in_) if rank else None, values(rows, rank or in_), 1.0)


@st.composite
def terms_of(draw, out, in_):
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    terms = []
    for _ in range(draw(st.integers(0, 4))):
        top = draw(st.integers(0, out - 1))
        rows = draw(st.integers(1, out - top))
        dtype = draw(st.sampled_from(DTYPES))
        pair = exact(g, rows, in_, draw(st.integers(0, 6)), dtype)
        strength = draw(st.sampled_from([1.0, 0.5, -0.25]))
        terms.append(Term(pair._replace(top=top), strength))
    return terms


@given(
    data=st.data(),
    out=st.integers(1, 30),
    in_=st.integers(1, 30),
    dtype=st.sampled_from(DTYPES),
    tile=st.integers(1, 200),
    prepared_bytes=st.sampled_from([0, 1 << 20]),
)
def test_kernels_agree_bit_for_bit_on_all_kinds(data, out, in_, dtype, tile, prepared_bytes):
    terms = data.draw(terms_of(out, in_))
    base = torch.randn(out, in_, generator=torch.Generator().manual_seed(out)).to(dtype)
    base.view(-1)[:2] = -0.0
    check_executions(base, terms, tile=tile, panel=8, prepared_bytes=prepared_bytes)
    untouched = torch.tensor([not any(row in t.pair.rows for t in terms) for row in range(out)])
    for rule in RULES:
        fused = reference_fuse(base, terms, rule)
        assert torch.equal(bits(fused[untouched]), bits(base[untouched]))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("product", [torch.bfloat16, torch.float32])
def test_gemm_allocates_nothing_once_warm_on_all_kinds(product, rule, dtype):
    g = torch.Generator().manual_seed(0)
    terms = [
        Term(exact(g, 64, 48, 8, torch.bfloat16), 0.5),
        Term(exact(g, 32, 48, 0, torch.float32)._replace(top=8), 0.5),
        Term(exact(g, 16, 48, 0, torch.float16), 0.5),
    ]
    scratch, weight = Scratch(), torch.zeros(64, 48, dtype=dtype)
    fuse = gemm_tiles(rule, product).fuse
    fuse(weight, terms, scratch)
    with NewStorage() as watch:
        fuse(weight, terms, scratch)
    assert watch.made == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan"), None])
def test_one_number_tells_whether_all_values_are_finite(dtype, bad):
    values = torch.full((300, 400), 6e4).to(dtype)  # an f16 sum of these is infinite
    if bad is not None:
        values[123, 45] = bad
    assert finite_if_all(values).isfinite().item() == (bad is None)
    assert finite_if_all(values[:0]).isfinite()


def test_a_pair_within_rows_counts_from_the_first_of_them():
    pair = Pair(None, torch.arange(12.0).view(6, 2), 1.0, top=4)
    for rows in (range(0, 20), range(5, 7), range(0, 5), range(8, 30)):
        within = pair.within(rows)
        touched = range(max(4, rows.start), min(10, rows.stop))
        assert [row + rows.start for row in within.rows] == [*touched]
        assert torch.equal(within.b, pair.b[touched.start - 4 : touched.stop - 4])
    assert not len(pair.within(range(0, 3)).b)
    assert not len(pair.within(range(12, 20)).b)
    assert pair._replace(top=0).within(range(6)).b is pair.b
