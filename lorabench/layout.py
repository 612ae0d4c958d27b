"""Text laid out for people: facts and tables, no wider than 100 columns."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence

WIDTH = 100
LISTED = 3
"""How many of a list's names are shown; --json has them all."""

Fact = tuple[str, int | str, str]
"""A name, a value and a remark."""


def table(header: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = ()) -> str:
    """Lay out rows under a header; a cell may have several lines.

    Parameters
    ----------
    right
        Numbers of the columns that are aligned to the right.
    """
    cells = [[cell.split("\n") for cell in row] for row in (header, *rows)]
    columns = list(zip(*cells, strict=True))
    widths = [max(len(line) for cell in column for line in cell) for column in columns]
    lines: list[str] = []
    for number, row in enumerate(cells):
        for at in range(max(map(len, row))):
            texts = [cell[at] if at < len(cell) else "" for cell in row]
            for column, width in enumerate(widths):
                pad = texts[column].rjust if column in right else texts[column].ljust
                texts[column] = pad(width)
            lines.append("  ".join(texts).rstrip())
        if number == 0:
            lines.append("  ".join("-" * width for width in widths))
    return "\n".join(lines)


def scaled(amount: float, unit: str) -> str:
    """Return an amount with two decimals and the prefix that fits: ``42.02 GB``, ``3.10 ms``."""
    if amount == 0:
        return f"0 {unit}"
    prefixes = ("u", "m", "") if unit == "s" else ("", "k", "M", "G", "T", "P")
    power = 1e-6 if unit == "s" else 1.0
    for prefix in prefixes:
        if amount < 1000 * power or prefix == prefixes[-1]:
            return f"{amount / power:.{0 if power == 1 and unit != 's' else 2}f} {prefix}{unit}"
        power *= 1000
    raise AssertionError


def facts(rows: Sequence[Fact]) -> str:
    """Lay out one fact a line; whole numbers are aligned to the right, among themselves."""
    names = max(len(name) for name, _, _ in rows)
    digits = max((len(f"{v:,}") for _, v, _ in rows if isinstance(v, int)), default=0)
    lines: list[str] = []
    for name, value, remark in rows:
        shown = f"{value:>{digits},}" if isinstance(value, int) else value
        line = f"  {name:{names}}  {shown}  {remark}".rstrip()
        indent = " " * (names + 4)
        lines += textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False)
    return "\n".join(lines)


def wrapped(lines: Iterable[str], width: int) -> str:
    """Wrap each line by itself, what follows its first line a little further in."""
    wrap = textwrap.TextWrapper(width, break_on_hyphens=False)
    found = []
    for line in filter(str.strip, lines):
        wrap.subsequent_indent = " " * (len(line) - len(line.lstrip()) + 2 * (line[0] != " "))
        found += wrap.wrap(line)
    return "\n".join(found)


def bytes_fact(name: str, nbytes: int) -> Fact:
    """Tell a number of bytes."""
    return name, nbytes, scaled(nbytes, "B")


def flops_fact(flops: int) -> Fact:
    """Tell the operations of a pass."""
    return "FLOPs of a pass", flops, scaled(flops, "FLOP")


def few(names: Sequence[str]) -> str:
    """Name the first of many."""
    more = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f", and {more:,} more" if more > 0 else "")


def histogram(counts: Mapping[str, int]) -> str:
    """Tell how often each thing is there."""
    return ", ".join(f"{name} x{count:,}" for name, count in counts.items())


def share(part: int, whole: int) -> str:
    """Tell how much of a model some parameters are."""
    return f"{part / whole:.1%} of the parameters" if whole else ""
