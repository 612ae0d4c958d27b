"""Figures of the engine at its limit: ways back, drift, passes of ours and of others, rules."""

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from lorabench.figures import (
    COLOURS,
    PATTERNS,
    SERIES,
    choose,
    decades,
    duration,
    finish,
    groups,
    height_of,
    tell,
)


def restores_figure(frame: pd.DataFrame, title: str) -> go.Figure:
    """Draw what each way back to base bits takes, and beside it what it keeps.

    Parameters
    ----------
    frame
        Columns ``lane``, ``fuse_s``, ``rebind_s``, ``unfuse_s``, ``kept_gb``, ``provenance``.
    """
    figure = make_subplots(
        cols=2,
        shared_yaxes=True,
        column_widths=[0.66, 0.34],
        horizontal_spacing=0.04,
        subplot_titles=("seconds", "GB kept"),
    )
    for column, part in (("fuse_s", "fuse"), ("rebind_s", "rebind"), ("unfuse_s", "restore")):
        for (provenance,), rows in groups(frame, "provenance"):
            figure.add_bar(
                x=rows[column],
                y=rows.lane,
                orientation="h",
                name="unfuse" if part == "restore" else part,
                marker={"color": COLOURS[part], "pattern": {"shape": PATTERNS[provenance]}},
                hovertemplate="%{y}: %{x:.3s} s<extra>" + provenance + "</extra>",
                row=1,
                col=1,
            )
    figure.add_bar(
        x=frame.kept_gb,
        y=frame.lane,
        orientation="h",
        showlegend=False,
        marker={"color": COLOURS["load"]},
        text=[f"{kept:.2g}" for kept in frame.kept_gb],
        textposition="outside",
        cliponaxis=False,
        hovertemplate="%{y} keeps %{x:.3g} GB<extra></extra>",
        row=1,
        col=2,
    )
    figure.update_xaxes(rangemode="tozero")
    figure.update_xaxes(range=[0, 1.3 * max(frame.kept_gb.max(), 1e-3)], row=1, col=2)
    figure.update_yaxes(autorange="reversed")
    told = tell(
        "{lane}: fuse {fuse}, rebind {rebind}, unfuse {unfuse}, keeps {kept_gb:.2g} GB",
        frame.assign(
            **{n: frame[f"{n}_s"].map(duration) for n in ("fuse", "rebind", "unfuse")},
        ),
    )
    return finish(figure, title, f"Bars by restore: {told}.", height_of(3 * len(frame)))


def bits_figure(frame: pd.DataFrame) -> go.Figure:
    """Draw the bits a weight that ``residual`` keeps by the size of the delta, and the entropy.

    Parameters
    ----------
    frame
        Columns ``ratio`` (std of the delta over that of the weight), ``bits``, ``entropy_bits``,
        ``entropy_given_exponent``.
    """
    figure = go.Figure()
    frame = frame.sort_values("ratio")
    lines = {
        "bits": ("kept", "solid"),
        "entropy_bits": ("entropy of the corrections", "dot"),
        "entropy_given_exponent": ("entropy, the exponent's change known", "dash"),
    }
    for colour, (column, (name, dash)) in zip(SERIES, lines.items(), strict=False):
        figure.add_scatter(
            x=frame.ratio,
            y=frame[column],
            mode="lines+markers",
            name=name,
            line={"color": colour, "dash": dash},
            hovertemplate="ratio %{x:.3g}: %{y:.3g} bits<extra>" + name + "</extra>",
        )
    figure.update_xaxes(title="std of the delta / std of the weight (log)", **decades(frame.ratio))
    figure.update_yaxes(title="bits a weight (log)", **decades(frame.entropy_given_exponent))
    figure.update_yaxes(range=[-1.2, 1.3])
    told = tell("ratio {ratio:.2g}: {bits:.2f} kept, entropy {entropy_bits:.2f}", frame)
    title = "What the residual keeps, of 16 bits a weight"
    return finish(figure, title, f"Lines over the ratio: {told}.")


