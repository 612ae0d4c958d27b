"""The notebooks run from top to bottom at size tiny, and their pages are drawn by a browser."""

import json
from pathlib import Path

import browser
import nbformat
import pytest

from lorabench import records
from lorabench.claims import load_claims
from lorabench.report import ReportFacts, build_reports

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
COMMITTED = ROOT / "data" / "records"
PAGES = ["index", *(n.stem for n in NOTEBOOKS)]
FACTS = ReportFacts("a test's machine", "abc1234", "2026-01-01T00:00+00:00", "tiny", "This run.")


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Folder of the built reports."""
    out = tmp_path_factory.mktemp("reports")
    parameters = {
        "SIZE": "tiny",
        "SCRATCH": str(out / "scratch"),
        "RECORDS": str(out / "records.jsonl"),
        "RESULTS": str(out / "results"),
    }
    build_reports(NOTEBOOKS, out, parameters, FACTS, timeout_seconds=300)
    return out


def result(out, notebook):
    return json.loads((out / "results" / f"{notebook}.json").read_text())


def test_there_are_the_four_notebooks():
    assert [n.stem for n in NOTEBOOKS] == [
        "01_reproduce_the_issue",
        "02_fix_strategies",
        "03_cost_per_recipe",
        "04_exact_unfuse",
    ]


def test_the_issue_is_reproduced(out):
    found = result(out, "01_reproduce_the_issue")
    assert found["pass_flops"] == 2 * 8_526_382_497_792
    assert found["busy_threads"] <= 1
    assert found["loop_stack_share"] > 0  # small weights are read most of the time
    assert 0 < found["scalar_gflops_per_s"] < 20
    expected = found["pass_flops"] / 3600e9 / found["hours_per_pass"]
    assert expected == pytest.approx(found["window_gflops_per_s"])


def test_the_extrapolation_has_the_error_of_a_pass_that_ended(out):
    found = result(out, "01_reproduce_the_issue")
    off = max(1 + found["first_tenth_error"], 1 / (1 + found["first_tenth_error"]))
    assert found["hours_high"] == pytest.approx(off * found["hours_per_pass"])
    assert found["hours_low"] == pytest.approx(found["hours_per_pass"] / off)
    loops = [r for r in records.read(out / "records.jsonl") if r.case["bench"] == "loop"]
    ended = {r.case["budget_seconds"]: r.counted["flops"] == r.counted["pass_flops"] for r in loops}
    assert ended[None]


def test_the_completed_sequence_is_the_committed_one_over_every_block(out):
    found = result(out, "01_reproduce_the_issue")
    streamed = [r for r in records.read(COMMITTED) if r.case["bench"] == "stream"]
    full = [r for r in streamed if r.case["blocks"] == 48]
    assert {r.case["params"] for r in full} == {21_004_025_600}
    fused = [r for r in full if r.counted["flops"]]
    assert {r.counted["flops"] for r in fused} == {found["pass_flops"]}
    assert found["full_pass_seconds"] in {s for r in fused for s in r.seconds}
    assert found["full_private_gib"] < 2


def test_every_claim_has_a_verdict_and_none_that_must_hold_is_broken(out):
    found = result(out, "01_reproduce_the_issue")
    verdicts = {k.removeprefix("claims_"): n for k, n in found.items() if k.startswith("claims_")}
    assert sum(verdicts.values()) == len(load_claims())
    assert verdicts["reproduced"] >= 24
    assert verdicts["inconsistent"] == 6


def test_the_strategies_are_exact_but_for_subtraction(out):
    found = result(out, "02_fix_strategies")
    assert 0.01 < found["wrong_share"] < 0.3
    walks = [r for r in records.read(out / "records.jsonl") if r.case["bench"] == "walk"]
    inexact = {r.case["strategy"] for r in walks if "not the exact one" in r.check}
    assert inexact == {"subtract"}


def test_five_of_the_twelve_recipes_rebind_in_every_render(out):
    found = result(out, "03_cost_per_recipe")
    assert (found["recipes"], found["recipes_that_rebind"]) == (12, 5)


def test_unfusing_is_exact_but_for_subtraction_and_the_residual_is_small(out):
    found = result(out, "04_exact_unfuse")
    assert 0.001 < found["wrong_share_bf16"] < 0.1  # the real base's delta is a hundredth of it
    assert 0 < found["residual_bits"] < 1
    assert found["product_share"] > found["add_share"] > 0
    assert found["idle_account_share"] < 0.01
    measured = [r for r in records.read(out / "records.jsonl") if r.case["bench"] == "restores"]
    wrong = {
        r.case["restore"]: r.details["wrong_share"]
        for r in measured
        if r.case["contender"] == "load"
    }
    assert {name for name, share in wrong.items() if share} == {"subtract"}


def test_each_case_was_measured_once_though_four_notebooks_asked(out):
    keys = [records.key(r.case) for r in records.read(out / "records.jsonl")]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_at_most_1300_kilobytes(out, page):
    assert (out / f"{page}.html").stat().st_size <= 1_300_000


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda n: n.stem)
def test_a_browser_without_network_draws_every_trace(out, notebook, dark, tmp_path):
    opened = browser.open_page(out / f"{notebook.stem}.html", tmp_path / "profile", dark=dark)
    traces = browser.drawn(opened.dom)
    executed = nbformat.read(out / "notebooks" / notebook.name, as_version=4)
    figures = [
        output.data["application/vnd.plotly.v1+json"]
        for cell in executed.cells
        for output in cell.get("outputs", ())
        if "application/vnd.plotly.v1+json" in output.get("data", {})
    ]
    visible = [t for f in figures for t in f["data"] if t.get("visible", True) is True]
    assert len({t.figure for t in traces}) == len(figures) > 0
    assert len(traces) == len(visible)
    assert all(t.marks > 0 for t in traces), [t for t in traces if not t.marks]
    assert not opened.requests


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda n: n.stem)
def test_notebooks_argue_and_the_package_computes(notebook):
    cells = nbformat.read(notebook, as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert all(len(cell.source.splitlines()) <= 30 for cell in code)
    assert not any(line.startswith("class ") for cell in code for line in cell.source.splitlines())
