"""The wheel holds what the package needs, and JupyterLab starts with a kernel that has it."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

import pytest

from lorabench import records
from lorabench.bench import accounts_frame, restores_frame, rules_frame
from lorabench.bench.decide import decisions_frame
from lorabench.cost import touches_of
from lorabench.derive import first_tenth, hours
from lorabench.geometry import load_geometry
from lorabench.priced import predicted_frame
from lorabench.rates import load_machine
from lorabench.recipe import load_recipe, recipe_names
from lorabench.streams import products_of

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder into which a freshly built wheel is unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def python(installed, code):
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=installed.parent,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_a_wheel_finds_its_templates_recipes_and_assets(installed):
    found = python(
        installed,
        "import json, lorabench.geometry as g, lorabench.recipe as r, lorabench.page as p;"
        "import lorabench.claims as c, lorabench.rates as m;"
        "from pathlib import Path; print(json.dumps([g.__file__, g.geometry_names(),"
        "len(r.recipe_names()), g.load_geometry('ltx-2.5-22b').counts().targets,"
        "sorted(f.name for f in Path(p.TEMPLATES).rglob('*.gz')), len(c.load_claims()),"
        "m.machine_names()]))",
    )
    assert Path(found[0]).is_relative_to(installed)
    assert found[1] == ["ltx-2.5-22b"]
    assert found[2:4] == [12, 1660]
    assert len(found[4]) == 1
    assert found[5] > 80
    assert found[6] == ["gb10", "h200", "zen5"]


def test_the_wheel_holds_no_tests_notebooks_or_records(installed):
    names = {p.relative_to(installed).parts[0] for p in installed.rglob("*") if p.is_file()}
    assert {n for n in names if not n.endswith(".dist-info")} == {"lorabench"}
    assert not list(installed.rglob("*.jsonl"))


def request(base, token, path, data=None, patience_seconds=0):
    asked = urllib.request.Request(
        f"{base}{path}", data=data, headers={"Authorization": f"token {token}"}
    )
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            with urllib.request.urlopen(asked, timeout=30) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError:
            raise
        except urllib.error.URLError:  # nobody listens, or not yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def test_jupyterlab_starts_and_runs_the_package_in_its_kernel(tmp_path):
    token = "lorabench"
    command = [
        *(sys.executable, "-m", "jupyter", "lab", "--no-browser", "--ip=127.0.0.1", "--port=0"),
        *(f"--IdentityProvider.token={token}", f"--notebook-dir={ROOT / 'notebooks'}"),
    ]
    if hasattr(os, "getuid") and os.getuid() == 0:
        command.append("--allow-root")
    folders = {"JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"}
    environment = os.environ | {name: str(tmp_path / name) for name in folders}
    log = tmp_path / "log"
    with log.open("w") as stream:
        server = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream)
    try:
        base = wait_for_address(server, log)
        contents = request(base, token, "/api/contents", patience_seconds=60)["content"]
        names = {item["name"] for item in contents}
        assert "01_reproduce_the_issue.ipynb" in names
        kernel = request(base, token, "/api/kernels", b"{}")
        connection = tmp_path / "JUPYTER_RUNTIME_DIR" / f"kernel-{kernel['id']}.json"
        assert run_in_kernel(connection, "import lorabench; lorabench.__version__") == "'0.1.0'"
    finally:
        server.terminate()
        server.wait(timeout=30)


def wait_for_address(server, log):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.poll() is None:
        # As far as the slash: what was written of the log may end within the port.
        if found := re.search(r"(http://127\.0\.0\.1:\d+)/", log.read_text()):
            return found[1]
        time.sleep(0.2)
    raise AssertionError(f"JupyterLab did not start:\n{log.read_text()}")


def run_in_kernel(connection, code):
    from jupyter_client.blocking.client import BlockingKernelClient

    client = BlockingKernelClient()
    client.load_connection_file(str(connection))
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        client.execute(code)
        while True:
            message = client.get_iopub_msg(timeout=60)
            if message["msg_type"] == "execute_result":
                return message["content"]["data"]["text/plain"]
            assert message["msg_type"] != "error", message["content"]
    finally:
        client.stop_channels()


RECORDS = ROOT / "data" / "records"


def test_the_committed_records_can_be_read_and_were_checked():
    found = records.read(RECORDS)
    assert found
    assert all(r.provenance == "measured" and r.check for r in found)
    assert {r.environment["machine"] for r in found} == {f.name for f in RECORDS.iterdir()}


def frame_of(name):
    return records.to_frame(records.read(RECORDS / "amd-epyc-2c-avx2" / f"{name}.jsonl"))


def assert_told(*figures):
    told = (ROOT / "README.md").read_text("utf-8")
    assert not [figure for figure in figures if figure not in told]


def test_the_readmes_figures_are_those_of_the_committed_report():
    frame = frame_of("report")
    rate = frame[frame.bench == "kernels"].set_index("contender").gflops_per_s
    fuses = frame[(frame.bench == "walk") & (frame.action == "rebind") & (frame.before == "base")]
    loops = [
        r
        for r in records.read(RECORDS / "amd-epyc-2c-avx2" / "report.jsonl")
        if r.case["bench"] == "loop"
    ]
    [whole] = [first_tenth(r) for r in loops if r.case["budget_seconds"] is None]
    [window] = [r for r in loops if r.case["budget_seconds"] is not None]
    flops = 2 * load_geometry("ltx-2.5-22b").counts().macs
    h = hours(flops, window.counted["flops"] / window.seconds[0], whole.error)
    assert_told(
        f"| {rate['scalar']:.2f} GFLOP/s, one thread | {rate['gemm']:.1f} GFLOP/s "
        f"(**{rate['gemm'] / rate['scalar']:.0f}x**)",
        f"{fuses.median_s.median():.1f} s, measured",
        f"| {h.expected:.1f} h, between {h.low:.1f} and {h.high:.1f}: extrapolated",
        f"an error of {whole.error:+.1%}",
        f"runs at {rate['ltx_core']:.2f} GFLOP/s",
        f"{frame.wrong_share.max():.1%} of the touched weights wrong",
    )


def test_the_readmes_figures_are_those_of_the_completed_sequences():
    frame = frame_of("full-depth")
    assert set(frame.blocks) == {48}
    took = frame.set_index(["strategy", "action", "state"]).median_s
    fast, both = took["fast_kernel"], took["both_fixes"]
    load, unfuse = fast["load", "distilled@1"], fast["rebind", "base"]
    assert_told(
        f"| {both['rebind', 'distilled@1']:.1f} s, completed, read from the disk |",
        f"| load | {load:.1f}, fused | {both['load', 'base']:.1f} |",
        f"| un-fuse for phase 0 | {unfuse:.1f} | none |",
        f"| **{load + unfuse:.1f}** | **{both['load', 'base']:.1f}** |",
        f"| {fast['rebind', 'distilled@1']:.1f} | {both['rebind', 'distilled@1']:.1f} |",
    )


def test_the_readmes_ratios_are_those_of_the_committed_fuse():
    frame = frame_of("fuse").set_index("contender")
    ratio = frame.median_s["fuse to a file"] / frame.median_s
    assert_told(
        f"**{ratio['read and fuse']:.2f} times** reading",
        f"{ratio['read and write']:.2f} times reading and writing",
        f"{ratio['cp']:.2f} times `cp`",
    )


def test_the_readmes_figures_of_the_engine_are_those_of_the_committed_records():
    machine = RECORDS / "amd-epyc-2c-avx2"
    found = records.read(machine / "engine.jsonl")
    judged = restores_frame([r for r in found if r.case["bench"] == "restores"])
    judged = judged.set_index("restore")
    residual, snapshot = judged.loc["residual"], judged.loc["host_snapshot"]
    [hot], [cold] = (
        [r for r in records.read(machine / name) if r.case.get("contender") == "fused load"]
        for name in ("engine.jsonl", "engine_cold.jsonl")
    )

    def passes(held, contender, mix):
        """A contender's first and steady passes."""
        mine = [
            r for r in held
            if r.case["bench"] == "peers"
            and (r.case["contender"], r.case.get("mix"), r.case.get("operation"))
            == (contender, mix, "fuse")
        ]  # fmt: skip
        first, steady = sorted(mine, key=lambda r: "ceiling_fraction" in r.details)
        return first.details, steady.details

    ltx = [p["times_ours"] for p in passes(found, "ltx_core", "sample")]
    later = records.read(machine / "engine_peft.jsonl")
    peft = [p["times_ours"] for p in passes(later, "peft", "whole")]
    fractions = [passes(held, "gemm", "whole")[1]["ceiling_fraction"] for held in (later, found)]

    def seconds_of(restore, contender):
        [record] = [
            r for r in found
            if r.case.get("restore") == restore and r.case.get("contender") == contender
        ]  # fmt: skip
        return record.seconds

    rounds = [
        mine / plain
        for mine, plain in zip(
            seconds_of("residual", "unfuse"), seconds_of("residual", "plain fuse"), strict=True
        )
    ]
    accounts = accounts_frame([r for r in found if r.case["bench"] == "restores"])
    fuse = accounts[(accounts.restore == "host_snapshot") & (accounts.operation == "fuse")]
    parts, spent = fuse.groupby("part").seconds.sum(), fuse.seconds.sum()
    rate = fuse.flops.sum() / parts["product"] / 1e9
    pairs = rules_frame([r for r in found if r.case["bench"] == "rules"])
    pairs = pairs.set_index(["first", "second", "strength", "ratio"]).differing_share
    r1_r4 = pairs["R1", "R4", 0.8, 0.05]
    worst = judged.memory_error.abs().max()
    assert_told(
        f"| **{fractions[0]:.2f}** and {fractions[1]:.2f} in two runs | 0.93: missed |",
        f"| {ltx[0]:.0f}x, {ltx[1]:.0f}x |",
        f"| {peft[0]:.2f}x, {peft[1]:.2f}x | 3x: missed |",
        f"un-fuse over a plain fuse, of {len(rounds)} rounds between {min(rounds):.2f} and "
        f"{max(rounds):.2f} | **{residual.unfuse_over_fuse:.2f}** | 1.15 |",
        f"it is {parts['product'] / spent:.0%} of a fuse, at {rate:.0f} GFLOP/s; rounding and "
        f"other copies are {parts['copy'] / spent:.0%}, adding {parts['add'] / spent:.0%}.",
        f"R1 from R4 in {r1_r4:.1%} at strength 0.8",
        f"entropy of what is kept: {residual.entropy_bits:.2f}) | {residual.bits:.2f} |",
        f"bandwidth of a plain copy | {snapshot.bandwidth_share:.2f} |",
        f"page cache hot, cold | {hot.details['ratio']:.2f}, {cold.details['ratio']:.2f} |",
        f"of every restore, off by at most | {worst:.1%} |",
        f"of a pass | {judged.digest_over_pass.max():.2f} |",
        f"pays at the fuse: {residual.fuse_s:.1f} s against {residual.plain_fuse_s:.1f} s",
        f"keeps {residual.kept_bytes / 1e6:.0f} MB where a snapshot keeps "
        f"{snapshot.kept_bytes / 1e9:.1f} GB",
    )


