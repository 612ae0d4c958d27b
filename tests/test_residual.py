"""A residual gives back every bit in place, keeps few of them, and refuses what it can't do."""

import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from conftest import bits
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from lorabench import corrections, residual
from lorabench.corrections import correction_entropy, decode, encode
from lorabench.cost import Work
from lorabench.errors import UnavailableError, WeightsLostError
from lorabench.fuse import RULES, Pair, Term
from lorabench.kernels import Scratch, get_tiles, one_nan
from lorabench.kernels import gemm as gemm_module
from lorabench.residual import Residual

CPU = torch.device("cpu")
BF16, F32 = torch.bfloat16, torch.float32


def any_bits(seed: int, shape: tuple[int, ...], dtype: torch.dtype = BF16) -> torch.Tensor:
    """Values of every kind: one in 256 of random bf16 bits is NaN or infinite, the same of f32."""
    g = torch.Generator().manual_seed(seed)
    integer = torch.int16 if dtype == BF16 else torch.int32
    info = torch.iinfo(integer)
    return torch.randint(info.min, info.max + 1, shape, generator=g, dtype=integer).view(dtype)


def pair(seed: int, shape: tuple[int, int], rank: int, size: float) -> Pair:
    """Factors whose delta has a standard deviation of about ``size``."""
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(rank, shape[1], generator=g)
    return Pair(a.bfloat16(), (size / rank**0.5 * torch.randn(shape[0], rank, generator=g)), 1.0)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(bits(one), bits(other))


