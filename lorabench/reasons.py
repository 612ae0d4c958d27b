"""Why a plan is the cheapest, in sentences for people."""

from collections.abc import Iterator

from lorabench.plan_text import duration, gib
from lorabench.planner import Advice, Choice, label
from lorabench.pricing import Memory

# of each part, what is said where it saves and where it costs
_PARTS = {
    "read": ("less reading", "more reading"),
    "keep": ("less keeping", "more keeping"),
    "restore": ("less restoring", "more restoring"),
    "fuse": ("less fusing", "more fusing"),
    "image": ("less making of images", "more making of images"),
    "apply": ("less for unfused adapters", "more for unfused adapters"),
    "hidden": ("more of it hidden", "less of it hidden"),
}


def why(advice: Advice) -> list[str]:
    """Return why the advised plan is the cheapest, a sentence for each thing that matters to it.

    What it saves against the runner-up, by part; what it takes of the memory there is; the cheaper
    plans that don't fit, with what they need; the idle time that it uses, and what would hide all
    of its rebinds; and where the base's file is taken to come from.
    """
    best = advice.best
    told = [*_against(best, advice.runner_up)]
    told.append(f"'{label(best)}' takes {_memory(best.memory, advice.limits)}")
    for choice in advice.too_large:
        if choice.value[:2] < best.value[:2]:
            saved = duration(best.bill.binding_seconds - choice.bill.binding_seconds)
            taken = _memory(choice.memory, advice.limits)
            told.append(f"'{label(choice)}' would save {saved} more, but takes {taken}")
    told += _idle(best, advice.setting.idle_seconds)
    if best.cold:
        told.append(
            "the base's file comes from the disk, for the load and wherever it is read again"
        )
    return told


def parts_of(choice: Choice) -> dict[str, float]:
    """Return the seconds that a plan takes for binding by part, and, negative, those ``hidden``.

    Their sum is what renders wait for binding; what their own forwards take isn't in it.
    """
    parts = dict.fromkeys((*_PARTS, "forward"), 0.0)
    for line in choice.bill.lines:
        for part, seconds in line.cost.parts.items():
            parts[part] += seconds
        parts["hidden"] -= line.cost.seconds - line.waited_seconds
    del parts["forward"]  # denoising's own, which no strategy changes
    return parts


def _against(best: Choice, other: Choice | None) -> Iterator[str]:
    if other is None:
        return
    margin = other.bill.binding_seconds - best.bill.binding_seconds
    mine, others = parts_of(best), parts_of(other)
    saved = {part: others[part] - mine[part] for part in _PARTS}
    told = [
        f"{duration(abs(saved[part]))} {less if saved[part] > 0 else more}"
        for part, (less, more) in sorted(_PARTS.items(), key=lambda item: -abs(saved[item[0]]))
        if abs(saved[part]) > max(5e-3 * margin, 1e-9)
    ]
    if best.value.waited_ns == other.value.waited_ns:
        yield f"'{label(best)}' waits as long as the runner-up, '{label(other)}', and takes less"
        return
    by = f": {', '.join(told)}" if told else ""
    yield f"'{label(best)}' waits {duration(margin)} less than the runner-up, '{label(other)}'{by}"


def _memory(memory: Memory, limits: Memory) -> str:
    told = f"{gib(memory.device_bytes)} of {gib(limits.device_bytes)}"
    if memory.host_bytes:
        told += f", and {gib(memory.host_bytes)} of {gib(limits.host_bytes)} of the host's"
    return told


def _idle(best: Choice, idle_seconds: float) -> Iterator[str]:
    hidden = [line for line in best.bill.lines if not line.action.critical]
    if hidden:
        needed = best.bill.idle_needed_seconds
        enough = f"{duration(needed)} would hide them all" if needed > idle_seconds else "enough"
        many = "a rebind goes" if len(hidden) == 1 else f"{len(hidden)} rebinds go"
        yield f"{many} on in {duration(idle_seconds)} of idle time each: {enough}"
