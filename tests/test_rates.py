"""Machines: the shipped ones, and what is told of a file that isn't one."""

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorabench.errors import ConfigError
from lorabench.rates import (
    PROVENANCES,
    SIZES,
    Machine,
    Origin,
    Pace,
    class_of,
    load_machine,
    machine_names,
    machine_toml,
)

rates = st.floats(1e-9, 1e18)
paces = st.builds(Pace, rates, st.one_of(rates, st.just(math.inf)))
classes = st.fixed_dictionaries(dict.fromkeys(SIZES, paces))
texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)


@st.composite
def machines(draw) -> Machine:
    """Any machine that could be measured."""
    origin = st.builds(Origin, st.sampled_from(PROVENANCES), texts, st.booleans())
    figures = {name: draw(rates) for name in ("launch_seconds", "copy_host")}
    for name in ("read_cold", "read_warm", "load_warm", "copy_device", "copy_new", "encode"):
        if draw(st.booleans()):
            figures[name] = draw(rates)
    known = st.sampled_from(["gemm", "scalar", "triton"])
    kernels = {kernel: draw(classes) for kernel in draw(st.sets(known, min_size=1))}
    figures["memory_bytes"] = draw(st.integers(1, 2**50))
    named = [*figures, *(f"forward.{size}" for size in SIZES)]
    named += [f"kernels.{kernel}.{size}" for kernel in kernels for size in SIZES]
    return Machine(
        name="mine",
        title=draw(texts),
        device=draw(st.sampled_from(["cpu", "cuda"])),
        kernels=kernels,
        forward=draw(classes),
        origins={name: draw(origin) for name in named},
        **figures,
    )


@given(machine=machines())
def test_a_machine_is_read_back_equal(machine, tmp_path_factory):
    path = tmp_path_factory.mktemp("machines") / "mine.toml"
    path.write_text(machine_toml(machine), "utf-8")
    assert load_machine(path) == machine


def test_the_shipped_machines_are_those_of_the_issue_and_a_gpu():
    assert machine_names() == ["gb10", "h200", "zen5"]


@pytest.mark.parametrize("name", machine_names())
def test_a_shipped_machine_is_read_back_equal_and_measured_by_nobody_here(name, tmp_path):
    machine = load_machine(name)
    path = tmp_path / f"{name}.toml"
    path.write_text(machine_toml(machine), "utf-8")
    assert load_machine(path) == machine
    assert machine.name == name
    assert {origin.provenance for origin in machine.origins.values()} == {"published", "derived"}


@pytest.mark.parametrize("name", machine_names())
def test_what_a_shipped_machine_derives_is_said_to_be_a_bound_or_tells_from_what(name):
    for figure, origin in load_machine(name).origins.items():
        if origin.provenance == "derived":
            told = ("a bound: ", "an assumption, ", "design notes", "an eighth of ", "as for ")
            assert any(text in origin.source for text in told), figure


def test_the_shipped_rates_of_the_module_that_was_timed_give_its_published_times():
    zen5, elements = load_machine("zen5"), 4096 * 4096
    flops = 2 * elements * 450
    assert class_of(elements) == "large"
    gemm, scalar = zen5.kernels["gemm"]["large"], zen5.kernels["scalar"]["large"]
    assert gemm.seconds(flops, elements) == pytest.approx(0.1242, rel=1e-3)
    assert scalar.seconds(flops, elements) == pytest.approx(17.7761, rel=1e-3)
    assert elements / gemm.params_per_second == pytest.approx(0.59 * 0.1242, rel=1e-3)


def test_the_issues_pass_takes_nine_hours_at_its_rate(geometry):
    pace = load_machine("gb10").kernels["scalar"]["large"]
    hours = pace.seconds(2 * 8_526_382_497_792, 18_977_652_736) / 3600
    assert hours == pytest.approx(8.94, abs=0.01)


@pytest.mark.parametrize(
    ("elements", "size"),
    [(0, "small"), (2**20 - 1, "small"), (2**20, "medium"), (2**24 - 1, "medium"),
     (2**24, "large"), (2**40, "large")],
)  # fmt: skip
def test_weights_have_a_class_by_their_elements(elements, size):
    assert class_of(elements) == size


def test_a_pace_without_a_second_rate_takes_its_products_alone():
    assert Pace(4.0).seconds(8.0, 100.0) == 2.0
    assert Pace(4.0, 50.0).seconds(8.0, 100.0) == 4.0


def test_the_weakest_provenance_is_a_machines(tmp_path):
    machine = load_machine("gb10")
    assert machine.provenance == "published"
    ours = dict.fromkeys(machine.origins, Origin("measured", "here"))
    assert replace(machine, origins=ours).provenance == "measured"
    some = ours | {"copy_host": Origin("derived", "a bound")}
    assert replace(machine, origins=some).provenance == "derived"


BAD = """
title = ""
device = "gpu"
memory_bytes = { value = -1, provenance = "measured", source = "x" }
read_colt = { value = 1.0, provenance = "measured", source = "x" }
read_warm = { value = "fast", provenance = "measured", source = "x" }
load_warm = { value = 1.0, provenance = "guessed", source = "" }
copy_new = { value = inf, provenance = "measured", source = "x" }

[kernels.gem.small]
flops_per_second = 1.0
provenance = "measured"
source = "x"

[kernels.gemm.small]
flops_per_second = 1.0
provenance = "measured"
source = "x"

[forward.huge]
flops_per_second = 1.0
"""


def test_all_that_is_wrong_in_a_file_is_told_at_once(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text(BAD)
    with pytest.raises(ConfigError) as caught:
        load_machine(path)
    told = str(caught.value)
    assert str(path) in told
    for problem in (
        "title", "device", "memory_bytes.value", "read_colt: unknown key", "read_cold",
        "read_warm.value", "load_warm.provenance", "load_warm.source", "copy_new.value",
        "copy_host: required", "kernels.gem.", "kernels.gemm.medium: required",
        "kernels.gemm.large: required",
        "forward.small: required", "forward.huge",
    ):  # fmt: skip
        assert problem in told, problem


def test_an_unknown_machine_is_answered_with_the_nearest_and_the_way_to_ones_own():
    with pytest.raises(ConfigError, match=r"no machine 'gb11'.*'gb10'.*calibrate"):
        load_machine("gb11")


def test_a_path_is_no_shipped_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"gb10\.toml: can't be read"):
        load_machine("gb10.toml")


@pytest.mark.parametrize("value", ["1e-300", "5e-324", "1e308"])
def test_a_figure_that_no_machine_has_is_refused(tmp_path, value):
    path = tmp_path / "absurd.toml"
    text = machine_toml(load_machine("gb10"))
    path.write_text(re.sub(r"(read_cold = \{ value = )[\d.e+]+", rf"\g<1>{value}", text))
    with pytest.raises(ConfigError, match=r"read_cold\.value: .*(greater|less) than or equal"):
        load_machine(path)
