"""Turn an executed notebook into one HTML file that reads like an article and needs no network.

nbconvert renders the cells; everything round them is ours.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
from bs4 import BeautifulSoup, Tag
from markupsafe import Markup
from nbformat import NotebookNode

from lorabench.errors import CheckError
from lorabench.page import TEMPLATES, plotly_bundle, render, replace_file

PLOTLY_MIME = "application/vnd.plotly.v1+json"

PLOT_HEIGHT = 420  # pixels, for a figure that doesn't say
# Pixels. Axes make room for their labels; the top has room for subplot titles, and no more once
# the figure's title has become its caption.
MARGIN = {"l": 8, "r": 8, "t": 36, "b": 8}
MENU_TOP_MARGIN = 84  # pixels; a menu above the plot stays clear of plotly's own buttons


@dataclass(frozen=True)
class ReportFacts:
    """What the head of every page says.

    Attributes
    ----------
    machine
        The machine that ran the notebooks, for a person.
    commit
        The commit they ran at, and whether the tree had changes.
    date
        When they ran, in ISO 8601.
    size
        ``tiny``, ``laptop`` or ``full``.
    sources
        A sentence: which figures come from committed records, and which from this run.
    """

    machine: str
    commit: str
    date: str
    size: str
    sources: str


@dataclass(frozen=True)
class Article:
    """What the index page repeats of a page; ``lead`` and ``findings`` are HTML."""

    title: str
    lead: Markup
    findings: tuple[Markup, ...]


class Heading(NamedTuple):
    """A line of the table of contents."""

    level: int
    anchor: str
    text: str


def export_html(executed: Path, html: Path, facts: ReportFacts) -> Article:
    """Write the page of an executed notebook.

    Every plotly figure needs a text for those who can't see it, in ``layout.meta["alt"]``. Its
    title becomes the caption. Headings of level 2 and 3 become the table of contents; paragraphs
    that start with ``**Finding.**``, in a Markdown cell or output, are set apart and returned.
    Code cells tagged ``hide-input`` are folded.

    Parameters
    ----------
    executed
        The executed notebook.
    html
        Where the page goes.
    facts
        What the head of the page says.

    Raises
    ------
    CheckError
        A figure lacks its text, or has a trace that the embedded plotly.js can't draw.
    """
    from nbconvert.exporters import HTMLExporter

    notebook = nbformat.read(executed, as_version=4)
    count = _figures_to_html(notebook, executed)
    exporter = HTMLExporter(
        template_name="article",
        extra_template_basedirs=[str(TEMPLATES)],
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        exclude_anchor_links=True,
    )
    body, _ = exporter.from_notebook_node(notebook)
    soup = BeautifulSoup(body, "html.parser")
    _set_tables(soup)
    article = _take_head(soup, executed.stem)
    contents = _contents(soup)
    page = render(
        "report.html.j2",
        title=article.title,
        facts=facts,
        article=article,
        body=Markup(str(soup)),
        contents=contents,
        notebook=Path(os.path.relpath(executed, html.parent)).as_posix(),
        plotly=plotly_bundle() if count else None,
    )
    replace_file(html, page)
    return article


def _figures_to_html(notebook: NotebookNode, source: Path) -> int:
    """Replace each plotly output by a figure element; return how many there are."""
    count = 0
    for index, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", ()):
            figure = output.get("data", {}).get(PLOTLY_MIME)
            if figure is not None:
                count += 1
                html = _figure(figure, count, f"{source}: figure {count}, in cell {index}")
                output["data"] = NotebookNode({"text/html": html})
    return count


def _figure(figure: Mapping[str, Any], number: int, place: str) -> str:
    layout = dict(figure.get("layout", {}))
    meta = layout.get("meta")
    alt = meta.get("alt", "") if isinstance(meta, Mapping) else ""
    if not alt:
        raise CheckError(
            f"{place}, has no text for those who can't see it; expected layout.meta['alt']"
        )
    drawable = plotly_bundle().traces
    for trace in figure["data"]:
        kind = trace.get("type", "scatter")
        if drawable is not None and kind not in drawable:
            raise CheckError(
                f"{place}, has a trace of type {kind!r}, which the page's plotly.js can't draw; "
                f"use one of {', '.join(sorted(drawable))}"
            )

    # The title becomes the caption, because a drawn title neither wraps nor can be selected.
    title: Mapping[str, Any] = layout.pop("title", {})
    parts = (title.get("text"), title.get("subtitle", {}).get("text"))
    default = layout.get("template", {}).get("layout", {}).get("margin", {})
    margin = {**MARGIN, **default, **layout.get("margin", {})}
    layout["margin"] = {**margin, "t": min(margin["t"], MARGIN["t"])}
    if layout.get("updatemenus"):
        layout["margin"]["t"] = MENU_TOP_MARGIN
    layout.pop("width", None)  # the page's width, whatever the screen
    drawing = {"data": figure["data"], "layout": layout, "frames": figure.get("frames", [])}
    text = json.dumps(drawing, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return render(
        "figure.html.j2",
        alt=alt,
        number=number,
        caption=" ".join(_sentence(part) for part in parts if part),
        height=layout.get("height", PLOT_HEIGHT),
        drawing=Markup(text),
    )


def _sentence(markup: str) -> str:
    """Return the words of a plotly text, which may have a few HTML tags, with a full stop."""
    for line_break in ("<br>", "<br/>", "<br />"):
        markup = markup.replace(line_break, " ")
    words = " ".join(BeautifulSoup(markup, "html.parser").get_text().split())
    return words if words.endswith((".", "?", "!")) else f"{words}."


def _take_head(soup: BeautifulSoup, fallback: str) -> Article:
    """Move the title and first paragraph out of the body, and mark the findings in it."""
    title, lead = fallback, Markup("")
    heading = soup.find("h1")
    if heading is not None:
        title = heading.get_text().strip()
        paragraph = heading.find_next_sibling()
        if paragraph is not None and paragraph.name == "p":
            lead = Markup(paragraph.extract().decode_contents())
        heading.decompose()
    findings = []
    for paragraph in soup.find_all("p"):
        mark = paragraph.find("strong")
        if mark is not None and mark is paragraph.contents[0] and mark.get_text() == "Finding.":
            paragraph["class"] = "finding"
            findings.append(Markup("".join(map(str, paragraph.contents[1:])).strip()))
    return Article(title, lead, tuple(findings))


def _contents(soup: BeautifulSoup) -> list[Heading]:
    """Give the headings anchors of their own, and list them."""
    headings: list[Heading] = []
    for heading in soup.find_all(["h2", "h3"]):
        text = heading.get_text().strip()
        slug = re.sub(r"[^\w]+", "-", text.lower()).strip("-") or "section"
        taken = {known.anchor for known in headings}
        anchor, repeat = slug, 2
        while anchor in taken:
            anchor, repeat = f"{slug}-{repeat}", repeat + 1
        heading["id"] = anchor
        headings.append(Heading(int(heading.name[1]), anchor, text))
    return headings


def _set_tables(soup: BeautifulSoup) -> None:
    """Give tables their own scroll, numbers their alignment, and headers their scope."""
    for style in soup.select("style[scoped]"):  # pandas' own, which knows no dark page
        style.decompose()
    for table in soup.find_all("table"):
        del table["border"]
        for header in table.select("thead th"):
            header["scope"] = "col"
        for header in table.select("tbody th"):
            header["scope"] = "row"
        labels = table.select("tbody th:first-child")
        numbers = [str(row) for row in range(len(labels))]
        if labels and [label.get_text() for label in labels] == numbers:
            for label in table.select("tr > th:first-child"):  # a frame's default row numbers
                label.decompose()
        rows = [row.find_all(["th", "td"]) for row in table.find_all("tr")]
        if table.select("[rowspan]"):  # rows of a grouped index are shorter than its first
            rows = [list(reversed(row)) for row in rows]
        for column in zip(*rows, strict=False):
            values = [cell for cell in column if cell.name == "td"]
            if values and all(_is_number(cell) for cell in values):
                for cell in column:
                    cell["class"] = "number"
        table.wrap(soup.new_tag("div", attrs={"class": "table", "tabindex": "0"}))


def _is_number(cell: Tag) -> bool:
    text = cell.get_text().strip().replace(",", "").replace("−", "-").rstrip("%×x")
    try:
        float(text or "nan")
    except ValueError:
        return False
    return True
