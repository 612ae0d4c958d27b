"""Adapters of all kinds on a base of all dtypes, through everything that applies them."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from conftest import bits
from odd import folder_bytes, write_raw
from safetensors.torch import save_file

from lorabench import check, limits
from lorabench.adapter import Adapter
from lorabench.checkpoint import Checkpoint
from lorabench.cost import Work, predict_work
from lorabench.digest import digest
from lorabench.errors import AdapterError, CheckError, UnavailableError
from lorabench.fuse import RULES, Pair, Term, as_matrix, by_rows, reference_fuse
from lorabench.fusedfile import fuse_file
from lorabench.header import Entry
from lorabench.kernels import gemm, one_nan
from lorabench.loading import read_factors
from lorabench.pairing import PairEntry
from lorabench.plan import Load, Rebind
from lorabench.recipe import BASE, State
from lorabench.resident import ResidentWeights
from lorabench.segments import lay_out
from lorabench.streamed import StreamedWeights

EXACT = ["reread", "host_snapshot", "residual", "images"]
STATES = [
    State(user=1.0),
    State(user=0.8, other=-1.0),
    BASE,
    State(other=0.5, user=0.3),
    State(other=1.0),
]
# -0, quiet and signalling NaN with payloads, infinity, a subnormal
ODD = torch.tensor([-0x8000, 0x7FC1, 0x7F81, -0x5B, 0x7F80, 0x0001], dtype=torch.int16)


@dataclass(frozen=True)
class Held:
    """What an adapter is made of: the tensors of its file, and which rows of which weight each."""

    tensors: dict[str, torch.Tensor]
    pairs: tuple[tuple[str, str | None, str, float, int, range | None], ...]
    """Weight, A, B, scale, first row of the weight, and which rows of B; None for all."""


def sixteenths(*shape, seed, dtype=torch.bfloat16):
    g = torch.Generator().manual_seed(seed)
    return (torch.randint(-8, 9, shape, generator=g) / 16).to(dtype)


def base_tensors() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)

    def normal(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, generator=g).to(dtype)

    qkv = normal(24, 16)
    qkv[8:12].view(-1)[: len(ODD)] = ODD.view(torch.bfloat16)  # rows that `user` leaves alone
    return {
        "qkv": qkv,
        "half": normal(20, 12, dtype=torch.float16),
        "wide": normal(18, 10, dtype=torch.float32),
        "bias": normal(24),
        "norm": normal(16, dtype=torch.float32),
        "half.bias": normal(9, dtype=torch.float16),
        "plain": normal(5, 5),
    }


USER = Held(
    {
        "q.A": sixteenths(3, 16, seed=1), "q.B": sixteenths(8, 3, seed=2),
        "k.A": sixteenths(2, 16, seed=3), "k.B": sixteenths(4, 2, seed=4),
        "half.diff": sixteenths(20, 12, seed=5, dtype=torch.float16),
        "bias.diff": sixteenths(24, seed=6, dtype=torch.float32),
        "norm.diff": sixteenths(16, seed=7),
        "fused.A": sixteenths(2, 10, seed=8), "fused.B": sixteenths(12, 2, seed=9),
    },
    (
        ("qkv", "q.A", "q.B", 0.5, 0, None),
        ("qkv", "k.A", "k.B", 2.0, 12, None),
        ("half", None, "half.diff", 1.0, 0, None),
        ("bias", None, "bias.diff", 1.0, 0, None),
        ("norm", None, "norm.diff", 0.3, 0, None),
        ("wide", "fused.A", "fused.B", 1.0, 2, range(4, 10)),
    ),
)  # fmt: skip
OTHER = Held(
    {
        "qkv.diff": sixteenths(8, 16, seed=11),
        "half.A": sixteenths(3, 12, seed=12, dtype=torch.float16),
        "half.B": sixteenths(16, 3, seed=13, dtype=torch.float16),
        "wide.A": sixteenths(4, 10, seed=14), "wide.B": sixteenths(18, 4, seed=15),
        "half.bias.diff": sixteenths(9, seed=16),
    },
    (
        ("qkv", None, "qkv.diff", 1.0, 6, None),
        ("half", "half.A", "half.B", 0.7, 4, None),
        ("wide", "wide.A", "wide.B", 1.0, 0, None),
        ("half.bias", None, "half.bias.diff", 1.0, 0, None),
    ),
)  # fmt: skip


def some_rows(entry: Entry, rows: range | None) -> Entry:
    """An entry that points into a tensor of the file."""
    if rows is None:
        return entry
    shape = entry.spec.shape
    row_bytes = entry.spec.nbytes // shape[0]
    spec = replace(entry.spec, shape=(len(rows), *shape[1:]))
    return Entry(spec, entry.file, entry.offset + rows.start * row_bytes)


def adapter_of(held: Held, path: Path, base: Checkpoint) -> Adapter:
    save_file(held.tensors, path)
    file = Checkpoint.open(path)
    pairs = tuple(
        PairEntry(
            module=weight,
            weight=base.entries[weight].spec,
            a=file.entries[a] if a else None,
            b=some_rows(file.entries[b], rows),
            scale=scale,
            top=top,
        )
        for weight, a, b, scale, top, rows in held.pairs
    )
    return Adapter(file, (), pairs, (), (), ())


@dataclass(frozen=True)
class Model:
    base: Checkpoint
    adapters: dict[str, Adapter]

    def expected(self, state: State, rule: str = "R1") -> dict[str, torch.Tensor]:
        """By the reference, from the tensors themselves."""
        fused = base_tensors()
        for name, weight in fused.items():
            terms = [
                Term(Pair(held.tensors[a] if a else None, as_matrix(cut(held, b, rows)), *where), s)
                for role, s in state.items()
                for held in [{"user": USER, "other": OTHER}[role]]
                for touched, a, b, *where, rows in held.pairs
                if touched == name
            ]
            fused[name] = reference_fuse(as_matrix(weight), terms, rule).view(weight.shape)
            for rows, _ in by_rows(terms):
                one_nan(fused[name][rows.start : rows.stop])
        return fused

    def resident(self, restore="reread", rule="R1", kernel="gemm") -> ResidentWeights:
        return ResidentWeights(self.base, self.adapters, kernel=kernel, restore=restore, rule=rule)


def cut(held: Held, name: str, rows: range | None) -> torch.Tensor:
    b = held.tensors[name]
    return b if rows is None else b[rows.start : rows.stop]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed")
    save_file(base_tensors(), folder / "base.safetensors")
    base = Checkpoint.open(folder / "base.safetensors")
    held = {"user": USER, "other": OTHER}
    adapters = {r: adapter_of(h, folder / f"{r}.safetensors", base) for r, h in held.items()}
    return Model(base, adapters)


@pytest.fixture(params=[40, gemm.TILE])
def tile(request, monkeypatch):
    """Tiles of a few rows, which end where ranges of rows do, and larger ones."""
    monkeypatch.setattr(gemm, "TILE", request.param)


def assert_bits(found, expected):
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape, name
        assert torch.equal(bits(found[name]), bits(tensor)), name


@pytest.mark.parametrize("kernel", ["gemm", "reference"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("restore", EXACT)
def test_a_walk_has_the_references_bits_and_the_work_that_was_predicted(
    model, tile, kernel, rule, restore
):
    weights = model.resident(restore, rule, kernel)
    how = {"factor_bytes": sum(a.factor_bytes for a in model.adapters.values())}
    base_bytes = sum(spec.nbytes for spec in model.base.tensors)
    imaged = {STATES[0]}
    work = weights.load(STATES[0])
    assert work == predict_work(Load(STATES[0]), weights.touches, base_bytes, restore, **how)
    assert_bits(weights.tensors, model.expected(STATES[0], rule))
    for state in STATES[1:]:
        action = Rebind(weights.state, state, 0, 0, True)
        predicted = predict_work(action, weights.touches, base_bytes, restore, imaged=imaged)
        assert weights.rebind(state) == predicted
        imaged.add(state)
        assert_bits(weights.tensors, model.expected(state, rule))
    weights.rebind(BASE)
    assert_bits(weights.tensors, base_tensors())


@pytest.mark.parametrize("restore", EXACT)
def test_rows_that_nothing_touches_keep_every_bit(model, restore):
    """NaN payloads, -0 and the low bits of f32, beside rows that are fused and rounded."""
    base = base_tensors()
    weights = model.resident(restore)
    weights.load(State(user=0.8))
    qkv, wide = weights.tensors["qkv"], weights.tensors["wide"]
    for rows in (slice(8, 12), slice(16, 24)):
        assert torch.equal(bits(qkv[rows]), bits(base["qkv"][rows]))
    for rows in (slice(0, 2), slice(8, 18)):
        assert torch.equal(bits(wide[rows]), bits(base["wide"][rows]))
    assert not torch.equal(wide[8:18], wide[8:18].bfloat16().float())
    assert torch.equal(wide[2:8], wide[2:8].bfloat16().float())  # R1 rounds an f32 weight


def test_the_work_counts_products_and_the_rows_that_are_added_to(model):
    """By hand, of `user`: two products into qkv, one of the 6 rows of `wide`."""
    work = model.resident()
    assert work.load(BASE).flops == 0
    assert work.rebind(State(user=1.0)) == Work(
        flops=2 * (8 * 16 * 3 + 4 * 16 * 2 + 6 * 10 * 2),
        fused_params=12 * 16 + 20 * 12 + 24 + 16 + 6 * 10,
    )
    assert work.rebind(State(user=1.0, other=1.0)).fused_params == (  # 6..14 beside 0..8 and 12..16
        16 * 16 + 20 * 12 + 24 + 16 + 18 * 10 + 9
    )


@pytest.mark.parametrize("kernel", ["gemm", "reference", "scalar"])
def test_every_restore_and_kernel_loads_the_same_bits(model, kernel):
    if kernel == "scalar":  # it has no f16
        adapters = {
            role: replace(a, pairs=tuple(p for p in a.pairs if p.weight.dtype != "F16"))
            for role, a in model.adapters.items()
        }
        model = Model(model.base, adapters)
    digests = set()
    for restore in EXACT:
        if (kernel, restore) != ("scalar", "residual"):
            weights = model.resident(restore, kernel=kernel)
            weights.load(STATES[1])
            digests.add(weights.digest())
    again = model.resident()
    again.load(STATES[3])
    again.rebind(STATES[1])
    assert digests == {again.digest()}


def test_what_streams_has_the_bits_of_resident_weights_and_passes_every_byte(model, tile):
    weights, streamed = model.resident(), StreamedWeights(model.base, model.adapters)
    weights.load(BASE)
    streamed.load(BASE)
    for state in STATES:
        weights.rebind(state)
        streamed.rebind(state)
        assert streamed.digest() == weights.digest() == digest(weights.tensors)
    for limit in (1, 100, 1 << 20):
        segments = lay_out(model.base, model.adapters, STATES[1], limit=limit)
        assert sum(s.base_bytes for s in segments) == sum(t.nbytes for t in model.base.tensors)
        work = sum((s.work for s in segments), Work())
        weights.load(STATES[1])
        fused = weights.rebind(BASE) + weights.rebind(STATES[1])
        assert (work.flops, work.fused_params) == (fused.flops, fused.fused_params)


@pytest.mark.parametrize("rule", RULES)
def test_a_fused_file_has_the_bits_of_resident_weights(model, tile, tmp_path, rule):
    state = STATES[1]
    out = tmp_path / "fused.safetensors"
    fuse_file(model.base, model.adapters, state, out, rule=rule, segment_bytes=100)
    weights = model.resident(rule=rule)
    weights.load(state)
    fused = Checkpoint.open(out)
    assert_bits({name: fused.read(name) for name in fused.entries}, weights.tensors)


def test_factors_at_odd_bytes_are_read_by_their_place(model, tmp_path):
    """Rows of a tensor, in a file that lies askew for its dtype."""
    path = tmp_path / "askew.safetensors"
    write_raw(path, {"one": torch.ones(1, dtype=torch.uint8), "B": USER.tensors["fused.B"],
                     "A": USER.tensors["fused.A"]})  # fmt: skip
    file = Checkpoint.open(path)
    b = some_rows(file.entries["B"], range(3, 12))
    pair = PairEntry("wide", model.base.entries["wide"].spec, file.entries["A"], b, 1.0, 4)
    adapters = {"user": Adapter(file, (), (pair,), (), (), ())}
    state = State(user=1.0)
    weights = ResidentWeights(model.base, adapters, rule="R4")
    weights.load(state)
    delta = USER.tensors["fused.B"][3:12].float() @ USER.tensors["fused.A"].float()
    expected = base_tensors()["wide"]
    expected[4:13] += delta
    assert torch.equal(bits(weights.tensors["wide"]), bits(expected))
    fuse_file(model.base, adapters, state, out := tmp_path / "out.safetensors", rule="R4")
    assert torch.equal(bits(Checkpoint.open(out).read("wide")), bits(expected))


# What overflows


@pytest.fixture
def overflowing(model, tmp_path):
    """An adapter that takes one value of the f16 weight beyond 65504, after others were fused."""
    delta = torch.zeros(20, 12)
    delta[13, 5] = 50_000.0
    held = Held(
        {"half.diff": delta, "bias.diff": torch.ones(24)},
        (("bias", None, "bias.diff", 1.0, 0, None), ("half", None, "half.diff", 1.0, 0, None)),
    )
    adapter = adapter_of(held, tmp_path / "overflowing.safetensors", model.base)
    return Model(model.base, model.adapters | {"over": adapter})


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("restore", EXACT)
def test_an_f16_value_that_overflows_rolls_everything_back(overflowing, restore, rule):
    weights = overflowing.resident(restore, rule)
    weights.load(before := State(user=0.8, other=0.5))
    found = weights.digest()
    with pytest.raises(AdapterError, match=r"weight 'half': 1 values overflow in state 'over@2'"):
        weights.rebind(State(over=2.0))
    assert (weights.state, weights.digest()) == (before, found)
    weights.rebind(State(over=1.0))  # 50,000 fits
    assert weights.tensors["half"].max() > 49_000
    weights.rebind(BASE)
    assert_bits(weights.tensors, base_tensors())


def test_an_f16_value_that_overflows_leaves_no_file_and_no_streamed_state(overflowing, tmp_path):
    before = folder_bytes(tmp_path)
    message = r"weight 'half': 1 values overflow in rows 0 to 19"
    out = tmp_path / "deep" / "out.safetensors"
    with pytest.raises(AdapterError, match=message):
        fuse_file(overflowing.base, overflowing.adapters, State(over=2.0), out)
    assert folder_bytes(tmp_path) == before
    with pytest.raises(AdapterError, match=message):
        StreamedWeights(overflowing.base, overflowing.adapters).load(State(over=2.0))


def test_a_large_f16_weight_whose_sum_overflows_is_not_read_again(tmp_path, monkeypatch):
    """As a norm's: its values are finite, their f16 sum isn't."""
    save_file({"norm": torch.full((400, 400), 2.0).half()}, tmp_path / "base.safetensors")
    base = Checkpoint.open(tmp_path / "base.safetensors")
    assert base.read("norm").sum().isinf()
    held = Held({"norm.diff": torch.ones(400, 400)}, (("norm", None, "norm.diff", 1.0, 0, None),))
    weights = ResidentWeights(base, {"user": adapter_of(held, tmp_path / "a.safetensors", base)})
    monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("the base is read again"))
    weights.load(State(user=1.0))
    assert weights.tensors["norm"].unique().tolist() == [3.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_a_delta_that_isnt_finite_is_refused_by_its_name(model, tmp_path, bad):
    """1e30 becomes infinite where the rule rounds factors to f16."""
    delta = torch.zeros(20, 12)
    delta[0, 0] = bad
    held = Held({"half.diff": delta}, (("half", None, "half.diff", 1.0, 0, None),))
    adapters = {"user": adapter_of(held, tmp_path / "bad.safetensors", model.base)}
    with pytest.raises(AdapterError, match=r"bad\.safetensors: tensor 'half\.diff': 1 of 240"):
        ResidentWeights(model.base, adapters, rule="R2").load(State(user=1.0))


def test_factors_that_are_all_zeros_are_warned_of_once(model, tmp_path):
    tensors = {name: torch.zeros_like(t) if name.endswith("B") else t
               for name, t in USER.tensors.items()}  # fmt: skip
    adapter = adapter_of(replace(USER, tensors=tensors), tmp_path / "new.safetensors", model.base)
    with pytest.warns(UserWarning, match="2 of 5 modules add nothing.* 'qkv', 'wide'") as found:
        read_factors(adapter)
    assert len(found) == 1


@pytest.mark.parametrize("tile", [1, 1 << 20])
def test_factors_that_are_all_zeros_are_warned_of_where_they_stream(
    model, tmp_path, monkeypatch, tile
):
    monkeypatch.setattr(gemm, "TILE", tile)
    tensors = {name: torch.zeros_like(t) if name.endswith("B") else t
               for name, t in USER.tensors.items()}  # fmt: skip
    adapter = adapter_of(replace(USER, tensors=tensors), tmp_path / "new.safetensors", model.base)
    out = tmp_path / "out.safetensors"
    with pytest.warns(UserWarning, match="factors are all zeros, so that their modules") as found:
        fuse_file(model.base, {"user": adapter}, State(user=1.0), out)
    assert len(found) == 1


# What can't be done


def only(adapter: Adapter, *weights: str) -> Adapter:
    return replace(adapter, pairs=tuple(p for p in adapter.pairs if p.weight.name in weights))


@pytest.mark.parametrize(
    ("kernel", "weight", "message"),
    [
        ("triton", "qkv", r"a delta without factors: adapter 'other' touches 'qkv', BF16"),
        ("scalar", "half", r"an F16 weight: adapter 'other' touches 'half', F16 \[20, 12\]"),
    ],
)
def test_a_kernel_that_cant_is_refused_before_a_weight_is_read(model, kernel, weight, message):
    adapters = {"other": only(model.adapters["other"], weight)}
    with pytest.raises(UnavailableError, match=f"kernel '{kernel}' can't fuse {message}"):
        limits.check_kernel(kernel, adapters)
    if kernel == "scalar":
        with pytest.raises(UnavailableError, match=message):
            ResidentWeights(model.base, adapters, kernel=kernel)
        with pytest.raises(UnavailableError, match=message):
            StreamedWeights(model.base, adapters, kernel=kernel)


@pytest.mark.parametrize(
    ("role", "weight", "what"),
    [
        ("user", "qkv", "in rows 0 to 7 of 24"),
        ("other", "qkv", "with a delta without factors"),
        ("user", "bias", "with a delta without factors"),
        ("other", "half", "in rows 4 to 19 of 20"),
        ("other", "wide", None),
    ],
)
def test_what_is_measured_on_whole_weights_is_refused_for_others(model, role, weight, what):
    adapter = only(model.adapters[role], weight)
    if what is None:
        limits.check_plain("a kernel", adapter)
        with pytest.raises(UnavailableError, match="'wide' which is F32"):
            limits.check_plain("a peer", adapter, dtypes=["BF16"])
        return
    with pytest.raises(UnavailableError, match=rf"a kernel is measured .*'{weight}' {what}"):
        limits.check_plain("a kernel", adapter)


# What is checked


def test_checked_rows_begin_where_a_weight_is_touched_and_a_wrong_one_is_found(model):
    wanted = check.rows_to_check(model.adapters)
    assert wanted["half.bias"] == range(9)
    assert wanted.keys() == {"half.bias", "bias", "qkv"}  # the smallest, the largest, one between
    assert wanted["qkv"] == range(24)
    only_low = {"other": only(model.adapters["other"], "qkv")}
    assert check.rows_to_check(only_low) == {"qkv": range(6, 24)}

    weights = model.resident()
    weights.load(STATES[1])
    assert check.check_against_reference(weights).startswith("3 weights within")
    streamed = StreamedWeights(model.base, model.adapters, keep=wanted)
    streamed.load(STATES[1])
    told = check.check_rows(streamed.kept, model.base, model.adapters, STATES[1])
    assert told.startswith("3 weights within the reference's bound, 0.0e+00")
    streamed.kept["half.bias"][3] += 0.25
    with pytest.raises(CheckError, match=r"'half\.bias': value 3 is"):
        check.check_rows(streamed.kept, model.base, model.adapters, STATES[1])
