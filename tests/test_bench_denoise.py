"""A forward is timed in each way at each number of tokens, and its products are checked first."""

import pytest

from lorabench import bench, records
from lorabench.bench import denoise
from lorabench.cost import touches_of
from lorabench.errors import CheckError, ConfigError
from lorabench.forward import WAYS, Forward
from lorabench.plan import STRATEGY_VALUES
from lorabench.recipe import State
from lorabench.streams import STREAMS, forward_work, products_of

STATE = State(distilled=1.0)


@pytest.fixture(scope="module")
def subject(files):
    return bench.Subject(files.base, {"distilled": files.adapters["distilled"]})


@pytest.fixture(scope="module")
def results(subject):
    found = denoise._denoise(subject, STATE, tuple(WAYS), (4, 8), 2)
    return {(r.what["apply"], r.what["tokens"]): r for r in found}


def test_the_ways_are_those_of_a_strategy():
    assert tuple(WAYS) == STRATEGY_VALUES["apply"]


def test_each_way_at_each_number_of_tokens_has_a_record_of_its_own(subject, tmp_path):
    case = bench.denoise_case(subject, tokens=(4, 8), rounds=2)
    found = bench.sweep([case], tmp_path / "r.jsonl")
    assert [(r.case["tokens"], r.case["apply"]) for r in found] == [
        (n, apply) for n in (4, 8) for apply in WAYS
    ]
    assert all(len(r.seconds) == 2 for r in found)
    assert all(len(r.warmup_seconds) == (r.case["tokens"] == 4) for r in found)
    assert {r.case["state"] for r in found} == {"distilled@1"}
    assert bench.sweep([case], tmp_path / "r.jsonl") == found  # it has ended
    assert records.read(tmp_path / "r.jsonl") == found


def test_the_laps_of_globals_and_blocks_make_up_the_forward(results):
    for result in results.values():
        globals_seconds, block = (
            result.details[f"{part}_seconds"] for part in ("globals", "block")
        )
        assert globals_seconds > 0
        assert block > 0
        assert globals_seconds + block <= 1.05 * max(result.samples.seconds)  # of one block


def test_what_is_counted_is_the_arithmetic_of_the_streams(results, subject, geometry):
    products = products_of(geometry, touches_of(geometry, STATE))
    for (apply, tokens), result in results.items():
        work = forward_work(products, dict.fromkeys(STREAMS, tokens), STATE, apply)
        assert result.counted == {
            "products": len(geometry.weights),
            "flops": 2 * tokens * geometry.counts().touched_params,
            "weight_bytes": 2 * geometry.counts().touched_params,
            "apply_flops": work.apply.flops,
            "copied_bytes": work.apply.snapshot_bytes,
            "fused_params": work.apply.fused_params,
        }
    assert results["runtime", 8].counted["apply_flops"] > 0
    assert results["per_layer", 8].counted["copied_bytes"] > 0


def test_each_way_says_how_it_was_checked(results, geometry):
    bits = f"at 4 tokens: {len(geometry.weights)} products with resident bits"
    near = "at 4 tokens: 3 products within their rounding"
    for n in (4, 8):
        checks = [results[apply, n].check for apply in ("resident", "runtime", "per_layer")]
        assert checks == [near, near, bits]


def test_a_way_can_be_timed_alone(subject):
    [result] = denoise._denoise(subject, STATE, ("per_layer",), (4,), 1)
    assert "resident bits" in result.check


def spoil(monkeypatch, apply, spoiled):
    """Let one way go wrong."""
    way = WAYS[apply]

    def wrong(x, weight, terms, out, kernel, scratch):
        work = way(x, weight, terms, out, kernel, scratch)
        spoiled(weight, out)
        return work

    monkeypatch.setitem(WAYS, apply, wrong)


@pytest.mark.parametrize(
    ("apply", "message"),
    [
        ("resident", "the resident product is off by"),
        ("runtime", "the runtime product is off by"),
        ("per_layer", "fused per layer, the product has other bits"),
    ],
)
def test_a_way_that_gives_other_products_is_not_recorded(subject, monkeypatch, apply, message):
    spoil(monkeypatch, apply, lambda weight, out: out[-1:].mul_(1.03125))
    with pytest.raises(CheckError, match=message):
        denoise._denoise(subject, STATE, (apply,), (4,), 1)


def test_forgetting_the_adapter_is_caught(subject, monkeypatch):
    def forgetful(self, state, tokens, apply="resident", **kwargs):
        return run(self, State(), tokens, apply, **kwargs)

    run = Forward.run
    monkeypatch.setattr(Forward, "run", forgetful)
    with pytest.raises(CheckError, match="the runtime product is off by"):
        denoise._denoise(subject, STATE, ("runtime",), (4,), 1)


def test_a_forward_that_writes_to_the_weights_is_caught(subject, monkeypatch, geometry):
    calls = []

    def write(weight, out):
        calls.append(weight)
        if len(calls) > len(geometry.weights):  # when the first forward has been checked
            weight[-1:].zero_()

    spoil(monkeypatch, "runtime", write)
    with pytest.raises(CheckError, match="forwards changed the weights"):
        denoise._denoise(subject, STATE, ("runtime",), (4,), 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"applies": ()}, "expected at least one way"),
        ({"applies": ("fused",)}, "apply 'fused'"),
        ({"tokens": ()}, "at least one way, round and number of tokens"),
        ({"tokens": (64, 0)}, "tokens .64, 0."),
        ({"rounds": 0}, "0 rounds"),
        ({"state": {"usr": 1.0}}, "needs adapter 'usr'"),
    ],
)
def test_what_can_not_be_timed_is_refused_before_anything_runs(subject, options, message):
    with pytest.raises(ConfigError, match=message):
        bench.denoise_case(subject, **options)
