"""The model held against measured cases: what is predicted of each, and what is left out."""

import pytest
from test_pricing import CPU, GEOMETRY, TOUCHES

from lorabench.counted import Counted
from lorabench.predicted import FREE_SECONDS, predict
from lorabench.pricing import Pricing
from lorabench.recipe import BASE, Phase, State
from lorabench.records import Record

MODEL = Pricing(CPU, "gemm", Counted(GEOMETRY, TOUCHES))
WHAT = {"params": sum(t.params for t in GEOMETRY.tensors)}
FUSED, OTHER = State(user=1.0), State(user=0.8)


def models(kernel: str) -> Pricing | None:
    return MODEL if kernel == "gemm" else None


def measured(*seconds: float, **case) -> Record:
    return Record(
        case={**WHAT, **case},
        seconds=seconds,
        check="said so",
        environment={},
        commit="unknown",
        provenance="measured",
        details={"others_cores": 0.5},
    )


WALK = {"bench": "walk", "kernel": "gemm", "restore": "host_snapshot"}
RESTORES = {"bench": "restores", "restore": "residual", "strength": 1.0, "roles": ["user"]}
DENOISE = {"bench": "denoise", "state": "user@1", "tokens": 3}


@pytest.mark.parametrize(
    ("case", "kind", "seconds"),
    [
        (
            {**WALK, "action": "load", "state": "user@1"},
            "load",
            MODEL.load(FUSED, "host_snapshot"),
        ),
        (
            {**WALK, "action": "load", "state": "base", "apply": "runtime"},
            "load",
            MODEL.load(BASE, "host_snapshot", "runtime"),
        ),
        (
            {**WALK, "action": "rebind", "before": "base", "state": "user@1"},
            "fuse",
            MODEL.rebind(BASE, FUSED, "host_snapshot"),
        ),
        (
            {**WALK, "action": "rebind", "before": "user@1", "state": "base"},
            "restore",
            MODEL.rebind(FUSED, BASE, "host_snapshot"),
        ),
        (
            {**WALK, "action": "rebind", "before": "user@1", "state": "user@0.8"},
            "rebind",
            MODEL.rebind(FUSED, OTHER, "host_snapshot"),
        ),
        (
            {"bench": "load", "contender": "pass", "roles": ["user"], "restore": "reread"},
            "fuse",
            MODEL.rebind(BASE, FUSED, "reread"),
        ),
        ({**RESTORES, "contender": "load"}, "load", MODEL.load(BASE, "residual")),
        ({**RESTORES, "contender": "plain fuse"}, "fuse", MODEL.rebind(BASE, FUSED, "reread")),
        ({**RESTORES, "contender": "fuse"}, "fuse", MODEL.rebind(BASE, OTHER, "residual")),
        ({**RESTORES, "contender": "rebind"}, "rebind", MODEL.rebind(OTHER, FUSED, "residual")),
        ({**RESTORES, "contender": "unfuse"}, "restore", MODEL.rebind(FUSED, BASE, "residual")),
        (
            {**DENOISE, "apply": "per_layer"},
            "forward",
            MODEL.denoise(Phase(FUSED, 1, 1, 1, 3, 3, text_tokens=3), "per_layer"),
        ),
    ],
)
def test_a_measured_case_is_predicted_by_the_rates_alone(case, kind, seconds):
    [row] = predict([measured(4.0, 1.0, 2.0, **case)], models).to_dict("records")
    assert row["kind"] == kind
    assert row["predicted_s"] == pytest.approx(seconds.seconds)
    assert row["measured_s"] == 2.0
    assert row["error"] == pytest.approx(seconds.seconds / 2 - 1)
    assert row["others_cores"] == 0.5


@pytest.mark.parametrize(
    "record",
    [
        measured(1.0, **{**WALK, "kernel": "scalar"}, action="load", state="base"),
        measured(1.0, **WALK, **{"params": 5}, action="load", state="base"),
        measured(FREE_SECONDS / 2, **WALK, action="rebind", before="base", state="user@1"),
        measured(1.0, bench="load", contender="plain load", roles=["user"], restore="reread"),
        measured(1.0, **RESTORES, contender="digest"),
        measured(1.0, bench="stream"),
    ],
    ids=["other kernel", "other weights", "free", "memory in use", "no action", "streamed"],
)
def test_what_no_plan_does_is_left_out(record):
    assert predict([record], models).empty
