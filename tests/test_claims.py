"""The ledger of claims: what is in it, how a claim is judged, and what the command says."""

import json
import subprocess
import sys
import tomllib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from lorabench import claims as claims_module
from lorabench import geometry as geometry_module
from lorabench import records as records_module
from lorabench import resources
from lorabench.arithmetic import evaluate, names, show, spell
from lorabench.claims import VERDICTS, Check, Claim, count_verdicts, judge, load_claims, to_frame
from lorabench.cli import app
from lorabench.errors import ConfigError
from lorabench.evidence import counted_figures, measured_figures
from lorabench.geometry import load_geometry
from lorabench.recipe import load_recipe, recipe_names
from lorabench.records import read

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "data" / "records" / "amd-epyc-2c-avx2" / "report.jsonl"
MACHINE = "amd-epyc-2c-avx2"


@pytest.fixture(scope="module")
def geometry():
    return load_geometry("ltx-2.5-22b")


@pytest.fixture(scope="module")
def counted(geometry):
    return counted_figures(geometry, [load_recipe(name).bind() for name in recipe_names()])


@pytest.fixture(scope="module")
def measured(geometry):
    return measured_figures(read(RECORDS), geometry)


@pytest.fixture(scope="module")
def judged(counted, measured):
    return {one.claim.id: one for one in judge(load_claims(), counted, measured)}


