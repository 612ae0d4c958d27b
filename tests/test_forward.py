"""A forward's products: right, the same bits in every way that says so, counted, and in scratch."""

import pytest
import torch
from conftest import bits
from test_mixed import model as mixed_model  # noqa: F401 - a fixture

from lorabench import forward
from lorabench.errors import ConfigError
from lorabench.forward import Forward, multiply
from lorabench.fuse import Term
from lorabench.geometry import TensorSpec, from_tensors
from lorabench.kernels import Scratch, get_kernel
from lorabench.plan import STRATEGY_VALUES
from lorabench.recipe import BASE, State
from lorabench.resident import ResidentWeights
from lorabench.streams import Product, Stream, forward_work, products_of

APPLIES = STRATEGY_VALUES["apply"]
TOKENS = {"video": 24, "audio": 7, "text": 1}
STATES = [
    State(user=1.0),
    State(distilled=0.8),
    State(user=0.3, distilled=-1.0),
    State(distilled=1.0, user=0.25, detailing=2.0),
    BASE,
]
BF16, F32 = 2.0**-8, 2.0**-24  # what rounding a value once may be off by, of its size
SECOND_ORDER = 1.02  # errors of errors


def product_error(x, weight):
    """How far x @ weight.T may be off: summed in f32, rounded to bf16. All in f64."""
    y = x @ weight.T
    return BF16 * y.abs() + weight.shape[1] * F32 * (x.abs() @ weight.abs().T)


def runtime_reference(x, weight, terms):
    """Return y = x @ (W + Σ s·B@A).T in f64, and how far the sum of rounded products may be off."""
    x, weight = x.double(), weight.double()
    y, error = x @ weight.T, product_error(x, weight)
    for term in terms:
        a, b, _, top = term.pair
        b, h, h_error = b.double(), x, 0 * x
        if a is not None:
            h, h_error = x @ a.double().T, product_error(x, a.double())
        columns = slice(top, top + len(b))
        y[:, columns] += term.factor * (h @ b.T)
        delta_error = product_error(h, b) + h_error @ b.abs().T
        error[:, columns] += abs(term.factor) * delta_error + BF16 * y[:, columns].abs()
    return y, SECOND_ORDER * error


def assert_within(found, expected, error):
    known = expected.isfinite()
    assert torch.equal(found.isfinite(), known)
    assert ((found.double() - expected).abs() <= error)[known].all()


def random(*shape, dtype=torch.bfloat16, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g).to(dtype)


