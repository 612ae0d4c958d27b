"""Figures of the decision tell what they show, and their menus don't undo one another."""

import math

import numpy as np
import pandas as pd
import pytest

from lorabench import decision_figures, model_figures
from lorabench.page import CARTESIAN_TRACES

LADDER = pd.DataFrame(
    [
        ("one", "base → d", "here", "as written", 39000.0, "derived"),
        ("one", "base → d", "here", "fixed", 190.0, "measured"),
        ("one", "base → d", "GB10", "as written", 72000.0, "published"),
        ("one", "base → d", "GB10", "fixed", 60.0, "predicted"),
        ("two", "d → base", "here", "fixed", 0.0, "predicted"),
    ],
    columns=["recipe", "rebind", "machine", "way", "seconds", "provenance"],
)
WAITS = pd.DataFrame(
    [
        ("one", "as_written", 9000.0, 7200.0, 7.2e5, 47.0, "predicted"),
        ("one", "advised", 200.0, 0.0, 200.0, 83.0, "predicted"),
        ("one", "both_fixes", 210.0, 190.0, 19000.0, 47.0, "measured"),
        ("two", "advised", 3.0, 2.0, 201.0, 60.0, "predicted"),
    ],
    columns=[
        *("recipe", "strategy", "first_s", "later_s", "hundred_s", "memory_gib", "provenance"),
    ],
)
CELLS = pd.DataFrame(
    [
        {
            "recipe": recipe,
            "machine": machine,
            "renders": renders,
            "memory_gib": memory,
            "answer": "" if memory < 48 else "images" if renders > 1 else f"reread on {machine}",
            "seconds": math.nan if memory < 48 else 60.0 * renders,
            "margin": math.nan if memory < 48 else 0.125,
            "runner_up": "" if memory < 48 else "residual",
        }
        for recipe in ("one", "two")
        for machine in ("here", "GB10")
        for renders in (1, 10, 100)
        for memory in (40, 64)
    ]
)
CASES = pd.DataFrame(
    {
        "kind": ["load", "fuse", "fuse"],
        "case": ["load into base", "base to d", "base to u"],
        "measured_s": [10.0, 100.0, 1.0],
        "predicted_s": [10.5, 98.0, 1.3],
        "error": [0.05, -0.02, 0.3],
    }
)
FORWARDS = pd.DataFrame(
    {
        "apply": ["resident", "resident", "runtime", "runtime"],
        "tokens": [64, 64, 256, 64],
        "seconds": [1.0, 1.1, 5.0, 1.5],
        "provenance": ["measured", "predicted", "predicted", "predicted"],
    }
)
ADDED = pd.DataFrame(
    [
        ("one", "fused", 1024, 20.0, "predicted"),
        ("one", "fused", 64, 20.0, "predicted"),
        ("one", "runtime", 64, 2.0, "predicted"),
        ("one", "runtime", 1024, 32.0, "predicted"),
        ("two", "runtime", 64, 3.0, "measured"),
    ],
    columns=["recipe", "apply", "tokens", "seconds", "provenance"],
)
MADE = {
    "rebind_ladder": decision_figures.rebind_ladder(LADDER, "t"),
    "first_steady_hundred": decision_figures.first_steady_hundred(WAITS),
    "answer_map": decision_figures.answer_map(CELLS),
    "validation": model_figures.validation(CASES),
    "linear": model_figures.linear(FORWARDS),
    "crossover": model_figures.crossover(ADDED, "t"),
}
TOLD = {
    "rebind_ladder": "one, base → d on GB10, as written: 20 hours, published",
    "first_steady_hundred": "one, advised: first 3.33 minutes, later no time, 100 renders 3.33",
    "answer_map": "two on GB10: images in 2 cells",
    "validation": "median error 5.0%; by kind: load, 1 cases: 5.0%; fuse, 2 cases: 16.0%",
    "linear": "runtime, predicted: 5 seconds at 256 tokens",
    "crossover": "one, fused: 20 seconds at 1024 tokens, predicted; one, runtime: 32 seconds",
}


@pytest.mark.parametrize("name", MADE)
def test_a_figure_says_its_numbers_to_those_who_cannot_see_it(name):
    assert TOLD[name] in MADE[name].layout.meta["alt"]


@pytest.mark.parametrize("name", MADE)
def test_a_figure_uses_only_traces_that_the_bundled_plotly_draws(name):
    assert {trace.type for trace in MADE[name].data} <= CARTESIAN_TRACES


