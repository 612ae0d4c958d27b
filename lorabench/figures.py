"""Figures: a DataFrame in, a plotly Figure out, with a text for those who can't see it.

Each provenance is drawn in its own way: measured solid, derived hatched, predicted dotted,
published as an open diamond, so that nothing extrapolated passes for a measurement.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

# Okabe and Ito's palette, which colour-blind readers can tell apart.
COLOURS = {
    "load": "#7f8c9b",
    "restore": "#0072b2",
    "fuse": "#d55e00",
    "hidden rebind": "#e69f00",
    "denoise": "#009e73",
    "rebind": "#e69f00",
    # of a pass's account
    "read": "#7f8c9b",
    "copy": "#56b4e9",
    "product": "#d55e00",
    "add": "#e69f00",
    "write": "#009e73",
    "other": "#cccccc",
}
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
PATTERNS = {"measured": "", "derived": "/", "predicted": "."}


def rates(frame: pd.DataFrame) -> go.Figure:
    """Draw GFLOP/s by contender on a log axis.

    Parameters
    ----------
    frame
        Columns ``contender``, ``gflops_per_s``, ``provenance``, ``machine``.
    """
    figure = go.Figure()
    for (provenance,), rows in groups(frame, "provenance"):
        labels = [f"{value:.3g}" for value in rows.gflops_per_s]
        if provenance == "published":
            figure.add_scatter(
                x=rows.gflops_per_s,
                y=rows.contender,
                mode="markers+text",
                marker={"symbol": "diamond-open", "size": 12, "color": COLOURS["load"]},
                text=labels,
                textposition="middle right",
                name=provenance,
                customdata=rows.machine,
                hovertemplate="%{x:.3g} GFLOP/s on %{customdata}<extra>published</extra>",
            )
        else:
            figure.add_bar(
                x=rows.gflops_per_s,
                y=rows.contender,
                orientation="h",
                marker={"color": SERIES[0], "pattern": {"shape": PATTERNS[provenance]}},
                text=labels,
                textposition="outside",
                cliponaxis=False,
                name=provenance,
                customdata=rows.machine,
                hovertemplate="%{x:.3g} GFLOP/s on %{customdata}<extra></extra>",
            )
    figure.update_xaxes(title="GFLOP/s (log)", **decades(frame.gflops_per_s))
    figure.update_yaxes(autorange="reversed")
    told = tell("{contender} {gflops_per_s:.3g}", frame)
    return finish(figure, "Rate of B @ A by kernel", f"Bars of GFLOP/s on a log axis: {told}.")


def memory_growth(memory: pd.DataFrame, expected: pd.DataFrame) -> go.Figure:
    """Draw private memory over a window against what the loop's own progress predicts.

    Parameters
    ----------
    memory
        Columns ``seconds``, ``mib``: measured growth since the window began.
    expected
        Columns ``seconds``, ``mib``: growth predicted from the rows done.
    """
    figure = go.Figure()
    figure.add_scatter(
        x=memory.seconds, y=memory.mib, name="measured", mode="lines", line={"color": SERIES[0]}
    )
    figure.add_scatter(
        x=expected.seconds,
        y=expected.mib,
        name="predicted from progress",
        mode="lines",
        line={"color": SERIES[1], "dash": "dot"},
    )
    figure.update_xaxes(title="seconds in the loop")
    figure.update_yaxes(title="private memory, growth in MiB", rangemode="tozero")
    alt = (
        f"Two lines over {memory.seconds.max():.0f} s: measured growth ends at "
        f"{memory.mib.iloc[-1]:.0f} MiB, predicted growth at {expected.mib.iloc[-1]:.0f} MiB."
    )
    return finish(figure, "Memory grows as the loop widens weights to f32", alt)


def stacked_seconds(frame: pd.DataFrame, title: str, *, log: bool = False) -> go.Figure:
    """Draw seconds by lane, stacked by part.

    Parameters
    ----------
    frame
        Columns ``lane``, ``part`` (a key of ``COLOURS``), ``seconds``, ``provenance``.
    log
        Draw one bar a lane, its parts summed, on a log axis: stacked parts mean nothing there.
    """
    if log:
        frame = frame.groupby(["lane", "provenance"], sort=False, as_index=False).seconds.sum()
        frame = frame.assign(part="fuse")
    figure = go.Figure()
    named = set()
    for (part, provenance), rows in groups(frame, "part", "provenance"):
        name = provenance if log else part
        figure.add_bar(
            y=rows.lane,
            x=rows.seconds,
            orientation="h",
            name=name,
            legendgroup=name,
            showlegend=name not in named,
            marker={
                "color": SERIES[0] if log else COLOURS[part],
                "pattern": {"shape": PATTERNS[provenance]},
            },
            text=[duration(s) for s in rows.seconds] if log else None,
            textposition="outside" if log else None,
            cliponaxis=False,
            hovertemplate=f"%{{y}}: {name} %{{x:.3s}} s<extra>{provenance}</extra>",
        )
        named.add(name)
    figure.update_layout(barmode="stack")
    axis = decades(frame.seconds) if log else {}
    figure.update_xaxes(title="seconds (log)" if log else "seconds", **axis)
    lanes = list(dict.fromkeys(frame.lane))
    figure.update_yaxes(autorange="reversed", categoryorder="array", categoryarray=lanes)
    sums = frame.groupby("lane", sort=False).seconds.sum()
    told = "; ".join(f"{lane} {duration(s)}" for lane, s in sums.items())
    return finish(figure, title, f"Horizontal bars: {told}.", height_of(len(lanes)))


def timelines(frame: pd.DataFrame, title: str) -> go.Figure:
    """Draw every load and rebind to scale, one recipe at a time, chosen from a menu.

    Parameters
    ----------
    frame
        Columns ``recipe``, ``panel``, ``lane``, ``start``, ``seconds``, ``part`` (a key of
        ``COLOURS``), ``label``, ``provenance``. Each panel has an axis of its own, so that hours
        and seconds are both to scale. A denoise is a tick: its place is known, not its time.
    """
    panels = list(dict.fromkeys(frame.panel))
    lanes = {panel: list(dict.fromkeys(frame[frame.panel == panel].lane)) for panel in panels}
    height = 180 * len(panels) + 34 * sum(map(len, lanes.values()))
    figure = make_subplots(
        rows=len(panels),
        subplot_titles=panels,
        row_heights=[len(lanes[panel]) for panel in panels],
        vertical_spacing=130 / height,
    )
    recipes = list(dict.fromkeys(frame.recipe))
    owners: list[str] = []
    for row, panel in enumerate(panels, start=1):
        of_panel = frame.loc[frame.panel == panel]
        size, unit = _unit((of_panel.start + of_panel.seconds).max())
        for (recipe, part), rows in groups(of_panel, "recipe", "part"):
            owners.append(recipe)
            figure.add_trace(_timeline_trace(rows, part, size), row=row, col=1)
        figure.update_xaxes(title=unit, rangemode="tozero", row=row, col=1)
        figure.update_yaxes(categoryorder="array", categoryarray=lanes[panel][::-1], row=row, col=1)
    choose(figure, owners, recipes)
    figure.update_layout(barmode="overlay", bargap=0.4)
    ends = (frame.start + frame.seconds).groupby(
        [frame.recipe, frame.panel, frame.lane], sort=False
    )
    told = "; ".join(f"{', '.join(lane)}: {duration(s)}" for lane, s in ends.max().items())
    alt = f"Timelines of loads and rebinds by recipe, chosen from a menu. Totals: {told}."
    return finish(figure, title, alt, height)


def _timeline_trace(rows: pd.DataFrame, part: str, size: float) -> go.Bar | go.Scatter:
    told = [f"{label}, {duration(s)}" for label, s in zip(rows.label, rows.seconds, strict=True)]
    if part == "denoise":
        return go.Scatter(
            x=rows.start / size,
            y=rows.lane,
            mode="markers",
            marker={"symbol": "triangle-right", "size": 14, "color": COLOURS[part]},
            name="denoise begins",
            legendgroup=part,
            text=rows.label,
            hovertemplate="%{y}: %{text}<extra></extra>",
        )
    return go.Bar(
        base=rows.start / size,
        x=rows.seconds / size,
        y=rows.lane,
        orientation="h",
        name=part,
        legendgroup=part,
        marker={
            "color": COLOURS[part],
            "pattern": {"shape": [PATTERNS[p] for p in rows.provenance]},
        },
        text=told,
        textposition="none",
        hovertemplate="%{y}: %{text}<extra></extra>",
    )


def choose(figure: go.Figure, owners: Sequence[str], choices: Sequence[str]) -> None:
    """Show the first choice's traces, each name once in the legend, and a menu for the others."""
    traces = cast("tuple[go.Bar | go.Scatter, ...]", figure.data)
    buttons = []
    for choice in choices:
        visible = [owner == choice for owner in owners]
        shown = [str(t.name) if v else None for t, v in zip(traces, visible, strict=True)]
        legend = [name is not None and name not in shown[:i] for i, name in enumerate(shown)]
        args = [{"visible": visible, "showlegend": legend}]
        buttons.append({"label": choice, "method": "restyle", "args": args})
    first = buttons[0]["args"][0]
    for trace, visible, legend in zip(traces, first["visible"], first["showlegend"], strict=True):
        trace.update(visible=visible, showlegend=legend)
    menu = {"buttons": buttons, "x": 1, "xanchor": "right", "y": 1.08, "yanchor": "bottom"}
    figure.update_layout(updatemenus=[menu])


