"""The figures of ours that claims are held against: counted from what is shipped, or measured.

A new one is a line here: a name and what it is counted or measured from.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from statistics import median

from lorabench.arithmetic import Number
from lorabench.errors import ConfigError
from lorabench.geometry import Geometry
from lorabench.machine import machine_name
from lorabench.plan import STRATEGIES, Action, Load, Rebind, plan
from lorabench.recipe import BASE, Recipe
from lorabench.records import Record

COUNTED, MEASURED = "counted_", "measured_"
"""What the names of our figures begin with; every other name is a claim's."""

BASE_PREFIX, ADAPTER_PREFIX = "model.diffusion_model.", "diffusion_model."
ADAPTER_SUFFIXES = (".lora_A.weight", ".lora_B.weight")
RANKS = (450, 256, 128, 32)
"""The published adapter's: its own, and what smaller modules cap it to."""


def counted_figures(geometry: Geometry, recipes: Iterable[Recipe]) -> dict[str, Number]:
    """Count a model, the adapter on all its targets, and what bound recipes ask of an engine.

    Plans are ``as_written`` over two renders, unless a name says otherwise. A pass is one fuse or
    one un-fuse; a rebind between two fused states is two of them.
    """
    counts, factors = geometry.counts(), list(geometry.adapter_tensors())
    prefixed = [t.name for t in factors if t.name.startswith(ADAPTER_PREFIX)]
    figures: dict[str, Number] = {
        "tensors": counts.tensors,
        "params": counts.params,
        "tensor_bytes": counts.tensor_bytes,
        "bf16_tensors": sum(t.dtype == "BF16" for t in geometry.tensors),
        "f32_tensors": sum(t.dtype == "F32" for t in geometry.tensors),
        "prefixed_tensors": sum(t.name.startswith(BASE_PREFIX) for t in geometry.tensors),
        "targets": counts.targets,
        "touched_params": counts.touched_params,
        "macs": counts.macs or 0,
        "adapter_tensors": len(factors),
        "adapter_bf16_tensors": sum(t.dtype == "BF16" for t in factors),
        "adapter_tensors_in_form": sum(name.endswith(ADAPTER_SUFFIXES) for name in prefixed),
        "adapter_params": counts.adapter_params or 0,
        "adapter_tensor_bytes": counts.adapter_tensor_bytes or 0,
        "adapter_rank": max(counts.ranks or {0: 0}),
    }
    figures |= {f"pairs_at_rank_{rank}": (counts.ranks or {}).get(rank, 0) for rank in RANKS}
    recipes = list(recipes)
    for recipe in recipes:
        figures |= {f"{recipe.name}_{name}": n for name, n in _count_recipe(recipe).items()}
    staged = [r for r in recipes if len(r.phases) > 1 and r.roles]
    changes = [figures[f"{recipe.name}_state_changes"] for recipe in staged]
    figures |= {
        "staged_recipes": len(staged),
        "staged_recipes_rebinding": sum(n > 0 for n in changes),
        "staged_recipes_in_one_state": sum(n == 0 for n in changes),
    }
    return {f"{COUNTED}{name}": figure for name, figure in figures.items()}


def measured_figures(records: Iterable[Record], geometry: Geometry) -> dict[str, dict[str, Number]]:
    """Return each machine's figures by name, from records on this geometry at its real width.

    Machines are never mixed; a name that a machine has no record for isn't there.

    Raises
    ------
    ConfigError
        A record lacks what records of its kind have.
    """
    by_machine: dict[str, list[Record]] = {}
    cut_params = cache(lambda blocks: sum(t.params for t in geometry.cut(blocks).tensors))
    for record in records:
        if record.provenance == "measured" and _at_real_width(record, geometry, cut_params):
            by_machine.setdefault(machine_name(record.environment), []).append(record)
    figures: dict[str, dict[str, Number]] = {}
    for machine, found in sorted(by_machine.items()):
        figures[machine] = {}
        for name, measure in _MEASURES.items():
            try:
                figure = measure(found, geometry)
            except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
                raise ConfigError(
                    f"records of {machine}: {MEASURED}{name} can't be taken from them ({error!r}); "
                    f"measure again or leave them out"
                ) from error
            if figure is not None:
                figures[machine][f"{MEASURED}{name}"] = figure
    return figures


def measured_names() -> tuple[str, ...]:
    """Return the names that records may give a figure for."""
    return tuple(f"{MEASURED}{name}" for name in _MEASURES)


def _count_recipe(recipe: Recipe) -> dict[str, Number]:
    actions = plan(recipe, STRATEGIES["as_written"], renders=2)
    first = [a for a in actions if isinstance(a, Load) or a.render == 0]
    phase_aware = plan(recipe, STRATEGIES["phase_aware"])
    states = [phase.state for phase in recipe.phases]
    return {
        "load_passes": _passes(actions[:1]),
        "passes_before_denoise": _passes(_opening(actions)),
        "passes_before_denoise_phase_aware": _passes(_opening(phase_aware)),
        "passes_first_render": _passes(first),
        "rebinds_next_render": sum(isinstance(a, Rebind) and a.render == 1 for a in actions),
        "state_changes": sum(a != b for a, b in pairwise(states)),
        "fused_or_not_changes": sum(bool(a) != bool(b) for a, b in pairwise(states)),
        **{
            f"phase_{number}_{role}": strength
            for number, state in enumerate(states)
            for role, strength in state.items()
        },
    }


