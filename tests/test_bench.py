"""Cases are checked before they are recorded, recorded as they end, and not repeated."""

import dataclasses
import os
from itertools import pairwise

import pytest
import torch
from conftest import cases_run_here

from lorabench import bench, records
from lorabench.bench import loop
from lorabench.check import compare
from lorabench.errors import CheckError, ConfigError
from lorabench.fuse import Pair, Term, reference_fuse
from lorabench.geometry import load_geometry
from lorabench.measure import Samples
from lorabench.plan import STRATEGIES
from lorabench.recipe import load_recipe
from lorabench.synthetic import SIZES, synthesize


@pytest.fixture
def subject(files):
    return bench.Subject(files.base, {"distilled": files.adapters["distilled"]})


def two_results(seconds):
    process = {"process": os.getpid()}
    return [
        bench.Result(Samples((seconds,)), check="checked", what={"part": part}, details=process)
        for part in "ab"
    ]


def wrong_bits(seconds):
    raise CheckError("a value is off")


def case(function=two_results, **what):
    return bench.Case({"bench": "made up", **what}, function, (1.5,))


def test_a_case_runs_alone_and_its_results_are_recorded_with_where_they_come_from(tmp_path):
    found = bench.sweep([case(blocks=2)], tmp_path / "r.jsonl")
    assert records.read(tmp_path / "r.jsonl") == found
    assert [r.case for r in found] == [
        {"bench": "made up", "blocks": 2, "part": part} for part in "ab"
    ]
    assert {r.provenance for r in found} == {"measured"}
    [process] = {r.details["process"] for r in found}
    assert process != os.getpid()
    assert all(r.environment["machine"] and r.commit for r in found)


@pytest.mark.usefixtures("_cases_run_here")
def test_an_ended_case_is_not_run_again_and_another_is(tmp_path):
    first = bench.sweep([case(blocks=2)], tmp_path / "r.jsonl")
    again = bench.sweep([case(blocks=2), case(blocks=3)], tmp_path / "r.jsonl")
    assert again[:2] == first
    assert len(records.read(tmp_path / "r.jsonl")) == 4


@pytest.mark.usefixtures("_cases_run_here")
def test_a_case_whose_records_are_not_all_there_is_run_again(tmp_path):
    path = tmp_path / "r.jsonl"
    bench.sweep([case()], path)
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    whole = bench.sweep([case()], path)
    assert [r.case["part"] for r in whole] == ["a", "b"]
    assert bench.sweep([case()], path) == whole  # and then it has ended
    assert len(records.read(path)) == 3


@pytest.mark.usefixtures("_cases_run_here")
def test_records_of_another_machine_do_not_count_as_ended(tmp_path):
    path = tmp_path / "r.jsonl"
    for record in bench.sweep([case()], tmp_path / "mine.jsonl"):
        records.append(path, dataclasses.replace(record, environment={"machine": "another"}))
    assert {r.environment["machine"] for r in bench.sweep([case()], path)} != {"another"}


@pytest.mark.usefixtures("_cases_run_here")
def test_what_fails_its_check_is_not_recorded_and_what_ended_before_is_kept(tmp_path):
    with pytest.raises(CheckError, match="a value is off"):
        bench.sweep([case(blocks=1), case(wrong_bits, blocks=2)], tmp_path / "r.jsonl")
    assert {r.case["blocks"] for r in records.read(tmp_path / "r.jsonl")} == {1}


def product(seed=0, out=40, in_=56, rank=16):
    g = torch.Generator().manual_seed(seed)
    base = (torch.randn(out, in_, generator=g) * 0.02).bfloat16()
    a, b = torch.randn(rank, in_, generator=g) * 0.1, torch.randn(out, rank, generator=g) * 0.01
    return base, [Term(Pair(a.bfloat16(), b.bfloat16(), 1.0), 0.8)]


def test_the_check_passes_the_reference_itself_and_other_orders_of_summing():
    base, terms = product()
    assert compare(reference_fuse(base, terms), base, terms, "m") == 0
    [pair, strength] = terms[0]
    turned = [Term(Pair(pair.a.flip(0), pair.b.flip(1), 1.0), strength)]
    assert compare(reference_fuse(base, turned), base, terms, "m") < 0.1


