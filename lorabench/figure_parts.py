"""What figures of times share: an axis that tells them as a person would, menus, legends."""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import plotly.graph_objects as go

from lorabench.figures import choose, decades

_TICKS = {
    **{1e-6: "1 µs", 1e-5: "10 µs", 1e-4: "0.1 ms", 1e-3: "1 ms", 1e-2: "10 ms", 0.1: "0.1 s"},
    **{1.0: "1 s", 10.0: "10 s", 60.0: "1 min", 600.0: "10 min", 3600.0: "1 h", 36000.0: "10 h"},
    **{86400.0: "1 d", 864000.0: "10 d", 8640000.0: "100 d"},
}


def times_axis(
    seconds: Iterable[float], *, room: float = 0.35, few: bool = False
) -> tuple[dict[str, Any], float]:
    """Return a log axis of times, told as a person would, and its left end in seconds.

    Parameters
    ----------
    room
        Decades for labels at the right end.
    few
        Leave every other tick out, and those that would reach into a neighbour's axis.
    """
    axis = decades(seconds)
    low, high = axis["range"][0], axis["range"][1] + room - 0.35
    last = high - 0.2 * (high - low) if few else high
    ticks = [tick for tick in _TICKS if 10**low <= tick <= 10**last][:: 2 if few else 1]
    told = {"tickvals": ticks, "ticktext": [_TICKS[tick] for tick in ticks]}
    return {"type": "log", "range": [low, high], **told}, 10.0**low


def short(told: str) -> str:
    """Shorten a duration's unit, for a label beside a bar."""
    units = {"milliseconds": "ms", "seconds": "s", "minutes": "min", "hours": "h"}
    number, _, unit = told.partition(" ")
    return f"{number} {units.get(unit, unit)}" if unit in units else told.replace("no time", "0")


def menu_above(
    figure: go.Figure, owners: Sequence[str], choices: Sequence[str], height: int
) -> go.Figure:
    """Add a menu above the left end, clear of plotly's own buttons, where there is a choice."""
    if len(choices) > 1:
        choose(figure, owners, choices)
        place = {"x": 0, "xanchor": "left", "y": 1 + 28 / (height - 200)}
        figure.update_layout({f"updatemenus[0].{key}": value for key, value in place.items()})
    else:
        named = set[str]()
        for trace in cast("tuple[go.Bar | go.Scatter, ...]", figure.data):
            trace.update(showlegend=trace.name not in named)
            named.add(str(trace.name))
    return figure


def legend_below(figure: go.Figure, height: int) -> go.Figure:
    """Put the legend right below the axis, however high the figure is."""
    return figure.update_layout(legend_y=-80 / height, legend_yanchor="top")
