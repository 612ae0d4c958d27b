"""The command ``lorabench advise``: what it takes, what it prints, and what it refuses."""

import pytest
from conftest import Ended
from safetensors.torch import save_file
from test_advised import GIB, MACHINE

from lorabench import calibrate
from lorabench.arguments import parse_bytes, parse_only
from lorabench.checkpoint import Checkpoint
from lorabench.cli import app
from lorabench.errors import ConfigError
from lorabench.plan import STRATEGIES, STRATEGY_VALUES
from lorabench.rates import machine_toml
from lorabench.recipe import load_recipe


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    path = tmp_path_factory.mktemp("machines") / "made-up.toml"
    path.write_text(machine_toml(MACHINE))
    return path


@pytest.fixture
def run(capfd, monkeypatch, machine):
    """Run the command on a machine that nobody has."""
    monkeypatch.setenv("COLUMNS", "100")

    def call(recipe, *arguments, on=machine):
        capfd.readouterr()
        where = () if on is None else ("--machine", on)
        with pytest.raises(SystemExit) as exit_:
            app(["advise", recipe, *map(str, (*where, *arguments))], prog_name="lorabench")
        return Ended(int(exit_.value.code or 0), *capfd.readouterr())

    return call


@pytest.fixture
def refused(run):
    """Run the command with what must be refused as a mistake: one error and no data."""

    def call(*arguments, **options):
        ended = run(*arguments, **options)
        assert ended.code == 2, ended
        assert ended.out == ""
        assert "error: " in ended.err.lower()
        assert "Traceback" not in ended.err
        return " ".join(ended.err.split())

    return call


@pytest.mark.parametrize("recipe", ["t2a_one_stage", "ti2vid_two_stage", "hq_two_stage", "dub_it"])
def test_advice_is_never_costlier_than_a_named_strategy_that_may_be(run, recipe):
    bound = [f"--adapter={role.name}" for role in load_recipe(recipe).roles]
    found = run(recipe, "--renders", 10, "--memory", "64GiB", "--json", *bound).json
    may_be = [c["binding_seconds"] for c in found["named"].values() if c["fits"] and c["exact"]]
    assert len(may_be) >= 3
    assert found["advised"]["binding_seconds"] <= min(may_be) * (1 + 1e-9)


def test_json_is_all_that_stdout_has(run):
    ended = run("ti2vid_two_stage", "--memory", "64GiB", "--json")
    assert (ended.code, ended.err) == (0, "")
    found = ended.json
    assert (found["recipe"], found["renders"], found["memory_bytes"]) == (
        "ti2vid_two_stage", 10, 64 * GIB,
    )  # fmt: skip
    assert found["advised"]["actions"][0]["kind"] == "load"
    assert {*found["named"]} | {*found["not_priced"]} == {*STRATEGIES}
    assert {change["parameter"] for change in found["changes"]} >= {"memory"}


def test_text_fits_100_columns(run):
    ended = run("hq_two_stage", "--memory", "200GiB", "--adapter=user", "--adapter=distilled")
    assert ended.code == 0
    assert max(map(len, ended.out.splitlines())) <= 100
    assert "user@1" in ended.out


def test_help_fits_100_columns_and_names_every_option(run):
    ended = run("--help", on=None)
    assert max(map(len, ended.out.splitlines())) <= 100
    for option in (
        *("--renders", "--memory", "--host-memory", "--machine", "--adapter", "--rank", "--cache"),
        *("--geometry", "--idle", "--batch", "--only", "--json", "--scratch", "--device"),
    ):
        assert option in ended.out


# Adapters and models


def test_an_adapters_file_tells_what_is_touched(run, files):
    adapter = files.adapters["distilled"]
    found = run(
        "ti2vid_two_stage", f"--adapter=distilled={adapter}=0.5", f"--geometry={files.base}",
        "--only=restore=reread", "--json",
    ).json  # fmt: skip
    told = found["adapters"]["distilled"]
    assert (told["strength"], told["path"], told["targets"]) == (0.5, str(adapter), 62)
    assert sum(told["ranks"].values()) == 62
    load = found["advised"]["actions"][0]
    sizes = [Checkpoint.open(path).tensors for path in (files.base, adapter)]
    assert load["host_bytes"] == sum(t.nbytes for tensors in sizes for t in tensors)


def test_a_file_that_touches_less_costs_less(run, files, tmp_path):
    whole = Checkpoint.open(files.adapters["distilled"])
    kept = {n: whole.read(n) for n in whole.entries if ".attn1." in n}
    save_file(kept, tmp_path / "few.safetensors")
    common = ("ti2vid_two_stage", f"--geometry={files.base}", "--json")
    paths = (files.adapters["distilled"], tmp_path / "few.safetensors")
    all_, few = (run(*common, f"--adapter=distilled={path}").json for path in paths)
    assert few["advised"]["binding_seconds"] < all_["advised"]["binding_seconds"]
    assert few["adapters"]["distilled"]["targets"] == len(kept) // 2