def pick(figure, menu, label):
    """Choose from a menu as a reader does; give what it sets."""
    [button] = [b for b in figure.layout.updatemenus[menu].buttons if b.label == label]
    return button.method, button.args[0]


# What rebinds take


def test_a_rung_has_a_marker_for_each_way_drawn_by_where_its_seconds_are_from():
    markers = [t for t in MADE["rebind_ladder"].data if t.mode == "markers"]
    drawn = {(y, t.name): t.marker.symbol for t in markers for y in t.y}
    assert drawn == {
        ("base → d<br><sub>here</sub>", "as written"): "circle-open",
        ("base → d<br><sub>here</sub>", "fixed"): "circle",
        ("base → d<br><sub>GB10</sub>", "as written"): "diamond-open",
        ("base → d<br><sub>GB10</sub>", "fixed"): "circle-open-dot",
        ("d → base<br><sub>here</sub>", "fixed"): "circle-open-dot",
    }


def test_a_rung_reaches_from_the_quickest_way_to_the_slowest():
    rung = MADE["rebind_ladder"].data[0]
    assert list(rung.x) == [190.0, 39000.0, None, 60.0, 72000.0, None]
    assert list(dict.fromkeys(rung.y)) == [
        "base → d<br><sub>here</sub>",
        "base → d<br><sub>GB10</sub>",
    ]


def test_what_takes_no_time_stands_at_the_axis_left_end_and_says_so():
    figure = MADE["rebind_ladder"]
    [marker] = [t for t in figure.data if t.mode == "markers" and "d → base" in t.y[0]]
    assert math.log10(marker.x[0]) == pytest.approx(figure.layout.xaxis.range[0])
    assert marker.customdata == ("no time",)


def test_a_log_axis_of_times_is_told_in_milliseconds_minutes_and_hours():
    axis = MADE["rebind_ladder"].layout.xaxis
    ticks = dict(zip(axis.tickvals, axis.ticktext, strict=True))
    assert (ticks[60.0], ticks[600.0], ticks[36000.0]) == ("1 min", "10 min", "10 h")


def test_a_recipe_alone_needs_no_menu_and_names_each_way_once():
    figure = decision_figures.rebind_ladder(LADDER[LADDER.recipe == "one"], "t")
    assert not figure.layout.updatemenus
    named = [t.name for t in figure.data if t.showlegend]
    assert sorted(named) == sorted({t.name for t in figure.data})


# What renders wait for


def test_every_strategy_has_bars_of_its_waits_and_its_memory():
    figure = MADE["first_steady_hundred"]
    bars = {(t.xaxis, y): x for t in figure.data for x, y in zip(t.x, t.y, strict=True)}
    assert bars["x", "as_written"] == 9000.0
    assert bars["x2", "both_fixes"] == 190.0
    assert bars["x3", "as_written"] == 7.2e5
    assert bars["x4", "both_fixes"] == 47.0


def test_strategies_keep_their_order_whatever_their_provenance():
    order = ["as_written", "advised", "both_fixes"]
    assert list(MADE["first_steady_hundred"].layout.yaxis.categoryarray) == order


def test_the_planners_own_strategy_has_a_colour_of_its_own():
    bars = [t for t in MADE["first_steady_hundred"].data if t.xaxis == "x"]
    ours = {t.marker.color for t in bars if t.y[0] == "advised"}
    assert not ours & {t.marker.color for t in bars if t.y[0] != "advised"}


def test_the_menu_of_recipes_shows_one_recipes_bars():
    _, args = pick(MADE["first_steady_hundred"], 0, "two")
    shown = zip(MADE["first_steady_hundred"].data, args["visible"], strict=True)
    assert {trace.text[0] for trace, visible in shown if visible} == {
        "3 s",
        "2 s",
        "3.35 min",
        "60",
    }


# Where the answer changes


def seen(figure, recipe, machine):
    """What a reader sees who picked a recipe and a machine, whatever came first."""
    method, args = pick(figure, 0, recipe)
    assert (method, list(args)) == ("restyle", ["visible"])
    [trace] = [t for t, visible in zip(figure.data, args["visible"], strict=True) if visible]
    method, args = pick(figure, 1, machine)
    assert (method, list(args)) == ("relayout", ["xaxis.range"])
    low, high = args["xaxis.range"]
    at = [i for i, x in enumerate(trace.x) if low < x < high]
    ticks = dict(zip(figure.layout.xaxis.tickvals, figure.layout.xaxis.ticktext, strict=True))
    return trace, at, [ticks[trace.x[i]] for i in at]


