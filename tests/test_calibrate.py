"""Calibration: rates told apart from timings, and what a calibration leaves behind."""

import math
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from lorabench import calibrate as calibrating
from lorabench.calibrate import calibrate, calibration_file, check_out, here, measured, store
from lorabench.cli import app
from lorabench.errors import FileError, UnavailableError
from lorabench.machine_text import describe_machine, machine_text
from lorabench.measure import time_once
from lorabench.rates import SIZES, Pace, load_machine, machine_toml
from lorabench.rounds import Rounds
from lorabench.separate import Timing, beside, bytes_per_second, launch_seconds, pace
from lorabench.specimens import SHAPES, Sizes

TINY = Sizes(
    shapes={
        "large": ((96, 64), (96, 64), (64, 128)),
        "medium": ((64, 64), (64, 32)),
        "small": ((8, 64), (64, 8)),
    },
    ranks=(16, 4),
    tokens=(8, 2),
    launches=4,
    rounds=(3, 3),
    sample_seconds=1e-4,
)

amounts = st.floats(1e-3, 1e3)


def timing(seconds: float, *, weights=1, flops=0, params=0, nbytes=0) -> Timing:
    return Timing("a thing", (seconds, seconds, seconds), weights, flops, params, nbytes)


@given(
    launch=st.floats(0, 1e-4),
    flops_per_second=st.floats(1e8, 1e15),
    params_per_second=st.floats(1e6, 1e12),
    weights=st.integers(1, 50),
    ranks=st.tuples(st.integers(1, 64), st.integers(2, 32)),
)
def test_rates_that_made_the_timings_are_found_again(
    launch, flops_per_second, params_per_second, weights, ranks
):
    less_rank, times = ranks
    made, params = Pace(flops_per_second, params_per_second), weights << 24

    def taken(rank: int) -> Timing:
        flops = 2 * params * rank
        seconds = weights * launch + made.seconds(flops, params)
        return timing(seconds, weights=weights, flops=flops, params=params)

    more, less = taken(less_rank * times), taken(less_rank)
    found, origin = pace(more, less, launch)
    product, elements = more.flops / flops_per_second, params / params_per_second
    assert found.seconds(more.flops, params) == pytest.approx(product + elements, rel=1e-6)
    if 0.05 < product / (product + elements + weights * launch) < 0.95:
        assert found.flops_per_second == pytest.approx(flops_per_second, rel=1e-6)
        assert found.params_per_second == pytest.approx(params_per_second, rel=1e-4)
        assert "bound" not in origin.source


@given(more=amounts, less=amounts, launch=amounts)
def test_timings_that_contradict_each_other_give_positive_rates_all_the_same(more, less, launch):
    a = timing(more, weights=3, flops=10**9, params=10**6)
    b = timing(less, weights=3, flops=10**8, params=10**6)
    found, _ = pace(a, b, launch)
    assert 0 < found.flops_per_second < math.inf
    assert found.params_per_second > 0
    # What was measured comes out again, unless the launches alone take longer.
    beside_launches = max(0.02 * more, more - 3 * launch)
    assert found.seconds(a.flops, a.params) == pytest.approx(beside_launches)


@pytest.mark.parametrize(
    ("more", "less", "launch", "said"),
    [
        (1.0, 0.5, 2.0, "launches take all of it"),
        (1.0, 1.0, 0.0, "more FLOP take no longer"),
        (1.0, 0.01, 0.0, "elements take no time"),
    ],
)
def test_a_rate_that_the_timings_dont_show_says_why(more, less, launch, said):
    a = timing(more, flops=100, params=10)
    b = timing(less, flops=10, params=10)
    assert said in pace(a, b, launch)[1].source


def test_a_rate_is_of_the_median_and_tells_what_was_run():
    rate = bytes_per_second(Timing("reading", (1.0, 2.0, 90.0), nbytes=8))
    assert rate.value == 4.0
    assert rate.origin.provenance == "measured"
    assert rate.origin.source == "reading (3 samples, median 2 s)"
    assert launch_seconds(timing(6.0, weights=3)).value == 2.0


def test_what_coding_takes_is_what_it_adds_to_a_fuse():
    plain = timing(1.0, params=100)
    assert beside(timing(3.0), plain, 100).value == 50.0
    faster = beside(timing(0.5), plain, 100)
    assert faster.value == 100 / 0.02
    assert "bound" in faster.origin.source


class Clock:
    """A timer by which each step takes what made-up rates say of the work that it really did."""

    def __init__(self, rates: dict[str, Pace], launch: float, per_byte: float) -> None:
        self.rates, self.launch, self.per_byte = rates, launch, per_byte
        self.steps = []

    def __call__(self, run, device) -> float:
        run()
        step, work = self.steps[-1]
        moved = work.file_bytes + work.snapshot_bytes
        if step.name == "launch_seconds":
            return len(step.weights) * self.launch
        group = step.name.rpartition(".")[0]
        if step.name == "load_beside":
            group = "kernels.gemm.large"
        elif group not in self.rates:
            return moved * self.per_byte + 1e-9
        seconds = self.rates[group].seconds(work.flops, work.fused_params)
        return len(step.weights) * self.launch + seconds + moved * self.per_byte