@contextmanager
def cut_small(tile: int = 24, chunk: int = 12):
    """Make tiles and chunks small, so that small weights have several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemm_module, "TILE", tile)
        patch.setitem(residual.CHUNK, "cpu", chunk)
        yield


def make(rule: str = "R1", kernel: str = "gemm") -> Residual:
    return Residual(get_tiles(kernel, CPU, rule), Scratch())


@given(
    seed=st.integers(0, 2**31),
    out=st.integers(1, 20),
    in_=st.integers(1, 20),
    sizes=st.lists(st.sampled_from([1e-38, 1e-4, 0.05, 1.0, 1e4, 1e38]), min_size=1, max_size=3),
    strength=st.sampled_from([1.0, 0.8, -0.25, 3.0]),
    rule=st.sampled_from(list(RULES)),
    dtype=st.sampled_from([BF16, F32]),
    ordinary=st.booleans(),
    kernel=st.sampled_from(["gemm", "reference"]),
    tile=st.integers(1, 500),
    chunk=st.integers(1, 25).map(lambda n: 4 * n),
)
def test_every_bit_comes_back(
    seed, out, in_, sizes, strength, rule, dtype, ordinary, kernel, tile, chunk
):
    weight = any_bits(seed, (out, in_), dtype)
    if ordinary:
        weight = torch.randn(out, in_, generator=torch.Generator().manual_seed(seed)).to(dtype)
    base, fused = weight.clone(), weight.clone()
    terms = [Term(pair(seed + i, (out, in_), 3, size), strength) for i, size in enumerate(sizes)]
    keeper = make(rule, kernel)
    with cut_small(tile, chunk):
        keeper.keep("w", weight)
        work = keeper.fuse("w", weight, terms)
        get_tiles(kernel, CPU, rule).fuse(fused, terms, Scratch())
        one_nan(fused)
        one_nan(weight)  # as is done to fused weights
        assert same(weight, fused)
        assert keeper.kept_bytes >= (weight.nbytes if dtype == F32 else 0)
        keeper.check()
        assert keeper.restore("w", weight, terms) == work
    assert same(weight, base)
    assert keeper.kept_bytes == 0
    assert work == Work(flops=sum(t.pair.flops for t in terms), fused_params=out * in_)


@given(
    seed=st.integers(0, 2**31),
    size=st.integers(0, 3000),
    share=st.sampled_from([0.0, 0.0003, 0.02, 0.1, 0.25, 0.5, 1.0]),
    reach=st.sampled_from([1, 2, 7, 40, 130, 2**15]),
    nan_guess=st.booleans(),
)
@example(seed=0, size=1, share=1.0, reach=1, nan_guess=False)
def test_any_guess_is_corrected_to_any_bits(seed, size, share, reach, nan_guess):
    g = torch.Generator().manual_seed(seed)
    guess = any_bits(seed, (size,))
    offsets = torch.randint(-reach, reach + 1, (size,), generator=g)
    wrong = torch.rand(size, generator=g) < share
    base = (guess.view(torch.int16) + (offsets * wrong).to(torch.int16)).view(BF16)
    if nan_guess:
        guess[wrong] = float("nan")
    coded = encode(base, guess, Scratch())
    assert coded.data.nbytes <= base.nbytes
    # What guesses are NaN comes out of a subtraction in any of a NaN's bits.
    again = torch.where(guess.isnan(), any_nan(seed, size), guess)
    decode(coded, again, Scratch())
    assert same(again, base)


def any_nan(seed: int, size: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    payload = torch.randint(1, 128, (size,), generator=g)
    sign = torch.randint(0, 2, (size,), generator=g) << 15
    return (sign | 0x7F80 | payload).to(torch.int16).view(BF16)


def test_every_16_bits_come_back_from_under_every_kind_of_delta():
    base = torch.arange(-(2**15), 2**15).to(torch.int16).view(BF16).view(256, 256)
    kinds = torch.tensor([0.0, -0.0, 1e-40, 2e-38, 1e-5, 1.0, 1e10, 3e38, -3e38, 1e30])
    for rule in RULES:
        for kind in kinds:
            weight, keeper = base.clone(), make(rule)
            # 1e30 squared is infinite, and infinity times 0 is NaN.
            a = torch.full((2, 256), 1e30 if kind == 1e30 else 1.0)
            terms = [Term(Pair(a, kind.repeat(256, 2) / 2, 1.0), 1.0)]
            keeper.fuse("w", weight, terms)
            keeper.restore("w", weight, terms)
            assert same(weight, base), (rule, kind)


@pytest.fixture(scope="module")
def million():
    """A weight of a million elements, and its terms by ratio of deviations of delta and weight."""
    shape = (1024, 1024)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3)).bfloat16()
    ratios = (0.01, 0.05, 0.1, 0.3, 1.0, 30.0)
    return weight, {ratio: [Term(pair(4, shape, 64, ratio), 1.0)] for ratio in ratios}


@pytest.mark.parametrize(
    ("ratio", "most"), [(0.01, 0.27), (0.05, 0.7), (0.1, 1.02), (0.3, 1.9), (1.0, 4.0), (30.0, 16)]
)
def test_few_bits_a_weight_are_kept(million, ratio, most):
    weight, terms = million[0].clone(), million[1][ratio]
    keeper = make()
    keeper.fuse("w", weight, terms)
    kept = 8 * keeper.kept_bytes / weight.numel()
    entropy = correction_entropy([(million[0], terms)], get_tiles("gemm", CPU), Scratch())
    assert entropy.given_exponent < entropy.bits <= kept < most
    keeper.restore("w", weight, terms)
    assert same(weight, million[0])


def test_the_entropy_is_that_of_all_corrections(million):
    base, terms = million[0][:100], million[1][0.3]
    terms = [Term(terms[0].pair._replace(b=terms[0].pair.b[:100]), 1.0)]
    fused = base.clone()
    [(tile, deltas)] = get_tiles("gemm", CPU)(fused, terms, Scratch())
    delta = next(deltas).clone()
    tile.add_(delta)
    wrong = base.view(torch.int16) - (fused - delta).view(torch.int16)
    share = wrong.unique(return_counts=True)[1] / wrong.numel()
    found = correction_entropy([(base[:40], cut(terms, 0, 40)), (base[40:], cut(terms, 40, 100))],
                               get_tiles("gemm", CPU), Scratch())  # fmt: skip
    assert found.bits == pytest.approx(-float((share * share.log2()).sum()), rel=1e-4)
    assert same(base, million[0][:100])


def cut(terms: list[Term], top: int, end: int) -> list[Term]:
    return [Term(p._replace(b=p.b[top:end]), s) for p, s in terms]


def test_noise_is_kept_in_no_more_than_its_own_bits():
    weight, keeper = any_bits(5, (300, 300)), make()
    base, terms = weight.clone(), [Term(pair(6, (300, 300), 4, 1.0), 1.0)]
    keeper.fuse("w", weight, terms)
    assert weight.nbytes / 2 < keeper.kept_bytes <= weight.nbytes + 8
    keeper.restore("w", weight, terms)
    assert same(weight, base)


def small(rule: str = "R1", dtype: torch.dtype = BF16):
    """A keeper and a weight of several tiles of several chunks, with two states' terms."""
    shape = (4, 12)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight[:, :2] = any_bits(2, (4, 2), dtype)
    terms = [[Term(pair(seed, shape, 3, 0.5), 1.0), Term(pair(seed + 1, shape, 2, 0.1), 0.8)]
             for seed in (10, 20)]  # fmt: skip
    return make(rule), weight, *terms


