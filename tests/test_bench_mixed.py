"""Measurements of adapters that hold more than factors for whole weights: taken, or refused."""

import pytest
import torch
from safetensors.torch import save_file

from lorabench import bench
from lorabench.errors import UnavailableError
from lorabench.plan import STRATEGIES
from lorabench.recipe import Phase, Recipe, Role, State


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    """A fused projection whose q and v have pairs, a delta with its bias's, and an f16 weight."""
    folder = tmp_path_factory.mktemp("mixed")
    g = torch.Generator().manual_seed(1)

    def normal(*shape, std=1.0, dtype=torch.bfloat16):
        return (torch.randn(*shape, generator=g) * std).to(dtype)

    base = {
        "blocks.0.attn.qkv.weight": normal(48, 16),
        "blocks.0.mlp.weight": normal(24, 16),
        "blocks.0.mlp.bias": normal(24),
        "blocks.0.half.weight": normal(24, 16, dtype=torch.float16),
    }
    user = {
        "blocks.0.attn.to_q.lora_A.weight": normal(4, 16, std=0.3),
        "blocks.0.attn.to_q.lora_B.weight": normal(16, 4, std=0.3),
        "blocks.0.attn.to_v.lora_A.weight": normal(2, 16, std=0.3),
        "blocks.0.attn.to_v.lora_B.weight": normal(16, 2, std=0.3),
        "blocks.0.mlp.diff": normal(24, 16, std=0.1),
        "blocks.0.mlp.diff_b": normal(24, std=0.1),
        "blocks.0.half.lora_A.weight": normal(4, 16, std=0.3),
        "blocks.0.half.lora_B.weight": normal(24, 4, std=0.3),
    }
    save_file(base, folder / "base.safetensors")
    save_file(user, folder / "user.safetensors")
    return bench.Subject(folder / "base.safetensors", {"user": folder / "user.safetensors"})


def run(case):
    return case.function(*case.arguments)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_walk_is_measured_and_its_rows_are_checked(subject, streamed):
    phases = (Phase(State(user=1.0), steps=1), Phase(State(user=0.5), steps=1))
    recipe = Recipe("two strengths", "", "", (Role("user", required=True),), phases)
    results = run(
        bench.walk_case(
            subject, recipe, STRATEGIES["fast_kernel"], "fast_kernel", streamed=streamed
        )
    )
    assert "3 weights within the reference's bound" in results[-1].check


@pytest.mark.parametrize("restore", ["residual", "host_snapshot"])
def test_restores_and_loads_are_measured(subject, restore):
    for case in (
        bench.restores_case(subject, restore, repetitions=1),
        bench.load_case(subject, rounds=1, restore=restore),
    ):
        results = run(case)
        assert results
        assert all("3 weights within the reference's bound" in r.check for r in results)


def test_a_fuse_to_a_file_is_measured(subject, tmp_path):
    results = {r.what["contender"]: r for r in run(bench.fuse_case(subject, tmp_path))}
    assert "3 weights within" in results["fuse to a file"].check
    assert results["cp"].check == "3 weights have the base's bits"


@pytest.mark.parametrize(
    ("measurement", "make"),
    [
        ("a kernel", lambda subject: bench.kernels_case(subject, "user")),
        ("a peer", lambda subject: bench.peers_case(subject, "user", ("gemm",))),
        ("the scalar loop", lambda subject: bench.loop_case(subject, "user", 0.1)),
    ],
)
def test_what_multiplies_whole_weights_is_refused_before_anything_runs(subject, measurement, make):
    with pytest.raises(UnavailableError, match=f"^{measurement} is measured on pairs of factors"):
        make(subject)
