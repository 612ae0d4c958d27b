"""Opens a page in headless Chromium, and says what it drew and what it asked the network for."""

import json
import os
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from bs4 import BeautifulSoup, Tag

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--disable-dev-shm-usage --disable-default-apps --disable-extensions"
).split()

# Where plotly.js puts the traces of a type, and what it draws for one.
MARKS = {
    "scatter": (".scatterlayer > .trace", "path.point, path.js-line, path.js-fill, text"),
    "bar": (".barlayer > .trace", ".point > path"),
    "histogram": (".barlayer > .trace", ".point > path"),
    "box": (".boxlayer > .trace", "path.box"),
    "violin": (".violinlayer > .trace", "path.violin"),
    "heatmap": (".heatmaplayer > *", "image"),
    "contour": (".contourlayer > *", "path"),
    "pie": (".pielayer > .trace", ".slice > path"),
}
BROWSER_ITSELF = "not an origin"
EMPTY_PATHS = {None, "", "M0,0", "M0,0Z"}


@dataclass(frozen=True)
class Opened:
    """A page after its scripts ran."""

    dom: str
    console: tuple[str, ...]
    requests: tuple[str, ...]


@dataclass(frozen=True)
class Drawn:
    """The marks that one visible trace of a figure left in the page."""

    figure: str
    kind: str
    name: str
    marks: int


def chromium() -> str:
    """Return the browser's path; skip the test where there is none, unless one is required."""
    for name in NAMES:
        if path := shutil.which(name):
            return path
    reason = f"no browser found (looked for {', '.join(NAMES)}); install Chromium"
    if os.environ.get("LORABENCH_REQUIRE_BROWSER") == "1":
        pytest.fail(f"{reason}, or unset LORABENCH_REQUIRE_BROWSER")
    pytest.skip(reason)


def open_page(page: Path, profile: Path, *, dark: bool = False) -> Opened:
    """Open a file in a new profile and wait for its figures."""
    netlog = profile / "netlog.json"
    result = _run(page, profile, dark, 1280, 1000, "--dump-dom", f"--log-net-log={netlog}")
    console = tuple(line for line in result.stderr.splitlines() if ":CONSOLE" in line)
    return Opened(result.stdout, console, tuple(_requests(netlog)))


def screenshot(page: Path, png: Path, profile: Path, *, dark: bool = False) -> None:
    """Take a picture of a page's top."""
    _run(page, profile, dark, 1280, 2400, f"--screenshot={png}")


def drawn(dom: str) -> list[Drawn]:
    """Count the marks of every visible trace of every figure on a page.

    Traces of one type are matched to their groups in the order in which plotly.js draws them,
    which is the order of the figure's data.
    """
    found = []
    for figure in BeautifulSoup(dom, "html.parser").select("figure[role=img]"):
        script = figure.find("script")
        assert isinstance(script, Tag)
        seen: Counter[str] = Counter()
        for trace in json.loads(script.get_text())["data"]:
            if trace.get("visible", True) is not True:
                continue
            kind = trace.get("type", "scatter")
            group, mark = MARKS[kind]
            groups = figure.select(group)
            index = seen[group]
            seen[group] += 1
            marks = groups[index].select(mark) if index < len(groups) else []
            count = sum(m.name != "path" or m.get("d") not in EMPTY_PATHS for m in marks)
            found.append(Drawn(str(figure["id"]), kind, trace.get("name", ""), count))
    return found


def _run(
    page: Path, profile: Path, dark: bool, width: int, height: int, *flags: str
) -> subprocess.CompletedProcess[str]:
    profile.mkdir(parents=True, exist_ok=True)
    scheme = 0 if dark else 1
    return subprocess.run(
        [
            chromium(),
            *FLAGS,
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
            f"--blink-settings=preferredColorScheme={scheme}",
            "--enable-logging=stderr",
            "--virtual-time-budget=20000",
            *flags,
            page.resolve().as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


def _requests(netlog: Path) -> list[str]:
    """List the addresses that the page asked the network for.

    What the browser asks on its own account has no initiator, and doesn't count.
    """
    parameters = (event.get("params", {}) for event in json.loads(netlog.read_text())["events"])
    return [
        sent["url"]
        for sent in parameters
        if sent.get("initiator", BROWSER_ITSELF) != BROWSER_ITSELF
        and not sent.get("url", "").startswith(("file:", "data:", "blob:"))
    ]