def test_changed_factors_are_noticed_before_a_bit_is_written(million):
    weight, terms = million[0].clone(), million[1][1.0]
    keeper = make()
    keeper.fuse("w", weight, terms)
    fused = weight.clone()
    row = terms[0].pair.b[7].clone()
    terms[0].pair.b[7, 0] += 1.0
    with pytest.raises(WeightsLostError, match=r"weight 'w' don't come out.*call load"):
        keeper.restore("w", weight, terms)
    assert same(weight, fused)
    terms[0].pair.b[7] = row
    keeper.restore("w", weight, terms)
    assert same(weight, million[0])


@given(seed=st.integers(0, 2**31), changes=st.integers(1, 3), rows=st.integers(0, 3))
def test_a_checksum_tells_any_few_changes(seed, changes, rows):
    g = torch.Generator().manual_seed(seed)
    size = rows * 4 * residual.COLUMNS + 4 * int(torch.randint(0, 9, (), generator=g)) + 4
    before = any_bits(seed, (size,))
    after = before.clone()
    at = torch.randperm(size // 4, generator=g)[:changes]
    # The top bits of words, and opposite changes, are what a plain sum would not see.
    after.view(torch.int64)[at] += torch.tensor([1, -1, 1 << 48])[: len(at)]
    after.view(torch.int64)[at[:1]] ^= -(1 << 63)
    sums = [residual._checksum(x, Scratch()) for x in (before, after, before)]
    assert sums[0] == sums[2] != sums[1]


@pytest.mark.parametrize("apart", [1, residual.COLUMNS, residual.COLUMNS + 1])
def test_a_checksum_tells_opposite_changes_in_a_row_and_in_a_column(apart):
    before = any_bits(7, (3 * 4 * residual.COLUMNS,))
    after = before.clone()
    after.view(torch.int64)[5] += 1
    after.view(torch.int64)[5 + apart] -= 1
    assert residual._checksum(before, Scratch()) != residual._checksum(after, Scratch())


@contextmanager
def threads(count: int):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def test_codes_made_under_another_setting_are_refused_before_a_write():
    keeper, weight, terms, other = small()
    keeper.check()
    with threads(2):
        keeper.fuse("a", weight, terms)
        keeper.check()
    fused = weight.clone()
    with pytest.raises(UnavailableError, match=r"'a' was fused under torch.get_num_threads\(\) = 2"
                       r"; now it is torch.get_num_threads\(\) = 1.*set it back"):  # fmt: skip
        keeper.check()
    keeper.fuse("b", weight.clone(), other)
    with threads(2), pytest.raises(UnavailableError, match="'b' was fused under"):
        keeper.check()
    keeper.keep("a", weight)
    keeper.check()
    assert same(weight, fused)


@pytest.mark.parametrize(
    ("holder", "key", "value"),
    [
        (torch.backends.mkldnn, "enabled", False),
        (torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    ],
)
def test_a_setting_that_may_change_a_product_is_compared(holder, key, value):
    keeper, weight, terms, _ = small()
    keeper.fuse("w", weight, terms)
    before = getattr(holder, key)
    setattr(holder, key, value)
    try:
        with pytest.raises(UnavailableError, match=f"{key} = {before}; now .*{key} = {value}"):
            keeper.check()
    finally:
        setattr(holder, key, before)
    keeper.check()


def test_flushing_denormals_is_a_setting_too():
    keeper, weight, terms, _ = small()
    keeper.fuse("w", weight, terms)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU can't flush denormals")
    try:
        with pytest.raises(UnavailableError, match="set_flush_denormal = False; now"):
            keeper.check()
    finally:
        torch.set_flush_denormal(False)
    keeper.check()


class Breaking(TorchDispatchMode):
    """Raises instead of one operation, or right after it."""

    def __init__(self, step: int, after: bool, error: type[BaseException]) -> None:
        super().__init__()
        self.step, self.after, self.error, self.count = step, after, error, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        here = self.count == self.step
        self.count += 1
        if here and not self.after:
            raise self.error
        result = func(*args, **(kwargs or {}))
        if here:
            raise self.error
        return result


@contextmanager
def interrupted(step: int):
    """Raise KeyboardInterrupt at a line of the two modules, as Ctrl-C may between any two."""
    ours = {str(Path(module.__file__)) for module in (residual, corrections)}
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        if frame.f_code.co_filename not in ours:
            return None
        if event == "line":
            count += 1
            if count > step:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def every_break(step: int):
    """The ways to break off at a step."""
    return [
        lambda: Breaking(step, False, MemoryError),
        lambda: Breaking(step, True, RuntimeError),
        lambda: Breaking(step, True, KeyboardInterrupt),
        lambda: interrupted(step),
    ]


@pytest.mark.parametrize(("rule", "dtype"), [("R1", BF16), ("R2", BF16), ("R1", F32)])
@pytest.mark.parametrize("what", ["fuse", "restore"])
@pytest.mark.parametrize("way", range(4))
def test_broken_off_anywhere_base_bits_still_come_back(rule, dtype, what, way):
    with cut_small():
        step, done = 0, False
        while not done:
            keeper, weight, before, after = small(rule, dtype)
            base = weight.clone()
            keeper.keep("w", weight)
            keeper.fuse("w", weight, before)
            if what == "fuse":
                keeper.restore("w", weight, before)
            try:
                with every_break(step)[way]():
                    keeper.fuse("w", weight, after) if what == "fuse" else keeper.restore(
                        "w", weight, before
                    )
                done = True
            except (MemoryError, RuntimeError, KeyboardInterrupt):
                pass
            # Undoing may be broken off as well.
            if step % 3 == 0:
                try:
                    with every_break(step // 3)[way]():
                        keeper.restore("w", weight, before)
                except (MemoryError, RuntimeError, KeyboardInterrupt):
                    pass
            keeper.restore("w", weight, before)
            assert same(weight, base), step
            assert keeper.kept_bytes == 0
            keeper.fuse("w", weight, before)  # which a weight that isn't at base bits would refuse
            step += 1 + step // 10
    assert step > 30


def test_a_load_forgets_a_pass_that_was_broken_off():
    keeper, weight, terms, other = small()
    with cut_small(), pytest.raises(MemoryError), Breaking(90, False, MemoryError):
        keeper.fuse("w", weight, terms)
    newly_read = torch.full_like(weight, 2.0)
    weight.copy_(newly_read)
    keeper.keep("w", weight)
    keeper.fuse("w", weight, other)
    keeper.restore("w", weight, other)
    assert same(weight, newly_read)


class NewStorage(TorchDispatchMode):
    """Collects the sizes of outputs that lie in memory that no input had."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = [*args, *(kwargs or {}).values()]
        known = {x.untyped_storage().data_ptr() for x in inputs if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in known:
            self.made.append(result.nbytes)
        return result


@pytest.mark.parametrize("rule", RULES)
def test_nothing_is_allocated_but_what_is_kept(million, rule):
    weight, keeper = million[0].clone(), make(rule)
    terms = [*million[1][0.3], *million[1][0.05]]
    for _ in range(2):
        with NewStorage() as fusing:
            keeper.fuse("w", weight, terms)
        kept = keeper.kept_bytes
        with NewStorage() as restoring:
            keeper.restore("w", weight, terms)
    assert kept - 8 <= sum(fusing.made) <= kept + 100  # and a few numbers of the setting
    assert restoring.made == []
