"""Forwards scaled from measured ones, with sums worked out by hand."""

import pytest

from lorabench.cost import touches_of
from lorabench.forwards import (
    ForwardLine,
    added_seconds,
    forward_lines,
    forward_points,
    forwards_frame,
    on_lines,
    phase_seconds,
)
from lorabench.geometry import load_geometry
from lorabench.recipe import BASE, Phase, State, load_recipe
from lorabench.records import Record
from lorabench.streams import STREAMS, forward_work, products_of

GEOMETRY = load_geometry("ltx-2.5-22b", shrink=16).cut(2)
PRODUCTS = products_of(GEOMETRY, touches_of(GEOMETRY, ["distilled"]))
STATE = State(distilled=1.0)
FLOPS = 1e-9  # seconds each
FIXED, FUSING = 0.5, 2.0


def forward(apply, tokens, noise=0.0):
    """A forward on a machine of which all is known."""
    work = forward_work(PRODUCTS, dict.fromkeys(STREAMS, tokens), STATE, apply)
    added = {"resident": 0.0, "runtime": 2 * FLOPS * work.apply.flops, "per_layer": FUSING}
    return Record(
        case={"bench": "denoise", "apply": apply, "tokens": tokens, "state": str(STATE)},
        seconds=(FIXED + FLOPS * work.flops + added[apply] + noise,),
        check="bits", environment={}, commit="c", provenance="measured",
    )  # fmt: skip


RECORDS = [forward(a, n) for n in (64, 128, 256) for a in ("resident", "runtime", "per_layer")]
LINES = forward_lines(forward_points(RECORDS, PRODUCTS))


def test_lines_have_the_rates_that_the_points_were_made_of():
    assert LINES["resident"].flops_per_second == pytest.approx(1e9)
    assert LINES["resident"].fixed_seconds == pytest.approx(FIXED)
    assert LINES["runtime"].flops_per_second == pytest.approx(0.5e9)
    fused = forward_work(PRODUCTS, {"video": 1, "audio": 1, "text": 1}, STATE, "per_layer")
    assert fused.apply.flops / LINES["per_layer"].flops_per_second == pytest.approx(FUSING)


def test_points_without_noise_are_on_their_lines():
    points = forward_points(RECORDS, PRODUCTS)
    assert list(on_lines(points, LINES).seconds) == pytest.approx([*points.seconds])


def test_noise_that_hides_a_slope_leaves_a_line_through_the_origin():
    noisy = [forward("resident", n, noise=10.0 / n) for n in (64, 128, 256)]
    falling = [forward("resident", n, noise=1e3 / n) for n in (64, 128, 256)]
    for records in (noisy, falling):
        line = forward_lines(forward_points(records, PRODUCTS))["resident"]
        assert line.flops_per_second > 0
    assert line.fixed_seconds == 0


def test_a_phase_takes_its_forwards_times_one_of_them():
    phase = Phase(STATE, steps=3, evaluations=2, guidance_passes=4, video_tokens=100)
    work = forward_work(PRODUCTS, phase.tokens)
    one = LINES["resident"].seconds(work.flops, work.products)
    assert phase_seconds(phase, "resident", LINES, PRODUCTS) == pytest.approx(24 * one)
    assert one < FIXED + FLOPS * work.flops  # there is no audio, so that fewer products are made
    idle = Phase(BASE, steps=3, video_tokens=100)
    assert phase_seconds(idle, "runtime", LINES, PRODUCTS) == 0
    assert phase_seconds(idle, "per_layer", LINES, PRODUCTS) == 0


def test_a_longer_model_has_more_of_everything():
    whole = load_geometry("ltx-2.5-22b", shrink=16)
    products = products_of(whole, touches_of(whole, ["distilled"]))
    phase = Phase(STATE, 1, video_tokens=256, audio_tokens=256, text_tokens=256)
    share = len(products) / len(PRODUCTS)
    for apply in ("resident", "runtime", "per_layer"):
        small, large = (phase_seconds(phase, apply, LINES, p) for p in (PRODUCTS, products))
        assert share / 2 < large / small < 1.2 * share


def test_not_fusing_adds_what_its_phases_add():
    recipe = load_recipe("hq_two_stage").bind()
    frame = forwards_frame([recipe], LINES, PRODUCTS)
    assert list(frame.forwards) == [90, 6]
    assert list(frame.video) == [8160, 32640]
    for apply in ("runtime", "per_layer"):
        assert added_seconds(recipe, apply, LINES, PRODUCTS) == pytest.approx(frame[apply].sum())
    assert list(frame.per_layer) == [pytest.approx(90 * FUSING), pytest.approx(6 * FUSING)]


def test_a_line_scales_its_fixed_part_by_products():
    assert ForwardLine(1.0, 10.0, products=4).seconds(flops=20, products=8) == 2 + 2
