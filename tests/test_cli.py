import json
import subprocess
import sys
from dataclasses import asdict, fields
from math import prod
from pathlib import Path

import nbformat
import pytest
import torch
from conftest import Ended, shard
from nbformat.v4 import new_code_cell, new_notebook
from safetensors.torch import save_file

import lorabench
from lorabench import records
from lorabench.checkpoint import Checkpoint
from lorabench.cli import app
from lorabench.cost import predict_work, touches_of
from lorabench.derive import first_tenth
from lorabench.digest import digest
from lorabench.errors import CheckError, ConfigError, WeightsLostError
from lorabench.geometry import Counts, load_geometry
from lorabench.layout import scaled, table
from lorabench.machine import git_commit
from lorabench.plan import STRATEGIES, plan
from lorabench.recipe import State, load_recipe, recipe_names
from lorabench.report import NotebookError
from lorabench.resident import ResidentWeights

HEAVY = ("torch", "pandas", "plotly", "numba", "nbformat")
COMMANDS = [
    [],
    ["geometry"],
    ["inspect"],
    ["synth"],
    ["plan"],
    ["recipes"],
    ["advise"],
    ["calibrate"],
    ["fuse"],
    ["walk"],
    ["claims"],
    ["bench", "fuse"],
    ["strategies"],
    ["report"],
    ["bench"],
    ["bench", "decide"],
    ["bench", "denoise"],
    ["bench", "drift"],
    ["bench", "kernels"],
    ["bench", "load"],
    ["bench", "loop"],
    ["bench", "peers"],
    ["bench", "restores"],
    ["bench", "rules"],
    ["bench", "walk"],
]


@pytest.fixture
def run(capfd, monkeypatch):
    """Run a command in this process; capture what it and its children print."""
    monkeypatch.setenv("COLUMNS", "100")

    def call(*arguments):
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_:
            app([str(argument) for argument in arguments], prog_name="lorabench")
        return Ended(int(exit_.value.code or 0), *capfd.readouterr())

    return call


@pytest.fixture
def refused(run):
    """Run a command that must be refused as a mistake: one error, no data, no traceback."""

    def call(*arguments):
        ended = run(*arguments)
        assert ended.code == 2, ended
        assert ended.out == ""
        assert "error: " in ended.err.lower()
        assert "Traceback" not in ended.err
        return ended.err

    return call