@pytest.mark.parametrize("strength", [0.0, 0.79, 1.6, -0.8])
def test_the_check_catches_a_wrong_strength(strength):
    base, [term] = product()
    wrong = reference_fuse(base, [Term(term.pair, strength)] if strength else [])
    with pytest.raises(CheckError, match="'m': value"):
        compare(wrong, base, [term], "m")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1.0])
def test_the_check_catches_a_single_wrong_value(value):
    base, terms = product()
    fused = reference_fuse(base, terms)
    fused[7, 9] = value
    with pytest.raises(CheckError, match=f"value {7 * 56 + 9} is"):
        compare(fused, base, terms, "m")


def test_a_walk_records_each_load_and_rebind_of_its_plan(subject, tmp_path):
    recipe = load_recipe("hq_two_stage")
    walk = bench.walk_case(subject, recipe, STRATEGIES["fast_kernel"], "fast_kernel", renders=2)
    found = bench.sweep([walk], tmp_path / "r.jsonl")
    assert [(r.case["action"], r.case.get("before"), r.case["state"]) for r in found] == [
        ("load", None, "distilled@0.5"),
        ("rebind", "distilled@0.5", "distilled@0.25"),
        ("rebind", "distilled@0.25", "distilled@0.5"),
        ("rebind", "distilled@0.5", "distilled@0.25"),
        ("rebind", "distilled@0.25", "distilled@0.5"),
    ]
    digests = [r.check.split(";")[0] for r in found]
    assert digests[0] == digests[2] == digests[4] != digests[1] == digests[3]
    for r in found:
        laps = r.details["globals_seconds"] + r.details["block_seconds"] * r.case["blocks"]
        assert 0 < laps <= r.seconds[0]
        assert r.peak_private_bytes > 0
    touched = [r.details["touched_bytes"] for r in found]
    assert touched[0] > max(touched[1:])  # what the load has taken needn't be there again


def test_a_role_that_the_recipe_does_not_have_is_refused_before_anything_runs(files):
    subject = bench.Subject(files.base, {"user": files.adapters["user"]})
    with pytest.raises(ConfigError, match="distilled"):
        bench.walk_case(subject, load_recipe("hq_two_stage"), STRATEGIES["snapshot"], "snapshot")


def test_the_scalar_loop_is_refused_on_a_gpu(files):
    subject = bench.Subject(files.base, {"user": files.adapters["user"]}, device="cuda")
    with pytest.raises(ConfigError, match="runs on the CPU"):
        bench.loop_case(subject, "user", 1.0)


def disturbed(cores):
    return [
        bench.Result(Samples((s,)), check="c", what={"part": s}, details={"others_cores": o})
        for s, o in ((9.0, cores), (0.001, 40.0))
    ]


@pytest.mark.usefixtures("_cases_run_here")
@pytest.mark.parametrize(("cores", "told"), [(0.1, False), (1.2, True)])
def test_a_case_that_others_disturbed_is_told_of(cores, told, tmp_path, capsys):
    bench.sweep([bench.Case({"bench": "made up"}, disturbed, (cores,))], tmp_path / "r.jsonl")
    said = capsys.readouterr().err
    assert ("other processes kept 1.2 cores busy" in said) == told
    assert "measure 1 of 1: made up" in said


def test_other_files_or_other_phases_are_another_case(files, tmp_path):
    recipe = load_recipe("hq_two_stage")
    subject = bench.Subject(files.base, {"distilled": files.adapters["distilled"]})
    other = bench.Subject(files.base, {"distilled": files.adapters["user"]})
    [first, *rest] = [
        bench.walk_case(s, r, STRATEGIES["snapshot"], "snapshot").what
        for s, r in (
            (subject, recipe),
            (other, recipe),
            (subject, dataclasses.replace(recipe, phases=recipe.phases[::-1])),
        )
    ]
    assert all(records.key(what) != records.key(first) for what in rest)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_check_accepts_what_was_not_finite_in_the_base(value):
    base, terms = product()
    base[3, 4] = value
    assert compare(reference_fuse(base, terms), base, terms, "m") == 0


