"""The machine and the code that a record comes from."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any


def environment() -> dict[str, Any]:
    """Return the fingerprint of this machine and its software; no host name, user name or path."""
    import torch

    cuda = torch.cuda.is_available()
    found: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "os": platform.system(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "numpy", "numba", "safetensors")},
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch_threads": torch.get_num_threads(),
        "fast_bf16_products": _fast_bf16_products(),
        "cuda_device": torch.cuda.get_device_name(0) if cuda else None,
        "cuda": torch.version.cuda if cuda else None,
        "cuda_driver": _cuda_driver() if cuda else None,
        "load_average": list(os.getloadavg()),
    }
    parts = (_short(found["cpu"]), f"{found['cores']}c", found["torch_cpu_capability"])
    label = " ".join(map(str, (*parts, found["cuda_device"] or "")))
    return {"machine": re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-"), **found}


def machine_name(environment: Mapping[str, Any]) -> str:
    """Return the machine's short label, as ``amd-epyc-2c-avx2``; ``unknown`` where none is told."""
    return str(environment.get("machine") or "unknown")


def available_bytes() -> int | None:
    """Return the memory that a program could take now; None where the system doesn't say."""
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    except OSError:
        return None
    free = next((line for line in lines if line.startswith("MemAvailable:")), None)
    return int(free.split()[1]) * 1024 if free else None


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.M) if info.exists() else None
    return model[1].strip() if model else platform.processor() or platform.machine()


def _short(cpu: str) -> str:
    """Return a CPU's model without marks, clock rate and filler, which differ between kernels."""
    return re.sub(r"\((R|TM)\)|@.*|\b(\d+-Core|CPU|Processor)\b", " ", str(cpu), flags=re.I)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _fast_bf16_products() -> bool:
    """Return whether oneDNN multiplies bf16 natively on this CPU, rather than by way of f32."""
    import torch

    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):  # a build without oneDNN
        return False


def _cuda_driver() -> str | None:
    about = Path("/proc/driver/nvidia/version")
    version = re.search(r"\s(\d+(?:\.\d+)+)\s", about.read_text()) if about.exists() else None
    return version[1] if version else None


def git_commit() -> str:
    """Return the commit of the code that runs: ``1a2b3c4d5e6f``, ``+dirty`` where it was changed.

    ``unknown`` where this package isn't tracked by git, though it may lie inside a checkout of
    something else. Records being collected don't make the code dirty, nor do untracked files.
    """
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return "unknown"
    commit = _git("rev-parse", "--short=12", "HEAD")
    changes = _git(
        *("--no-optional-locks", "status", "--porcelain", "--untracked-files=no"),
        *("--", ":(top)", ":(top,exclude)data/records"),
    )
    return "unknown" if commit is None else f"{commit}+dirty" if changes else commit


def _git(*arguments: str) -> str | None:
    # A git hook's variables would point git at another repository than the package's.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