def modules_after(*calls):
    """Return which heavy modules a fresh process holds after some command lines."""
    script = (
        "import contextlib, json, sys\n"
        "from lorabench.cli import app\n"
        f"for call in {list(calls)!r}:\n"
        "    with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(SystemExit):\n"
        "        app(call)\n"
        f"print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


# The command as a whole


def test_help_imports_nothing_heavy():
    assert modules_after(*([*command, "--help"] for command in COMMANDS)) == []


def test_commands_about_headers_and_plans_import_nothing_heavy(files):
    adapter = str(files.adapters["distilled"])
    calls = [
        ["geometry", "ltx-2.5-22b"],
        ["geometry", str(files.base)],
        ["inspect", str(files.base)],
        ["inspect", adapter, "--base", str(files.base)],
        ["plan", "ti2vid_two_stage"],
        ["advise", "ti2vid_two_stage", "--machine", "gb10"],
        ["recipes"],
        ["strategies"],
        ["synth", "nowhere", "--dry-run"],
    ]
    assert modules_after(*calls) == []


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_fits_100_columns_without_markup(run, command):
    ended = run(*command, "--help")
    assert ended.code == 0
    assert ended.out.startswith("Usage: lorabench")
    assert max(map(len, ended.out.splitlines())) <= 100
    assert not set(ended.out) & set("│╭\x1b`")


@pytest.mark.parametrize(
    "command",
    [
        ["geometry", "ltx-2.5-22b"],
        "plan hq_two_stage --renders 12 --adapter user --adapter distilled".split(),
        "plan dfr --strategy batched --adapter user --adapter distilled".split(),
        ["recipes"],
        ["strategies"],
        ["synth", "nowhere", "--dry-run"],
    ],
    ids=str,
)
def test_tables_fit_100_columns(run, command):
    ended = run(*command)
    assert ended.code == 0
    assert max(map(len, ended.out.splitlines())) <= 100


def test_python_m_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "lorabench", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"lorabench {lorabench.__version__}\n"


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (CheckError("bits differ"), 1, "error: bits differ"),
        (ConfigError("no such thing"), 2, "error: no such thing"),
        (WeightsLostError("gone"), 2, "error: gone"),
        (NotebookError("a cell raised"), 1, "error: a cell raised"),
        (NotebookError("too slow", 3), 3, "error: too slow"),
        (NotebookError("it died", 4), 4, "error: it died"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_each_kind_of_failure_has_its_exit_code(run, monkeypatch, error, code, told):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr("lorabench.recipe.load_recipe", fail)
    assert run("plan", "ti2vid_two_stage") == Ended(code, "", told + "\n")


def test_a_traceback_is_shown_when_asked_for(run, monkeypatch):
    monkeypatch.setenv("LORABENCH_TRACEBACK", "1")
    ended = run("plan", "nonsense")
    assert ended.code == 2
    assert ended.err.startswith("Traceback")
    assert "error: unknown recipe 'nonsense'" in ended.err


@pytest.mark.parametrize("command", [["plam"], ["plan"], ["plan", "x", "--renders", "0"]], ids=str)
def test_a_usage_mistake_exits_with_2(refused, command):
    assert "Usage: lorabench" in refused(*command)


# The package


def test_importing_the_package_imports_nothing_heavy_until_it_is_named():
    script = (
        "import sys, lorabench\n"
        "lorabench.load_geometry, lorabench.Checkpoint, lorabench.Adapter, lorabench.synthesize\n"
        "lorabench.__version__, dir(lorabench)\n"
        f"assert not set({HEAVY!r}) & set(sys.modules), 'too early'\n"
        "lorabench.ResidentWeights\n"
        "assert 'torch' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_plan_is_the_function_though_a_module_has_its_name():
    script = (
        "import lorabench.plan, lorabench.cost\n"
        "from lorabench import STRATEGIES, load_recipe, plan\n"
        "assert len(plan(load_recipe('one_stage').bind(), STRATEGIES['both_fixes'])) == 2\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_all_that_the_package_names_is_there():
    for name in lorabench.__all__:
        assert getattr(lorabench, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = lorabench.nonsense


# geometry


def test_geometry_reproduces_the_published_counts(run):
    assert run("geometry", "ltx-2.5-22b", "--json").json == {
        "name": "ltx-2.5-22b",
        "blocks": 48,
        "tensors": 4349,
        "params": 21004025600,
        "targets": 1660,
        "macs": 8526382497792,
        "adapter_params": 4449681408,
        "touched_params": 18977652736,
        "ranks": {"450": 1360, "256": 8, "128": 4, "32": 288},
        "tensor_bytes": 42017512960,
        "adapter_tensor_bytes": 8899362816,
    }


def test_geometry_json_has_the_names_of_counts(run):
    ended = run("geometry", "ltx-2.5-22b", "--blocks", 1, "--shrink", 16, "--json")
    assert set(ended.json) == {field.name for field in fields(Counts)} | {"name", "blocks"}


def test_geometry_tells_people_units(run):
    text = run("geometry", "ltx-2.5-22b").out
    assert "42,017,512,960  42.02 GB" in text
    assert "17.05 TFLOP per pass" in text


def test_geometry_of_a_checkpoint_equals_the_template_that_it_was_made_from(run, files):
    options = ("--rank", 14, "--json")
    template = run("geometry", "ltx-2.5-22b", "--blocks", 1, "--shrink", 32, *options).json
    checkpoint = run("geometry", files.base, *options).json
    assert checkpoint == template | {"name": "base.safetensors"}


def test_geometry_of_a_checkpoint_has_no_rank_unless_it_is_given_one(run, files):
    ended = run("geometry", files.base, "--json").json
    assert ended["targets"] == 62
    assert ended["macs"] is ended["ranks"] is ended["adapter_params"] is None
    assert "no rank is known; give one with --rank" in run("geometry", files.base).out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["ltx-2.5-22B"], "did you mean 'ltx-2.5-22b'?"),
        (["missing.toml"], "missing.toml: can't be read"),
        (["missing.safetensors"], "missing.safetensors: can't be opened"),
        (["some/where"], "some/where: can't be opened"),
        (["ltx-2.5-22b", "--blocks", "49"], "has 48 blocks"),
        (["ltx-2.5-22b", "--shrink", "3"], "can't be divided by shrink = 3"),
    ],
    ids=str,
)
def test_geometry_refuses_what_it_cannot_find_or_cut(refused, arguments, told):
    assert told in refused("geometry", *arguments, "--json")


def test_geometry_refuses_an_adapter_and_a_shrunk_checkpoint(refused, files):
    assert "is an adapter" in refused("geometry", files.adapters["user"])
    assert "can't be shrunk" in refused("geometry", files.base, "--shrink", 2)


# inspect


def test_inspect_describes_a_base(run, files, base):
    found = run("inspect", files.base, "--json").json
    assert found["kind"] == "base"
    assert found["files"] == [str(files.base)]
    assert found["bytes"] == files.base.stat().st_size
    assert found["tensors"] == len(base.entries) == sum(found["dtypes"].values())
    assert set(found["dtypes"]) == {"BF16", "F32"}
    assert found["params"] == sum(tensor.params for tensor in base.tensors)
    assert found["blocks"] == 1
    assert found["metadata"] == {"geometry": "ltx-2.5-22b", "seed": "7"}
    assert "BF16 x" in run("inspect", files.base).out


def test_inspect_describes_an_adapter_without_a_base(run, files, adapters):
    found = run("inspect", files.adapters["user"], "--json").json
    adapter = adapters["user"]
    assert found["kind"] == "adapter"
    assert (found["modules"], found["kinds"]) == (62, {"LoRA": 62})
    assert found["names"] == ["lora_A/lora_B"]
    assert found["ranks"] == {str(rank): n for rank, n in adapter.ranks.items()}
    told = "metadata lora_alpha 14 / lora_rank 14"
    assert found["scales"] == [{"scale": 1.0, "source": told, "modules": 62}]
    assert found["text_encoders"] == found["not_applied"] == []
    assert found["factor_bytes"] == adapter.factor_bytes
    assert found["dtypes"] == {"BF16": 124}
    assert found["pass_flops"] == 2 * sum(target.macs for target in adapter.targets)
    assert "base" not in found


def test_inspect_holds_an_adapter_against_a_base(run, files, geometry):
    found = run("inspect", files.adapters["user"], "--base", files.base, "--json").json["base"]
    assert found["matched"] == [target.module for target in geometry.targets]
    assert found["unmatched"] == []
    assert found["touched_params"] == geometry.counts().touched_params
    assert found["touched_share"] == found["touched_params"] / found["params"]
    assert found["pass_flops"] == 2 * geometry.counts().macs
    counts = geometry.counts()
    assert found["pass_bytes"] == 2 * 2 * counts.touched_params + counts.adapter_tensor_bytes


@pytest.fixture
def deeper(tmp_path, run):
    """An adapter of two blocks, which a base of one block doesn't wholly match."""
    folder = tmp_path / "deeper"
    assert run("synth", folder, "--blocks", 2, "--shrink", 32).code == 0
    return folder / "distilled.safetensors"


def test_inspect_tells_unmatched_modules(run, refused, deeper, files):
    assert "only 62 of 96 modules match" in refused("inspect", deeper, "--base", files.base)
    ended = run("inspect", deeper, "--base", files.base, "--allow-unmatched", "--json")
    assert len(ended.json["base"]["matched"]) == 62
    assert len(ended.json["base"]["unmatched"]) == 34
    text = run("inspect", deeper, "--base", files.base, "--allow-unmatched").out
    assert "and 31 more" in text


def test_inspect_refuses_an_adapter_of_another_model(refused, files, tmp_path):
    stranger = tmp_path / "stranger.safetensors"
    write_f32(stranger, {"other.lora_A.weight": [1, 4], "other.lora_B.weight": [4, 1]})
    told = refused("inspect", stranger, "--base", files.base, "--allow-unmatched")
    assert "no modules match the base" in told


@pytest.fixture
def mixed(tmp_path):
    """A file of everything: LoRA of two names, a bias, a full delta, a text encoder's, and DoRA."""
    file = tmp_path / "mixed.safetensors"
    write_f32(
        file,
        {
            "lora_unet_blocks_0_to_q.lora_down.weight": [2, 8],
            "lora_unet_blocks_0_to_q.lora_up.weight": [6, 2],
            "lora_unet_blocks_0_to_q.alpha": [],
            "blocks.0.to_k.lora_A.weight": [4, 8],
            "blocks.0.to_k.lora_B.weight": [6, 4],
            "blocks.0.to_k.lora_B.bias": [6],
            "blocks.0.norm.diff": [8],
            "lora_te_text_model_x.lora_down.weight": [2, 8],
            "lora_te_text_model_x.lora_up.weight": [6, 2],
            "blocks.0.to_v.lora_A.weight": [4, 8],
            "blocks.0.to_v.lora_B.weight": [6, 4],
            "blocks.0.to_v.dora_scale": [6, 1],
        },
        {"lora_alpha": "8", "lora_rank": "4"},
    )
    base = tmp_path / "base.safetensors"
    shapes = {f"blocks.0.to_{x}.weight": [6, 8] for x in "qkv"}
    write_f32(base, shapes | {"blocks.0.to_k.bias": [6], "blocks.0.norm.weight": [8]})
    return file, base


def test_inspect_tells_every_kind_name_and_scale_that_a_file_holds(run, refused, mixed):
    file, base = mixed
    found = run("inspect", file, "--json").json
    assert set(found["names"]) == {"lora_A/lora_B", "lora_down/lora_up"}
    assert found["modules"] == 4
    assert found["kinds"] == {"LoRA": 3, "LoRA bias": 1, "full delta": 1}
    assert found["ranks"] == {"4": 1, "2": 2}
    assert {(s["scale"], s["modules"]) for s in found["scales"]} == {(0.0, 1), (2.0, 2)}
    assert found["text_encoders"] == ["lora_te_text_model_x"]
    assert {key["tensor"] for key in found["not_applied"]} == {
        f"blocks.0.to_v.{what}" for what in ("lora_A.weight", "lora_B.weight", "dora_scale")
    }
    assert found["pass_flops"] == 2 * (6 * 8 * 2 + 6 * 8 * 4 + 6 * 8 * 2)
    text = run("inspect", file).out
    for told in ("not applied", "DoRA x 1: blocks.0.to_v.dora_scale", "merge it into a base"):
        assert told in text
    assert max(map(len, text.splitlines()[1:])) <= 100  # the first has the path
    assert "isn't applied: DoRA" in refused("inspect", file, "--base", base)
    match = run("inspect", file, "--base", base, "--allow-skip", "--json").json["base"]
    assert set(match["matched"]) == {
        "blocks.0.to_q", "blocks.0.to_k", "blocks.0.to_k.bias", "blocks.0.norm"
    }  # fmt: skip
    assert match["touched_params"] == 2 * 6 * 8 + 6 + 8
    assert match["pass_flops"] == 2 * (6 * 8 * 2 + 6 * 8 * 4)


def test_inspect_takes_an_alpha_for_what_a_file_does_not_tell(run, refused, tmp_path, mixed):
    silent = tmp_path / "silent.safetensors"
    write_f32(silent, {"x.lora_A.weight": [4, 8], "x.lora_B.weight": [6, 4]})
    [scale] = run("inspect", silent, "--json").json["scales"]
    assert scale["scale"] == 1.0
    assert scale["source"].startswith("assumed")
    [scale] = run("inspect", silent, "--alpha", 2, "--json").json["scales"]
    assert (scale["scale"], scale["source"]) == (0.5, "given: alpha 2")
    assert "leave the given one away" in refused("inspect", mixed[0], "--alpha", 2)


def test_what_a_terminal_would_obey_is_written_out(run, refused, tmp_path):
    file = tmp_path / "odd.safetensors"
    shapes = {"\x1b[2Jx.lora_A.weight": [1, 4], "\x1b[2Jx.lora_B.weight": [4, 1]}
    write_f32(file, shapes, {"note": "\x1b]0;title\x07"})
    assert r"\x1b]0;title\x07" in run("inspect", file).out
    base = tmp_path / "base.safetensors"
    write_f32(base, {"y.weight": [4, 4]})
    told = refused("inspect", file, "--base", base)
    assert r"it lacks '\x1b[2Jx'" in told
    assert "\x1b" not in told


def test_inspect_tells_of_half_a_pair(refused, tmp_path):
    kohya = tmp_path / "kohya.safetensors"
    write_f32(kohya, {"lora_unet_x.lora_down.weight": [1, 4]})
    assert "but no lora_B (lora_up); the file is incomplete" in refused("inspect", kohya)


def test_inspect_refuses_what_is_no_whole_file(refused, files, tmp_path):
    cut_off = tmp_path / "cut.safetensors"
    cut_off.write_bytes(files.base.read_bytes()[:-1])
    assert "is truncated" in refused("inspect", cut_off, "--json")
    assert "can't be opened" in refused("inspect", tmp_path / "none.safetensors")
    assert "--base, --allow-unmatched, --allow-skip and --alpha go with an adapter" in refused(
        "inspect", files.base, "--base", files.base
    )


def test_inspect_shortens_long_metadata_for_people_only(run, tmp_path):
    file = tmp_path / "wordy.safetensors"
    write_f32(file, {"x.weight": [2, 2]}, {"config": "word " * 1000})
    assert max(map(len, run("inspect", file).out.splitlines())) <= 100
    assert run("inspect", file, "--json").json["metadata"]["config"] == "word " * 1000


def write_f32(path, shapes, metadata=None):
    header, end = {"__metadata__": metadata or {}}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


# synth


def test_synth_writes_what_it_says(run, tmp_path):
    ended = run(
        *("synth", tmp_path / "w", "--blocks", 1, "--shrink", 32, "--json"),
        *("--adapter", "user", "--adapter", "distilled"),
    )
    found = ended.json
    assert found["written"] is True
    assert set(found["adapters"]) == {"user", "distilled"}
    for file in (found["base"], *found["adapters"].values()):
        tensors = Checkpoint.open(file["path"]).tensors
        assert file["tensors"] == len(tensors)
        assert file["tensor_bytes"] == sum(tensor.nbytes for tensor in tensors)


def test_synth_gives_the_same_bits_for_the_same_seed(run, files, tmp_path):
    options = ("--blocks", 1, "--shrink", 32, "--ratio", 0.3)
    run("synth", tmp_path, *options, "--adapter", "user", "--seed", 7)
    assert (tmp_path / "user.safetensors").read_bytes() == files.adapters["user"].read_bytes()
    assert (tmp_path / "base.safetensors").read_bytes() == files.base.read_bytes()


def test_synth_predicts_without_writing(run, tmp_path):
    found = run("synth", tmp_path / "w", "--blocks", "all", "--dry-run", "--json").json
    assert found["written"] is False
    assert found["base"]["tensor_bytes"] == 42017512960
    assert found["adapters"]["distilled"]["tensor_bytes"] == 8899362816
    assert not (tmp_path / "w").exists()


def test_synth_overwrites_only_when_asked(run, refused, tmp_path):
    options = ("--blocks", 0, "--shrink", 32)
    assert run("synth", tmp_path, *options).code == 0
    before = (tmp_path / "base.safetensors").read_bytes()
    assert "exists already" in refused("synth", tmp_path, *options, "--seed", 1)
    assert (tmp_path / "base.safetensors").read_bytes() == before
    assert run("synth", tmp_path, *options, "--seed", 1, "--overwrite").code == 0
    assert (tmp_path / "base.safetensors").read_bytes() != before


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--blocks", "two"], "expected a number of blocks, or all"),
        (["--geometry", "ltx"], "no geometry 'ltx'"),
        (["--adapter", "base"], "must be an identifier other than 'base'"),
        (["--adapter", "a", "--adapter", "a"], "given once"),
        (["--ratio", "0"], "ratio must be a positive number"),
    ],
    ids=str,
)
def test_synth_refuses_before_it_writes(refused, tmp_path, options, told):
    assert told in refused("synth", tmp_path / "w", "--shrink", 32, *options)
    assert not (tmp_path / "w").exists()


