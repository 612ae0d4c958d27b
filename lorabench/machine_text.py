"""A machine's figures, as plain JSON and for people."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from math import isfinite
from typing import Any

from lorabench.layout import scaled, table
from lorabench.rates import Machine, Origin

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

_ORIGIN = tuple(field.name for field in fields(Origin))


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


def machine_text(described: Mapping[str, Any]) -> str:
    """Say what `describe_machine` found."""
    rows: list[tuple[str, str, str]] = []
    for name, figure in described["figures"].items():
        origin = f"{figure['provenance']}, at most" if figure["ceiling"] else figure["provenance"]
        for key, value in figure.items():
            if key in _ORIGIN:
                continue
            full = name if key == "value" else f"{name}.{key}"
            unit = _UNITS.get(full.rpartition(".")[2], "B/s")
            told = "nothing beside the product" if value is None else scaled(value, unit)
            rows.append((full, told, origin))
    lines = table(("figure", "value", ""), rows, right=(1,))
    return f"{described['title']}, on '{described['device']}'\n\n{lines}"


def _figure(machine: Machine, name: str) -> dict[str, float | None]:
    group, _, rest = name.partition(".")
    if not rest:
        return {"value": getattr(machine, group)}
    kernel, _, size = rest.rpartition(".")
    pace = (machine.kernels[kernel] if kernel else machine.forward)[size]
    return {key: rate if isfinite(rate) else None for key, rate in asdict(pace).items()}