@pytest.fixture(params=[1, 40, 1 << 23])
def tile(request, monkeypatch):
    """Tiles of a row, of a few rows, and larger than any weight here."""
    monkeypatch.setattr(forward, "tile_rows", lambda in_: max(1, request.param // in_))


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def product(request, monkeypatch):
    """Both ways to multiply, on whatever CPU this is."""
    monkeypatch.setattr(forward, "product_dtype", lambda device: request.param)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("tokens", "out", "in_"), [(1, 1, 1), (5, 33, 8), (17, 9, 70), (3, 0, 4)])
def test_a_product_is_summed_in_f32_and_rounded_once(tile, product, dtype, tokens, out, in_):
    x, weight = random(tokens, in_), random(out, in_, dtype=dtype, seed=1)
    y = torch.full((tokens, out), 7.0, dtype=torch.bfloat16)
    multiply(x, weight, y, Scratch())
    expected = x.double() @ weight.double().T
    assert_within(y, expected, SECOND_ORDER * product_error(x.double(), weight.double()))


def test_a_product_takes_no_new_memory_once_its_scratch_has_grown(product):
    x, weight, y, scratch = random(5, 16), random(32, 16), random(5, 32), Scratch()
    multiply(x, weight, y, scratch)
    held = scratch.nbytes
    with torch.profiler.profile(profile_memory=True) as profile:
        multiply(x, weight, y, scratch)
    assert scratch.nbytes == held
    allocated = {e.key: e.cpu_memory_usage for e in profile.key_averages()}
    assert not [key for key, nbytes in allocated.items() if nbytes > 64]


@pytest.fixture(scope="module")
def ltx(base, adapters):
    """Weights of LTX and the products of a forward."""
    weights = ResidentWeights(base, adapters, restore="host_snapshot")
    geometry = from_tensors(base.metadata["geometry"], base.tensors)
    weights.load(BASE)
    return weights, products_of(geometry, weights.touches)


def outputs(weights, products, state, apply, tokens=TOKENS, **kwargs):
    """Run a forward where the weights are as it wants them; give each y, and what was counted."""
    weights.rebind(state if apply == "resident" else BASE)
    ys = {}
    work = Forward(weights, products, **kwargs).run(
        state, tokens, apply, after_product=lambda name, y: ys.update({name: y.clone()})
    )
    return ys, work


@pytest.mark.parametrize("state", STATES, ids=str)
def test_fusing_per_layer_has_the_bits_of_resident_weights(ltx, state):
    resident, _ = outputs(*ltx, state, "resident")
    per_layer, _ = outputs(*ltx, state, "per_layer")
    assert resident.keys() == per_layer.keys() == {p.name for p in ltx[1]}
    for name, y in resident.items():
        assert torch.equal(bits(y), bits(per_layer[name])), name
    if state:
        base, _ = outputs(*ltx, BASE, "resident")
        assert not any(torch.equal(y, base[name]) for name, y in resident.items())


@pytest.mark.parametrize(
    ("kernel", "rule"), [("reference", "R1"), ("scalar", "R1"), ("gemm", "R4")]
)
def test_fusing_per_layer_uses_the_kernel_and_rule_of_the_weights(
    base, adapters, monkeypatch, kernel, rule
):
    asked = []
    monkeypatch.setattr(forward, "get_kernel", lambda *how: asked.append(how) or get_kernel(*how))
    geometry = from_tensors(base.metadata["geometry"], base.tensors).cut(0)
    state = State(user=0.8, distilled=0.3)
    weights = ResidentWeights(base, adapters, kernel=kernel, rule=rule, restore="host_snapshot")
    weights.load(BASE)
    products = products_of(geometry, weights.touches)
    resident, _ = outputs(weights, products, state, "resident")
    per_layer, _ = outputs(weights, products, state, "per_layer")
    assert set(asked) == {(kernel, weights.device, rule)}
    for name, y in resident.items():
        assert torch.equal(bits(y), bits(per_layer[name])), name


def terms_of(weights, name, state):
    return [Term(p, s) for r, s in state.items() for p in weights.factors(r).get(name, ())]


@pytest.mark.parametrize("state", STATES, ids=str)
def test_every_way_is_near_the_exact_products(ltx, state):
    weights, products = ltx
    ys = {apply: outputs(*ltx, state, apply)[0] for apply in APPLIES}
    weights.rebind(state)
    fused = {name: weight.clone() for name, weight in weights.tensors.items()}
    weights.rebind(BASE)
    run = Forward(weights, products)
    for product in products:
        name = product.name
        x = run.input_of(product.stream.tokens(TOKENS), product.in_)
        for apply, expected in (
            ("resident", runtime_reference(x, fused[name], [])),
            ("per_layer", runtime_reference(x, fused[name], [])),
            (
                "runtime",
                runtime_reference(x, weights.tensors[name], terms_of(weights, name, state)),
            ),
        ):
            assert_within(ys[apply][name], *expected)


@pytest.mark.parametrize("apply", APPLIES)
@pytest.mark.parametrize("state", STATES, ids=str)
@pytest.mark.parametrize("tokens", [TOKENS, {"audio": 3, "text": 2}, {"video": 4}])
def test_a_run_counts_what_was_predicted(ltx, state, tokens, apply):
    _, work = outputs(*ltx, state, apply, tokens)
    assert work == forward_work(ltx[1], tokens, state, apply)
    assert work.products > 0
    assert (work.apply.flops > 0) == (apply != "resident" and bool(state))


@pytest.mark.parametrize("rule", ["R1", "R3"])
@pytest.mark.parametrize(
    "state", [State(user=1.0), State(other=0.5), State(user=0.8, other=-1.0)], ids=str
)
def test_parts_of_weights_and_whole_deltas_are_applied_at_runtime_too(mixed_model, state, rule):  # noqa: F811
    """On bf16, f16 and f32 weights; NaN stay where they were."""
    weights = mixed_model.resident("host_snapshot", rule)
    weights.load(BASE)
    entries = mixed_model.base.entries
    products = [
        Product(
            entries[name].spec,
            Stream("video", "video"),
            {
                role: tuple(t for t in targets if t.weight.name == name)
                for role, targets in weights.touches.items()
            },
        )
        for name in ("qkv", "half", "wide", "plain")
    ]
    ys = {}
    for apply in APPLIES:
        ys[apply], work = outputs(weights, products, state, apply, {"video": 6})
        assert work == forward_work(products, {"video": 6}, state, apply)
    weights.rebind(BASE)
    for product in products:
        name = product.name
        finite = ys["resident"][name].isfinite()
        assert torch.equal(ys["resident"][name][finite], ys["per_layer"][name][finite])
        x = Forward(weights, products).input_of(6, product.in_)
        terms = terms_of(weights, name, state)
        assert_within(ys["runtime"][name], *runtime_reference(x, weights.tensors[name], terms))


@pytest.mark.parametrize("apply", APPLIES)
def test_a_forward_leaves_the_weights_as_they_are_and_takes_no_memory_twice(ltx, apply):
    weights, products = ltx
    state = State(user=0.3, distilled=0.8)
    weights.rebind(state if apply == "resident" else BASE)
    run, before = Forward(weights, products), weights.digest()
    run.run(state, TOKENS, apply)
    held = run.scratch_bytes
    run.run(state, TOKENS, apply)
    assert run.scratch_bytes == held > 0
    assert weights.digest() == before


def test_the_inputs_are_the_same_in_every_run_and_differ_by_seed(ltx):
    first, _ = outputs(*ltx, BASE, "resident")
    again, _ = outputs(*ltx, BASE, "resident")
    other, _ = outputs(*ltx, BASE, "resident", seed=1)
    for name, y in first.items():
        assert torch.equal(y, again[name])
        assert not torch.equal(y, other[name])


def test_weights_are_asked_for_in_order_each_before_its_product(ltx):
    weights, products = ltx
    weights.rebind(BASE)
    run, told = Forward(weights, products), []
    run.run(
        BASE,
        {"audio": 2, "text": 3},
        before_weight=lambda name: told.append((name, "before")),
        after_product=lambda name, y: told.append((name, len(y))),
    )
    rows = {Stream("audio", "audio"): 2, Stream("text", "audio"): 3}
    used = [(p.name, rows[p.stream]) for p in products if p.stream in rows]
    assert told == [event for name, n in used for event in ((name, "before"), (name, n))]


@pytest.mark.parametrize("apply", APPLIES)
def test_weights_in_another_state_are_refused(ltx, apply):
    weights, products = ltx
    weights.rebind(State(user=0.5))
    with pytest.raises(
        ConfigError, match=r"expects the weights in state '.*', found 'user@0.5'; r"
    ):
        Forward(weights, products).run(State(user=1.0), TOKENS, apply)


def test_a_state_of_an_adapter_that_is_not_bound_is_refused(ltx):
    weights, products = ltx
    weights.rebind(BASE)
    with pytest.raises(ConfigError, match="'usr'"):
        Forward(weights, products).run(State(usr=1.0), TOKENS, "runtime")


def test_products_of_another_model_are_refused(ltx):
    weights, _ = ltx
    other = from_tensors("other", [TensorSpec("fc.weight", (4, 4), "BF16")])
    with pytest.raises(ConfigError, match=r"holds no weight 'fc\.weight'"):
        Forward(weights, products_of(other))