def test_synth_needs_a_rank_before_it_writes(refused, files, tmp_path):
    told = refused("synth", tmp_path / "w", "--geometry", files.base, "--blocks", "all")
    assert "give one (--rank)" in told
    assert not (tmp_path / "w").exists()


def test_synth_tells_of_a_folder_that_it_cannot_write(refused, tmp_path):
    (tmp_path / "file").write_text("in the way")
    told = refused("synth", tmp_path / "file" / "w", "--blocks", 0, "--shrink", 32)
    assert "can't be written" in told
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# plan, recipes, strategies


@pytest.mark.parametrize(("strategy", "rebinds"), [("as_written", 6), ("phase_aware", 5)])
def test_plan_of_three_renders_has_one_load_and_these_rebinds(run, strategy, rebinds):
    ended = run("plan", "ti2vid_two_stage", "--strategy", strategy, "--renders", 3, "--json")
    kinds = [action["kind"] for action in ended.json["actions"]]
    assert kinds.count("load") == 1
    assert kinds.count("rebind") == rebinds
    assert ended.err == ""


def test_plan_json_is_the_plan_and_its_predicted_work(run):
    found = run("plan", "hq_two_stage", "--strategy", "snapshot", "--json").json
    recipe, strategy = load_recipe("hq_two_stage").bind(), STRATEGIES["snapshot"]
    actions = plan(recipe, strategy)
    model = load_geometry("ltx-2.5-22b")
    touches = touches_of(model, ["distilled"])
    assert found["recipe"] == "hq_two_stage"
    assert found["roles"] == {"distilled": 1.0}
    assert found["strategy"] == asdict(strategy)
    assert found["renders"] == 1
    assert found["actions"] == [action.as_dict() for action in actions]
    assert found["work"] == [
        asdict(predict_work(action, touches, 42017512960, "host_snapshot")) for action in actions
    ]


