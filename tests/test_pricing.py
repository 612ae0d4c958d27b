"""Prices are what an action does over the machine's rates: every part by hand, on round numbers."""

from dataclasses import replace

import pytest

from lorabench.cost import kept_bytes, predict_work, resident_bytes, touches_of
from lorabench.counted import Counted
from lorabench.errors import ConfigError, UnavailableError
from lorabench.geometry import Geometry, Target, TensorSpec, load_geometry
from lorabench.plan import STRATEGY_VALUES, Load, Rebind
from lorabench.pricing import Memory, Pricing
from lorabench.rates import Machine, Pace
from lorabench.recipe import BASE, Phase, State
from lorabench.streams import forward_work, products_of
from lorabench.tallies import per_layer_of

WEIGHT0 = TensorSpec("blocks.0.a.weight", (64, 32), "BF16")  # 2048 elements, 4096 bytes
WEIGHT1 = TensorSpec("blocks.1.a.weight", (64, 32), "BF16")
OUT = TensorSpec("out.weight", (16, 64), "F32")  # 1024 elements, 4096 bytes
TABLE = TensorSpec("table", (8,), "F32")  # 32 bytes
GEOMETRY = Geometry(
    "small",
    (WEIGHT0, WEIGHT1, OUT, TABLE),
    block_prefix="blocks.",
    streams=(("out", "audio"), ("*", "video")),
)
BASE_BYTES = 3 * 4096 + 32
TOUCHES = {
    "user": [Target("blocks.0.a", WEIGHT0, 4), Target("blocks.1.a", WEIGHT1, 4)],
    "distilled": [Target("blocks.0.a", WEIGHT0, 4), Target("out", OUT, 2)],
}
FACTOR_BYTES = 2 * (2 * 4 * 96 + 4 * 96 + 2 * 80)
FILE_BYTES = BASE_BYTES + FACTOR_BYTES
USER, DISTILLED, BOTH = State(user=1.0), State(distilled=0.5), State(user=1.0, distilled=1.0)

# A weight of 2048 elements at rank 4 is 16384 FLOP of 2048 a second, its elements 512 a second.
FUSE_A = 0.5 + 16384 / 2048 + 2048 / 512  # 12.5
FUSE_OUT = 0.5 + 2 * 16 * 64 * 2 / 2048 + 1024 / 512  # 4.5
FUSE = {"user": 2 * FUSE_A, "distilled": FUSE_A + FUSE_OUT}  # 25, 17

PACE = Pace(2048.0, 512.0)
CPU = Machine(
    name="made up",
    title="Round numbers",
    device="cpu",
    memory_bytes=1 << 20,
    launch_seconds=0.5,
    read_cold=256.0,
    read_warm=1024.0,
    load_warm=512.0,
    copy_host=2048.0,
    copy_new=128.0,
    encode=64.0,
    decode=32.0,
    kernels={"gemm": dict.fromkeys(("small", "medium", "large"), PACE)},
    forward=dict.fromkeys(("small", "medium", "large"), Pace(4096.0, 1024.0)),
    origins={},
)
GPU = replace(CPU, device="cuda", host_bytes=1 << 20, copy_device=8192.0)

LTX = load_geometry("ltx-2.5-22b", shrink=8).cut(3)
ODD = {  # some rows, a bias's delta, and two pairs on one weight
    "user": [*LTX.targets, Target("x", LTX.weights[3], 8, range(16))],
    "distilled": [Target("y", LTX.weights[3], 4, range(8, 32)), *LTX.targets[5:40]],
}


def pricing(machine: Machine = CPU, *, cold: bool = False) -> Pricing:
    return Pricing(machine, "gemm", Counted(GEOMETRY, TOUCHES), cold)


def test_a_load_waits_for_reading_what_it_does_not_hide():
    read = FILE_BYTES / 512
    assert pricing().load(BASE, "reread").parts == {"read": read}
    fused = pricing().load(USER, "reread")
    assert fused.parts == {"read": read - 25, "fuse": 25.0}
    assert fused.seconds == read
    slow = pricing(replace(CPU, load_warm=1e9)).load(USER, "reread")
    assert slow.seconds == pytest.approx(25.0)


def test_what_reading_takes_of_a_cpu_comes_on_top_of_a_fuse():
    beside = replace(CPU, load_warm=1e9, load_beside=512.0)  # so that little is to be hidden
    assert pricing(beside).load(BASE, "reread").seconds == FILE_BYTES / 1e9
    capped = pricing(beside).load(USER, "reread")  # no longer than one after the other
    assert capped.seconds == pytest.approx(25.0 + FILE_BYTES / 1e9)
    fast = replace(CPU, load_beside=1024.0)
    for cold, read in ((False, FILE_BYTES / 512), (True, FILE_BYTES / 256)):
        beside = max(read - 25.0, FILE_BYTES / 1024)
        assert pricing(fast, cold=cold).load(USER, "reread").parts == {"read": beside, "fuse": 25.0}
    kept = pricing(fast).load(BASE, "host_snapshot").parts
    assert kept == {"read": FILE_BYTES / 1024, "keep": 3 * 4096 / 128}