DECIDED = ("amd-epyc-2c-avx512", "amd-epyc-2c-avx2")


def decision(*machines):
    """What each recipe's renders waited for under every strategy that was carried out."""
    cut = load_geometry("ltx-2.5-22b").cut(2)
    products = products_of(cut, touches_of(cut, ["distilled", "user"]))
    recipes = {name: load_recipe(name).bind() for name in recipe_names()}
    found = [r for machine in machines for r in records.read(RECORDS / machine / "decision.jsonl")]
    return decisions_frame(found, recipes, products)


def modelled(machine):
    """What the machine's calibration says of each of those records."""
    found = records.read(RECORDS / machine / "decision.jsonl")
    rates = load_machine(RECORDS / machine / "machine.toml")
    return predicted_frame(found, rates, [load_geometry("ltx-2.5-22b").cut(2)])


def test_what_machines_took_is_not_mixed():
    both = decision(*DECIDED)
    assert [*both.machine.unique()] == [*DECIDED]
    for machine in DECIDED:
        mine = both[both.machine == machine].reset_index(drop=True)
        assert mine.equals(decision(machine).reset_index(drop=True))


@pytest.mark.parametrize("machine", DECIDED)
def test_the_advised_plan_was_within_15_percent_of_the_best_in_every_recipe(machine):
    frame = decision(machine)
    advised = frame[frame.strategy == "advised"].set_index("recipe")
    assert len(advised) == 12
    assert set(frame.groupby("recipe").size()) == {12}  # every strategy of the kernel, and advised
    assert advised.over_best.max() <= 1.15


