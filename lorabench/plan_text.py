"""A priced plan in text: its actions in a table, repeats told once, and a timeline to scale."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from math import fsum, isclose
from typing import Any

from lorabench.layout import table
from lorabench.recipe import State

Fields = Mapping[str, Any]

_BAR = 40
"""Columns of a timeline's longest stretch."""
_NAME = 33
"""Columns of an action's name beside it."""
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_MARK, _HIDDEN = "▸", "░"
_WAYS = ("disk", "host", "link", "device")
_FORM = {"resident": "denoise", "runtime": "denoise, unfused", "per_layer": "denoise, per layer"}


@dataclass(frozen=True)
class Row:
    """Actions that follow one another and take the same, told once."""

    action: Fields
    count: int
    renders: range


@dataclass(frozen=True)
class Group:
    """What renders that go through the same actions, or batches that do, have each."""

    rows: tuple[Row, ...]
    times: int
    renders: range


def fold(actions: Sequence[Fields], together: int) -> list[Group]:
    """Fold a plan's actions: repeats in a batch of so many renders, and batches that are the same.

    Actions are the same if they do the same and take the same, whatever their renders.
    """
    batches: list[list[Row]] = []
    for _, in_batch in groupby(actions, lambda action: action.get("render", 0) // together):
        rows = []
        for _, same in groupby(in_batch, _alike):
            found = list(same)
            first, last = (found[i].get("render", 0) for i in (0, -1))
            rows.append(Row(found[0], len(found), range(first, last + 1)))
        batches.append(rows)
    groups = []
    for _, same in groupby(batches, lambda rows: [(_alike(r.action), r.count) for r in rows]):
        found = list(same)
        first, last = found[0][0].renders.start, max(row.renders.stop for row in found[-1])
        groups.append(Group(tuple(found[0]), len(found), range(first, last)))
    return groups


def actions_text(groups: Sequence[Group]) -> str:
    """Lay out what each action takes, repeats once; ways that move nothing are left out."""
    ways = [w for w in _WAYS if any(row.action[f"{w}_bytes"] for g in groups for row in g.rows)]
    rows: list[Sequence[str]] = []
    for group in groups:
        if len(groups) > 1:
            rows.append((_renders(group), *[""] * (4 + len(ways))))
        for row in group.rows:
            action = row.action
            times = f" x{row.count}" if row.count > 1 else ""
            phase = action.get("phase")
            rows.append(
                (
                    "  " + _kind(action) + times,
                    "" if phase is None else str(phase),
                    str(State(action.get("to", action.get("state")))).replace(" + ", "\n+ "),
                    duration(action["seconds"]),
                    duration(action["waited_seconds"]),
                    *(_gigabytes(action[f"{way}_bytes"]) for way in ways),
                )
            )
    header = (
        "action",
        "phase",
        "state",
        "takes",
        "waits",
        *(f"{way}\nGB" for way in ways),
    )
    return table(header, rows, right=(1, *range(3, 5 + len(ways))))


def timeline_text(groups: Iterable[Group]) -> str:
    """Draw what is waited for to scale, and where forwards come in; hidden work is shaded."""
    placed = [(group, _starts(group)) for group in groups]
    ends = [at + _row_taken(row) for group, starts in placed for at, row in starts]
    longest = max([*ends, 1e-12])
    lines = [
        f"Timeline: {_BAR} columns are {duration(longest)} (predicted); █ waited for, "
        f"{_HIDDEN} hidden, {_MARK} denoise, not to scale"
    ]
    for group, starts in placed:
        lines.append(_renders(group))
        for at, row in starts:
            label = textwrap.shorten(_label(row), _NAME, placeholder="...")
            drawn = _drawn(row, at / longest, _BAR / longest)
            lines.append(f"  {label:{_NAME}}  {drawn:{_BAR + 1}}  {_took(row)}".rstrip())
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """Tell seconds in the unit that a person would: ``45 ms``, ``3.4 min``, ``2.1 h``."""
    if not seconds:
        return "0 s"
    units = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"))
    size, unit = next((unit for unit in units if abs(seconds) >= unit[0]), (1e-6, "us"))
    told = seconds / size
    return f"{told:.0f} {unit}" if abs(told) >= 100 else f"{told:.3g} {unit}"


def gib(nbytes: float) -> str:
    """Tell bytes of memory in GiB, or in MiB where they are few."""
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**29 else f"{nbytes / 2**20:.1f} MiB"


def _alike(action: Fields) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in action.items() if key != "render"]


def _renders(group: Group) -> str:
    first, last = group.renders[0], group.renders[-1]
    if first == last:
        return f"render {first}"
    if group.times == 1:
        return f"renders {first}-{last} together"
    size = len(group.renders) // group.times
    return f"renders {first}-{last}, each" if size == 1 else f"renders {first}-{last} by {size}"


def _kind(action: Fields) -> str:
    if action["kind"] == "denoise":
        return _FORM[action["apply"]]
    if action["kind"] == "rebind" and not action["critical"]:
        return "rebind, hidden"
    return "rebind, ahead" if action.get("overlapped") else action["kind"]


def _label(row: Row) -> str:
    action = row.action
    if action["kind"] == "denoise":
        told = f"denoise phase {action['phase']}"
        return f"{told} x{row.count}" if row.count > 1 else told
    return f"{_kind(action)} {State(action.get('to', action.get('state')))}"


def _row_wait(row: Row) -> float:
    """Return what is waited for binding, beside forwards."""
    action = row.action
    alone = action["kind"] == "denoise"
    waited = action["parts"].get("apply", 0.0) if alone else action["waited_seconds"]
    return row.count * waited


def _row_taken(row: Row) -> float:
    parts = row.action["parts"].items()
    return row.count * fsum(seconds for part, seconds in parts if part != "forward")


def _starts(group: Group) -> list[tuple[float, Row]]:
    """Place actions one after another; what is hidden takes no place."""
    ends = accumulate(map(_row_wait, group.rows), initial=0.0)
    return list(zip(ends, group.rows, strict=False))


def _drawn(row: Row, start: float, scale: float) -> str:
    """Draw an action's bar from where it starts, a share of the whole, on."""
    at, waited = round(_BAR * start), _row_wait(row)
    eighths = round(8 * scale * waited)
    bar = "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
    if row.action["kind"] == "denoise":
        return " " * at + bar[: _BAR - at] + _MARK
    hidden = _HIDDEN * round(scale * (_row_taken(row) - waited))
    return " " * at + (bar + hidden)[: _BAR - at]


def _took(row: Row) -> str:
    action = row.action
    if action["kind"] == "denoise":
        forwards = duration(row.count * action["parts"].get("forward", 0.0))
        unfused = _row_wait(row)
        return f"({forwards})" if not unfused else f"{duration(unfused)} ({forwards})"
    waited, taken = _row_wait(row), _row_taken(row)
    return duration(taken) if isclose(waited, taken) else f"{duration(waited)} of {duration(taken)}"


def _gigabytes(nbytes: int) -> str:
    amount = nbytes / 1e9
    if amount >= 1000:
        return f"{amount:,.0f}"
    return f"{amount:.3g}" if amount >= 0.1 else f"{amount:.1g}" if amount else ""
