"""Figures of the decision: what rebinds take, what strategies cost, and which one is the answer."""

import textwrap
from collections.abc import Mapping, Sequence
from itertools import cycle
from string import ascii_uppercase
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from lorabench.figure_parts import legend_below, menu_above, short, times_axis
from lorabench.figures import (
    COLOURS,
    PATTERNS,
    SERIES,
    duration,
    finish,
    groups,
    height_of,
    tell,
)

SYMBOLS = {
    "measured": "circle",
    "derived": "circle-open",
    "predicted": "circle-open-dot",
    "published": "diamond-open",
}
MARKS = {"measured": "●", "derived": "○", "predicted": "⊙", "published": "◇"}
ANSWERS = (*SERIES, "#b5a642", "#7f8c9b", "#882255", "#44aa99", "#999933", "#aa4499")
"""Colours of a map's answers, which letters tell apart as well."""

NOWHERE = "#dfe3e8"


def rebind_ladder(frame: pd.DataFrame, title: str) -> go.Figure:
    """Draw what each load and rebind takes, way by way and machine by machine, a recipe at a time.

    Parameters
    ----------
    frame
        Columns ``recipe``, ``rebind`` (``base → user@1``, or a load), ``machine``, ``way``,
        ``seconds``, ``provenance``. What takes no time stands at the axis' left end.
    """
    axis, low = times_axis(frame.seconds)
    frame = frame.assign(
        lane=frame.rebind + "<br><sub>" + frame.machine + "</sub>",
        at=frame.seconds.clip(lower=low),
    )
    figure = go.Figure()
    recipes, ways = list(dict.fromkeys(frame.recipe)), list(dict.fromkeys(frame.way))
    owners: list[str] = []
    for recipe in recipes:
        mine = frame.loc[frame.recipe == recipe]
        rungs = mine.groupby("lane", sort=False)["at"].agg(["min", "max"])
        owners.append(recipe)
        figure.add_scatter(  # comes first, so that it has the lanes in their order
            x=[x for rung in rungs.itertuples() for x in (rung.min, rung.max, None)],
            y=[lane for lane in rungs.index for _ in range(3)],
            mode="lines",
            line={"color": COLOURS["other"], "width": 2},
            name="from the quickest to the slowest",
            hoverinfo="skip",
        )
        for (way, provenance), rows in groups(mine, "way", "provenance"):
            owners.append(recipe)
            number = ways.index(way)
            colour = ANSWERS[number % len(ANSWERS)]
            figure.add_scatter(
                x=rows["at"],
                y=rows.lane,
                mode="markers",
                name=way,
                legendgroup=way,
                marker={
                    "symbol": SYMBOLS[provenance],
                    "size": max(9, 19 - 2 * number),  # equal costs show as rings in one another
                    "color": colour,
                    "line": {"width": 2, "color": colour},
                },
                cliponaxis=False,
                customdata=[duration(s) for s in rows.seconds],
                hovertemplate="%{y}: %{customdata}<extra>" + f"{way}, {provenance}" + "</extra>",
            )
    key = ", ".join(f"{mark} {provenance}" for provenance, mark in MARKS.items())
    figure.update_xaxes(title=f"time that it takes (log): {key}", **axis)
    figure.update_yaxes(autorange="reversed")
    told = tell(
        "{recipe}, {rebind} on {machine}, {way}: {took}, {provenance}",
        frame.assign(took=frame.seconds.map(duration)),
    )
    lanes = max(len({*frame.loc[frame.recipe == recipe].lane}) for recipe in recipes)
    alt = f"Markers on a log axis, by recipe chosen from a menu: {told}."
    height = 260 + 46 * max(3, lanes)
    finish(figure, title, alt, height)
    return legend_below(menu_above(figure, owners, recipes, height), height)