def test_the_readmes_figures_of_the_decision_are_those_of_the_committed_records():
    frame = decision("amd-epyc-2c-avx512")
    exact = frame[frame.strategy != "subtract"].set_index(["recipe", "strategy"]).binding_s
    over = frame[frame.strategy == "advised"].set_index("recipe").over_best
    rows = []
    for recipe in ("ti2vid_two_stage", "hq_two_stage", "ic_lora", "dfr", "one_stage"):
        mine, advised = exact[recipe].drop("advised"), exact[recipe, "advised"]
        rows.append(
            f"| `{recipe}` | {advised:.1f} | {mine.min():.1f}, `{mine.idxmin()}` | "
            f"{mine['fast_kernel']:.1f} | {over[recipe]:.2f} |"
        )
    model, before = modelled("amd-epyc-2c-avx512"), modelled("amd-epyc-2c-avx2")
    off = model.error.abs()
    assert off.median() <= 0.10
    loads = model[model.kind == "load"]
    assert loads.error.max() <= 0.25
    copies = model[(model.kind == "restore") & model.case.str.endswith("host_snapshot")].measured_s
    made = model[model.kind.isin(["fuse", "rebind"]) & model.case.str.endswith("images")]
    longer = made.measured_s / made.predicted_s - 1
    kinds = off.groupby(model.kind).median()
    worst = model.loc[off.idxmax()]
    assert_told(
        *rows,
        f"off by {off.median():.1%} in the median of {len(model)} loads, rebinds and forwards",
        f"fuses and rebinds by {kinds.fuse:.0%}, forwards by {kinds.forward:.0%}, loads by "
        f"{kinds.load:.0%}, ways back by {kinds.restore:.0%}",
        f"between {copies.min():.2f} and {copies.max():.2f} s",
        f"the {(loads.error < -0.25).sum()} loads that are off by over a quarter",
        f"{longer.min():.0%} to {longer.max():.0%} longer than predicted",
        f"{worst.predicted_s:.2f} s predicted, {worst.measured_s:.2f} s measured",
        f"the model off by {before.error.abs().median():.1%} over {len(before)} cases",
    )