def test_plan_shows_people_a_line_an_action(run):
    text = run("plan", "ti2vid_two_stage").out
    assert "load x1, rebind x2, denoise x2" in text
    rows = text.splitlines()[-5:]
    assert [row.split()[0] for row in rows] == ["0", "1", "2", "3", "4"]
    assert rows[1].split() == "1 0 0 rebind distilled@1 base yes 37.96".split()
    assert rows[3].split() == "3 0 1 rebind base distilled@1 yes 17.05".split()


def test_plan_multiplies_the_recipes_strength_by_the_users(run, tmp_path):
    file = tmp_path / "a=b.safetensors"  # an equals sign in a path is part of the path
    file.touch()
    ended = run(
        *("plan", "res2s_two_stage", "--strategy", "both_fixes", "--json"),
        *("--adapter", f"distilled={file}=0.5", "--adapter", "user"),
    )
    assert ended.json["roles"] == {"user": 1.0, "distilled": 0.5}
    assert ended.json["actions"][0]["state"] == {"user": 1.0, "distilled": 0.125}
    assert ended.err.startswith("note: the work is predicted for rank 450 on every target")
    without = run("plan", "hq_two_stage", "--adapter", f"distilled={file}", "--json")
    assert without.json["roles"] == {"distilled": 1.0}


