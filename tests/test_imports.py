"""Which module may import which, and what the engine does without."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "lorabench"

ANY = None
MAY_IMPORT: dict[str, set[str] | None] = {
    "errors": set(),
    "resources": set(),
    # the engine
    "geometry": {"resources"},
    "foreign": set(),
    "header": {"foreign", "geometry"},
    "checkpoint": {"foreign", "geometry", "header"},
    "rows": set(),
    "fuse": {"rows"},
    "keys": set(),
    "places": {"geometry"},
    "peft_config": {"checkpoint", "header", "places"},
    "scales": {"checkpoint", "header", "peft_config", "places"},
    "adapter_file": {"checkpoint", "header", "keys", "places", "scales"},
    "pairing": {"adapter_file", "geometry", "header", "places"},
    "adapter": {
        "adapter_file", "checkpoint", "geometry", "keys", "pairing", "places", "scales",
    },
    "limits": {"adapter"},
    "recipe": {"resources"},
    "plan": {"recipe"},
    "account": set(),
    "kernels": {"fuse", "account"},
    "cost": {"geometry", "recipe", "plan", "rows"},
    "corrections": {"kernels", "fuse"},
    "residual": {"fuse", "kernels", "cost", "corrections"},
    "restore": {"fuse", "kernels", "checkpoint", "cost", "residual"},
    "digest": set(),
    "devices": {"machine"},
    "sweep": {"recipe", "fuse", "kernels", "restore", "checkpoint", "cost"},
    "loading": {"header", "checkpoint", "adapter", "fuse", "kernels", "readahead", "sweep"},
    "resident": {
        "recipe", "adapter", "fuse", "kernels", "restore", "checkpoint", "digest", "cost",
        "devices", "limits", "sweep", "loading",
    },
    "run": {"plan", "recipe", "resident", "streamed", "cost"},
    # a forward, as it bears on binding
    "streams": {"cost", "geometry", "plan", "recipe"},
    "forward": {"cost", "fuse", "kernels", "recipe", "resident", "residual", "streams"},
    "overlap": {"cost", "recipe", "resident"},
    # deciding
    "rates": {"plan", "resources"},
    "counted": {"cost", "geometry", "plan", "recipe", "streams"},
    "tallies": {"counted", "geometry", "rates", "recipe", "streams"},
    "pricing": {"cost", "counted", "geometry", "rates", "recipe", "tallies"},
    "bill": {"plan", "pricing", "recipe"},
    "routes": {"bill", "plan", "pricing", "recipe"},
    "setting": {"cost", "counted", "geometry", "plan", "pricing", "rates", "recipe", "routes"},
    "ways": {"plan", "pricing", "recipe", "routes", "setting"},
    "planner": {"bill", "plan", "pricing", "routes", "setting", "ways"},
    "breakeven": {"plan_text", "planner", "recipe", "routes", "setting", "ways"},
    "reasons": {"plan_text", "planner", "pricing"},
    "specimens": {"checkpoint", "fuse", "geometry", "recipe"},
    "rounds": {
        "cost", "devices", "directio", "forward", "kernels", "loading", "measure", "readahead",
        "recipe", "restore", "specimens", "sweep",
    },
    "separate": {"rates"},
    "calibrate": {
        "alone", "checkpoint", "cost", "devices", "machine", "measure", "progress", "rates",
        "rounds", "separate", "specimens",
    },
    # the same, streamed
    "directio": {"checkpoint"},
    "readahead": {"checkpoint", "directio", "header"},
    "segments": {
        "adapter", "checkpoint", "cost", "directio", "geometry", "header", "kernels", "pairing",
        "recipe", "rows",
    },
    "stream": {
        "adapter", "adapter_file", "checkpoint", "directio", "fuse", "kernels", "progress",
        "readahead",
        "segments",
    },
    "streamed": {
        "adapter", "checkpoint", "cost", "digest", "limits", "recipe", "segments", "stream",
    },
    "fusedfile": {
        "adapter", "checkpoint", "cost", "directio", "fuse", "header", "journal", "kernels",
        "recipe", "segments", "stream",
    },
    "journal": {"checkpoint"},
    # around it
    "synthetic": {"geometry", "checkpoint", "machine", "progress"},
    "progress": set(),
    # measuring
    "measure": set(),
    "outside": {"measure"},
    "alone": set(),
    "peers": {"fuse"},
    "machine": set(),
    "records": {"machine"},
    "derive": {"claims", "cost", "geometry", "plan", "recipe", "records"},
    "predicted": {"pricing", "recipe", "records"},
    "forwards": {"plan", "recipe", "records", "streams"},
    "priced": {
        "bill", "breakeven", "cost", "counted", "geometry", "plan", "planner", "predicted",
        "pricing", "rates", "recipe", "records",
    },
    "check": {"adapter", "checkpoint", "fuse", "loading", "recipe", "resident"},
    "bench": ANY,
    "gpu_check": ANY,
    "gpu_rebind": {
        "check", "checkpoint", "fuse", "geometry", "kernels", "measure", "restore", "synthetic",
    },
    # the ledger
    "arithmetic": set(),
    "evidence": {"arithmetic", "geometry", "machine", "plan", "recipe", "records"},
    "ledger": {"arithmetic", "evidence", "resources"},
    "claims": {"arithmetic", "evidence", "ledger", "resources"},
    # telling
    "figures": set(),
    "engine_figures": {"figures"},
    "figure_parts": {"figures"},
    "decision_figures": {"figure_parts", "figures"},
    "model_figures": {"decision_figures", "figure_parts", "figures"},
    "page": set(),
    "export": {"page"},
    "report": ANY,
    "arguments": {"calibrate", "checkpoint", "geometry", "keys", "plan", "rates", "synthetic"},
    "machine_text": {"layout", "rates"},
    "plan_text": {"layout", "recipe"},
    "advised": {"bill", "machine_text", "plan", "planner", "setting", "breakeven", "reasons"},
    "advised_text": {"breakeven", "layout", "plan", "plan_text"},
    "describe": {
        "adapter", "adapter_file", "checkpoint", "cost", "geometry", "places", "plan", "recipe",
        "synthetic",
    },
    "layout": set(),
    "inspected": {"adapter", "layout"},
    "tables": {"arithmetic", "claims", "cost", "layout", "measure", "plan", "recipe", "records"},
    "cli": ANY,
    "cli_advise": ANY,
    "cli_calibrate": ANY,
    "cli_decide": ANY,
    "cli_options": set(),
    "cli_say": set(),
    "cli_subject": ANY,
    "cli_bench": ANY,
    "cli_claims": ANY,
    "cli_stream": ANY,
    "cli_report": ANY,
    "__main__": {"cli"},
    "__init__": ANY,  # names the public API, lazily
}  # fmt: skip
"""What a module of this package may import of it, beside ``errors``, which all may."""

CLI = {
    "__main__", "cli", "cli_advise", "cli_bench", "cli_calibrate", "cli_claims", "cli_decide",
    "cli_options", "cli_report", "cli_say", "cli_stream", "cli_subject",
}  # fmt: skip
ONLY_IMPORTED_BY = {
    "figures": CLI
    | {
        "report",
        "engine_figures",
        "figure_parts",
        "decision_figures",
        "model_figures",
    },
    "engine_figures": CLI | {"report"},
    "decision_figures": CLI | {"report", "model_figures"},
    "model_figures": CLI | {"report"},
    "bench": CLI | {"report"},
    "report": CLI,
    "export": {"report"},
    "cli": {"__main__"},
}

ENGINE = [
    "geometry", "checkpoint", "adapter", "fuse", "kernels", "restore", "resident", "run", "cost",
    "digest", "plan", "recipe", "streamed", "fusedfile", "forward", "overlap", "planner",
]  # fmt: skip
NOT_NEEDED = ["pydantic", "typer", "tqdm", "psutil", "pandas", "plotly", "numba"]


def module_files() -> dict[str, list[Path]]:
    """The files of each module: one, or those of a subpackage."""
    found: dict[str, list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        found.setdefault(path.relative_to(PACKAGE).parts[0].removesuffix(".py"), []).append(path)
    return found


def imported(source: str, package: str, modules: set[str]) -> set[str]:
    """The modules of ``lorabench`` that a file of ``package`` imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: 1 - node.level or None] if node.level else []
            home = ".".join([*parents, *([node.module] if node.module else [])])
            names |= {f"{home}.{alias.name}" for alias in node.names}
    parts = [name.split(".") for name in names if name.split(".")[0] == "lorabench"]
    return {p[1] if len(p) > 1 and p[1] in modules else "__init__" for p in parts}