def first_steady_hundred(frame: pd.DataFrame) -> go.Figure:
    """Draw what renders wait for binding by strategy, beside its memory, a recipe at a time.

    Parameters
    ----------
    frame
        Columns ``recipe``, ``strategy`` (the planner's own is ``advised``), ``first_s``,
        ``later_s``, ``hundred_s``, ``memory_gib``, ``provenance``. What takes no time has no bar.
    """
    panels = {
        "first_s": "first render",
        "later_s": "each later one",
        "hundred_s": "100 renders",
        "memory_gib": "memory, GiB",
    }
    figure = make_subplots(
        cols=4,
        shared_yaxes=True,
        column_widths=[0.27, 0.27, 0.27, 0.19],
        horizontal_spacing=0.025,
    )
    recipes = list(dict.fromkeys(frame.recipe))
    owners: list[str] = []
    seconds = [column for column in panels if column.endswith("_s")]
    axis, low = times_axis(frame[seconds].to_numpy().ravel(), room=1.2, few=True)
    frame = frame.assign(ours=frame.strategy.eq("advised").map({True: "advised, ", False: ""}))
    for (recipe, ours, provenance), rows in groups(frame, "recipe", "ours", "provenance"):
        for column, (name, panel) in enumerate(panels.items(), start=1):
            timed = name in seconds
            told = [duration(s) if timed else f"{s:.3g}" for s in rows[name]]
            owners.append(recipe)
            figure.add_bar(
                x=rows[name].clip(lower=low) if timed else rows[name],
                y=rows.strategy,
                orientation="h",
                name=f"{ours}{provenance}",
                legendgroup=f"{ours}{provenance}",
                marker={
                    "color": SERIES[1 if ours else 0] if timed else COLOURS["load"],
                    "pattern": {"shape": PATTERNS[provenance]},
                },
                text=[short(text) for text in told],
                textposition="outside",
                cliponaxis=False,
                customdata=told,
                hovertemplate=f"%{{y}}, {panel}: %{{customdata}}<extra>{provenance}</extra>",
                row=1,
                col=column,
            )
            # below, for plotly's own buttons are above
            figure.update_xaxes(title=panel, **(axis if timed else {}), row=1, col=column)
    figure.update_xaxes(range=[0, 1.6 * frame.memory_gib.max()], row=1, col=4)
    order = list(dict.fromkeys(frame.strategy))
    figure.update_yaxes(autorange="reversed", categoryorder="array", categoryarray=order)
    figure.update_layout(barmode="overlay")
    told = tell(
        "{recipe}, {strategy}: first {first}, later {later}, 100 renders {hundred}, "
        "{memory_gib:.3g} GiB",
        frame.assign(**{name[:-2]: frame[name].map(duration) for name in seconds}),
    )
    lanes = max(len({*frame.loc[frame.recipe == recipe].strategy}) for recipe in recipes)
    title = "What renders wait for loads, rebinds and unfused adapters (log), by strategy"
    alt = f"Bars on log axes, by recipe chosen from a menu: {told}."
    height = height_of(lanes) + 60
    finish(figure, title, alt, height)
    return legend_below(menu_above(figure, owners, recipes, height), height)


