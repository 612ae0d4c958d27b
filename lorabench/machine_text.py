"""A machine's figures, as plain JSON and for people."""

from collections.abc import Mapping
from dataclasses import asdict
from math import isfinite
from typing import Any

from lorabench.layout import scaled, table
from lorabench.rates import Machine

_UNITS = {
    "memory_bytes": "B",
    "host_bytes": "B",
    "launch_seconds": "s",
    "encode": "weights/s",
    "decode": "weights/s",
    "flops_per_second": "FLOP/s",
    "params_per_second": "weights/s",
}
"""Of a figure by the last part of its name; all others are bytes a second."""


def describe_machine(machine: Machine) -> dict[str, Any]:
    """Return a machine's figures by their names in its file; a rate that nothing bounds is null."""
    return {
        "name": machine.name,
        "title": machine.title,
        "device": machine.device,
        "provenance": machine.provenance,
        "figures": {
            name: _figure(machine, name) | asdict(origin)
            for name, origin in machine.origins.items()
        },
    }


def machine_text(fields: Mapping[str, Any]) -> str:
    """Say what `describe_machine` found."""
    rows: list[tuple[str, str, str]] = []
    for name, figure in fields["figures"].items():
        for key, value in figure.items():
            if key in ("provenance", "source"):
                continue
            full = name if key == "value" else f"{name}.{key}"
            unit = _UNITS.get(full.rpartition(".")[2], "B/s")
            told = "nothing beside the product" if value is None else scaled(value, unit)
            rows.append((full, told, figure["provenance"]))
    lines = table(("figure", "value", ""), rows, right=(1,))
    return f"{fields['title']}, on '{fields['device']}'\n\n{lines}"


def _figure(machine: Machine, name: str) -> dict[str, float | None]:
    group, _, rest = name.partition(".")
    if not rest:
        return {"value": getattr(machine, group)}
    kernel, _, size = rest.rpartition(".")
    pace = (machine.kernels[kernel] if kernel else machine.forward)[size]
    return {key: rate if isfinite(rate) else None for key, rate in asdict(pace).items()}