MODULES = module_files()
IMPORTS = {
    module: set().union(
        *(
            imported(
                path.read_text("utf-8"),
                ".".join(["lorabench", *path.relative_to(PACKAGE).parts[:-1]]),
                set(MODULES),
            )
            for path in paths
        )
    )
    for module, paths in MODULES.items()
}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import lorabench.plan", {"plan"}),
        ("import lorabench.kernels.gemm as g, torch", {"kernels"}),
        ("from lorabench import recipe, State", {"recipe", "__init__"}),
        ("from lorabench.cost import Work", {"cost"}),
        ("def f():\n    from lorabench.cost import Work", {"cost"}),
        ("from . import gemm", {"kernels"}),
        ("from .gemm import fuse_gemm", {"kernels"}),
        ("from .. import plan", {"plan"}),
        ("from ..plan import Load", {"plan"}),
        ("import lorabenchmark, planar", set()),
    ],
)
def test_imports_are_found_in_every_form(source, found):
    assert imported(source, "lorabench.kernels", set(MODULES)) == found


def test_every_module_has_its_place_in_the_table():
    assert MODULES.keys() <= MAY_IMPORT.keys()


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_it_may(module):
    allowed = MAY_IMPORT[module]
    if allowed is not ANY:
        assert IMPORTS[module] - {module, "errors"} <= allowed


