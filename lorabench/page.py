"""The frame of a page: its templates, its policy, and the plotly.js that it carries.

plotly.js travels in a page once, in gzip and base64, and the page's policy lets no script run but
that one and our own.
"""

import base64
import functools
import gzip
import hashlib
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

TEMPLATES = Path(__file__).parent / "templates"

# What plotly.js-cartesian can draw (its own schema, which a browser test asks for).
CARTESIAN_TRACES = frozenset(
    "bar box contour heatmap histogram histogram2d histogram2dcontour image pie scatter "
    "scatterternary violin".split()
)


class Bundle(NamedTuple):
    """A plotly.js: its text in gzip, the script's hash, and what it draws (None: everything)."""

    compressed: bytes
    sha256: str
    traces: frozenset[str] | None


def render(template: str, *, plotly: Bundle | None = None, **values: Any) -> str:
    """Fill a page template; the policy admits its scripts by their hashes and nothing else."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = (TEMPLATES / "figures.js").read_text(encoding="utf-8")
    hashes = f"'sha256-{_sha256(script.encode())}' 'sha256-{plotly.sha256}'" if plotly else "'none'"
    environment.globals |= {
        "style": Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
        "script": Markup(script),
        "plotly": base64.b64encode(plotly.compressed).decode() if plotly else None,
        "policy": (
            f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
            "img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'"
        ),
    }
    return environment.get_template(template).render(**values)


@functools.cache
def plotly_bundle() -> Bundle:
    """Return the plotly.js that belongs to the installed plotly.

    The shipped cartesian bundle, where its version is the right one; else the whole of the
    installed plotly's own, with a warning, since the page grows by about a megabyte.
    """
    from plotly.offline import get_plotlyjs, get_plotlyjs_version

    version = get_plotlyjs_version()
    shipped = TEMPLATES / f"plotly-cartesian-{version}.min.js.gz"
    if shipped.is_file():
        compressed = shipped.read_bytes()
        return Bundle(compressed, _sha256(gzip.decompress(compressed)), CARTESIAN_TRACES)
    print(
        f"warning: no small plotly.js {version} is shipped, so pages carry the whole one; "
        "install the plotly that lorabench was released with for smaller pages",
        file=sys.stderr,
    )
    whole = get_plotlyjs().encode()
    return Bundle(gzip.compress(whole, mtime=0), _sha256(whole), None)


def _sha256(text: bytes) -> str:
    return base64.b64encode(hashlib.sha256(text).digest()).decode()


def replace_file(path: Path, text: str) -> None:
    """Write a text file under a temporary name, then move it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