def test_plan_predicts_that_an_image_is_made_once(run):
    options = ("plan", "ti2vid_two_stage", "--strategy", "both_fixes,restore=images")
    plan = run(*options, "--renders", "2", "--json").json
    flops = [work["flops"] for work in plan["work"]]
    rebinds = [f for f, a in zip(flops, plan["actions"], strict=True) if a["kind"] == "rebind"]
    assert rebinds == [17_052_764_995_584, 0, 0]


def test_plan_reads_a_recipe_of_ones_own(run, refused, tmp_path):
    recipe = tmp_path / "mine.toml"
    recipe.write_text('description = "Mine"\n[[phases]]\nsteps = 1\n')
    assert run("plan", recipe, "--json").json["recipe"] == "mine"
    recipe.write_text('description = "Mine"\n[[phases]]\nstep = 1\n')
    told = refused("plan", recipe)
    assert "phases.0.step: unknown key (did you mean 'steps'?)" in told
    assert "phases.0.steps: required, but missing" in told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["ti2vid_two_stag"], "did you mean 'ti2vid_two_stage'?"),
        (["ic_lora", "--strategy", "as_writen"], "did you mean 'as_written'?"),
        (["ic_lora", "--strategy", "both_fixes,load=al"], "did you mean 'all'?"),
        (["ic_lora", "--adapter", "usr"], "did you mean 'user'?"),
        (["ti2vid_two_stage", "--adapter", "user"], "needs its required role 'distilled'"),
        (["ic_lora", "--adapter", "user=none.safetensors"], "there is no such adapter file"),
        (["ic_lora", "--adapter", "user="], "expected role, role=path or role=path=strength"),
        (["ic_lora", "--adapter", "=path"], "expected role, role=path or role=path=strength"),
        (["ic_lora", "--adapter", "user=path=strong"], "the strength a number; found 'strong'"),
        (["ic_lora", "--adapter", "user=x=nan"], "expected a finite number, found nan"),
        (["ic_lora", "--adapter", "user", "--adapter", "user"], "bound twice"),
        (["ic_lora", "--geometry", "ltx-2.5"], "did you mean 'ltx-2.5-22b'?"),
    ],
    ids=str,
)
def test_plan_refuses_what_cannot_be_meant(refused, arguments, told):
    assert told in refused("plan", *arguments, "--json")


def test_recipes_lists_what_is_shipped(run):
    found = run("recipes", "--json").json
    assert [recipe["name"] for recipe in found] == recipe_names()
    hq = next(recipe for recipe in found if recipe["name"] == "hq_two_stage")
    assert hq["aliases"] == ["res2s_two_stage"]
    assert hq["roles"] == {"user": "optional", "distilled": "required"}
    assert hq["phases"][1] == {"user": 1.0, "distilled": 0.5}
    text = run("recipes").out
    assert all(name in text for name in recipe_names())
    assert "[user]" in text


def test_strategies_lists_what_is_shipped(run):
    found = run("strategies", "--json").json
    assert [strategy["name"] for strategy in found] == list(STRATEGIES)
    assert all(strategy["note"] for strategy in found)
    assert {k: found[0][k] for k in ("kernel", "load")} == {"kernel": "scalar", "load": "all"}
    assert all(name in run("strategies").out for name in STRATEGIES)


# bench


@pytest.fixture
def on_files(files, tmp_path):
    """Options to measure on the small files, into a fresh folder."""
    role = f"distilled={files.adapters['distilled']}"
    return ("--base", files.base, "--adapter", role, "--out", tmp_path / "new" / "records.jsonl")


@pytest.mark.usefixtures("_cases_run_here")
def test_bench_walk_records_each_load_and_rebind_once(run, on_files):
    options = ("bench", "walk", "hq_two_stage", "--strategy", "both_fixes", *on_files)
    first = run(*options, "--json")
    assert first.code == 0
    lines = [json.loads(line) for line in first.out.splitlines()]
    assert [line["case"]["action"] for line in lines] == ["load", "rebind"]
    assert first.out == on_files[-1].read_text()
    again = run(*options)
    assert "2 of 2 records were in" in again.err
    assert len(records.read(on_files[-1])) == 2
    for word in ("hq_two_stage, both_fixes", "rebind distilled@0.25 ->", "digest", "MB"):
        assert word in again.out
    assert max(map(len, again.out.splitlines())) <= 100


def test_bench_kernels_compares_the_contenders(run, on_files):
    contenders = ("--contender", "gemm", "--contender", "reference")
    ended = run("bench", "kernels", *contenders, "--budget", 0.01, *on_files)
    assert ended.code == 0
    assert "  gemm, " in ended.out
    assert "  reference, " in ended.out
    assert "within the reference's" in ended.out


def test_bench_loop_watches_the_scalar_loop(run, on_files):
    ended = run("bench", "loop", "--budget", 0.2, *on_files, "--json")
    assert ended.code == 0
    record = json.loads(ended.out)
    assert (record["case"]["budget_seconds"], record["case"]["widen"]) == (0.2, True)
    assert record["counted"]["flops"] > 0
    assert "note: at its first tenth's rate" not in ended.err


