"""The wheel holds what the package needs, and JupyterLab starts with a kernel that has it."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
import zipfile
from pathlib import Path

import pytest

from lorabench import records
from lorabench.geometry import load_geometry

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
        "import lorabench.claims as c;"
        "from pathlib import Path; print(json.dumps([g.__file__, g.geometry_names(),"
        "len(r.recipe_names()), g.load_geometry('ltx-2.5-22b').counts().targets,"
        "sorted(f.name for f in Path(p.TEMPLATES).rglob('*.gz')), len(c.load_claims())]))",
    )
    assert Path(found[0]).is_relative_to(installed)
    assert found[1] == ["ltx-2.5-22b"]
    assert found[2:4] == [12, 1660]
    assert len(found[4]) == 1
    assert found[5] > 80


def test_the_wheel_holds_no_tests_notebooks_or_records(installed):
    names = {p.relative_to(installed).parts[0] for p in installed.rglob("*") if p.is_file()}
    assert {n for n in names if not n.endswith(".dist-info")} == {"lorabench"}
    assert not list(installed.rglob("*.jsonl"))


def request(base, token, path, data=None):
    asked = urllib.request.Request(
        f"{base}{path}", data=data, headers={"Authorization": f"token {token}"}
    )
    with urllib.request.urlopen(asked, timeout=30) as answer:
        return json.loads(answer.read())


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
        names = {item["name"] for item in request(base, token, "/api/contents")["content"]}
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
        if found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text()):
            return found[0]
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


def test_the_readmes_figures_are_those_of_the_committed_records():
    frame = records.to_frame(records.read(RECORDS / "amd-epyc-2c-avx2"))
    rate = frame[frame.bench == "kernels"].set_index("contender").gflops_per_s
    fuses = frame[(frame.action == "rebind") & (frame.before == "base")]
    hours = 2 * load_geometry("ltx-2.5-22b").counts().macs / rate / 3600e9
    wrong = frame.wrong_share.max()
    told = (ROOT / "README.md").read_text("utf-8")
    for figure in (
        f"| {rate['scalar']:.2f} GFLOP/s, one thread | {rate['gemm']:.1f} GFLOP/s "
        f"(**{rate['gemm'] / rate['scalar']:.0f}x**)",
        f"{fuses.median_s.median():.1f} s, measured",
        f"| {hours['scalar']:.1f} h | {60 * hours['gemm']:.1f} min |",
        f"runs at {rate['ltx_core']:.2f} GFLOP/s",
        f"{wrong:.1%} of the touched weights wrong",
    ):
        assert figure in told, figure
