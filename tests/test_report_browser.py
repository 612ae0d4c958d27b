import gzip
import json
import re
from collections import Counter

import nbformat
import numpy as np
import plotly.graph_objects as go
import pytest
from browser import drawn, open_page, screenshot
from nbformat.v4 import new_code_cell, new_notebook, new_output

from lorabench.export import PLOTLY_MIME
from lorabench.page import CARTESIAN_TRACES, plotly_bundle
from lorabench.report import ReportFacts, export_html

FACTS = ReportFacts("a machine", "abc1234", "2026-11-30T09:00", "tiny", "All from this run.")

SQUARE = np.arange(9.0).reshape(3, 3)
FIGURES = {
    "bars": go.Figure(
        [
            go.Bar(x=["a", "b", "c"], y=[1, 2, 3], name="measured", marker_color="#1f4e8c"),
            go.Bar(x=["a", "b", "c"], y=[2, 3, 4], name="predicted", marker_color="#8c4a1f"),
        ]
    ),
    "lines": go.Figure(
        [
            go.Scatter(y=np.arange(5), mode="markers", name="dots"),
            go.Scatter(y=np.arange(5), mode="lines", name="line"),
            go.Scatter(y=np.arange(5), name="hidden", visible="legendonly"),
        ]
    ),
    "boxes": go.Figure([go.Box(y=[1, 2, 4], name="one"), go.Box(y=[2, 3, 9], name="two")]),
    "heat": go.Figure(go.Heatmap(z=SQUARE, colorscale="Blues")),
    "spread": go.Figure(go.Violin(y=[1, 2, 2, 3, 5], name="spread")),
}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    cells = []
    for name, figure in FIGURES.items():
        figure.update_layout(title=name, meta={"alt": f"The figure of {name}"})
        data = {PLOTLY_MIME: json.loads(figure.to_json())}
        cells.append(new_code_cell("", outputs=[new_output("display_data", data)]))
    nbformat.write(new_notebook(cells=cells), folder / "page.ipynb")
    export_html(folder / "page.ipynb", folder / "page.html", FACTS)
    return folder / "page.html"


@pytest.fixture(scope="module", params=["light", "dark"])
def opened(page, request, tmp_path_factory):
    profile = tmp_path_factory.mktemp("profile")
    return request.param, open_page(page, profile, dark=request.param == "dark")


def test_every_trace_of_every_figure_is_drawn(opened):
    marks = {(trace.kind, trace.name): trace.marks for trace in drawn(opened[1].dom)}
    assert marks == {
        ("bar", "measured"): 3,
        ("bar", "predicted"): 3,
        ("scatter", "dots"): 5,
        ("scatter", "line"): 1,
        ("box", "one"): 1,
        ("box", "two"): 1,
        ("heatmap", ""): 1,
        ("violin", "spread"): 1,
    }


def test_nothing_is_asked_of_the_network_and_the_console_is_empty(opened):
    assert opened[1].requests == ()
    assert opened[1].console == ()


def test_a_drawn_figure_no_longer_shows_its_text_in_its_place(opened):
    assert 'class="plot' in opened[1].dom
    assert "<p>The figure of bars</p>" not in opened[1].dom


def test_no_figure_offers_to_upload_its_data(opened):
    titles = set(re.findall(r'data-title="([^"]+)"', opened[1].dom))
    assert "Reset axes" in titles
    assert not {title for title in titles if re.search("share|cloud|produced|chart", title, re.I)}


def test_figures_are_dark_on_light_and_light_on_dark(opened):
    scheme, result = opened
    text = re.search(r'class="xtick"><text[^>]*fill: rgb\((\d+), (\d+), (\d+)\)', result.dom)
    assert text is not None
    brightness = sum(map(int, text.groups())) / 3
    assert brightness > 200 if scheme == "dark" else brightness < 60
    blue = "rgb(31, 78, 140)"
    assert (blue in result.dom) == (scheme == "light")


def test_the_picture_of_a_dark_page_differs_from_that_of_a_light_one(page, tmp_path):
    pictures = []
    for dark in (False, True):
        png = tmp_path / f"{dark}.png"
        screenshot(page, png, tmp_path / str(dark), dark=dark)
        pictures.append(png.read_bytes())
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert pictures[0] != pictures[1]


def test_the_list_of_drawable_traces_is_the_bundles_own(tmp_path):
    probe = tmp_path / "probe.html"
    script = gzip.decompress(plotly_bundle().compressed).decode()
    asked = "document.body.textContent = Object.keys(Plotly.PlotSchema.get().traces).join(' ')"
    probe.write_text(f"<!doctype html><meta charset=utf-8><body><script>{script}</script>"
                     f"<script>{asked}</script>")  # fmt: skip
    dom = open_page(probe, tmp_path / "profile").dom
    listed = re.search(r"<body>([\w ]+)", dom)
    assert listed is not None
    assert set(listed[1].split()) == CARTESIAN_TRACES


def test_the_browser_would_notice_requests_and_errors_and_missing_marks(tmp_path):
    probe = tmp_path / "probe.html"
    figure = json.dumps({"data": [{"type": "bar"}, {"type": "bar", "visible": False}]})
    probe.write_text(
        "<!doctype html><img src='http://127.0.0.1:9/pixel.png'><script>oops()</script>"
        "<figure role=img id=f><script type=application/json>" + figure + "</script></figure>"
    )
    result = open_page(probe, tmp_path / "profile")
    assert Counter(result.requests).keys() == {"http://127.0.0.1:9/pixel.png"}
    assert any("oops" in line for line in result.console)
    assert [trace.marks for trace in drawn(result.dom)] == [0]
