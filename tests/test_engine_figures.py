"""Figures of passes and of rules tell what they show."""

import pandas as pd
import pytest

from lorabench import engine_figures
from lorabench.page import CARTESIAN_TRACES

PASSES = pd.DataFrame(
    {
        "contender": ["gemm", "gemm", "peer", "square_float32", "square_bfloat16"],
        "operation": ["fuse", "fuse", "fuse", "product", "product"],
        "pass": ["first", "steady", "steady", "steady", "steady"],
        "mix": ["whole", "whole", "sample", "square", "square"],
        "threads": [1] * 5,
        "gflops_per_s": [20.0, 40.0, 0.5, 45.0, 0.6],
        "weighted_gflops_per_s": [21.0, 41.0, 0.7, None, None],
        "is_ceiling": [None, None, None, True, False],
        "provenance": ["measured"] * 5,
    }
)
PASSES = pd.concat([PASSES, PASSES.assign(threads=2)], ignore_index=True)
RULES = pd.DataFrame(
    {
        "strength": [1.0, 1.0, 0.8, 0.8],
        "ratio": [0.1, 1.0, 0.1, 1.0],
        "first": ["R1"] * 4,
        "second": ["R2"] * 4,
        "differing_share": [0.0, 0.0, 0.05, 0.25],
        "1": [0.0, 0.0, 0.04, 0.2],
        "more": [0.0, 0.0, 0.01, 0.05],
    }
)
MADE = {
    "peers_figure": engine_figures.peers_figure(PASSES, "t"),
    "rules_figure": engine_figures.rules_figure(RULES, "t"),
}
TOLD = {
    "peers_figure": "2 threads, gemm fuse, whole, steady: 40",
    "rules_figure": "R1 / R2 at strength 0.8: 5 to 25 %",
}


@pytest.mark.parametrize("name", MADE)
def test_a_figure_says_its_numbers_to_those_who_cannot_see_it(name):
    assert TOLD[name] in MADE[name].layout.meta["alt"]


@pytest.mark.parametrize("name", MADE)
def test_a_figure_uses_only_traces_that_the_bundled_plotly_draws(name):
    assert {trace.type for trace in MADE[name].data} <= CARTESIAN_TRACES


def test_a_samples_bar_has_the_rate_that_is_weighted_by_a_whole_passs_work():
    [steady, *_] = [t for t in MADE["peers_figure"].data if t.name == "steady passes"]
    bars = dict(zip(steady.y, steady.x, strict=True))
    assert bars == {"gemm fuse, whole": 40.0, "peer fuse, sample": 0.7}


def test_the_ceiling_is_a_line_over_all_bars_of_its_threads_and_no_bar():
    ceilings = [t for t in MADE["peers_figure"].data if t.type == "scatter"]
    assert [set(line.x) for line in ceilings] == [{45.0}, {45.0}]
    assert set(ceilings[0].y) == {"gemm fuse, whole", "peer fuse, sample"}
    bars = {lane for t in MADE["peers_figure"].data if t.type == "bar" for lane in t.y}
    assert not {lane for lane in bars if "square" in lane}


def test_a_cell_of_rules_is_in_percent_and_hovering_tells_the_ulps():
    at_one, at_other = MADE["rules_figure"].data
    assert [list(row) for row in at_one.z] == [[0.0, 0.0]]
    assert [list(row) for row in at_other.z] == [[5.0, 25.0]]
    assert list(at_other.x) == ["0.1", "1"]
    assert "0.2 by 1, 0.05 by more" in str(at_other.customdata)