@pytest.mark.parametrize("recipe", ["one", "two"])
@pytest.mark.parametrize("machine", ["here", "GB10"])
def test_the_menus_of_recipes_and_machines_show_any_two_together(recipe, machine):
    trace, at, ticks = seen(MADE["answer_map"], recipe, machine)
    assert ticks == ["1", "10", "100"]
    told = [row[i] for row in trace.customdata for i in at]
    assert len(told) == 6
    assert all(f" GiB, {machine}:" in text for text in told)


def test_a_cell_hovered_over_tells_the_answer_its_seconds_and_the_margin():
    trace, at, _ = seen(MADE["answer_map"], "one", "here")
    assert list(trace.y) == ["40", "64"]
    assert trace.customdata[0][at[0]] == "1 renders, 40 GiB, here:<br>nothing fits"
    assert trace.customdata[1][at[2]] == (
        "100 renders, 64 GiB, here:<br><b>images</b>, 1.67 hours of binding<br>residual: 12.5% more"
    )


def test_a_map_needs_no_runners_up():
    rows = CELLS.drop(columns=["runner_up", "margin"]).replace({"answer": {"": "nothing fits"}})
    trace, at, _ = seen(decision_figures.answer_map(rows), "one", "here")
    assert trace.customdata[0][at[0]].endswith("nothing fits")
    assert trace.text[0][at[0]] == ""
    assert trace.customdata[1][at[2]].endswith("<b>images</b>, 1.67 hours of binding")


def test_an_answers_letter_in_a_cell_is_that_of_its_colour_in_the_key():
    figure = MADE["answer_map"]
    bar = figure.layout.coloraxis.colorbar
    key = dict(zip(bar.tickvals, bar.ticktext, strict=True))
    for trace in figure.data:
        for z, text, told in zip(
            *map(np.ravel, (trace.z, trace.text, trace.customdata)), strict=True
        ):
            letter, answer = [*key[z].split("  "), ""][:2] if text else ("", "")
            assert text.startswith(f"<b>{letter}</b>") if text else key[z] == "nothing fits"
            assert answer in told


def test_each_answer_has_one_colour_all_over_its_part_of_the_scale():
    axis = MADE["answer_map"].layout.coloraxis
    levels = len(axis.colorbar.tickvals)
    starts, ends = axis.colorscale[::2], axis.colorscale[1::2]
    assert [colour for _, colour in starts] == [colour for _, colour in ends]
    assert len({colour for _, colour in starts}) == levels == 4
    assert (axis.cmax - axis.cmin) == levels


# The model


def test_the_worst_case_is_labelled_where_it_is():
    [label] = MADE["validation"].layout.annotations
    assert label.text == "base to u: +30%"
    assert (label.x, label.y) == pytest.approx((0.0, math.log10(1.3)))


def test_the_band_is_ten_percent_either_way_of_the_diagonal():
    low, high, diagonal = MADE["validation"].data[:3]
    assert np.divide(low.y, diagonal.y) == pytest.approx([0.9, 0.9])
    assert np.divide(high.y, diagonal.y) == pytest.approx([1.1, 1.1])
    assert list(diagonal.x) == list(diagonal.y)
    assert (low.fill, high.fill) == (None, "tonexty")


def test_measured_forwards_are_points_and_predicted_ones_a_dotted_line_over_rising_tokens():
    traces = {t.name: t for t in MADE["linear"].data}
    assert traces["resident (measured)"].mode == "markers"
    line = traces["runtime (predicted)"]
    assert (line.mode, line.line.dash, list(line.x)) == ("lines", "dot", [64, 256])


def test_what_binding_adds_is_a_line_over_rising_tokens_for_each_way_of_a_recipe():
    figure = MADE["crossover"]
    shown = {t.name: (list(t.x), list(t.y)) for t in figure.data if t.visible}
    assert shown == {
        "fused (predicted)": ([64, 1024], [20.0, 20.0]),
        "runtime (predicted)": ([64, 1024], [2.0, 32.0]),
    }
    _, args = pick(figure, 0, "two")
    [other] = [t for t, seen in zip(figure.data, args["visible"], strict=True) if seen]
    assert other.mode == "markers"