def test_from_the_disk_a_load_is_as_slow_as_the_slower_of_disk_and_memory():
    assert pricing(cold=True).load(BASE, "reread").seconds == FILE_BYTES / 256
    fast_disk = replace(CPU, read_cold=1e9)
    assert pricing(fast_disk, cold=True).load(BASE, "reread").seconds == FILE_BYTES / 512


@pytest.mark.parametrize(
    ("restore", "machine", "part", "seconds"),
    [
        ("host_snapshot", CPU, "keep", 3 * 4096 / 128),  # whatever is fused, of all adapters
        ("host_snapshot", GPU, "keep", 3 * 4096 / 2048),
        ("device_snapshot", GPU, "keep", 3 * 4096 / 128),
        ("images", CPU, "image", 2 * 4096 / 128),  # of the user's state alone
        ("residual", CPU, "fuse", 25 + 2 * 2048 / 64),
    ],
)
def test_a_load_keeps_what_its_restore_asks_for(
    restore: str, machine: Machine, part: str, seconds: float
):
    cost = pricing(machine).load(USER, restore)
    assert cost.parts[part] == seconds
    assert cost.seconds == pytest.approx(max(FILE_BYTES / 512, sum(cost.parts.values())))


def test_a_base_needs_no_image():
    assert pricing().load(BASE, "images").parts == pricing().load(BASE, "reread").parts


@pytest.mark.parametrize("apply", ["runtime", "per_layer"])
def test_where_nothing_is_fused_a_load_keeps_nothing(apply: str):
    assert pricing().load(BASE, "host_snapshot", apply) == pricing().load(BASE, "reread")


@pytest.mark.parametrize(
    ("restore", "machine", "cold", "seconds", "waited"),
    [
        ("reread", CPU, False, 8192 / 1024, 0.0),  # a copy, by the CPU
        ("reread", CPU, True, 8192 / 256, 8192 / 256),
        ("reread", GPU, False, 8192 / 1024, 8192 / 1024),  # over the link
        ("host_snapshot", CPU, False, 8192 / 2048, 0.0),
        ("host_snapshot", GPU, False, 8192 / 2048, 8192 / 2048),
        ("device_snapshot", GPU, False, 8192 / 8192, 0.0),
        ("residual", CPU, False, 17 + (2048 + 1024) / 32, 0.0),
        ("subtract", CPU, False, 17.0, 0.0),
    ],
)
def test_a_rebind_restores_what_was_fused_then_fuses(
    restore: str, machine: Machine, cold: bool, seconds: float, waited: float
):
    prices = pricing(machine, cold=cold)
    cost = prices.rebind(DISTILLED, USER, restore)
    fuse = 25 + (2 * 2048 / 64 if restore == "residual" else 0)
    assert cost.parts == {"restore": seconds, "fuse": fuse}
    assert cost.transfer_seconds == waited
    assert prices.rebind(BASE, USER, restore).parts == {"fuse": fuse}
    assert prices.rebind(DISTILLED, BASE, restore).parts == {"restore": seconds}


def test_every_adapter_of_a_state_adds_a_fuse_and_a_shared_weight_is_restored_once():
    cost = pricing().rebind(BOTH, BOTH, "reread")
    assert cost.parts == {"restore": 3 * 4096 / 1024, "fuse": 42.0}
    coded = pricing().rebind(BASE, BOTH, "residual")
    assert coded.parts["fuse"] == 42 + (2 * 2048 + 1024) / 64


def test_an_image_is_made_once_and_switched_to_for_nothing():
    first = pricing().rebind(DISTILLED, USER, "images")
    assert first.parts == {"image": 2 * 4096 / 128, "fuse": 25.0}
    assert pricing().rebind(DISTILLED, USER, "images", imaged=True).seconds == 0
    assert pricing().rebind(DISTILLED, BASE, "images").seconds == 0


def test_a_forward_multiplies_the_weights_whose_stream_has_tokens():
    phase = Phase(BASE, steps=3, guidance_passes=2, video_tokens=8)
    one = 2 * (0.5 + 2 * 2048 * 8 / 4096 + 2048 / 1024)
    cost = pricing().denoise(phase)
    assert cost.parts == {"forward": 6 * one}
    assert cost.work.flops == 6 * 2 * 2 * 2048 * 8
    assert cost.device_bytes == 6 * 2 * 2 * 2048
    heard = one + 0.5 + 2 * 1024 * 2 / 4096 + 1024 / 1024
    both = pricing().denoise(replace(phase, audio_tokens=2))
    assert both.parts == {"forward": 6 * heard}


