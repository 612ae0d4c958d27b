"""Figures of the cost model: what it predicts over what was measured."""

from math import log10

import pandas as pd
import plotly.graph_objects as go

from lorabench.decision_figures import SYMBOLS
from lorabench.figure_parts import legend_below, menu_above, times_axis
from lorabench.figures import COLOURS, SERIES, duration, finish, groups, tell


def validation(frame: pd.DataFrame) -> go.Figure:
    """Draw what the cost model predicts over what was measured, with a band of 10 % either way.

    Parameters
    ----------
    frame
        Columns ``kind``, ``case``, ``predicted_s``, ``measured_s``, ``error``, as
        :func:`lorabench.predicted.predict` gives them.
    """
    low = 0.7 * min(frame.measured_s.min(), frame.predicted_s.min())
    high = 1.4 * max(frame.measured_s.max(), frame.predicted_s.max())
    figure = go.Figure()
    for name, factor, fill in (("−10 %", 0.9, None), ("within 10 %", 1.1, "tonexty")):
        figure.add_scatter(
            x=[low, high],
            y=[factor * low, factor * high],
            mode="lines",
            line={"width": 0},
            fill=fill,
            fillcolor="rgba(127, 140, 155, 0.25)",
            name=name,
            showlegend=fill is not None,
            hoverinfo="skip",
        )
    figure.add_scatter(
        x=[low, high],
        y=[low, high],
        mode="lines",
        line={"color": COLOURS["load"], "dash": "dash"},
        name="predicted as measured",
        hoverinfo="skip",
    )
    for colour, ((kind,), rows) in zip(SERIES, groups(frame, "kind"), strict=False):
        figure.add_scatter(
            x=rows.measured_s,
            y=rows.predicted_s,
            mode="markers",
            name=kind,
            marker={"color": colour, "size": 9, "opacity": 0.75},
            customdata=[
                f"{case}<br>measured {duration(m)}, predicted {duration(p)} ({e:+.1%})"
                for case, m, p, e in rows[["case", "measured_s", "predicted_s", "error"]].values
            ],
            hovertemplate="%{customdata}<extra>" + kind + "</extra>",
        )
    worst = frame.loc[frame.error.abs().idxmax()]
    _label_worst(figure, worst)
    for update, name in ((figure.update_xaxes, "measured"), (figure.update_yaxes, "predicted")):
        update(title=f"{name} (log)", **times_axis([low, high])[0])
    errors = frame.assign(size=frame.error.abs())
    kinds = errors.groupby("kind", sort=False)["size"].agg(["median", "count"]).reset_index()
    median = f"{errors['size'].median():.1%}"
    told = tell("{kind}, {count} cases: {median:.1%}", kinds)
    alt = (
        f"Predicted over measured seconds on log axes, {len(frame)} cases; median error {median}; "
        f"by kind: {told}. The worst: {worst.case}, {worst.error:+.1%}."
    )
    title = f"Predicted against measured: median error {median}"
    figure.update_layout(legend_traceorder="normal")
    return legend_below(finish(figure, title, alt, 620), 620)


def linear(frame: pd.DataFrame) -> go.Figure:
    """Draw what a forward takes over its tokens, and the lines that are predicted.

    Parameters
    ----------
    frame
        Columns ``apply``, ``tokens``, ``seconds``, ``provenance``: measured rows are points,
        predicted ones are joined by a dotted line.
    """
    figure = go.Figure()
    ways = list(dict.fromkeys(frame["apply"]))
    for (way, provenance), rows in groups(frame.sort_values("tokens"), "apply", "provenance"):
        colour = SERIES[ways.index(way) % len(SERIES)]
        figure.add_scatter(
            x=rows.tokens,
            y=rows.seconds,
            mode="lines" if provenance == "predicted" else "markers",
            name=f"{way} ({provenance})",
            legendgroup=way,
            line={"color": colour, "dash": "dot"},
            marker={"color": colour, "size": 9, "symbol": SYMBOLS[provenance]},
            customdata=[duration(s) for s in rows.seconds],
            hovertemplate="%{x} tokens: %{customdata}<extra>" + f"{way}, {provenance}</extra>",
        )
    figure.update_xaxes(title="tokens of a forward", rangemode="tozero")
    figure.update_yaxes(title="seconds of a forward", rangemode="tozero")
    ends = frame.loc[frame.groupby(["apply", "provenance"], sort=False).tokens.idxmax()]
    told = tell(
        "{apply}, {provenance}: {took} at {tokens} tokens",
        ends.assign(took=ends.seconds.map(duration)),
    )
    return finish(figure, "What a forward takes, over its tokens", f"Lines: {told}.")


def crossover(frame: pd.DataFrame, title: str) -> go.Figure:
    """Draw what binding adds to a render over its tokens, fused and not, a recipe at a time.

    Parameters
    ----------
    frame
        Columns ``recipe``, ``apply``, ``tokens``, ``seconds`` (above 0), ``provenance``: measured
        rows are points, others are joined by lines, predicted ones dotted.
    """
    figure = go.Figure()
    recipes, ways = list(dict.fromkeys(frame.recipe)), list(dict.fromkeys(frame["apply"]))
    owners: list[str] = []
    for (recipe, way, provenance), rows in groups(
        frame.sort_values("tokens", kind="stable"), "recipe", "apply", "provenance"
    ):
        owners.append(recipe)
        colour = SERIES[ways.index(way) % len(SERIES)]
        figure.add_scatter(
            x=rows.tokens,
            y=rows.seconds,
            mode="markers" if provenance == "measured" else "lines+markers",
            name=f"{way} ({provenance})",
            line={"color": colour, "dash": "dot" if provenance == "predicted" else "solid"},
            marker={"color": colour, "size": 9, "symbol": SYMBOLS[provenance]},
            customdata=[duration(s) for s in rows.seconds],
            hovertemplate="%{x} tokens: %{customdata}<extra>" + f"{way}, {provenance}</extra>",
        )
    figure.update_xaxes(title="video tokens of a forward (log)", type="log", dtick="D2")
    figure.update_yaxes(title="added to a render (log)", **times_axis(frame.seconds)[0])
    ends = frame.loc[frame.groupby(["recipe", "apply"], sort=False).tokens.idxmax()]
    told = tell(
        "{recipe}, {apply}: {took} at {tokens} tokens, {provenance}",
        ends.assign(took=ends.seconds.map(duration)),
    )
    alt = f"Lines on log axes, by recipe chosen from a menu. At the most tokens: {told}."
    finish(figure, title, alt, 520)
    return legend_below(menu_above(figure, owners, recipes, 520), 520)


def _label_worst(figure: go.Figure, worst: pd.Series) -> None:
    figure.add_annotation(
        x=log10(worst.measured_s),
        y=log10(worst.predicted_s),
        text=f"{worst.case}: {worst.error:+.0%}",
        ax=-90 if worst.error > 0 else 90,
        ay=-36 if worst.error > 0 else 36,
        arrowcolor=COLOURS["load"],
    )
