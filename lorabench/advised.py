"""What `lorabench.planner.advise` found, as plain JSON."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from lorabench.bill import Bill, binding_seconds, first_and_later
from lorabench.breakeven import Change
from lorabench.machine_text import describe_machine
from lorabench.plan import STRATEGIES, STRATEGY_VALUES, Load, Rebind, Strategy
from lorabench.planner import Advice, Choice, label
from lorabench.reasons import why
from lorabench.setting import INEXACT, Pricings

LIMITS = (
    "every second is predicted, from the machine's rates and the bytes and FLOPs of the headers",
    "forwards are the targets' products alone: no attention, no norms, no VAE, no text encoder",
    "memory is that of weights, factors, scratch and kept bits: activations come on top",
    "a warm file is in the page cache, for which the machine has room beside the weights; a first "
    "load after a start is cold: --cache cold",
    "memory is the machine's own: what a virtual machine has yet to be given by its host, as at a "
    "first load, takes longer",
)
"""What the model leaves out."""

RESTORES = {
    "reread": "read base bits again",
    "host_snapshot": "keep a copy of the base in the host's memory",
    "device_snapshot": "keep a copy of the base on the device",
    "residual": "keep what subtracting gets wrong",
    "images": "keep an image of each state",
    "subtract": "subtract (not exact)",
}
"""How base bits come back, in a few words."""


Asked = Mapping[str, Mapping[str, Any]]
"""Of each bound role: its strength, the adapter's path (or None), targets and ranks."""


def describe_advice(
    advice: Advice,
    pricings: Pricings,
    asked: Asked,
    changes: Iterable[Change],
) -> dict[str, Any]:
    """Return what was asked, the advised plan with each action's cost, and what it beats.

    Seconds are predicted. ``binding_seconds`` are what renders wait for loads, rebinds and
    unfused adapters, ``critical_seconds`` are these with the forwards, and ``total_seconds`` are
    what all actions take, waited for or not.
    """
    setting, best, machine = advice.setting, advice.best, pricings.machine
    named = {name: _choice(choice, advice) for name, choice in advice.named.items()}
    cheaper = [c for c in advice.too_large if _wait(c) < _wait(best)]
    runner_up = advice.runner_up
    # a batch's first render waits for all of them, which isn't everybody's way
    singly = next((c for c in advice.choices if c.strategy.order == "render_major"), None)
    if best.strategy.order == "render_major":
        singly = None
    return {
        "recipe": setting.recipe.name,
        "adapters": {role: dict(told) for role, told in asked.items()},
        "renders": setting.renders,
        "memory_bytes": advice.limits.device_bytes,
        "host_bytes": None if machine.host_bytes is None else advice.limits.host_bytes,
        "idle_seconds": setting.idle_seconds,
        "batch": setting.batch,
        "only": {field: list(values) for field, values in setting.only.items()},
        "cache": pricings.cache,
        "geometry": pricings.geometry.name,
        "rank": pricings.geometry.rank,
        "machine": describe_machine(machine),
        "provenance": "predicted",
        "limits": list(LIMITS),
        "advised": _choice(best, advice) | {"actions": _actions(best.bill)},
        "why": why(advice),
        "runner_up": _choice(runner_up, advice) | _margin(runner_up, best) if runner_up else None,
        "cheapest_one_by_one": _choice(singly, advice) if singly else None,
        "considered": {"fit": len(advice.choices), "too_large": len(advice.too_large)},
        "cheaper_but_too_large": _choice(min(cheaper, key=_wait), advice) if cheaper else None,
        "named": named,
        "not_priced": [name for name in STRATEGIES if name not in named],
        "unpriced": list(advice.unpriced),
        "changes": [change.as_dict() for change in changes],
    }


def summary(choice: Choice, batch: int | None = None) -> str:
    """Say a plan in one line."""
    strategy, actions = choice.strategy, choice.actions
    loads = [f"load {action.state}" for action in actions if isinstance(action, Load)]
    if strategy.apply == "runtime":
        told = [*loads, "fuse nothing: each forward adds s·B(Ax)"]
    elif strategy.apply == "per_layer":
        told = [*loads, "keep nothing fused: each forward fuses each weight into scratch"]
    else:
        rebinds = [action for action in actions if isinstance(action, Rebind)]
        told = [*loads, RESTORES[strategy.restore] if rebinds else "never rebind"]
        if any(rebind.overlapped for rebind in rebinds):
            told.append("rebind ahead of each phase's first forward")
        if any(not rebind.critical for rebind in rebinds):
            told.append("make ready for the next render after one")
    if strategy.order == "phase_major":
        told.append("all renders" if batch is None else f"{batch} renders at a time")
        told[-1] += " through a phase together"
    return ", ".join((*told, f"kernel {strategy.kernel}"))


def differences(strategy: Strategy, other: Strategy) -> list[str]:
    """Name the fields in which a strategy is another than ``other``."""
    mine, others = asdict(strategy), asdict(other)
    return [f"{field}={mine[field]}" for field in STRATEGY_VALUES if mine[field] != others[field]]


def _choice(choice: Choice, advice: Advice) -> dict[str, Any]:
    bill, setting = choice.bill, advice.setting
    first, later = first_and_later(bill, len(setting.recipe.phases), setting.renders)
    waited = dict.fromkeys(("load", "rebind", "denoise"), 0.0)
    for line in bill.lines:
        waited[line.action.kind] += binding_seconds(line)
    hidden = [line for line in bill.lines if not line.action.critical]
    return {
        "strategy": asdict(choice.strategy),
        "label": label(choice),
        "summary": summary(choice, setting.batch),
        "cache": "cold" if choice.cold else "warm",
        "device_bytes": choice.memory.device_bytes,
        "host_bytes": choice.memory.host_bytes,
        "fits": advice.fits(choice),
        "exact": choice.strategy.apply != "resident" or choice.strategy.restore not in INEXACT,
        "binding_seconds": bill.binding_seconds,
        "first_render_seconds": first,
        "later_render_seconds": later,
        "waited_seconds": {
            "loads": waited["load"],
            "rebinds": waited["rebind"],
            "unfused_adapters": waited["denoise"],
        },
        "critical_seconds": bill.critical_seconds,
        "total_seconds": bill.total_seconds,
        "hidden_rebinds": len(hidden),
        "idle_needed_seconds": bill.idle_needed_seconds,
    }


def _margin(runner_up: Choice, best: Choice) -> dict[str, Any]:
    margin = _wait(runner_up) - _wait(best)
    return {
        "differs_in": differences(runner_up.strategy, best.strategy),
        "margin_seconds": margin,
        "margin": margin / _wait(best) if _wait(best) else None,
    }


def _actions(bill: Bill) -> list[dict[str, Any]]:
    return [
        {
            **line.action.as_dict(),
            "seconds": line.cost.seconds,
            "waited_seconds": line.waited_seconds,
            "parts": dict(line.cost.parts),
            "flops": line.cost.work.flops,
            "disk_bytes": line.cost.disk_bytes,
            "host_bytes": line.cost.host_bytes,
            "link_bytes": line.cost.link_bytes,
            "device_bytes": line.cost.device_bytes,
        }
        for line in bill.lines
    ]


def _wait(choice: Choice) -> float:
    return choice.bill.binding_seconds