def test_runtime_adds_the_factors_products():
    phase = Phase(USER, steps=2, video_tokens=8)
    a = 0.5 + 2 * 8 * 4 * 32 / 4096 + 4 * 32 / 1024
    b = 0.5 + 2 * 8 * 4 * 64 / 4096 + 4 * 64 / 1024
    cost = pricing().denoise(phase, "runtime")
    assert cost.parts["apply"] == 2 * 2 * (a + b)
    assert cost.device_bytes == 2 * 2 * 2 * (2048 + 4 * 32 + 4 * 64)
    assert "apply" not in pricing().denoise(replace(phase, state=BASE), "runtime").parts


def test_runtime_multiplies_a_delta_without_factors_once():
    whole = Counted(GEOMETRY, {"user": [Target("blocks.0.a", WEIGHT0, 0)]})
    cost = Pricing(CPU, "gemm", whole).denoise(Phase(USER, steps=1, video_tokens=8), "runtime")
    assert cost.parts["apply"] == 0.5 + 2 * 8 * 2048 / 4096 + 2048 / 1024


@pytest.mark.parametrize("apply", STRATEGY_VALUES["apply"])
def test_a_forward_is_the_one_that_is_executed(apply: str):
    phase = Phase(BOTH, 5, 2, 3, video_tokens=96, audio_tokens=7)
    counted = Counted(LTX, ODD)
    work = forward_work(products_of(LTX, ODD), phase.tokens, phase.state, apply)
    cost = Pricing(CPU, "gemm", counted).denoise(phase, apply)
    assert cost.work.flops == 30 * (work.flops + work.apply.flops)
    if apply == "resident":
        assert cost.device_bytes == 30 * work.weight_bytes
    if apply == "per_layer":
        assert per_layer_of(counted, phase.tokens, BOTH)[1] == work.apply.snapshot_bytes


@pytest.mark.parametrize(("machine", "rate"), [(CPU, 2048), (GPU, 8192)])
def test_per_layer_copies_and_fuses_each_weight_of_each_forward(machine: Machine, rate: float):
    phase = Phase(BOTH, steps=2, video_tokens=8)  # silent: `out` isn't used
    cost = pricing(machine).denoise(phase, "per_layer")
    assert cost.parts["apply"] == 2 * (2 * 4096 / rate + 3 * FUSE_A)
    assert cost.work.flops == 2 * (2 * 2 * 2048 * 8 + 3 * 16384)
    assert cost.device_bytes == 2 * (8192 + 2 * 8192 + 3 * 2 * 4096)  # read, copied, fused


def test_what_is_read_and_moved_is_told_by_way():
    # memory apart from the device's: all that comes from a file or a host's snapshot takes the link
    cost = pricing(GPU).load(USER, "host_snapshot")
    assert (cost.disk_bytes, cost.host_bytes) == (0, FILE_BYTES + 3 * 4096)
    assert cost.link_bytes == FILE_BYTES + 3 * 4096
    assert cost.device_bytes == FILE_BYTES + 3 * 4096 + 4 * 2 * 2048
    cold = pricing(GPU, cold=True).load(USER, "images")
    assert (cold.disk_bytes, cold.host_bytes, cold.link_bytes) == (FILE_BYTES, 0, FILE_BYTES)
    shared = pricing(CPU).rebind(USER, BASE, "host_snapshot")
    assert (shared.host_bytes, shared.link_bytes, shared.device_bytes) == (8192, 0, 8192)


@pytest.mark.parametrize("tokens", [1, 10_000])
def test_an_overlapped_rebind_adds_its_own_work_and_a_block_ahead(tokens: int):
    phase = Phase(USER, steps=1, video_tokens=tokens)
    prices = pricing()
    cost = prices.rebind(DISTILLED, USER, "host_snapshot")
    assert prices.exposed(cost, phase) == cost.seconds  # all of it is the processor's


@pytest.mark.parametrize(("tokens", "hidden"), [(1, False), (10_000, True)])
def test_an_overlapped_rebind_hides_its_transfers_behind_a_long_forward(tokens: int, hidden: bool):
    phase = Phase(USER, steps=1, video_tokens=tokens)
    prices = pricing(replace(GPU, copy_host=128.0))
    cost = prices.rebind(DISTILLED, USER, "host_snapshot")
    assert cost.parts == {"restore": 64.0, "fuse": 25.0}
    forward = prices.denoise(phase).seconds
    assert hidden == (forward > 64)
    ahead = 89 / 3  # of two blocks and the globals
    assert prices.exposed(cost, phase) == pytest.approx(
        ahead + (25 if hidden else 64 - forward), rel=1e-12
    )