@pytest.fixture
def clock(monkeypatch):
    """Made-up rates for every pace that a CPU is measured for."""
    groups = [f"{g}.{s}" for g in ("kernels.gemm", "kernels.scalar", "forward") for s in SIZES]
    rates = {group: Pace(1e9 * (i + 1), 1e8 * (i + 3)) for i, group in enumerate(groups)}
    made = Clock(rates, 1e-5, 1e-9)
    steps = Rounds.steps

    def watched(rounds):
        for step in steps(rounds):

            def run(step=step):
                work = step.run()
                made.steps.append((step, work))
                return work

            yield step._replace(run=run)

    monkeypatch.setattr(Rounds, "steps", watched)
    return made


def test_a_calibration_finds_the_rates_by_which_its_steps_took_their_time(tmp_path, clock):
    machine = measured("cpu", tmp_path, TINY, False, clock)
    for group, made in clock.rates.items():
        kind, _, size = group.rpartition(".")
        paces = machine.forward if kind == "forward" else machine.kernels[kind[len("kernels.") :]]
        assert paces[size].flops_per_second == pytest.approx(made.flops_per_second, rel=1e-6), group
        found = paces[size].params_per_second
        assert found == pytest.approx(made.params_per_second, rel=1e-3), group
    assert machine.launch_seconds == pytest.approx(1e-5)
    for name in ("read_cold", "read_warm", "load_warm", "load_beside", "copy_host", "copy_new"):
        assert getattr(machine, name) == pytest.approx(1e9, rel=0.01), name


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    return measured("cpu", tmp_path_factory.mktemp("calibration"), TINY, False)


def test_every_figure_of_a_calibration_is_positive_finite_and_measured(machine):
    figures = [machine.launch_seconds, machine.read_cold, machine.read_warm, machine.load_warm]
    figures += [machine.load_beside]
    figures += [machine.copy_host, machine.copy_new, machine.encode, machine.decode]
    paces = [*machine.forward.values(), *(p for k in machine.kernels.values() for p in k.values())]
    figures += [pace.flops_per_second for pace in paces]
    assert all(0 < figure < math.inf for figure in figures)
    assert all(pace.params_per_second > 0 for pace in paces)
    assert machine.provenance == "measured"
    assert {*machine.kernels} == {"gemm", "scalar"}
    assert all({*paces} == {*SIZES} for paces in machine.kernels.values())
    assert machine.copy_device is None
    samples = {"read_warm": 6}  # twice a round
    for name, origin in machine.origins.items():
        if name != "memory_bytes":
            assert f"({samples.get(name, 3)} samples, median " in origin.source, name


def test_a_calibration_is_read_back_equal(machine, tmp_path):
    path = calibration_file(tmp_path, "cpu")
    store(machine, path)
    assert load_machine(path) == machine
    assert path.read_text() == machine_toml(machine)


def test_after_a_round_weights_have_base_bits(tmp_path):
    rounds = Rounds(torch.device("cpu"), tmp_path, TINY)
    for step in rounds.steps():
        step.before()
        step.run()
        rounds.new.clear()
    weights = rounds.weights
    for name in weights.coded:
        assert torch.equal(weights.tensors[name], weights.base.read(name))


def test_a_step_counts_what_it_does(tmp_path):
    steps = {step.name: step for step in Rounds(torch.device("cpu"), tmp_path, TINY).steps()}
    works = {}
    for name, step in steps.items():
        step.before()
        works[name] = step.run()
    params = 2 * 96 * 64 + 64 * 128
    for name in ("load_warm", "load_beside"):
        assert works[name].file_bytes == 2 * params
    assert works["read_cold"].file_bytes == TINY.nbytes
    assert works["load_beside"].fused_params == params
    assert works["copy_host"].snapshot_bytes == 2 * params
    assert works["read_warm"].file_bytes == TINY.nbytes
    assert works["kernels.gemm.large.more"].flops == 2 * params * 16
    assert works["kernels.gemm.large.less"].flops == 2 * params * 4
    assert works["kernels.gemm.large.more"].fused_params == params
    assert works["forward.large.more"].flops == 2 * params * 8
    assert works["encode"].fused_params == works["decode"].fused_params == 2 * 96 * 64


def test_the_weights_that_are_measured_are_of_their_class():
    from lorabench.rates import class_of

    for size, shapes in SHAPES.items():
        assert {class_of(out * in_) for out, in_ in shapes} == {size}
    assert Sizes().nbytes < 1.5e9 / 2