def cost_per_rebind(frame: pd.DataFrame, title: str) -> go.Figure:
    """Draw seconds a rebind by recipe, a marker for each way of binding, on a log axis.

    Parameters
    ----------
    frame
        Columns ``recipe``, ``rebind`` (from -> to), ``way``, ``seconds``, ``provenance``.
    """
    figure = go.Figure()
    symbols = {"measured": "circle", "derived": "circle-open", "predicted": "circle-dot",
               "published": "diamond-open"}  # fmt: skip
    ways = list(dict.fromkeys(frame.way))
    for (way, provenance), rows in groups(frame, "way", "provenance"):
        figure.add_scatter(
            x=rows.seconds,
            y=[
                f"{recipe}<br><sub>{rebind}</sub>"
                for recipe, rebind in zip(rows.recipe, rows.rebind, strict=True)
            ],
            mode="markers",
            name=f"{way} ({provenance})",
            marker={
                "symbol": symbols[provenance],
                "size": 20 - 5 * ways.index(way),  # equal costs show as rings in one another
                "color": SERIES[ways.index(way)],
                "line": {"width": 2},
            },
            customdata=[duration(s) for s in rows.seconds],
            hovertemplate="%{y}: %{customdata}<extra>" + way + "</extra>",
        )
    figure.update_xaxes(title="seconds a rebind (log)", **decades(frame.seconds))
    figure.update_yaxes(autorange="reversed")
    told = tell("{recipe} {rebind}, {way}: {took}", frame.assign(took=frame.seconds.map(duration)))
    lanes = frame[["recipe", "rebind"]].drop_duplicates()
    return finish(figure, title, f"Markers on a log axis: {told}.", 200 + 46 * len(lanes))