def test_weights_have_the_pace_of_their_size():
    sizes = {"small": (1 << 10, 1 << 9), "medium": (1 << 10, 1 << 10), "large": (1 << 12, 1 << 12)}
    paces = {"small": Pace(1e6), "medium": Pace(1e7), "large": Pace(1e8)}
    machine = replace(CPU, kernels={"gemm": paces}, launch_seconds=0.0)
    for size, (out, in_) in sizes.items():
        weight = TensorSpec("w.weight", (out, in_), "BF16")
        counted = Counted(Geometry("one", (weight,)), {"user": [Target("w", weight, 8)]})
        seconds = Pricing(machine, "gemm", counted).rebind(BASE, USER, "reread").seconds
        assert seconds == 2 * out * in_ * 8 / paces[size].flops_per_second


def test_a_kernel_or_a_figure_that_the_machine_lacks_is_named():
    with pytest.raises(ConfigError, match=r"'made up' has no figures of kernel 'scalar'.*gemm"):
        Pricing(CPU, "scalar", Counted(GEOMETRY, TOUCHES))
    with pytest.raises(UnavailableError, match=r"no figure 'decode'.*calibrate"):
        pricing(replace(CPU, decode=None)).rebind(USER, BASE, "residual")


STATES = [BASE, USER, DISTILLED, BOTH, State(user=0.5)]


@pytest.mark.parametrize(
    ("geometry", "touches"),
    [(GEOMETRY, TOUCHES), (LTX, touches_of(LTX, ["user", "distilled"])), (LTX, ODD)],
    ids=["small", "ltx", "odd"],
)
@pytest.mark.parametrize("restore", STRATEGY_VALUES["restore"])
def test_counting_alike_weights_once_gives_what_counting_all_gives(
    geometry: Geometry, touches: dict[str, list[Target]], restore: str
):
    counted = Counted(geometry, touches)
    nbytes = sum(tensor.nbytes for tensor in geometry.tensors)
    for before in STATES:
        load = predict_work(Load(before), touches, nbytes, restore)
        assert counted.load_work(before, restore) == load
        for after in STATES:
            action = Rebind(before, after, 0, None, critical=False)
            work = predict_work(action, touches, nbytes, restore)
            assert counted.rebind_work(before, after, restore) == work
    kept = kept_bytes(touches, restore, STATES)
    assert counted.kept_bytes(restore, STATES) == kept
    for wide in (False, True):
        held = resident_bytes(touches, nbytes, restore, STATES, f32_products=wide)
        assert counted.resident_bytes(restore, STATES, f32_products=wide) == held - kept


@pytest.mark.parametrize("restore", STRATEGY_VALUES["restore"])
@pytest.mark.parametrize("machine", [CPU, GPU], ids=["cpu", "cuda"])
def test_memory_is_what_is_resident_and_a_hosts_snapshot_is_the_hosts(
    machine: Machine, restore: str
):
    held = resident_bytes(TOUCHES, BASE_BYTES, restore, [BASE, BOTH], f32_products=machine is CPU)
    apart = 3 * 4096 if machine is GPU and restore == "host_snapshot" else 0
    assert pricing(machine).memory([BASE, BOTH], restore) == Memory(held - apart, apart)


def test_unfused_adapters_take_no_restore_and_per_layer_a_copy_of_the_largest_weight():
    runtime = pricing().memory([BASE, BOTH], "images", "runtime")
    assert runtime == Memory(BASE_BYTES + FACTOR_BYTES, 0)
    fused = resident_bytes(TOUCHES, BASE_BYTES, "reread", [BOTH], f32_products=True)
    assert pricing().memory([BOTH], "images", "per_layer") == Memory(fused + 4096, 0)
    told = Pricing(CPU, "gemm", Counted(GEOMETRY, TOUCHES, factor_bytes=7))
    assert told.memory([], "reread", "runtime") == Memory(BASE_BYTES + 7, 0)


@pytest.mark.parametrize("apply", ["runtime", "per_layer"])
def test_what_unfused_adapters_add_is_not_known_of_a_phase_that_tells_no_tokens(apply):
    silent = Phase(USER, 1)
    assert pricing().denoise(silent).seconds == 0
    assert pricing().denoise(Phase(BASE, 1), apply).seconds == 0
    with pytest.raises(UnavailableError, match=r"'user@1' tells no tokens.*video_tokens"):
        pricing().denoise(silent, apply)