@pytest.fixture
def run(capfd, monkeypatch):
    """Run `lorabench claims`; return its exit code, stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "100")

    def call(*arguments):
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_:
            app(["claims", *map(str, arguments)], prog_name="lorabench")
        return int(exit_.value.code or 0), *capfd.readouterr()

    return call


@pytest.fixture
def ledger(tmp_path, monkeypatch):
    """Put a ledger in the place of the shipped one."""

    def write(text):
        path = tmp_path / "claims.toml"
        path.write_text(text, "utf-8")
        monkeypatch.setattr(claims_module, "data_file", lambda _: path)
        return path

    return write


def shipped():
    return resources.data_file("claims.toml").read_text("utf-8")


# Arithmetic


@pytest.mark.parametrize(
    ("formula", "figure"),
    [
        ("1 + 2 * 3", 7),
        ("(1 + 2) * 3", 9),
        ("-a ** 2", -16),
        ("2**30", 1 << 30),
        ("2 ** -12", 2.0**-12),
        ("a / 8", 0.5),
        ("a - b - 1", 2),
    ],
)
def test_a_formula_is_worked_out_as_written(formula, figure):
    assert evaluate(formula, {"a": 4, "b": 1}) == figure


def test_large_whole_numbers_stay_exact():
    assert evaluate("a + 1", {"a": 10**18}) == 10**18 + 1


@pytest.mark.parametrize(
    ("formula", "complaint"),
    [
        ("abs(a)", r"found 'abs\(a\)'"),
        ("__import__('os')", "expected numbers, names"),
        ("a.real", "found 'a.real'"),
        ("a[0]", r"found 'a\[0\]'"),
        ("a % 2", "found 'a % 2'"),
        ("a if a else 1", "expected numbers, names"),
        ("lambda: 1", "expected numbers, names"),
        ("'a'", "expected numbers, names"),
        ("True", "found 'True'"),
        ("1j", "found '1j'"),
        ("+a", "found '.a'"),
        ("a; a", "can't be read"),
        ("", "can't be read"),
        ("a +", "can't be read"),
        ("(" * 140 + "a", "can't be read"),
        ("a" * 301, "longer than 300"),
        ("widht", r"nothing is called 'widht' \(did you mean 'width'\?\)"),
        ("1 / (a - 4)", "divides by zero"),
        ("0 ** -1", "divides by zero"),
        ("9**9**9", "exponent of at most 64"),
        ("2 ** 65", "exponent of at most 64"),
        ("(-a) ** 0.5", "no real value"),
        ("1e400", "expected a finite value"),
        ("1e300 * 1e300", "too large"),
        ("9.0 ** 64 ** 6", "exponent of at most 64"),
        ("((((9**64)**64)**64)**64)**64", "too large"),
        ("10**64 * 10**64 * 10**64 * 10**64 * 10**64", "too large"),
    ],
)
def test_a_formula_holds_nothing_but_arithmetic(formula, complaint):
    with pytest.raises(ConfigError, match=complaint) as refused:
        evaluate(formula, {"a": 4, "width": 1})
    assert formula[:40] in str(refused.value)


def test_names_are_told_once_and_in_order():
    assert names("b * (a + b) / c_1") == ("b", "a", "c_1")


def test_arithmetic_is_told_in_numbers():
    values = {"share": 0.023, "macs": 8.53e12, "bits": 18_977_652_736, "off": -1.5}
    told = "0.023 x 8.53e12 x 2 / (10.4 x 60) / 1e9 = 0.6288141"
    assert spell("share * macs * 2 / (10.4 * 60) / 1e9", values) == told
    assert spell("bits / 2**30", values) == "18,977,652,736 / 2^30 = 17.67432"
    assert spell("1 - off", values) == "1 - (-1.5) = 2.5"
    assert spell("bits", values) == "bits = 18,977,652,736"


@pytest.mark.parametrize(
    ("figure", "told"),
    [(1660, "1,660"), (20.0, "20"), (8.53e12, "8.53e12"), (4449681408.0, "4,449,681,408"),
     (0.25, "0.25"), (2.44e-7, "2.44e-7"), (-0.5, "-0.5"), (0, "0"), (1e10, "1e10")],
)  # fmt: skip
def test_figures_are_told_in_the_shortest_exact_way(figure, told):
    assert show(figure) == told


# The shipped ledger

IN_THE_ISSUE = {
    "transformer_params": 21_004_025_600,
    "transformer_file_bytes": 42_018_190_584,
    "transformer_tensors": 4349,
    "transformer_bf16_tensors": 4059,
    "transformer_f32_tensors": 290,
    "transformer_version": None,
    "transformer_prefix": 4349,
    "adapter_gigabytes": 8.9,
    "adapter_file_bytes": 8_899_889_568,
    "adapter_tensors": 3320,
    "adapter_pairs": 1660,
    "adapter_params": 4.450e9,
    "adapter_rank": 450,
    "adapter_alpha": 450,
    "adapter_names": 3320,
    "pass_macs": 8.53e12,
    "machine_cores": 20,
    "stack_samples": 3,
    "stack_order": None,
    "busy_percent": 99.9,
    "busy_threads": 1,
    "idle_cores": 19,
    "working_set_before": 9.432,
    "working_set_after": 10.235,
    "sampled_from": 300,
    "sampled_to": 629,
    "progress_percent": 2.3,
    "elapsed_minutes": 10.4,
    "scalar_rate": 0.53,
    "pass_hours": None,
    "passes_completed": 0,
    "passes_before_denoise": 3,
    "passes_that_cancel": 2,
    "next_render_rebinds": 2,
    "affected_percent": 100,
    "ti2vid_affected": 2,
    "a2vid_affected": 2,
    "one_stage_pays": 0,
    "loop_accumulates": None,
    "loop_threads": 1,
    "loop_conversion": None,
    "loop_adds_back": 2,
    "module_cores": 20,
    "module_side": 4096,
    "module_rank": 450,
    "module_scalar_seconds": 17.7761,
    "module_scalar_gmacs": 0.4247,
    "module_gemm_seconds": 0.1242,
    "module_speedup": 143.1,
    "addback_percent": 59,
    "simd_speedup": 27.5,
    "thread_speedup": None,
    "scalar_pass_seconds": 20280,
    "gemm_pass_seconds": 131,
    "unfuse_rereads": None,
    "unfuse_exact_percent": 100,
    "rebind_rereads_adapter": None,
    "state_is_boolean": None,
    "hq_phase_0_strength": 0.25,
    "hq_phase_1_strength": 0.5,
    "hq_missed_rebinds": 1,
}
OTHERS = {
    "sglang_apply_seconds": 18.5,
    "sglang_runtime_seconds": 11.855,
    "sglang_runtime_gigabytes": 60.35,
    "trtllm_copies": 2,
    "trtllm_one_copy_gib": 66.62,
    "trtllm_two_copies_gib": 101.94,
    "trtllm_before_seconds": 17.710,
    "trtllm_after_seconds": 13.473,
    "ttmetal_refuse_seconds": 45,
    "vllm_omni_rank": 64,
    "vllm_omni_overhead_1k": 12.4,
    "vllm_omni_overhead_4k": 19.8,
    "vllm_omni_overhead_16k": 29.9,
    "trl_drift_1": 2.44e-4,
    "trl_drift_1000": 1.49e-2,
}


@pytest.mark.parametrize(("name", "value"), (IN_THE_ISSUE | OTHERS).items())
def test_the_ledger_holds_every_published_figure(judged, name, value):
    assert judged[name].claim.value == value


def test_others_figures_name_others(judged):
    assert all("vllm.cpp" in judged[name].claim.source for name in IN_THE_ISSUE)
    assert not any("vllm.cpp" in judged[name].claim.source for name in OTHERS)


def test_all_that_can_be_counted_is_reproduced(judged):
    assert not [name for name, one in judged.items() if one.broken]
    reproduced = {name for name, one in judged.items() if one.verdict == "reproduced"}
    assert {"transformer_params", "transformer_file_bytes", "adapter_file_bytes"} <= reproduced
    assert {"transformer_tensors", "adapter_pairs", "pass_macs"} <= reproduced
    assert {"next_render_rebinds", "one_stage_pays", "hq_missed_rebinds"} <= reproduced


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("scalar_rate", [0.629, 0.590]),
        ("progress_percent", [1.136, 2.154]),
        ("scalar_pass_seconds", [20076]),
        ("gemm_pass_seconds", [141.7, 140.3]),
        ("passes_before_denoise", [2, 2]),
        ("affected_percent", [62.5]),
    ],
)
def test_claims_that_disagree_are_shown_as_such(judged, name, figures):
    one = judged[name]
    assert one.verdict == "inconsistent"
    worked_out = [o.figure for o in one.outcomes if o.check.kind != "measured"]
    assert worked_out == pytest.approx(figures, rel=1e-3)
    outside = [o for o in one.outcomes if o.inside is False]
    assert all(o.check.reading and o.reading_arithmetic for o in outside)


def test_no_other_claims_disagree(judged):
    inconsistent = {name for name, one in judged.items() if one.verdict == "inconsistent"}
    assert inconsistent == {
        *("scalar_rate", "progress_percent", "scalar_pass_seconds", "gemm_pass_seconds"),
        *("passes_before_denoise", "affected_percent"),
    }


@pytest.mark.parametrize(
    ("name", "arithmetic"),
    [
        ("working_set_growth", "10.235 - 9.432 = 0.803"),
        ("idle_cores", "20 - 1 = 19"),
        ("transformer_tensors", "4,059 + 290 = 4,349"),
        ("adapter_pairs", "1,360 + 8 + 4 + 288 = 1,660"),
        ("adapter_gigabytes", "8,899,889,568 / 1e9 = 8.89989"),
        ("module_speedup", "17.7761 / 0.1242 = 143.1248"),
        ("thread_speedup", "143.1 / 27.5 = 5.203636"),
        ("module_scalar_gmacs", "4,096 x 450 x 4,096 / 17.7761 / 1e9 = 0.4247134"),
        ("trtllm_copies", "1 + (101.94 - 66.62) x 2^30 / (2 x 18,977,652,736) = 1.99919"),
    ],
)
def test_relations_between_claims_are_worked_out(judged, name, arithmetic):
    assert judged[name].verdict != "inconsistent"
    assert arithmetic in [outcome.arithmetic for outcome in judged[name].outcomes]


def test_two_bytes_a_weight_would_explain_the_progress(judged):
    [growth, *_] = judged["progress_percent"].outcomes
    assert growth.reading_arithmetic.endswith(" = 2.271658")


def test_what_no_one_can_check_here_says_what_it_needs(judged):
    still_open = [one for one in judged.values() if one.verdict == "open"]
    assert len(still_open) > 20
    assert all(one.claim.needs for one in still_open)


# Figures of ours


@pytest.mark.parametrize(
    ("recipe", "before_denoise", "first_render", "next_render"),
    [
        ("one_stage", 0, 0, 0),  # nothing is bound
        ("ti2vid_two_stage", 2, 3, 2),  # fuse; un-fuse; fuse again
        ("hq_two_stage", 3, 5, 2),  # each rebind un-fuses one strength and fuses the other
        ("dfr", 1, 1, 0),  # one adapter throughout
    ],
)
def test_passes_and_rebinds_are_counted_in_the_plan(
    counted, recipe, before_denoise, first_render, next_render
):
    assert counted[f"counted_{recipe}_passes_before_denoise"] == before_denoise
    assert counted[f"counted_{recipe}_passes_first_render"] == first_render
    assert counted[f"counted_{recipe}_rebinds_next_render"] == next_render


def test_measured_figures_are_those_of_the_records(measured):
    assert measured.keys() == {MACHINE}
    figures = measured[MACHINE]
    found = read(RECORDS)
    for contender in ("scalar", "gemm"):
        [kernel] = [r for r in found if r.case.get("contender") == contender]
        rate = kernel.counted["flops"] / sorted(kernel.seconds)[2] / 1e9  # the middle one of five
        assert figures[f"measured_{contender}_gflops"] == pytest.approx(rate)
    [window] = [r for r in found if r.case["bench"] == "loop" and r.case["budget_seconds"]]
    busiest = 100 * max(window.details["threads"].values())
    assert figures["measured_busiest_thread_percent"] == pytest.approx(busiest)
    inside = sum(
        s["samples"]
        for s in window.details["stacks"]
        if "scalar:fuse_scalar" in " ".join(s["frames"])
    )
    share = inside / sum(s["samples"] for s in window.details["stacks"])
    assert figures["measured_scalar_stack_percent"] == pytest.approx(100 * share)
    assert figures["measured_busy_threads"] == 1
    assert figures["measured_exact_reread_percent"] == 100
    assert "measured_scalar_pass_hours" not in figures  # one was run to its end, over two blocks


def test_a_streamed_pass_over_every_block_is_a_figure(geometry):
    streamed = read(RECORDS.with_name("full-depth.jsonl"))
    figures = measured_figures(streamed, geometry)[MACHINE]
    fuses = [r.seconds[0] for r in streamed if r.case.get("before") == "base"]
    assert figures["measured_streamed_pass_seconds"] == pytest.approx(sum(fuses) / len(fuses))
    two_blocks = [r for r in read(RECORDS) if r.case["bench"] == "stream"]
    assert two_blocks
    assert "measured_streamed_pass_seconds" not in measured_figures(two_blocks, geometry)[MACHINE]


def test_a_scalar_pass_run_to_its_end_is_a_figure(geometry):
    loop, *_ = [r for r in read(RECORDS) if r.case["bench"] == "loop"]
    blocks, params = 48, sum(t.params for t in geometry.cut(48).tensors)
    case = {**loop.case, "budget_seconds": None, "blocks": blocks, "params": params}
    whole = replace(loop, case=case, seconds=(36_000.0,))
    figures = measured_figures([whole], geometry)[MACHINE]
    assert figures == {"measured_scalar_pass_hours": 10}
    cut = replace(whole, case={**loop.case, "budget_seconds": None})
    assert measured_figures([cut], geometry) == {MACHINE: {}}


def test_shrunken_weights_and_derived_records_give_no_figure(geometry):
    found = read(RECORDS)
    shrunk = [replace(r, case={**r.case, "params": 4_000_000}) for r in found]
    derived = [replace(r, provenance="derived", source="by hand") for r in found]
    assert measured_figures([*shrunk, *derived], geometry) == {}


def test_an_unfuse_that_gave_other_bits_is_seen(geometry):
    found = [
        replace(r, check="digest 0") if r.case.get("before") == "distilled@1" else r
        for r in read(RECORDS)
    ]
    assert measured_figures(found, geometry)[MACHINE]["measured_exact_reread_percent"] == 0


def test_a_record_without_what_it_should_hold_is_refused(geometry):
    bare = [replace(r, details={}) for r in read(RECORDS) if r.case["bench"] == "loop"]
    with pytest.raises(ConfigError, match=f"records of {MACHINE}: measured_busy_threads"):
        measured_figures(bare, geometry)


# Verdicts

COUNT = Check("counted", "counted_pairs", 0, "counted")
DERIVED = Check("derived", "half * 2", 0.01, "twice the half")
MEASURED = Check("measured", "measured_rate", 0.5, "as measured")
HALF = Claim("half", "Half of it.", "a/b#1", value=830, needs="nothing")


def verdict_of(claim, counted=None, measured=None):
    counted = {"counted_pairs": 1660} if counted is None else counted
    return judge([claim, HALF], counted, measured)[0]


def claim(*checks, **fields):
    told = {"value": 1660} if "at_least" not in fields else {}
    return Claim("pairs", "There are pairs.", "a/b#1", **told, **fields, checks=checks)


@pytest.mark.parametrize(
    ("checks", "rate", "verdict"),
    [
        ((COUNT,), None, "reproduced"),
        ((DERIVED,), None, "consistent"),
        ((COUNT, DERIVED), None, "reproduced"),
        ((MEASURED,), None, "open"),
        ((), None, "open"),
        ((COUNT, MEASURED), None, "reproduced"),
        ((MEASURED,), 1110, "consistent"),  # a factor of 1.5 either way
        ((MEASURED,), 2480, "consistent"),
        ((MEASURED,), 1100, "inconsistent"),
        ((MEASURED,), 2500, "inconsistent"),
        ((COUNT, MEASURED), 800, "inconsistent"),
        ((replace(DERIVED, formula="half"),), None, "inconsistent"),
        ((replace(COUNT, formula="counted_pairs + 1"),), None, "inconsistent"),
    ],
)
def test_a_verdict_follows_from_the_checks(checks, rate, verdict):
    measured = {"here": {"measured_rate": rate}} if rate else {}
    one = verdict_of(claim(*checks), measured=measured)
    assert one.verdict == verdict
    assert one.broken == ("counted_pairs + 1" in [check.formula for check in checks])


def test_a_band_is_a_share_of_the_claim_and_holds_its_edge():
    edge = replace(DERIVED, formula="1660 * 0.75", within=0.25)
    [outcome] = verdict_of(claim(edge)).outcomes
    assert (outcome.figure, outcome.difference, outcome.inside) == (1245, -0.25, True)
    assert not verdict_of(claim(replace(edge, within=0.2499))).outcomes[0].inside


@pytest.mark.parametrize(("bound", "inside"), [(830, True), (1660, True), (1661, False)])
def test_a_bound_holds_from_there_on(bound, inside):
    [outcome] = verdict_of(claim(DERIVED, at_least=bound)).outcomes
    assert outcome.inside is (inside or outcome.figure >= bound * 0.99)
    [outcome] = verdict_of(claim(replace(DERIVED, within=0), at_least=bound)).outcomes
    assert outcome.inside is inside


@pytest.mark.parametrize(("figure", "difference", "inside"), [("0", 0.0, True), ("1", None, False)])
def test_nothing_is_told_as_nothing(figure, difference, inside):
    nothing = Claim("none", "None.", "a/b#1", value=0, checks=(replace(DERIVED, formula=figure),))
    [outcome] = verdict_of(nothing).outcomes
    assert (outcome.difference, outcome.inside) == (difference, inside)


def test_machines_are_never_mixed():
    found = {"one": {"measured_rate": 1660}, "two": {"measured_rate": 20}, "three": {}}
    one = verdict_of(claim(MEASURED), measured=found)
    assert [(o.machine, o.figure, o.inside) for o in one.outcomes] == [
        ("one", 1660, True),
        ("two", 20, False),
    ]


def test_a_reading_is_told_only_for_a_figure_outside_its_band():
    reading = {"reading": "half of it", "reading_formula": "half"}
    [outside] = verdict_of(claim(replace(DERIVED, formula="half", **reading))).outcomes
    [inside] = verdict_of(claim(replace(DERIVED, **reading))).outcomes
    assert (outside.reading_arithmetic, inside.reading_arithmetic) == ("half = 830", "")


def test_a_formula_that_fails_names_its_claim():
    with pytest.raises(
        ConfigError, match=r"claim 'pairs': formula 'counted_piars': .*did you mean"
    ):
        verdict_of(claim(replace(COUNT, formula="counted_piars")))


def test_a_frame_has_a_row_for_each_outcome(judged):
    frame = to_frame(judged.values())
    assert len(frame) == sum(len(one.outcomes) or 1 for one in judged.values())
    assert set(frame.id) == set(judged)
    rate = frame[(frame.id == "scalar_rate") & (frame.kind == "measured")].iloc[0]
    assert (rate.machine, rate.told, rate.verdict) == (MACHINE, 0.53, "inconsistent")


# Reading a ledger

BAD = """
version = 1
[claims.pairs]
says = "There are pairs."
valeu = 3
source = "a/b#1"
[claims.counted_rate]
says = "A rate."
source = "a/b#1"
value = true
at_least = 2
[claims.words]
says = "Words."
source = "a/b#1"
checks = [
  { kind = "derived", formula = "2 + parts", within = -1, how = "so" },
]
[claims.both]
says = "Both."
source = "a/b#1"
value = 1
at_least = 1
needs = "time"
[claims.silent]
says = "No number."
source = "a/b#1"
checks = [
  { kind = "derived", formula = "both", within = 0, how = "so" },
  { kind = "counted", formula = "silent + boht", within = 0, how = "so" },
  { kind = "counted", formula = "print(both)", within = 0, how = "so", reading_formula = "1" },
  { kind = "measured", formula = "measured_scalar_gflop", within = 0, how = "so" },
  { kind = "derived", formula = "measured_scalar_gflops", within = 0, how = "so" },
]
[claims.idle]
says = "Nothing checks this."
source = "a/b#1"
value = 3
"""


def test_all_that_is_wrong_in_a_ledger_is_told_at_once(tmp_path):
    path = tmp_path / "claims.toml"
    path.write_text(BAD, "utf-8")
    with pytest.raises(ConfigError) as refused:
        load_claims(path)
    told = str(refused.value)
    assert told.startswith(f"{path}: not a ledger of claims yet, problems found: ")
    for problem in (
        "version: unknown key",
        "claims.pairs.valeu: unknown key (did you mean 'value'?)",
        "claims.counted_rate.value",
        "claims.words.checks.0.within: ",
        "claims.both: has a value and an at_least",
        "claims.silent: has checks but no number",
        "claims.silent.checks.1.formula: claim 'silent' has no value",
        "claims.silent.checks.1.formula: there is no claim 'boht' (did you mean 'both'?)",
        "claims.silent.checks.1.formula: a counted check names a figure 'counted_...'",
        "claims.silent.checks.2.formula: formula 'print(both)': expected numbers",
        "claims.silent.checks.2.reading: required beside a reading_formula",
        "nothing is measured as 'measured_scalar_gflop' (did you mean 'measured_scalar_gflops'?)",
        "claims.silent.checks.4.formula: a derived check names no measured figure",
        "claims.idle.needs: required",
    ):
        assert problem in told, problem


@pytest.mark.parametrize("text", ["", "claims = 3", "[claim.x]", "claims = ["])
def test_a_file_without_claims_is_no_ledger(tmp_path, text):
    path = tmp_path / "claims.toml"
    path.write_text(text, "utf-8")
    with pytest.raises(ConfigError, match=r"claims\.toml"):
        load_claims(path)


def test_a_shipped_file_is_found_in_a_wheel_and_in_a_checkout(tmp_path, monkeypatch):
    package = tmp_path / "lorabench"
    monkeypatch.setattr(resources, "__file__", str(package / "resources.py"))
    with pytest.raises(ConfigError, match=r"'claims\.toml' not found .*reinstall"):
        resources.data_file("claims.toml")
    for folder in (tmp_path / "data", package / "data"):
        folder.mkdir(parents=True)
        (folder / "claims.toml").touch()
        assert resources.data_file("claims.toml") == folder / "claims.toml"


def test_the_ledger_goes_into_the_wheel_and_the_source_archive():
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["build"]
    included = targets["targets"]["wheel"]["force-include"]
    assert included["data/claims.toml"] == "lorabench/data/claims.toml"
    assert "/data/claims.toml" in targets["targets"]["sdist"]["include"]


# The command


def test_the_command_lists_every_claim(run, judged):
    code, out, err = run("--records", RECORDS)
    assert (code, err) == (0, "")
    assert all(f"  {name}" in out for name in judged)
    assert max(map(len, out.splitlines())) <= 100
    counts = count_verdicts(judged.values())
    last = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)
    assert out.splitlines()[-1] == f"{len(judged)} claims: {last}"
    assert "not within 0.04 %" in out
    assert "reading: 20,280 s are the same work at this rate" in out


def test_json_has_an_entry_for_each_claim(run, judged):
    code, out, _ = run("--records", RECORDS, "--json")
    found = {claim["id"]: claim for claim in json.loads(out)}
    assert code == 0
    assert Counter(claim["verdict"] for claim in found.values()) == Counter(
        one.verdict for one in judged.values()
    )
    rate = found["scalar_rate"]
    assert (rate["value"], rate["verdict"]) == (0.53, "inconsistent")
    assert [check["machine"] for check in rate["checks"]] == [None, None, MACHINE]
    assert (
        rate["checks"][0]["arithmetic"] == "2.3 / 100 x 8.53e12 x 2 / (10.4 x 60) / 1e9 = 0.6288141"
    )
    assert rate["checks"][0]["inside"] is False


def test_without_records_what_they_would_check_is_open(run, tmp_path):
    empty = tmp_path / "none.jsonl"
    empty.touch()
    code, out, _ = run("--records", empty, "--json")
    found = {claim["id"]: claim for claim in json.loads(out)}
    assert code == 0
    assert found["stack_samples"]["verdict"] == "open"
    assert found["stack_samples"]["checks"][0]["figure"] is None
    assert found["transformer_params"]["verdict"] == "reproduced"


def test_the_checkouts_own_records_are_the_default(run):
    assert run("--json")[1] == run("--records", ROOT / "data" / "records", "--json")[1]


def test_records_of_two_machines_give_two_lines(run, tmp_path):
    found = read(RECORDS)
    other = [replace(r, environment={**r.environment, "machine": "another"}) for r in found]
    path = tmp_path / "both.jsonl"
    records_module.append(path, *found, *other)
    claims = {claim["id"]: claim for claim in json.loads(run("--records", path, "--json")[1])}
    checks = claims["busy_percent"]["checks"]
    assert [check["machine"] for check in checks] == [MACHINE, "another"]


def test_a_changed_claim_fails_after_the_whole_list(run, ledger):
    path = ledger(shipped().replace("value = 4059\n", "value = 4058\n"))
    code, out, err = run("--json")
    assert code == 1
    assert len(json.loads(out)) == len(load_claims(path))
    assert "aren't: transformer_bf16_tensors;" in err
    code, out, err = run()
    assert code == 1
    assert " inconsistent, " in out.splitlines()[-1]


def test_a_changed_model_fails(run, tmp_path, monkeypatch):
    text = resources.data_folder("models").joinpath("ltx-2.5-22b.toml").read_text("utf-8")
    (tmp_path / "ltx-2.5-22b.toml").write_text(text.replace("rank = 450", "rank = 449"), "utf-8")
    monkeypatch.setattr(geometry_module, "data_folder", lambda _: tmp_path)
    code, out, err = run()
    assert code == 1
    assert "adapter_file_bytes, adapter_pairs, adapter_params, adapter_rank, pass_macs" in err
    assert "claims: " in out.splitlines()[-1]


@pytest.mark.parametrize("text", ["", BAD])
def test_a_bad_ledger_is_a_mistake(run, ledger, text):
    path = ledger(text)
    code, out, err = run()
    assert (code, out) == (2, "")
    assert f"error: {path}: not a ledger" in err


def test_bad_records_are_a_mistake(run, tmp_path):
    code, out, err = run("--records", tmp_path / "none.jsonl")
    assert (code, out) == (2, "")
    assert "can't read records" in err


def test_help_fits_the_width_and_nothing_heavy_is_imported():
    script = (
        "import sys; from lorabench.cli import app\n"
        "for call in (['claims', '--help'], ['claims', '--json']):\n"
        "    try: app(call)\n"
        "    except SystemExit: pass\n"
        "heavy = {'torch', 'pandas', 'plotly', 'numba'} & sys.modules.keys()\n"
        "print(heavy or 'light', file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stderr == "light\n"
    helped = done.stdout.partition("[\n")[0]
    assert "--records" in helped
    assert max(map(len, helped.splitlines())) <= 100
