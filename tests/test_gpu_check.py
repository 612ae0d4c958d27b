"""What `make gpu-check` runs, on the CPU and small: it runs at all, and tells what is wrong."""

import os
import subprocess
import sys

import pytest
import torch
from test_imports import BLOCKER

from lorabench import gpu_check, gpu_rebind, records
from lorabench.errors import CheckError
from lorabench.geometry import load_geometry
from lorabench.gpu_rebind import Demand, Rates, Touched, measure_rates, time_rebinds
from lorabench.restore import Snapshot

CPU = torch.device("cpu")
RATES = Rates(flops=800e12, memory=4.8e12, link=50e9)
SMALL = ["--device", "cpu", "--shrink", "32", "--blocks", "1", "--depth", "1"]
SMALL += ["--repetitions", "2", "--square", "64", "--copy", "65536"]


@pytest.fixture(scope="module")
def touched():
    return Touched(load_geometry("ltx-2.5-22b", shrink=32).cut(1), CPU)


def test_it_runs_with_torch_safetensors_numpy_and_triton_alone(tmp_path):
    out = tmp_path / "records.jsonl"
    code = BLOCKER + "from lorabench.gpu_check import main\nsys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, *SMALL, "--out", out, "--folder", tmp_path],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "9 cases, every bit right" in done.stdout
    for restore in ("reread", "host_snapshot", "residual", "images"):
        assert f"under gemm and {restore}: a load's bits" in done.stdout
    found = {(r.case["restore"], r.case["action"]): r for r in records.read(out)}
    assert found.keys() == {
        ("none", "fuse"), ("host_snapshot", "fuse"), ("host_snapshot", "restore"),
        ("residual", "fuse"), ("residual", "restore"), ("images", "image"),
        ("subtract", "fuse"), ("subtract", "restore"),
    }  # fmt: skip
    assert {len(r.seconds) for r in found.values()} == {2}
    assert "wrong" in found["subtract", "restore"].check
    assert found["residual", "restore"].check == "all base bits"
    assert list(tmp_path.iterdir()) == [out], "the files it wrote are gone"


def test_without_a_gpu_it_says_so(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert gpu_check.main([]) == 1
    assert "finds no CUDA GPU" in capsys.readouterr().err


def test_the_least_that_a_full_fuse_takes_is_counted():
    demand = Demand.of(load_geometry("ltx-2.5-22b").cut(48))
    assert demand == Demand(17_052_764_995_584, 37_955_305_472, 8_899_362_816)
    assert demand.moved_bytes == 84_809_973_760
    assert demand.seconds(RATES) == pytest.approx(17.05e12 / 800e12, rel=1e-3)
    slow = Rates(flops=800e12, memory=1e12, link=50e9)
    assert demand.seconds(slow) == pytest.approx(84.8e9 / 1e12, rel=1e-3)


def test_rates_count_both_ways_of_a_copy(monkeypatch):
    monkeypatch.setattr(gpu_rebind, "time_once", lambda operation, device: operation() is None or 2)
    rates = measure_rates(CPU, size=8, nbytes=64)
    assert rates == Rates(flops=2 * 8**3 / 2, memory=2 * 64 / 2, link=16 / 2)


def test_weights_are_made_again_to_the_same_bits(touched):
    touched.reset()
    touched.check_base()
    weight = next(iter(touched.weights.values()))
    weight[0, 0] += 1
    with pytest.raises(CheckError, match="other bits than the base's"):
        touched.check_base()
    assert touched.wrong_share() == 1 / sum(w.numel() for w in touched.weights.values())
    touched.reset()


def test_factors_give_a_delta_of_the_ratio_that_is_said(touched):
    name = max(touched.terms, key=lambda name: touched.weights[name].numel())
    [term] = touched.terms[name]
    delta = term.pair.b.float() @ term.pair.a.float()
    assert delta.std() / touched.weights[name].float().std() == pytest.approx(0.05, rel=0.1)


def test_a_restore_that_does_not_restore_is_told(touched, monkeypatch):
    monkeypatch.setattr(Snapshot, "restore", lambda self, name, weight, terms: None)
    with pytest.raises(CheckError, match="other bits than the base's"):
        list(time_rebinds(touched, "gemm", "host_snapshot", RATES, repetitions=1))


def test_a_fuse_that_is_off_is_told(touched, monkeypatch):
    kernel = gpu_rebind.get_kernel("gemm", CPU)

    def off(weight, terms, scratch):
        kernel(weight, terms, scratch)
        weight *= 1.1

    monkeypatch.setattr(gpu_rebind, "get_kernel", lambda name, device: off)
    with pytest.raises(CheckError, match="further apart than"):
        list(time_rebinds(touched, "gemm", "images", RATES, repetitions=1))


def test_goldens_that_come_out_otherwise_are_told(monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "get_kernel", lambda name, device: lambda w, t, s: None)
    assert gpu_check.main(SMALL) == 1
    assert "gemm gives other bits" in capsys.readouterr().err


def test_what_there_is_no_time_for_is_left_out_and_said(touched, capsys):
    rows = list(gpu_check._measured(touched, ["gemm"], RATES, 1, begun=-1e9))
    assert [row.restore for row in rows] == ["none"]
    assert "left out: residual under gemm; 270 s are over" in capsys.readouterr().out
