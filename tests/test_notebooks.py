"""The notebooks run from top to bottom at size tiny, and their pages are drawn by a browser."""

import json
from pathlib import Path

import browser
import nbformat
import pytest

from lorabench import calibrate, records
from lorabench.claims import load_claims
from lorabench.geometry import load_geometry
from lorabench.rates import SIZES, Machine, Origin, Pace
from lorabench.report import ReportFacts, build_reports, run_notebook
from lorabench.synthetic import synthesize

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
COMMITTED = ROOT / "data" / "records"
PAGES = ["index", *(n.stem for n in NOTEBOOKS)]
FACTS = ReportFacts("a test's machine", "abc1234", "2026-01-01T00:00+00:00", "tiny", "This run.")


def calibrated(scratch):
    """Leave a made-up calibration where notebooks look for one, so that none is measured."""
    copies = ("copy_host", "read_cold", "read_warm", "load_warm", "copy_new", "encode", "decode")
    kernels = {"gemm": Pace(1e11, 5e9), "scalar": Pace(5e8)}
    figures = ["memory_bytes", *copies, *(f"kernels.{k}.{s}" for k in kernels for s in SIZES)]
    path = calibrate.calibration_file(scratch, "cpu")
    machine = Machine(
        name=path.stem,
        title="a test's machine",
        device="cpu",
        memory_bytes=24 << 30,
        **dict.fromkeys(copies, 2e9),
        kernels={name: dict.fromkeys(SIZES, pace) for name, pace in kernels.items()},
        forward=dict.fromkeys(SIZES, Pace(1e11, 5e9)),
        origins=dict.fromkeys(
            [*figures, *(f"forward.{s}" for s in SIZES)], Origin("measured", "made up")
        ),
    )
    path.parent.mkdir(parents=True)
    calibrate.store(machine, path)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Folder of the built reports."""
    out = tmp_path_factory.mktemp("reports")
    calibrated(out / "scratch")
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


def test_there_are_the_six_notebooks():
    assert [n.stem for n in NOTEBOOKS] == [
        "01_reproduce_the_issue",
        "02_fix_strategies",
        "03_cost_per_recipe",
        "04_exact_unfuse",
        "05_which_strategy",
        "06_your_model",
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


def test_a_rebind_takes_hours_as_written_and_seconds_fixed(out):
    found = result(out, "03_cost_per_recipe")
    assert found["GB10_as_written_s"] == pytest.approx(2 * 8_526_382_497_792 / 0.53e9)
    assert found["Zen 5_fixed_s"] == pytest.approx(140, rel=0.05)
    assert found["H200_fixed_s"] < found["here_fixed_s"] < found["here_as_written_s"] / 100
    assert found["ti2vid_hundred_advised_s"] <= found["ti2vid_hundred_both_fixes_s"]
    assert found["ti2vid_later_both_fixes_s"] < found["ti2vid_later_as_written_s"] / 100


def test_the_cost_models_error_is_told(out):
    found = result(out, "03_cost_per_recipe")
    assert found["model_cases"] > 20
    assert abs(found["model_worst_error"]) >= found["model_median_error"] > 0


def test_the_advised_strategy_is_the_cheapest_and_the_answer_depends(out):
    found = result(out, "05_which_strategy")
    assert found["ti2vid_advised_s"] <= found["ti2vid_best_named_s"] < found["ti2vid_as_written_s"]
    assert found["answers"] >= 3
    assert found["least_memory_gib"] == 48  # the model and its adapter take 47.5
    assert found["ti2vid_changes"] > 0
    assert 0 < found["overlap_hides_most"] < 1


def test_the_default_model_is_the_one_with_a_trained_adapter(out):
    found = result(out, "06_your_model")
    assert 0.05 < found["touched_share"] < 0.1  # queries and values of a 22 M parameter BERT
    assert found["cases"] > 0


def test_a_model_of_your_own_is_given_by_its_paths(tmp_path):
    calibrated(tmp_path / "scratch")
    files = synthesize(tmp_path / "mine", load_geometry("ltx-2.5-22b", shrink=16).cut(1), ["style"])
    (tmp_path / "mine.toml").write_text(
        'description = "mine"\nroles = { style = "required" }\n'
        "[[phases]]\nsteps = 2\nvideo_tokens = 64\n"
        "[[phases]]\nsteps = 1\nvideo_tokens = 64\nadapters = { style = 0.5 }\n"
    )
    parameters = {
        "SIZE": "tiny",
        "SCRATCH": tmp_path / "scratch",
        "RECORDS": tmp_path / "records.jsonl",
        "RESULTS": tmp_path / "results",
        "BASE": files.base,
        "ADAPTERS": {role: str(path) for role, path in files.adapters.items()},
        "RECIPE": tmp_path / "mine.toml",
    }
    notebook = next(n for n in NOTEBOOKS if n.stem == "06_your_model")
    run_notebook(notebook, tmp_path / "mine.ipynb", parameters, timeout_seconds=300)
    found = json.loads((tmp_path / "results" / "06_your_model.json").read_text())
    assert found["touched_share"] > 0.8
    walks = records.read(tmp_path / "records.jsonl")
    assert {r.case["state"] for r in walks} == {"base", "style@0.5"}


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


def test_each_case_was_measured_once_though_several_notebooks_asked(out):
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