def drift_figure(frame: pd.DataFrame, title: str) -> go.Figure:
    """Draw how far weights drift over cycles of fusing and subtracting, a subject at a time.

    Parameters
    ----------
    frame
        Columns ``subject``, ``way``, ``dtype``, ``cycles``, ``max_abs``, ``wrong_share``,
        ``provenance``. What a way that loses nothing would draw is off a log axis: it is told.
    """
    figure = make_subplots(
        rows=2,
        shared_xaxes=True,
        row_heights=[0.6, 0.4],
        vertical_spacing=0.06,
    )
    ways = list(dict.fromkeys(frame.way))
    dashes = {"bfloat16": "solid", "float16": "dash", "float32": "dot"}
    owners: list[str] = []
    exact = frame.groupby(["subject", "way", "dtype"], sort=False).max_abs.transform("max") == 0
    for (subject, way, dtype, provenance), rows in groups(
        frame.loc[~exact], "subject", "way", "dtype", "provenance"
    ):
        for row, column in ((1, "max_abs"), (2, "wrong_share")):
            owners.append(subject)
            figure.add_scatter(
                x=rows.cycles,
                y=rows[column],
                mode="markers" if provenance == "published" else "lines+markers",
                name=f"{way}, {dtype}",
                legendgroup=f"{way}, {dtype}",
                line={"color": SERIES[ways.index(way) % len(SERIES)], "dash": dashes[dtype]},
                marker={"symbol": "diamond-open" if provenance == "published" else "circle"},
                hovertemplate="%{x} cycles: %{y:.3g}<extra>" + f"{way}, {dtype}" + "</extra>",
                row=row,
                col=1,
            )
    choose(figure, owners, list(dict.fromkeys(owners)))
    figure.update_xaxes(type="log", dtick=1)
    figure.update_xaxes(title="cycles of fuse and unfuse (log)", row=2, col=1)
    figure.update_yaxes(type="log", dtick=1, exponentformat="power", row=1, col=1)
    figure.update_yaxes(title="largest difference (log)", row=1, col=1)
    figure.update_yaxes(title="share that is wrong", rangemode="tozero", row=2, col=1)
    ends = frame.loc[frame.groupby(["subject", "way", "dtype"], sort=False).cycles.idxmax()]
    told = tell("{subject}, {way}, {dtype}: {max_abs:.1e} after {cycles}", ends)
    alt = f"Lines over cycles, by subject chosen from a menu. Largest differences: {told}."
    return finish(figure, title, alt, 780)


def peers_figure(frame: pd.DataFrame, title: str) -> go.Figure:
    """Draw the rates of passes by contender, first and later ones, under the big squares' rate.

    Parameters
    ----------
    frame
        Records of ``bench peers`` as a frame. A sample's rate is weighted by what each kind of
        target has of a whole pass's work, where that is known.
    """
    rate = frame.gflops_per_s
    if "weighted_gflops_per_s" in frame:
        rate = frame.weighted_gflops_per_s.where(frame["mix"] == "sample", rate).fillna(rate)
    lanes = frame.contender + " " + frame.operation + ", " + frame["mix"]
    frame = frame.assign(rate=rate, lane=lanes, label=[f"{value:.3g}" for value in rate])
    squares = frame["mix"] == "square"
    threads = list(dict.fromkeys(frame.threads))
    figure = make_subplots(
        rows=len(threads),
        subplot_titles=[f"{n} thread{'s' if n > 1 else ''}" for n in threads],
        shared_xaxes=True,
        vertical_spacing=0.12 / len(threads),
    )
    colours = {"steady": SERIES[0], "first": SERIES[4]}
    for row, n in enumerate(threads, start=1):
        of_panel = frame.loc[frame.threads == n]
        for (when, provenance), rows in groups(of_panel.loc[~squares], "pass", "provenance"):
            figure.add_bar(
                x=rows.rate,
                y=rows.lane,
                orientation="h",
                name=f"{when} passes",
                legendgroup=when,
                showlegend=row == 1,
                marker={"color": colours[when], "pattern": {"shape": PATTERNS[provenance]}},
                text=rows.label,
                textposition="outside",
                cliponaxis=False,
                hovertemplate=f"%{{y}}: %{{x:.3g}} GFLOP/s<extra>{when}, {provenance}</extra>",
                row=row,
                col=1,
            )
        of_lanes = list(dict.fromkeys(of_panel.loc[~squares].lane))
        ceiling = of_panel.loc[squares & frame.is_ceiling.eq(True)]
        figure.add_scatter(
            x=[rate for rate in ceiling.rate for _ in of_lanes],
            y=of_lanes * len(ceiling),
            mode="lines",
            name="ceiling: big squares",
            legendgroup="ceiling",
            showlegend=row == 1,
            line={"color": SERIES[1], "dash": "dash"},
            hovertemplate="%{x:.3g} GFLOP/s<extra>big squares</extra>",
            row=row,
            col=1,
        )
    figure.update_xaxes(**decades(frame.rate))
    figure.update_xaxes(title="GFLOP/s (log)", row=len(threads), col=1)
    figure.update_yaxes(autorange="reversed")
    told = tell("{threads} threads, {lane}, {pass}: {label}", frame)
    alt = f"Bars of GFLOP/s on a log axis: {told}."
    return finish(figure, title, alt, 160 + 34 * len(frame)).update_layout(legend_y=-0.1)