def _opening(actions: Sequence[Action]) -> Sequence[Action]:
    return actions[: next(i for i, action in enumerate(actions) if action.kind == "denoise")]


def _passes(actions: Iterable[Action]) -> int:
    passes = 0
    for action in actions:
        if isinstance(action, Load):
            passes += action.state != BASE
        elif isinstance(action, Rebind):
            passes += (action.before != BASE) + (action.after != BASE)
    return passes


def _at_real_width(record: Record, geometry: Geometry, cut_params: Callable[[int], int]) -> bool:
    """Tell weights of the model's own shapes, whole or cut, from shrunken ones of the same name."""
    case, blocks = record.case, record.case.get("blocks")
    if case.get("geometry") != geometry.name or not isinstance(blocks, int):
        return False
    if not 0 <= blocks <= geometry.blocks:
        return False
    return case.get("params") in (cut_params(blocks), sum(t.params for t in geometry.tensors))


def _rate(contender: str) -> "Measure":
    def measure(records: Sequence[Record], _: Geometry) -> Number | None:
        rates = [
            r.counted["flops"] / median(r.seconds) / 1e9
            for r in records
            if r.case["bench"] == "kernels"
            and (r.case["contender"], r.case["device"]) == (contender, "cpu")
        ]
        return median(rates) if rates else None

    return measure


def _busy_threads(records: Sequence[Record], _: Geometry) -> Number | None:
    busy = [sum(n > 0.5 for n in _threads(r).values()) for r in _loops(records)]
    return max(busy, default=None)


def _busiest_thread(records: Sequence[Record], _: Geometry) -> Number | None:
    busiest = [max(_threads(r).values()) for r in _loops(records)]
    return 100 * median(busiest) if busiest else None


def _stack_share(records: Sequence[Record], _: Geometry) -> Number | None:
    """Return the share of the stack samples that are inside the scalar kernel, in percent."""
    inside = samples = 0
    for record in _loops(records):
        for stack in record.details["stacks"]:  # pyright: ignore[reportGeneralTypeIssues, reportOptionalIterable]
            kernel = any(f.startswith("lorabench.kernels.scalar:") for f in stack["frames"])
            inside, samples = inside + kernel * stack["samples"], samples + stack["samples"]
    return 100 * inside / samples if samples else None


def _widening(records: Sequence[Record], _: Geometry) -> Number | None:
    """Return how fast the loop's f32 weights grow, in GiB a second."""
    loops = _loops(records)
    rates = [r.counted["widened_bytes"] / sum(r.seconds) / 2**30 for r in loops]
    return median(rates) if rates else None


def _whole_pass(records: Sequence[Record], geometry: Geometry) -> Number | None:
    """Return the hours of a scalar pass that ran to its end over every block."""
    ended = [
        sum(r.seconds) / 3600
        for r in records
        if r.case["bench"] == "loop"
        and r.case.get("budget_seconds", 0) is None
        and r.case["blocks"] == geometry.blocks
    ]
    return median(ended) if ended else None


def _streamed_pass(records: Sequence[Record], geometry: Geometry) -> Number | None:
    """Return the seconds of fusing one adapter into every block, read from the disk."""
    passes = [
        median(r.seconds)
        for r in records
        if r.case["bench"] == "stream"
        and (r.case["blocks"], r.case["kernel"]) == (geometry.blocks, "gemm")
        and r.case.get("before") == "base"
        and "+" not in str(r.case["state"])
    ]
    return median(passes) if passes else None


def _exact_rereads(records: Sequence[Record], _: Geometry) -> Number | None:
    """Return the share of un-fuses by re-reading that gave a load's bits, in percent."""
    benches = ("walk", "stream")
    walks = [r for r in records if r.case["bench"] in benches and r.case["state"] == "base"]
    loaded = {(str(r.case["files"]), _digest(r)) for r in walks if r.case["action"] == "load"}
    reread = [
        (str(r.case["files"]), _digest(r)) in loaded
        for r in walks
        if (r.case["action"], r.case["restore"]) == ("rebind", "reread")
    ]
    return 100 * sum(reread) / len(reread) if reread else None


def _loops(records: Sequence[Record]) -> list[Record]:
    """Return the loops watched for a while, as the host path runs them."""
    return [
        r
        for r in records
        if r.case["bench"] == "loop"
        and r.case.get("budget_seconds") is not None
        and r.case.get("widen", True)
    ]


def _threads(record: Record) -> Mapping[str, float]:
    return record.details["threads"]  # pyright: ignore[reportReturnType]


def _digest(record: Record) -> str:
    return record.check.split(";")[0].split(",")[0]


Measure = Callable[[Sequence[Record], Geometry], Number | None]

_MEASURES: dict[str, Measure] = {
    "scalar_gflops": _rate("scalar"),
    "gemm_gflops": _rate("gemm"),
    "busy_threads": _busy_threads,
    "busiest_thread_percent": _busiest_thread,
    "scalar_stack_percent": _stack_share,
    "widened_gib_per_second": _widening,
    "scalar_pass_hours": _whole_pass,
    "streamed_pass_seconds": _streamed_pass,
    "exact_reread_percent": _exact_rereads,
}