def answer_map(frame: pd.DataFrame) -> go.Figure:
    """Draw which strategy is the answer over renders and memory, by menus of recipes and machines.

    The machines' maps stand beside one another on one axis: a menu picks the stretch that is seen,
    so that it and the menu of recipes don't undo one another.

    Parameters
    ----------
    frame
        Columns ``recipe``, ``machine``, ``renders``, ``memory_gib``, ``answer`` (empty, or
        ``nothing fits``, for none), ``seconds``; and where there are runners-up, ``runner_up``
        (empty for none) and ``margin``, its seconds over the answer's, less one. Each recipe and
        machine has a row for every renders and memory.
    """
    frame = frame.assign(answer=frame.answer.replace("nothing fits", ""))
    recipes, machines = list(dict.fromkeys(frame.recipe)), list(dict.fromkeys(frame.machine))
    renders, memories = sorted({*frame.renders}), sorted({*frame.memory_gib})
    answers = list(dict.fromkeys(answer for answer in frame.answer if answer))
    # the scale goes upwards, and the first answer is at its top
    levels = {"": 0} | {answer: len(answers) - n for n, answer in enumerate(answers)}
    letters = {"": ""} | dict(zip(answers, cycle(ascii_uppercase), strict=False))
    columns = [(machine, count) for machine in machines for count in renders]
    figure = go.Figure()
    for recipe in recipes:
        mine = frame.loc[frame.recipe == recipe].to_dict("records")
        cells = {(c["memory_gib"], c["machine"], c["renders"]): c for c in mine}
        rows = [[cells[memory, *column] for column in columns] for memory in memories]
        figure.add_heatmap(
            z=[[levels[cell["answer"]] for cell in row] for row in rows],
            x=list(range(len(columns))),
            y=[f"{memory:g}" for memory in memories],
            text=[[_cell(cell, letters[cell["answer"]]) for cell in row] for row in rows],
            texttemplate="%{text}",
            customdata=[[_hover(cell) for cell in row] for row in rows],
            hovertemplate="%{customdata}<extra></extra>",
            coloraxis="coloraxis",
            xgap=2,
            ygap=2,
            name=recipe,
            visible=recipe == recipes[0],
        )
    colours = [NOWHERE, *reversed([c for _, c in zip(answers, cycle(ANSWERS), strict=False)])]
    keys = [textwrap.fill(f"{letters[a]}  {a}", 26).replace("\n", "<br>") for a in answers]
    figure.update_layout(
        coloraxis={
            "colorscale": _steps(colours),
            "cmin": -0.5,
            "cmax": len(answers) + 0.5,
            "colorbar": {
                "tickvals": list(range(len(answers) + 1)),
                "ticktext": ["nothing fits", *reversed(keys)],
                "thickness": 16,
            },
        },
        updatemenus=[
            _menu([("visible", [r == recipe for r in recipes], recipe) for recipe in recipes], 0.0),
            _menu(
                [
                    ("xaxis.range", [n * len(renders) - 0.5, (n + 1) * len(renders) - 0.5], machine)
                    for n, machine in enumerate(machines)
                ],
                0.5,
            ),
        ],
    )
    figure.update_xaxes(
        title="renders",
        tickvals=list(range(len(columns))),
        ticktext=[f"{count:g}" for _, count in columns],
        range=[-0.5, len(renders) - 0.5],
        showgrid=False,
        zeroline=False,
    )
    figure.update_yaxes(title="memory for weights, GiB", type="category", showgrid=False)
    most = frame.loc[frame.answer != ""].groupby(["recipe", "machine", "answer"], sort=False)
    spans = most.renders.size().reset_index(name="cells")
    told = tell("{recipe} on {machine}: {answer} in {cells} cells", spans)
    alt = f"Maps of the cheapest strategy over renders and memory, chosen from menus: {told}."
    title = "The cheapest strategy, over renders and memory (predicted)"
    return finish(figure, title, alt, 240 + 46 * len(memories))


def _menu(choices: Sequence[tuple[str, list[Any], str]], x: float) -> dict[str, Any]:
    """Return a menu, each choice of which sets one thing: of all traces, or of the layout."""
    buttons = [
        {
            "label": label,
            "method": "relayout" if "." in key else "restyle",
            "args": [{key: value}],
        }
        for key, value, label in choices
    ]
    return {"buttons": buttons, "x": x, "xanchor": "left", "y": 1.02, "yanchor": "bottom"}


def _cell(cell: Mapping[Any, Any], letter: str) -> str:
    return f"<b>{letter}</b><br>{short(duration(cell['seconds']))}" if letter else ""


def _hover(cell: Mapping[Any, Any]) -> str:
    told = "{renders:g} renders, {memory_gib:g} GiB, {machine}:<br>".format(**cell)
    if not cell["answer"]:
        return told + "nothing fits"
    told += f"<b>{cell['answer']}</b>, {duration(cell['seconds'])} of binding"
    return told + (
        "<br>{runner_up}: {margin:.1%} more".format(**cell) if cell.get("runner_up") else ""
    )


def _steps(colours: Sequence[str]) -> list[tuple[float, str]]:
    """Return a scale that changes colour at once."""
    ends = [(n / len(colours), (n + 1) / len(colours)) for n in range(len(colours))]
    return [(end, c) for c, pair in zip(colours, ends, strict=True) for end in pair]