def test_a_calibration_leaves_no_files(tmp_path, machine, monkeypatch):
    seen = []

    def in_this_process(function, device, folder, sizes, show):
        result = function(device, folder, sizes, show)
        seen.extend(path.name for path in folder.iterdir())
        return result

    monkeypatch.setattr(calibrating, "alone", in_this_process)
    found = calibrate("cpu", tmp_path / "new", sizes=TINY, show=False)
    assert seen == ["calibration.safetensors"]
    assert [*(tmp_path / "new").iterdir()] == []
    assert (found.name, found.title) == (machine.name, machine.title)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_a_calibration_that_is_broken_off_leaves_no_files(tmp_path, monkeypatch, error):
    def broken(function, device, folder, sizes, show):
        (folder / "calibration.safetensors").write_bytes(b"half")
        raise error

    monkeypatch.setattr(calibrating, "alone", broken)
    with pytest.raises(error):
        calibrate("cpu", tmp_path, sizes=TINY, show=False)
    assert [*tmp_path.iterdir()] == []


def test_a_calibration_runs_in_a_process_of_its_own(tmp_path, machine):
    assert calibrate("cpu", tmp_path, sizes=TINY, show=False).kernels.keys() == {"gemm", "scalar"}
    assert [*tmp_path.iterdir()] == []


def test_a_disk_without_room_is_told_before_anything_is_written(tmp_path, monkeypatch):
    full = os.statvfs_result((4096, 4096, 9, 1, 1, 9, 9, 9, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(FileError, match=r"needs .* bytes, but the disk has 4,096 free"):
        calibrate("cpu", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_device_that_isnt_here_is_refused(tmp_path):
    with pytest.raises(UnavailableError, match="device 'tpu'"):
        calibrate("tpu", tmp_path)


def stub(monkeypatch, machine) -> list[str]:
    """Have a calibration give this machine at once; list the devices that it is asked for."""
    asked: list[str] = []
    monkeypatch.setattr(calibrating, "calibrate", lambda device, _: asked.append(device) or machine)
    return asked


def test_here_measures_once_and_then_reads_the_file(tmp_path, machine, monkeypatch, capsys):
    asked = stub(monkeypatch, machine)
    assert here(tmp_path) == here(tmp_path) == machine
    assert asked == ["cpu"]
    told = capsys.readouterr().err
    assert told.count("isn't there yet: measuring this machine") == 1
    assert str(calibration_file(tmp_path, "cpu")) in told


def test_only_a_calibration_of_this_machine_is_overwritten_unasked(tmp_path, machine):
    path = tmp_path / "out.toml"
    check_out(path, "cpu")
    store(machine, path)
    check_out(path, "cpu")
    for text in (
        "what = 1",
        machine_toml(load_machine("gb10")),
        machine_toml(machine).replace(f'"{machine.title}"', '"another CPU"'),
    ):
        path.write_text(text)
        with pytest.raises(FileError, match="is no calibration of this machine"):
            check_out(path, "cpu")
        check_out(path, "cpu", overwrite=True)


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("where", ["folder", "file/mine.toml"])
def test_a_file_that_can_not_be_written_is_refused_before_anything_is_measured(
    tmp_path, machine, monkeypatch, where, overwrite
):
    asked = stub(monkeypatch, machine)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    option = ["--overwrite"] if overwrite else []
    ran = CliRunner().invoke(app, ["calibrate", "--out", str(tmp_path / where), *option])
    assert ran.exit_code == 2
    assert where.split("/")[0] in ran.output
    assert asked == []


def test_the_command_writes_the_machines_file_and_prints_its_figures(
    tmp_path, machine, monkeypatch
):
    stub(monkeypatch, machine)
    ran = CliRunner().invoke(app, ["calibrate", "--scratch", str(tmp_path)])
    assert ran.exit_code == 0, ran.output
    path = tmp_path / "machines" / f"{machine.name}.toml"
    assert load_machine(path) == machine
    assert str(path) in ran.output
    assert "kernels.gemm.large.flops_per_second" in ran.output
    assert "FLOP/s" in ran.output


def test_the_command_gives_the_figures_as_json(tmp_path, machine, monkeypatch):
    import json

    stub(monkeypatch, machine)
    out = tmp_path / "mine.toml"
    ran = CliRunner().invoke(
        app, ["calibrate", "--scratch", str(tmp_path), "--out", str(out), "--json"]
    )
    assert json.loads(ran.stdout) == describe_machine(machine)
    assert load_machine(out).kernels == machine.kernels


def test_the_command_leaves_another_file_alone_and_measures_nothing(tmp_path, machine, monkeypatch):
    asked = stub(monkeypatch, machine)
    out = Path(tmp_path / "mine.toml")
    out.write_text("precious")
    ran = CliRunner().invoke(app, ["calibrate", "--out", str(out)])
    assert ran.exit_code == 2
    assert out.read_text() == "precious"
    assert asked == []


def test_figures_are_told_with_their_units():
    told = machine_text(describe_machine(load_machine("gb10")))
    assert "273" not in told.split("\n")[0]
    for line in ("530.00 MFLOP/s", "128.00 GB", "136.50 GB/s", "nothing beside the product"):
        assert line in told
    origins = {row.split()[0]: row.split("  ")[-1] for row in told.splitlines() if "/s" in row}
    assert origins["kernels.scalar.large.flops_per_second"] == "published"
    assert origins["copy_host"] == "derived, at most"


def test_the_default_timer_is_the_projects_own():
    import inspect

    assert inspect.signature(measured).parameters["timer"].default is time_once