def unsteady():
    return [bench.Result(Samples((1.0, 2.0, 3.0)), check="c", what={"contender": "gemm"})]


@pytest.mark.usefixtures("_cases_run_here")
def test_samples_that_spread_too_far_are_told_of(tmp_path, capsys):
    bench.sweep([bench.Case({"bench": "made up"}, unsteady, ())], tmp_path / "r.jsonl")
    assert "the samples of gemm spread over 50% of their median" in capsys.readouterr().err


# The scalar pass


def chunks_of(walked, flops=10_000):
    return list(loop._chunks(walked.pairs, flops))


def test_a_pass_walks_the_touched_weights_in_the_files_order_and_all_their_rows(base, adapters):
    shuffled = dataclasses.replace(adapters["user"], pairs=adapters["user"].pairs[::-1])
    chunks = chunks_of(loop._Pass(base, shuffled, widen=True))
    touched = {pair.weight.name for pair in adapters["user"].pairs}
    assert list(dict.fromkeys(chunk.pair.weight.name for chunk in chunks)) == [
        name for name in base.entries if name in touched
    ]
    rows = {name: [] for name in touched}
    for chunk in chunks:
        rows[chunk.pair.weight.name] += range(chunk.rows.start, chunk.rows.stop)
    assert all(rows[name] == list(range(base.entries[name].spec.shape[0])) for name in touched)


@pytest.mark.parametrize("widen", [True, False])
def test_a_pass_fuses_the_references_bits_and_tells_how_far_it_is(widen, base, adapters):
    walked, told = loop._Pass(base, adapters["user"], widen), []
    chunks = chunks_of(walked)
    flops = [walked.fuse(told.append, chunk) for chunk in chunks[:40]]
    assert sum(flops) == told[-1]["flops"]
    assert told[-1]["weights"] == sum(
        (c.rows.stop - c.rows.start) * c.pair.weight.shape[1] for c in chunks[:40]
    )
    assert [step["module"] for step in told] == [chunk.pair.module for chunk in chunks[:40]]
    assert walked.first.chunk == chunks[0]
    assert walked.last.chunk == chunks[39]
    assert walked.first.check(base) < 0.1
    assert walked.last.check(base) < 0.1
    assert {rows.dtype for rows in walked.widened} == ({torch.float32} if widen else set())
    assert sum(rows.numel() for rows in walked.widened) == widen * told[-1]["weights"]


@pytest.mark.parametrize("which", ["first", "last"])
def test_a_wrong_row_of_a_pass_is_found(which, base, adapters):
    walked = loop._Pass(base, adapters["user"], widen=True)
    for chunk in chunks_of(walked)[:40]:
        walked.fuse(lambda fields: None, chunk)
    fused = getattr(walked, which)
    fused.rows[-1, -1] += 1
    with pytest.raises(CheckError, match=f"'{fused.chunk.pair.module}': value"):
        fused.check(base)


WINDOW_SECONDS = 2.0  # enough for what is widened to stand out, on a busy machine too


@pytest.fixture(scope="session")
def wide(tmp_path_factory):
    """LTX-2.5's globals at a quarter of the width: a loop that is at one weight for seconds."""
    folder = tmp_path_factory.mktemp("wide")
    files = synthesize(folder, load_geometry("ltx-2.5-22b", shrink=4).cut(0))
    return bench.Subject(files.base, files.adapters)


def measured(subject, folder, budget_seconds, widen):
    case = bench.loop_case(subject, "distilled", budget_seconds, widen)
    with cases_run_here():  # the loop itself runs in a process that the case starts
        [record] = bench.sweep([case], folder / "r.jsonl")
    return record


@pytest.fixture(scope="session")
def broken_off(wide, tmp_path_factory):
    return measured(wide, tmp_path_factory.mktemp("broken_off"), WINDOW_SECONDS, widen=True)