def rules_figure(frame: pd.DataFrame, title: str) -> go.Figure:
    """Draw how many values two rounding rules, or a peer and its rule, disagree on.

    Parameters
    ----------
    frame
        Columns ``strength``, ``ratio``, ``first``, ``second``, ``differing_share``, and a share for
        each class of ulps, named by numbers (``1``, ``2``, ``3-4``) and ``more``.
    """
    frame = frame.assign(pair=frame["first"] + " / " + frame["second"])
    classes = [name for name in frame if name[0].isdigit() or name == "more"]
    frame["told"] = [
        ", ".join(f"{share:.2g} by {name}" for name, share in zip(classes, row, strict=True))
        for row in frame[classes].itertuples(index=False)
    ]
    strengths = list(dict.fromkeys(frame.strength))
    pairs = list(dict.fromkeys(frame.pair))
    figure = make_subplots(
        cols=len(strengths),
        shared_yaxes=True,
        horizontal_spacing=0.02,
        subplot_titles=[f"strength {strength:g}" for strength in strengths],
    )
    for column, strength in enumerate(strengths, start=1):
        cells = frame.loc[frame.strength == strength].pivot(index="pair", columns="ratio")
        shares = 100 * cells.differing_share.loc[pairs]
        figure.add_heatmap(
            z=shares,
            x=[f"{ratio:g}" for ratio in shares.columns],
            y=pairs,
            text=[
                [f"{share:.2g}" if share >= 0.01 or not share else "<.01" for share in row]
                for row in shares.to_numpy()
            ],
            texttemplate="%{text}",
            customdata=cells.told.loc[pairs],
            hovertemplate="%{y}, ratio %{x}: %{z:.3g} %<br>ulps: %{customdata}<extra></extra>",
            coloraxis="coloraxis",
            row=1,
            col=column,
        )
        figure.update_xaxes(title="ratio", type="category", row=1, col=column)
    figure.update_yaxes(autorange="reversed")
    figure.update_layout(coloraxis={"colorscale": "Blues", "colorbar": {"title": "%"}, "cmin": 0})
    most = frame.groupby(["strength", "pair"], sort=False).differing_share.agg(["min", "max"])
    told = tell(
        "{pair} at strength {strength:g}: {low:.2g} to {high:.2g} %",
        most.reset_index().assign(low=100 * most["min"].values, high=100 * most["max"].values),
    )
    alt = f"Heat maps of values that differ, over the ratio of delta to weight: {told}."
    return finish(figure, title, alt, height_of(len(pairs)))
