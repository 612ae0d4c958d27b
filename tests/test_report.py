import base64
import gzip
import hashlib
import json
import re
import sys

import nbformat
import plotly.graph_objects as go
import pytest
from bs4 import BeautifulSoup
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from plotly.offline import get_plotlyjs_version

from lorabench.errors import CheckError, ConfigError
from lorabench.export import PLOTLY_MIME
from lorabench.page import plotly_bundle
from lorabench.report import (
    NotebookError,
    ReportFacts,
    build_reports,
    export_html,
    run_notebook,
)

FACTS = ReportFacts(
    machine="8-core <test> machine",
    commit="abc1234",
    date="2026-11-30T09:00",
    size="tiny",
    sources="Figure 1 was measured by this run.",
)


def code(source, *tags, outputs=()):
    return new_code_cell(source, metadata={"tags": list(tags)}, outputs=list(outputs))


def write(path, *cells):
    nbformat.write(new_notebook(cells=list(cells)), path)
    return path


PARAMETERS = code('SIZE = "laptop"\nROUNDS = 3', "parameters")


def figure_output(figure):
    return new_output("display_data", {PLOTLY_MIME: json.loads(figure.to_json())})


def a_figure(alt='Two bars & a "quote"', title="Seconds </script><b>bold</b>"):
    figure = go.Figure(go.Bar(x=["a", "b"], y=[1.0, 2.0], name="measured"))
    return figure.update_layout(title=title, meta={"alt": alt} if alt else None)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A report made from scratch: run, exported and indexed."""
    folder = tmp_path_factory.mktemp("notebooks")
    source = write(
        folder / "pass.ipynb",
        new_markdown_cell("# The cost of a pass\n\nIt reads *every* weight once.\n\nMore."),
        PARAMETERS,
        code(
            "import os, sys\nimport pandas as pd\nimport plotly.graph_objects as go", "hide-input"
        ),
        new_markdown_cell("## Predict\n\nText.\n\n### Bytes\n\nText.\n\n## Predict\n\nAgain."),
        code("print(SIZE, ROUNDS, os.getcwd())"),
        code("print(os.environ['LORABENCH_PROGRESS'], file=sys.stderr)"),
        code(
            "figure = go.Figure(go.Bar(x=['a', 'b'], y=[1, 2]))\n"
            "figure.update_layout(title='Seconds </script> of <b>a pass</b>',\n"
            "                     meta={'alt': 'Two \"bars\" & more'})"
        ),
        code("go.Figure(go.Box(y=[1, 2, 4])).update_layout(meta={'alt': 'A box'})"),
        code("pd.DataFrame({'strategy': ['as_written', 'fast'], 'seconds': [20280.0, 43.8]})"),
        code(
            "from IPython.display import Markdown\nMarkdown('**Finding.** It takes **2 s** < 3 s.')"
        ),
        code("raise SystemError('never run')", "skip-execution"),
    )
    out = folder / "out"
    build_reports([source], out, {"SIZE": "tiny"}, FACTS)
    return out


@pytest.fixture(scope="module")
def page(built):
    return BeautifulSoup((built / "pass.html").read_text(), "html.parser")


@pytest.fixture(scope="module")
def executed(built):
    return nbformat.read(built / "notebooks" / "pass.ipynb", as_version=4)


def texts(notebook):
    return [
        output["text"]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output["output_type"] == "stream"
    ]


def test_parameters_replace_the_committed_ones_and_leave_the_others(built, executed):
    tags = [cell.metadata.get("tags", []) for cell in executed.cells]
    at = tags.index(["injected-parameters"])
    assert tags[at - 1] == ["parameters"]
    assert "SIZE = 'tiny'" in executed.cells[at].source
    assert texts(executed)[0].startswith("tiny 3 ")


def test_cells_run_in_the_notebooks_folder(built, executed):
    assert texts(executed)[0].split()[2] == str(built.parent.resolve())


def test_the_kernel_is_the_callers_interpreter_whatever_python3_is_installed_as(
    tmp_path, monkeypatch
):
    other = tmp_path / "jupyter" / "kernels" / "python3"
    other.mkdir(parents=True)
    spec = {"argv": ["/nowhere/python"], "display_name": "Other", "language": "python"}
    (other / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    source = write(tmp_path / "x.ipynb", code("import sys; print(sys.executable)"))
    run_notebook(source, tmp_path / "done.ipynb", {}, None)
    executed = nbformat.read(tmp_path / "done.ipynb", as_version=4)
    assert texts(executed) == [f"{sys.executable}\n"]


def test_the_kernel_is_told_to_show_progress_as_text(executed):
    assert texts(executed)[1] == "text\n"


def test_the_executed_notebook_holds_figures_as_data_and_no_widgets_or_plotly_js(built, executed):
    assert (built / "notebooks" / "pass.ipynb").stat().st_size < 100_000
    assert "widgets" not in executed.metadata


def test_figures_are_images_to_a_screen_reader(page):
    figures = page.find_all("figure")
    assert [figure["role"] for figure in figures] == ["img", "img"]
    assert [figure["aria-label"] for figure in figures] == ['Two "bars" & more', "A box"]


def test_a_figures_title_is_its_caption(page):
    caption = page.find("figcaption").get_text()
    assert caption == "Figure 1. Seconds of a pass."
    assert "title" not in json.loads(page.find("figure").find("script").get_text())["layout"]


def test_a_closing_script_tag_in_a_figure_cannot_end_its_data(tmp_path):
    figure = a_figure().update_layout(xaxis_title="</script><script>alert(1)</script>")
    source = write(tmp_path / "x.ipynb", code("", outputs=[figure_output(figure)]))
    export_html(source, tmp_path / "x.html", FACTS)
    text = (tmp_path / "x.html").read_text()
    assert "alert(1)" in text
    assert "<script>alert" not in text
    data = BeautifulSoup(text, "html.parser").find("figure").find("script").get_text()
    assert json.loads(data)["layout"]["xaxis"]["title"]["text"].startswith("</script>")


def test_the_page_carries_one_plotly_js_of_the_installed_version(page):
    (bundle,) = page.select("script#plotly")
    script = gzip.decompress(base64.b64decode(bundle.get_text())).decode()
    assert f"v{get_plotlyjs_version()}" in script[:200]


def test_a_page_without_figures_carries_no_script(tmp_path):
    source = write(tmp_path / "x.ipynb", new_markdown_cell("# Words only"))
    export_html(source, tmp_path / "x.html", FACTS)
    assert "<script" not in (tmp_path / "x.html").read_text()


def test_the_page_loads_nothing(page):
    loading = page.select("[src], link[href], object, embed, iframe, [srcset]")
    sources = [element.get("src") or element.get("href") for element in loading]
    assert all(source.startswith("data:") for source in sources)
    assert not re.search(r"url\(|@import", page.find("style").get_text())


def test_the_policy_admits_the_pages_own_scripts_by_hash_and_nothing_else(page):
    policy = page.find("meta", attrs={"http-equiv": "Content-Security-Policy"})["content"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert "connect-src" not in rules
    own = page.select("script:not([type])")[0].get_text()
    digest = base64.b64encode(hashlib.sha256(own.encode()).digest())
    assert f"'sha256-{digest.decode()}'" in rules["script-src"]
    assert "unsafe" not in rules["script-src"]


def test_the_page_stays_small(built):
    assert (built / "pass.html").stat().st_size < 1_300_000


def test_every_line_of_the_contents_leads_to_its_own_heading(page):
    links = page.select("nav.contents a")
    assert [link.get_text() for link in links] == ["Predict", "Bytes", "Predict"]
    targets = [link["href"].removeprefix("#") for link in links]
    assert len(set(targets)) == 3
    for link, target in zip(links, targets, strict=True):
        (heading,) = page.find_all(id=target)
        assert heading.get_text() == link.get_text()


def test_no_two_elements_share_an_id(page):
    ids = [element["id"] for element in page.select("[id]")]
    assert len(ids) == len(set(ids))


def test_hidden_code_is_folded_and_other_code_is_not(page):
    (folded,) = [d for d in page.select("details.code") if "import pandas" in d.get_text()]
    assert not folded.has_attr("open")
    assert folded.find("summary").get_text() == "Code"
    (shown,) = [c for c in page.select("div.code") if "ROUNDS" in c.get_text()]
    assert shown.find_parent("details") is None


def test_the_head_says_where_the_page_comes_from(page):
    head = page.find("header").get_text()
    for fact in (FACTS.machine, FACTS.commit, "2026-11-30 09:00", FACTS.size, FACTS.sources):
        assert fact in head
    assert page.find("header").find("a")["href"] == "index.html"


def test_the_page_has_a_language_a_title_one_heading_and_landmarks(page):
    assert page.html["lang"] == "en"
    assert page.title.get_text() == "The cost of a pass · lorabench"
    assert [heading.get_text() for heading in page.find_all("h1")] == ["The cost of a pass"]
    assert page.find("a", class_="skip")["href"] == "#main"
    assert page.find("main")["id"] == "main"
    assert page.find("nav", attrs={"aria-label": True})


def test_tables_drop_row_numbers_and_align_numbers(page):
    table = page.find("table")
    assert not table.select("tbody th")
    assert [header.get_text() for header in table.select(".number")] == [
        "seconds", "20280.0", "43.8",
    ]  # fmt: skip
    assert {header["scope"] for header in table.select("thead th")} == {"col"}
    assert "style" not in {element.name for element in page.find("main").find_all()}


def test_colours_have_enough_contrast_in_light_and_dark(page):
    style = page.find("style").get_text()
    light, dark = (
        dict(re.findall(r"--(\w+): (#\w+);", block))
        for block in re.findall(r":root \{(.*?)\}", style, re.DOTALL)[:2]
    )
    for palette in (light, light | dark):
        for name in ("ink", "soft", "link", "mark", "wrong"):
            assert contrast(palette[name], palette["paper"]) >= 4.5, name
        for name in ("ink", "keyword", "string", "number", "comment"):
            assert contrast(palette[name], palette["wash"]) >= 4.5, name


def contrast(one, other):
    """Contrast ratio of two colours, by WCAG 2."""

    def luminance(colour):
        digits = colour[1:] if len(colour) == 7 else "".join(d * 2 for d in colour[1:])
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_the_index_lists_title_first_paragraph_findings_and_time(built):
    index = BeautifulSoup((built / "index.html").read_text(), "html.parser")
    entry = index.find("article")
    assert entry.find("h2").get_text() == "The cost of a pass"
    assert entry.find("a")["href"] == "pass.html"
    assert "It reads <em>every</em> weight once." in str(entry)
    (finding,) = entry.select(".findings li")
    assert finding.get_text() == "It takes 2 s < 3 s."
    assert re.search(r"Took \d+ s", entry.get_text())
    assert (built / entry.select(".took a")[0]["href"]).is_file()


@pytest.mark.parametrize(
    ("figure", "message"),
    [
        (a_figure(alt=""), "figure 1.*layout.meta"),
        (go.Figure(go.Scattergl(y=[1])).update_layout(meta={"alt": "dots"}), "'scattergl'"),
    ],
)
def test_a_figure_that_some_reader_could_not_see_is_an_error(tmp_path, figure, message):
    source = write(tmp_path / "x.ipynb", code("", outputs=[figure_output(figure)]))
    with pytest.raises(CheckError, match=message):
        export_html(source, tmp_path / "x.html", FACTS)
    assert not (tmp_path / "x.html").exists()


def test_another_plotly_brings_its_own_whole_plotly_js_and_says_so(monkeypatch, capsys):
    monkeypatch.setattr("plotly.offline.get_plotlyjs_version", lambda: "99.0.0")
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "/* plotly 99 */")
    plotly_bundle.cache_clear()
    bundle = plotly_bundle()
    plotly_bundle.cache_clear()
    assert gzip.decompress(bundle.compressed) == b"/* plotly 99 */"
    assert bundle.traces is None
    assert "99.0.0" in capsys.readouterr().err


FAILURES = {
    "raises": ("raise ValueError('three weights\\ndiffer')", 1, "ValueError: three weights differ"),
    "hangs": ("import time; time.sleep(60)", 3, "took longer than 1.5 s"),
    "dies": ("import os; os._exit(7)", 4, "the kernel died"),
}


@pytest.mark.parametrize(("source", "exit_code", "words"), FAILURES.values(), ids=FAILURES)
def test_a_failed_run_says_how_and_leaves_the_partly_executed_notebook(
    tmp_path, source, exit_code, words
):
    notebook = write(tmp_path / "bad.ipynb", code("print('before')"), code(source), code("1"))
    destination = tmp_path / "out" / "bad.ipynb"
    with pytest.raises(NotebookError) as caught:
        run_notebook(notebook, destination, {}, timeout_seconds=1.5)
    assert caught.value.exit_code == exit_code
    for part in ("bad.ipynb", "[2/3]", source.split("\\n")[0], words, str(destination)):
        assert part in str(caught.value)
    assert texts(nbformat.read(destination, as_version=4)) == ["before\n"]
    assert list(destination.parent.iterdir()) == [destination]


def test_progress_tells_each_cell_and_its_seconds(tmp_path, capsys):
    notebook = write(tmp_path / "x.ipynb", code("1"), new_markdown_cell("words"), code("2"))
    run_notebook(notebook, tmp_path / "done.ipynb", {}, None)
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"x.ipynb\n\[1/2\] \d+\.\d s\n\[2/2\] \d+\.\d s\n", err)


def test_one_failure_does_not_stop_the_others_and_is_raised_at_the_end(tmp_path):
    bad = write(tmp_path / "bad.ipynb", PARAMETERS, code("1 / 0"))
    good = write(tmp_path / "good.ipynb", new_markdown_cell("# Good"), PARAMETERS)
    with pytest.raises(NotebookError, match="ZeroDivisionError") as caught:
        build_reports([bad, good], tmp_path / "out", {"SIZE": "tiny"}, FACTS)
    assert caught.value.exit_code == 1
    index = BeautifulSoup((tmp_path / "out" / "index.html").read_text(), "html.parser")
    failed, done = index.find_all("article")
    assert "ZeroDivisionError" in failed.get_text()
    assert done.find("a")["href"] == "good.html"
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["good.html", "index.html", "notebooks"]


@pytest.mark.parametrize(
    ("cells", "parameters", "words"),
    [
        ([PARAMETERS], {"SIZES": 1}, "unknown parameter SIZES.*assigns SIZE, ROUNDS"),
        ([code("SIZE = 1")], {"SIZE": 1}, "found 0"),
        ([PARAMETERS], {"SIZE": object()}, "found object"),
        ([code("%magic", "parameters")], {"SIZE": 1}, "isn't plain Python"),
    ],
)
def test_a_parameter_that_cannot_be_meant_is_refused_before_anything_runs(
    tmp_path, cells, parameters, words
):
    first = write(tmp_path / "first.ipynb", code("SIZE = SIZES = 1", "parameters"))
    second = write(tmp_path / "second.ipynb", *cells)
    with pytest.raises(ConfigError, match=words):
        build_reports([first, second], tmp_path / "out", parameters, FACTS)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [None, "not json", '{"cells": 1}'])
def test_what_is_no_notebook_is_refused_by_name(tmp_path, content):
    source = tmp_path / "x.ipynb"
    if content is not None:
        source.write_text(content)
    with pytest.raises(ConfigError, match=r"x\.ipynb"):
        run_notebook(source, tmp_path / "done.ipynb", {}, None)


def test_pages_that_would_overwrite_one_another_are_refused(tmp_path):
    (tmp_path / "other").mkdir()
    twins = [write(tmp_path / "a.ipynb", PARAMETERS), write(tmp_path / "other/a.ipynb", PARAMETERS)]
    with pytest.raises(ConfigError, match=r"a\.html"):
        build_reports(twins, tmp_path / "out", {}, FACTS)


def test_an_executed_notebook_runs_again_with_new_parameters(tmp_path):
    source = write(tmp_path / "x.ipynb", PARAMETERS, code("print(SIZE)"))
    run_notebook(source, tmp_path / "once.ipynb", {"SIZE": "tiny"}, None)
    run_notebook(tmp_path / "once.ipynb", tmp_path / "twice.ipynb", {"SIZE": "full"}, None)
    twice = nbformat.read(tmp_path / "twice.ipynb", as_version=4)
    assert texts(twice) == ["full\n"]
    assert len(twice.cells) == 3


def test_pages_beside_the_notebooks_folder_would_overwrite_them_and_are_refused(tmp_path):
    source = tmp_path / "notebooks" / "one.ipynb"
    source.parent.mkdir()
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# One")])
    nbformat.write(notebook, source)
    before = source.read_bytes()
    with pytest.raises(ConfigError, match="would be overwritten by its executed copy"):
        build_reports([source], tmp_path, {}, ReportFacts("m", "c", "d", "tiny", "s"))
    assert source.read_bytes() == before