@pytest.fixture(scope="session")
def whole(files, tmp_path_factory):
    subject = bench.Subject(files.base, {"distilled": files.adapters["distilled"]})
    return measured(subject, tmp_path_factory.mktemp("whole"), None, widen=False)


def test_a_pass_is_broken_off_after_its_budget(broken_off):
    assert broken_off.case["budget_seconds"] == WINDOW_SECONDS
    assert broken_off.counted["flops"] < broken_off.counted["pass_flops"]
    steps = broken_off.details["progress"]
    assert steps[-1]["flops"] == broken_off.counted["flops"]
    assert min(broken_off.seconds[0], steps[-1]["seconds"]) >= WINDOW_SECONDS
    window = broken_off.details["memory"][-1]["seconds"]
    assert max(broken_off.seconds[0], steps[-1]["seconds"]) <= window
    for name in ("seconds", "flops", "weights"):
        assert all(a[name] < b[name] for a, b in pairwise(steps))


def test_stacks_of_the_pass_are_in_the_loop(broken_off):
    stacks = broken_off.details["stacks"]
    loop_frame = "lorabench.kernels.scalar:fuse_scalar:"
    in_loop = [stack for stack in stacks if stack["frames"][0].startswith(loop_frame)]
    assert sum(stack["samples"] for stack in in_loop) >= 3
    # Small weights come first in the file, and reading them is part of a pass: how large a part
    # depends on what else runs on the machine.
    assert stacks[0] in in_loop
    assert all(any("lorabench.bench.loop" in f for f in s["frames"]) for s in stacks), stacks


def test_one_thread_of_the_pass_is_busy(broken_off):
    main, *others = sorted(broken_off.details["threads"].items(), key=lambda t: -t[1])
    assert main[0].startswith("MainThread ")
    assert main[1] > 0.3, "less is left on a busy machine only"
    assert all(share < 0.1 for _, share in others)


def test_memory_grows_by_the_widened_weights(broken_off):
    """Each weight that was reached takes four bytes."""
    weights = broken_off.details["progress"][-1]["weights"]
    assert broken_off.counted["widened_bytes"] == 4 * weights
    memory = [look["private_bytes"] for look in broken_off.details["memory"]]
    assert memory[-1] - memory[0] == pytest.approx(4 * weights, abs=8e6)
    assert broken_off.peak_private_bytes == max(memory)


def test_without_widening_the_same_pass_keeps_nothing(wide, broken_off, tmp_path):
    record = measured(wide, tmp_path, WINDOW_SECONDS, widen=False)
    assert record.counted["widened_bytes"] == 0
    grown = [
        r.details["memory"][-1]["private_bytes"] - r.details["memory"][0]["private_bytes"]
        for r in (record, broken_off)
    ]
    assert grown[0] < grown[1] - broken_off.counted["widened_bytes"] / 2


def test_a_pass_without_a_budget_runs_to_its_end(whole, adapters):
    targets = adapters["distilled"].targets
    assert whole.case["budget_seconds"] is None
    assert whole.counted["flops"] == whole.counted["pass_flops"]
    assert whole.counted["pass_flops"] == 2 * sum(target.macs for target in targets)
    steps = whole.details["progress"]
    assert steps[-1]["weights"] == sum(target.weight.params for target in targets)
    assert {step["module"] for step in steps} == {target.module for target in targets}
    assert f"{steps[0]['module']} to {steps[-1]['module']}" == whole.case["module"]
    assert whole.details["differing_share"] < 0.1


def test_passes_of_other_budgets_and_with_other_memory_are_other_cases(subject):
    ways = [(1.0, True), (2.0, True), (None, True), (None, False)]
    keys = {records.key(bench.loop_case(subject, "distilled", *way).what) for way in ways}
    assert len(keys) == len(ways)


def test_notebooks_of_every_size_know_how_long_to_measure():
    assert SIZES.keys() == bench.KERNEL_SECONDS.keys() == bench.LOOP_SECONDS.keys()
    assert SIZES.keys() == bench.WHOLE_PASS.keys() >= set(bench.WHOLE_PASS.values())