def memory_bars(frame: pd.DataFrame) -> go.Figure:
    """Draw peak private memory by lane beside what the arithmetic predicts.

    Parameters
    ----------
    frame
        Columns ``lane``, ``measured_gb``, ``predicted_gb``.
    """
    figure = go.Figure()
    for column, name, pattern in (
        ("measured_gb", "measured peak", ""),
        ("predicted_gb", "predicted: weights, factors, kept copies", "."),
    ):
        figure.add_bar(
            y=frame.lane,
            x=frame[column],
            orientation="h",
            name=name,
            marker={
                "color": SERIES[0] if not pattern else SERIES[5],
                "pattern": {"shape": pattern},
            },
            hovertemplate="%{y}: %{x:.2f} GB<extra>" + name + "</extra>",
        )
    figure.update_layout(barmode="group")
    figure.update_xaxes(title="GB")
    figure.update_yaxes(autorange="reversed")
    told = tell("{lane} {measured_gb:.2f} GB, predicted {predicted_gb:.2f}", frame)
    return finish(figure, "Memory", f"Pairs of bars: {told}.", height_of(2 * len(frame)))


def tell(form: str, frame: pd.DataFrame) -> str:
    """Say each row of a frame in words, for those who can't see the figure."""
    return "; ".join(form.format(**row) for row in frame.to_dict("records"))


def groups(frame: pd.DataFrame, *by: str) -> Iterator[tuple[tuple[str, ...], pd.DataFrame]]:
    """Give the rows of each combination of values, in the order in which they first come."""
    for values, rows in frame.groupby(list(by), sort=False):
        yield cast(tuple[str, ...], values), rows


def _unit(seconds: float) -> tuple[float, str]:
    """Return the unit that a person would tell these seconds in: its size and its name."""
    units = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"), (1e-3, "milliseconds"))
    if seconds >= 10 * 86400:  # until then hours are what is compared
        return 86400.0, "days"
    return next((unit for unit in units if seconds >= unit[0]), units[-1])


def duration(seconds: float) -> str:
    """Tell seconds in the unit that a person would."""
    size, unit = _unit(seconds)
    return f"{seconds / size:.3g} {unit}" if seconds else "no time"


def decades(values: Iterable[float]) -> dict[str, Any]:
    """Return a log axis over whole decades, with room for a label at its end."""
    from math import ceil, floor, log10

    positive = [v for v in values if v > 0] or [1.0]
    low, high = floor(log10(min(positive))), ceil(log10(max(positive)) + 0.35)
    return {"type": "log", "range": [low, high], "dtick": 1}


def height_of(lanes: int) -> int:
    """Return the height in pixels of a figure with so many bars above one another."""
    return 180 + 34 * max(5, lanes)


def finish(figure: go.Figure, title: str, alt: str, height: int = 450) -> go.Figure:
    """Give a figure what all have in common, and the text for those who can't see it."""
    figure.update_yaxes(ticklabelstandoff=6)
    figure.update_layout(
        title=title,
        meta={"alt": alt},
        template="plotly_white",
        height=height,
        legend={"orientation": "h", "y": -0.25, "x": 0},
        colorway=list(SERIES),
    )
    return figure