@pytest.mark.usefixtures("_cases_run_here")
def test_bench_loop_run_to_its_end_tells_how_well_its_first_tenth_foretold_it(run, on_files):
    ended = run("bench", "loop", "--whole", "--no-widen", *on_files)
    assert ended.code == 0
    assert "  scalar loop " in ended.out
    [record] = records.read(on_files[-1])
    assert (record.case["budget_seconds"], record.case["widen"]) == (None, False)
    told = first_tenth(record)
    assert f"was to take {told.predicted_seconds:.2f} s" in ended.err
    assert f"it took {told.seconds:.2f} s (predicted {told.error:+.1%})" in ended.err


@pytest.mark.usefixtures("_cases_run_here")
def test_bench_peers_times_contenders_at_each_number_of_threads(run, on_files):
    options = ("--contender", "gemm", "--contender", "torch_f32", "--rounds", 1, "--budget", 600)
    ended = run("bench", "peers", *options, "--threads", 1, "--threads", 2, *on_files)
    assert ended.code == 0, ended.err
    for text in ("1 threads, whole", "2 threads, whole", "gemm fuse, first", "torch_f32 fuse, ste"):
        assert text in ended.out
    assert {r.case["threads"] for r in records.read(on_files[-1])} == {1, 2}


@pytest.mark.usefixtures("_cases_run_here")
def test_bench_rules_compares_them_at_the_strengths_and_ratios_asked_for(run, tmp_path):
    out = tmp_path / "records.jsonl"
    cells = ("--strength", 0.8, "--ratio", 0.1, "--ratio", 1, "--side", 16)
    ended = run("bench", "rules", *cells, "--out", out)
    assert ended.code == 0, ended.err
    assert "strength 0.8, ratio 0.1" in ended.out
    assert [r.case["ratio"] for r in records.read(out)] == [0.1, 1]


@pytest.mark.usefixtures("_cases_run_here")
def test_bench_restores_measures_each_restore_at_each_strength(run, on_files):
    names = ("--restore", "reread", "--restore", "host_snapshot")
    ended = run("bench", "restores", *names, "--repetitions", 1, *on_files)
    assert ended.code == 0, ended.err
    for text in ("reread, strength 1", "host_snapshot, strength 1", "  unfuse"):
        assert text in ended.out
    assert max(map(len, ended.out.splitlines())) <= 100


@pytest.mark.usefixtures("_cases_run_here")
def test_bench_load_measures_a_fused_load_beside_its_parts(run, on_files):
    ended = run("bench", "load", "--rounds", 1, *on_files)
    assert ended.code == 0, ended.err
    for text in ("reread, page cache hot", "  plain load", "  fused load"):
        assert text in ended.out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["walk", "nonsense"], "unknown recipe"),
        (["walk", "ic_lora", "--strategy", "nonsense"], "unknown preset"),
        (["walk", "hq_two_stage", "--adapter", "user"], "needs its required role"),
        (["walk", "ic_lora", "--size", "tyny"], "--size tyny (did you mean 'tiny'?)"),
        (["walk", "ic_lora", "--size", "tiny", "--base", "x"], "give one of the two"),
        (["walk", "ic_lora", "--base", "x", "--adapter", "user"], "expected role=path"),
        (["walk", "ic_lora", "--adapter", "user=x"], "a path needs --base"),
        (["walk", "ic_lora", "--adapter", "user=x=2"], "adapters are measured at 1"),
        (["kernels", "--contender", "gem"], "did you mean 'gemm'?"),
        (["kernels", "--adapter", "a", "--adapter", "b"], "expected one, found a, b"),
        (["kernels", "--base", "none.safetensors", "--adapter", "a=b"], "can't be opened"),
        (["loop", "--device", "cuda"], "runs on the CPU only"),
        (["loop", "--whole", "--budget", "3"], "--whole and --budget 3: give one of the two"),
        (["loop", "--device", "gpu"], "'cpu', 'cuda'"),
        (["peers", "--contender", "pefft"], "did you mean 'peft'?"),
        (["peers", "--threads", "0"], "--threads"),
        (["rules", "--ratio", "0"], "ratios above 0"),
        (["restores", "--restore", "snapshot"], "host_snapshot"),
        (["restores", "--restore", "device_snapshot"], "device_snapshot"),
        (["load", "--restore", "reeread"], "did you mean 'reread'?"),
        (["drift", "--cycles", "0"], "--cycles"),
    ],
    ids=str,
)
def test_bench_refuses_before_it_writes(refused, tmp_path, monkeypatch, arguments, told):
    monkeypatch.chdir(tmp_path)
    assert told in refused("bench", *arguments)
    assert list(tmp_path.iterdir()) == []


