"""Figures tell what they show, and draw each provenance in its own way."""

import pandas as pd
import pytest

from lorabench import figures
from lorabench.page import CARTESIAN_TRACES

RATES = pd.DataFrame(
    {
        "contender": ["scalar", "gemm", "issue"],
        "gflops_per_s": [0.43, 90.2, 0.53],
        "provenance": ["measured", "measured", "published"],
        "machine": ["m", "m", "GB10"],
    }
)
STEPS = pd.DataFrame(
    {
        "lane": ["as_written", "as_written", "both_fixes"],
        "part": ["load", "fuse", "load"],
        "seconds": [5.0, 7200.0, 4.0],
        "provenance": ["derived", "derived", "measured"],
    }
)
TIMES = pd.DataFrame(
    {
        "recipe": ["one", "one", "one", "two"],
        "panel": ["as written", "as written", "fixed", "fixed"],
        "lane": ["a", "a", "b", "b"],
        "start": [0.0, 7200.0, 0.0, 0.0],
        "seconds": [7200.0, 0.0, 120.0, 90.0],
        "part": ["fuse", "denoise", "fuse", "fuse"],
        "label": ["x", "y", "z", "w"],
        "provenance": ["derived"] * 4,
    }
)
COSTS = pd.DataFrame(
    {
        "recipe": ["one", "one"],
        "rebind": ["base → d", "base → d"],
        "way": ["slow", "fast"],
        "seconds": [39000.0, 190.0],
        "provenance": ["derived", "measured"],
    }
)
MEMORY = pd.DataFrame({"lane": ["x"], "measured_gb": [3.4], "predicted_gb": [2.9]})
GROWTH = pd.DataFrame({"seconds": [0.0, 10.0], "mib": [0.0, 26.0]})

MADE = {
    "rates": figures.rates(RATES),
    "memory_growth": figures.memory_growth(GROWTH, GROWTH),
    "stacked_seconds": figures.stacked_seconds(STEPS, "t"),
    "stacked_seconds, log": figures.stacked_seconds(STEPS, "t", log=True),
    "timelines": figures.timelines(TIMES, "t"),
    "cost_per_rebind": figures.cost_per_rebind(COSTS, "t"),
    "memory_bars": figures.memory_bars(MEMORY),
}
TOLD = {
    "rates": "scalar 0.43; gemm 90.2; issue 0.53",
    "memory_growth": "ends at 26 MiB",
    "stacked_seconds": "as_written 2 hours; both_fixes 4 seconds",
    "stacked_seconds, log": "as_written 2 hours; both_fixes 4 seconds",
    "timelines": "one, as written, a: 2 hours; one, fixed, b: 2 minutes; two, fixed, b: 1.5 min",
    "cost_per_rebind": "one base → d, slow: 10.8 hours; one base → d, fast: 3.17 minutes",
    "memory_bars": "x 3.40 GB, predicted 2.90",
}


@pytest.mark.parametrize("name", MADE)
def test_a_figure_says_its_numbers_to_those_who_cannot_see_it(name):
    assert TOLD[name] in MADE[name].layout.meta["alt"]


@pytest.mark.parametrize("name", MADE)
def test_a_figure_uses_only_traces_that_the_bundled_plotly_draws(name):
    assert {trace.type for trace in MADE[name].data} <= CARTESIAN_TRACES


def test_measured_bars_are_solid_derived_ones_hatched_and_published_values_diamonds():
    log = MADE["stacked_seconds, log"]
    assert {t.name: t.marker.pattern.shape for t in log.data} == {"derived": "/", "measured": ""}
    assert MADE["rates"].data[1].marker.symbol == "diamond-open"
    assert [t.marker.symbol for t in MADE["cost_per_rebind"].data] == ["circle-open", "circle"]


def test_on_a_log_axis_the_parts_of_a_lane_are_summed():
    [derived, measured] = MADE["stacked_seconds, log"].data
    assert (list(derived.x), list(measured.x)) == ([7205.0], [4.0])


def test_a_timelines_panels_have_axes_of_their_own_unit():
    layout = MADE["timelines"].layout
    assert (layout.xaxis.title.text, layout.xaxis2.title.text) == ("hours", "minutes")
    assert MADE["timelines"].data[0].x == (2.0,)


def test_the_menu_shows_one_recipe_at_a_time_and_names_each_part_once():
    figure = MADE["timelines"]
    [menu] = figure.layout.updatemenus
    assert [button.label for button in menu.buttons] == ["one", "two"]
    assert [trace.visible for trace in figure.data] == [True, True, True, False]
    assert [trace.showlegend for trace in figure.data] == [True, True, False, False]
    assert menu.buttons[1].args[0]["visible"] == [False, False, False, True]