@pytest.mark.parametrize("module", ONLY_IMPORTED_BY)
def test_few_may_import_what_stands_above_the_rest(module):
    importers = {name for name, found in IMPORTS.items() if module in found and name != module}
    assert importers <= ONLY_IMPORTED_BY[module]


def test_there_is_no_utils():
    assert not [path for path in PACKAGE.rglob("*") if path.stem in ("utils", "util", "helpers")]


BLOCKER = f"""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {NOT_NEEDED!r}:
            raise ModuleNotFoundError(f"{{name}} is not installed here", name=name)

sys.meta_path.insert(0, Blocker())
"""


def run(code: str, *arguments: str) -> str:
    """Run code in a Python that has none of what the engine can do without."""
    done = subprocess.run(
        [sys.executable, "-c", BLOCKER + code, *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_blocker_blocks():
    code = "\n".join(
        f"try:\n    import {name}\nexcept ModuleNotFoundError:\n    print('{name}')"
        for name in NOT_NEEDED
    )
    assert run(code).split() == NOT_NEEDED


def test_the_engine_works_with_torch_safetensors_and_numpy_alone(files):
    code = """
from importlib import import_module
for module in sys.argv[2:]:
    import_module(f"lorabench.{module}")

from lorabench.adapter import Adapter
from lorabench.checkpoint import Checkpoint
from lorabench.plan import Strategy, plan
from lorabench.recipe import Phase, Recipe, Role, State
from lorabench.resident import ResidentWeights
from lorabench.run import walk

recipe = Recipe("r", "", "", (Role("user", True),), (Phase(State(), 1), Phase(State(user=1.0), 1)))
base = Checkpoint.open(f"{sys.argv[1]}/base.safetensors")
user = Adapter.open(f"{sys.argv[1]}/user.safetensors", base.tensors)
weights = ResidentWeights(base, {"user": user})
for action, work in walk(plan(recipe, Strategy()), weights):
    print(action.kind)
"""
    done = run(code, str(files.base.parent), *ENGINE)
    assert done.split() == ["load", "denoise", "rebind", "denoise"]


def test_only_the_scalar_kernel_needs_numba():
    code = """
from lorabench.kernels import get_kernel
import torch
for name in ("reference", "gemm", "scalar"):
    get_kernel(name, torch.device("cpu"))
try:
    import lorabench.kernels.scalar
except ModuleNotFoundError as error:
    print(error.name)
"""
    assert run(code).split() == ["numba"]