def test_bench_refuses_a_gpu_that_is_not_there(refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "finds no CUDA GPU" in refused("bench", "kernels", "--device", "cuda")
    assert list(tmp_path.iterdir()) == []


def test_bench_refuses_a_place_for_records_before_it_measures(refused, tmp_path, on_files):
    (tmp_path / "file").touch()
    told = refused("bench", "loop", *on_files[:-1], tmp_path / "file" / "records.jsonl")
    assert "can't make this folder" in told


# report


def notebook(path: Path, *sources: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    names = ("SIZE", "SCRATCH", "RECORDS", "RESULTS")
    parameters = new_code_cell(
        "\n".join(f"{name} = ''" for name in names), metadata={"tags": ["parameters"]}
    )
    cells = [parameters, *map(new_code_cell, sources)]
    nbformat.write(new_notebook(cells=cells), path)
    return path


def test_report_runs_notebooks_with_absolute_paths(run, tmp_path, monkeypatch):
    source = notebook(
        tmp_path / "one.ipynb",
        "import json, pathlib\n"
        "found = [SIZE, SCRATCH, RECORDS, RESULTS, pathlib.Path(RECORDS).exists()]\n"
        "pathlib.Path(RESULTS, 'one.json').write_text(json.dumps(found))",
    )
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "pages"
    (out / "results").mkdir(parents=True)
    (out / "records.jsonl").touch()
    (out / "results" / "mine.json").touch()  # of no notebook here
    ended = run("report", source, "--size", "tiny", "--out", "pages")
    assert ended.code == 0, ended.err
    assert ended.out == f"{Path('pages', 'index.html')}\n"
    assert "tiny" in (out / "one.html").read_text()
    assert {path.name for path in (out / "results").iterdir()} == {"mine.json", "one.json"}
    scratch, recorded, results = tmp_path / "scratch", out / "records.jsonl", out / "results"
    found = json.loads((results / "one.json").read_text())
    assert found == ["tiny", str(scratch), str(recorded), str(results), False]


def test_report_takes_up_what_was_measured_only_when_asked(run, tmp_path, monkeypatch):
    source = notebook(tmp_path / "one.ipynb")
    out = tmp_path / "pages"
    out.mkdir()
    calls = []

    def build(notebooks, folder, parameters, facts, timeout):
        calls.append((parameters["RECORDS"].exists(), notebooks, facts, timeout))
        return folder / "index.html"

    monkeypatch.setattr("lorabench.report.build_reports", build)
    for options, kept in (["--resume"], True), (["--timeout", "60"], False):
        (out / "records.jsonl").touch()
        assert run("report", source, "--out", out, *options).code == 0
        assert calls[-1][0] is kept
    _, notebooks, facts, timeout = calls[-1]
    assert (notebooks, facts.size, timeout) == ([source], "laptop", 60)
    assert facts.commit == git_commit()
    assert "cores" in facts.machine


def test_report_tells_which_notebook_failed(run, tmp_path):
    source = notebook(tmp_path / "bad.ipynb", "raise ValueError('as it happens')")
    ended = run("report", source, "--size", "tiny", "--out", tmp_path / "pages")
    assert ended.code == 1
    assert ended.out == ""
    assert "error: " in ended.err
    assert "ValueError: as it happens" in ended.err
    assert f"{tmp_path / 'pages' / 'index.html'} lists what failed" in ended.err


def test_report_takes_all_notebooks_of_the_checkout_in_order(run, tmp_path, monkeypatch):
    for name in ("b", "a"):
        notebook(tmp_path / "notebooks" / f"{name}.ipynb")
    (tmp_path / "lorabench").mkdir()
    (tmp_path / "lorabench" / "cli.py").touch()
    monkeypatch.chdir(tmp_path)
    taken = []

    def build(notebooks, folder, *others):
        taken.extend(notebooks)
        return folder / "index.html"

    monkeypatch.setattr("lorabench.report.build_reports", build)
    assert run("report").code == 0
    assert [path.name for path in taken] == ["a.ipynb", "b.ipynb"]


def test_report_refuses_before_it_touches_what_was_measured(refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "pages"
    out.mkdir()
    (out / "records.jsonl").touch()
    assert "did you mean 'laptop'?" in refused("report", "--size", "labtop", "--out", out)
    assert "there is no such notebook" in refused("report", "none.ipynb", "--out", out)
    (tmp_path / "file").touch()
    source = notebook(tmp_path / "one.ipynb")
    assert "can't make this folder" in refused("report", source, "--out", tmp_path / "file" / "x")
    assert (out / "records.jsonl").exists()
    assert [path.name for path in out.iterdir()] == ["records.jsonl"]


def test_report_outside_a_checkout_needs_a_name(refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lorabench.cli_report.__file__", str(tmp_path / "lorabench" / "x.py"))
    assert "no notebook was named" in refused("report")


# fuse and walk


def test_fuse_writes_what_resident_weights_would_hold(run, files, base, adapters, tmp_path):
    out = tmp_path / "fused.safetensors"
    given = [f"{files.adapters['user']}=-0.5", files.adapters["distilled"]]
    told = run("fuse", files.base, *given, "-o", out, "--json")
    assert told.code == 0
    weights = ResidentWeights(base, adapters)
    weights.load(State(user=-0.5, distilled=1.0))
    fused = Checkpoint.open(out)
    assert digest({name: fused.read(name) for name in fused.entries}) == weights.digest()
    assert fused.metadata["lorabench.state"] == "user@-0.5 + distilled@1"
    assert told.json["state"] == {"user": -0.5, "distilled": 1.0}
    assert told.json["bytes"] == out.stat().st_size
    assert told.json["resumed_bytes"] == 0
    again = run("fuse", files.base, *given, "-o", out, "--overwrite")
    assert again.out.startswith(f"{out}: written\n  state  user@-0.5 + distilled@1\n  bytes ")


def test_fuse_says_what_scale_it_assumes_and_takes_another(run, tmp_path):
    base, silent = tmp_path / "base.safetensors", tmp_path / "silent.safetensors"
    write_f32(base, {"x.weight": [6, 8]})
    factors = {"x.lora_A.weight": torch.ones(4, 8), "x.lora_B.weight": torch.ones(6, 4)}
    save_file(factors, silent)
    ended = run("fuse", base, silent, "--out", tmp_path / "one.safetensors")
    assert "the scale of 1 modules is 1, assumed: nothing tells an alpha" in ended.err
    given = ("--alpha", "silent=2", "--out", tmp_path / "two.safetensors")
    assert "assumed" not in run("fuse", base, silent, *given).err
    assert run("fuse", base, silent, "--alpha", "silnt=2", *given).code == 2


def test_fuse_of_shards_gives_shards(run, files, base, adapters, tmp_path):
    (tmp_path / "shards").mkdir()
    shard(base, tmp_path / "shards", 3)
    out = tmp_path / "fused"
    assert run("fuse", tmp_path / "shards", files.adapters["user"], "-o", out).code == 0
    weights = ResidentWeights(base, adapters)
    weights.load(State(user=1.0))
    fused = Checkpoint.open(out)
    assert digest({name: fused.read(name) for name in fused.entries}) == weights.digest()
    assert sorted(path.name for path in out.iterdir()) == sorted(
        path.name for path in (tmp_path / "shards").iterdir()
    )


def test_adapters_of_one_file_name_are_told_apart_by_their_folders(run, files, tmp_path):
    given = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        given.append(tmp_path / folder / "lora.safetensors")
        given[-1].write_bytes(files.adapters["user"].read_bytes())
    out = tmp_path / "fused.safetensors"
    assert run("fuse", files.base, *given, "-o", out).code == 0
    assert Checkpoint.open(out).metadata["lorabench.state"] == "one/lora@1 + two/lora@1"


@pytest.mark.parametrize(
    ("given", "out", "told"),
    [
        (["none.safetensors"], "x.safetensors", "none.safetensors: can't be opened"),
        (["{user}=strong"], "x.safetensors", "the strength a number; found 'strong'"),
        (["{user}=nan"], "x.safetensors", "finite"),
        (["{user}", "{user}=2"], "x.safetensors", "is given twice"),
        (["{user}=0"], "x.safetensors", "every strength is 0"),
        (["{base}"], "x.safetensors", "is it a base, given in an adapter's place"),
        (["{user}"], "x.bin", "expected a file name that ends in .safetensors"),
        (["{user}"], "{user}", "is an input"),
        (["{user}"], "{base}", "is an input"),
        (["{user}"], "there.safetensors", "exists already"),
    ],
    ids=str,
)
def test_fuse_refuses_before_it_writes(refused, files, tmp_path, monkeypatch, given, out, told):
    monkeypatch.chdir(tmp_path)
    Path("there.safetensors").touch()
    names = {"user": files.adapters["user"], "base": files.base}
    given = [argument.format(**names) for argument in given]
    assert told in refused("fuse", files.base, *given, "-o", out.format(**names))
    assert [path.name for path in tmp_path.iterdir()] == ["there.safetensors"]


def test_walk_streams_each_action_once(run, on_files):
    options = ("walk", "ti2vid_two_stage", *on_files)
    first = run(*options, "--json")
    assert first.code == 0
    lines = [json.loads(line) for line in first.out.splitlines()]
    actions = [line["case"]["action"] for line in lines]
    assert actions == ["load", "rebind", "rebind", "load", "rebind"]
    assert {line["case"]["bench"] for line in lines} == {"stream"}
    by_state = {(line["case"]["state"], line["check"].split(";")[0]) for line in lines}
    assert len(by_state) == 2  # each state has one digest, wherever it was met
    assert "5 of 5 records were in" in run(*options).err


@pytest.mark.parametrize(
    ("strategy", "told"),
    [
        ("snapshot", "restore 'host_snapshot' needs weights that stay in memory"),
        ("subtract", "restore 'subtract' needs weights that stay in memory"),
        ("both_fixes,kernel=reference", "kernel 'reference' can't be streamed"),
        ("both_fix", "did you mean 'both_fixes'?"),
    ],
)
def test_walk_refuses_before_it_writes(refused, tmp_path, monkeypatch, strategy, told):
    monkeypatch.chdir(tmp_path)
    assert told in refused("walk", "ti2vid_two_stage", "--strategy", strategy, "--size", "tiny")
    assert list(tmp_path.iterdir()) == []


def test_bench_fuse_measures_the_whole_its_parts_and_a_copy(run, files, tmp_path):
    options = ("--base", files.base, "--adapter", f"distilled={files.adapters['distilled']}")
    scratch, out = tmp_path / "scratch", tmp_path / "records.jsonl"
    ended = run("bench", "fuse", *options, "--rounds", 2, "--scratch", scratch, "--out", out)
    assert ended.code == 0
    found = {r.case["contender"]: r for r in records.read(out)}
    assert list(found) == ["read and write", "read and fuse", "fuse to a file", "cp"]
    assert {len(r.seconds) for r in found.values()} == {2}
    assert found["fuse to a file"].counted["flops"] == found["read and fuse"].counted["flops"] > 0
    assert list(scratch.iterdir()) == []


# Text for people


@pytest.mark.parametrize(
    ("amount", "unit", "text"),
    [
        (0, "B", "0 B"),
        (999, "B", "999 B"),
        (1000, "B", "1.00 kB"),
        (42017512960, "B", "42.02 GB"),
        (17.052e12, "FLOP", "17.05 TFLOP"),
        (5e18, "FLOP", "5000.00 PFLOP"),
        (5e-8, "s", "0.05 us"),
        (0.0031, "s", "3.10 ms"),
        (7200.0, "s", "7200.00 s"),
    ],
)
def test_amounts_are_told_with_the_prefix_that_fits(amount, unit, text):
    assert scaled(amount, unit) == text


def test_a_table_aligns_cells_of_several_lines():
    assert table(("a", "b"), [("x\nyy", "1"), ("z", "10")], right=(1,)) == (
        "a    b\n--  --\nx    1\nyy\nz   10"
    )


def test_report_into_the_notebooks_own_folder_is_refused_and_removes_nothing(
    refused, tmp_path, monkeypatch
):
    source = notebook(tmp_path / "notebooks" / "one.ipynb", "1")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "one.json").write_text("mine")
    (tmp_path / "records.jsonl").write_text("mine too")
    before = source.read_bytes()
    monkeypatch.chdir(tmp_path)
    assert "would be overwritten" in refused("report", source, "--size", "tiny", "--out", ".")
    assert source.read_bytes() == before
    assert (tmp_path / "results" / "one.json").read_text() == "mine"
    assert (tmp_path / "records.jsonl").read_text() == "mine too"