def test_an_adapters_rank_without_a_file_is_the_one_given(run):
    found = run("ti2vid_two_stage", "--rank", 16, "--json").json
    assert found["adapters"]["distilled"]["ranks"] == {"16": 1660}


def test_a_file_for_another_model_is_refused(refused, files):
    path = files.adapters["distilled"]  # a 32nd of the template's width
    assert str(path) in refused("ti2vid_two_stage", f"--adapter=distilled={path}")


# Machines


def test_the_machine_at_hand_is_the_one_whose_calibration_is_in_the_scratch_folder(
    run, monkeypatch, tmp_path
):
    asked = []

    def here(folder, device):
        asked.append((folder, device))
        return MACHINE

    monkeypatch.setattr(calibrate, "here", here)
    ended = run("ti2vid_two_stage", "--scratch", tmp_path, "--json", on=None)
    assert asked == [(tmp_path, "cpu")]
    assert ended.json["machine"]["name"] == "made-up"
    assert "note: " in ended.err
    assert ended.json["memory_bytes"] == MACHINE.memory_bytes


def test_an_unknown_machine_is_refused_with_what_there_is(refused):
    assert "no machine 'gb11'" in refused("ti2vid_two_stage", on="gb11")


def test_a_hosts_memory_is_refused_where_it_is_not_apart(refused):
    error = refused("ti2vid_two_stage", "--host-memory", "64GiB")
    assert "--host-memory 64GiB" in error
    assert "give --memory alone" in error


# Settings


def test_only_holds_the_plan_to_what_may_be(run):
    found = run(
        "ti2vid_two_stage", "--only", "restore=reread/residual", "--only=order=render_major",
        "--json",
    ).json  # fmt: skip
    assert found["advised"]["strategy"]["restore"] in ("reread", "residual")
    assert found["advised"]["strategy"]["order"] == "render_major"
    assert found["only"] == {"restore": ["reread", "residual"], "order": ["render_major"]}


def test_idle_time_hides_rebinds(run):
    only = ("--only", "restore=reread", "--only", "order=render_major", "--json")
    busy, idle = (
        run("ti2vid_two_stage", "--idle", seconds, *only).json["advised"] for seconds in (0, 3600)
    )
    assert idle["binding_seconds"] < busy["binding_seconds"]
    assert idle["hidden_rebinds"] == 9


def test_what_fits_nowhere_is_refused_with_what_it_needs(refused):
    error = refused("ti2vid_two_stage", "--memory", "1GiB")
    assert "GiB" in error
    assert "fits" in error


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("nope",), "unknown recipe 'nope'"),
        (("dfr", "--adapter", "nope"), "no role 'nope'"),
        (("dfr", "--adapter", "user"), "required role 'distilled'"),
        (("dfr", "--memory", "lots"), "--memory lots: expected a size"),
        (("dfr", "--only", "restore"), "--only restore: expected field=value"),
        (("dfr", "--geometry", "ltx-9"), "no geometry 'ltx-9'"),
        (("dfr", "--adapter", "distilled=/nowhere/x.safetensors"), "/nowhere/x.safetensors"),
        (("dfr", "--renders", "0"), "--renders"),
        (("dfr", "--cache", "hot"), "--cache"),
    ],
)
def test_a_mistake_is_told_with_what_was_expected(refused, arguments, told):
    assert told in refused(*arguments)


# What is typed


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("64GiB", 64 * GIB), ("80GB", 80 * 10**9), ("1.5 tib", 1.5 * 2**40), ("512", 512),
        ("512 B", 512), ("2kb", 2000), ("0.5MiB", 2**19),
    ],
)  # fmt: skip
def test_sizes_are_read_in_binary_and_decimal_units(text, nbytes):
    assert parse_bytes(text, "--memory") == nbytes


@pytest.mark.parametrize(
    "text", ["", "0", "0.4", "-1GiB", "64G", "64Gi", "3iB", "1e9", "inf", "GiB", "9" * 400]
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match=r"--memory .*: expected a size above 0, as 64GiB"):
        parse_bytes(text, "--memory")


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        (["restor=images"], "no field 'restor' .did you mean 'restore'"),
        (["restore=image"], "restore can't be 'image' .did you mean 'images'"),
        (["restore="], "restore can't be ''"),
        (["load=all", "load=base"], "'load' is given twice"),
    ],
)
def test_only_names_fields_and_values_that_there_are(texts, told):
    with pytest.raises(ConfigError, match=told):
        parse_only(texts)


def test_only_takes_every_value_that_a_field_has():
    texts = [f"{field}={'/'.join(values)}" for field, values in STRATEGY_VALUES.items()]
    assert parse_only(texts) == STRATEGY_VALUES
