"""One way to show progress: a widget in a live notebook, a bar on a terminal, lines elsewhere."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from time import monotonic
from typing import TypeVar

Item = TypeVar("Item")

LINE_EVERY = 5.0  # seconds between two lines of text
BAR_AFTER = 0.5  # seconds before a bar shows, so that quick loops stay silent


def progress(
    iterable: Iterable[Item],
    *,
    label: str,
    total: float | None = None,
    unit: str = "it",
    size: Callable[[Item], float] | None = None,
) -> Iterator[Item]:
    """Yield the items, and show on standard error how far the loop has come.

    A loop that ends within a moment shows nothing. Where there is neither a live notebook nor a
    terminal, or where ``LORABENCH_PROGRESS`` is ``text``, a plain line is printed every few
    seconds, and one at the end.

    Parameters
    ----------
    iterable
        What to loop over.
    label
        What is being done.
    total
        The amount of work in all, in ``unit``; by default the number of items, where it is known.
    unit
        Unit of ``total`` and ``size``; amounts of ``"B"`` are shown in kB, MB, GB.
    size
        How much work an item is, in ``unit``; by default each is one.

    Examples
    --------
    >>> for shard in progress([3, 4], label="read", total=7, unit="B", size=lambda n: n):
    ...     pass
    """
    if total is None and size is None and isinstance(iterable, Sized):
        total = len(iterable)
    if _has_bar():
        yield from _with_bar(iterable, label, total, unit, size)
    else:
        yield from _with_lines(iterable, label, total, unit, size)


def _has_bar() -> bool:
    if os.environ.get("LORABENCH_PROGRESS") == "text":
        return False
    return _in_kernel() or sys.stderr.isatty()


def _in_kernel() -> bool:
    ipython = sys.modules.get("IPython")  # a kernel has imported it
    shell = ipython.get_ipython() if ipython else None
    return getattr(shell, "kernel", None) is not None


def _with_bar(
    iterable: Iterable[Item],
    label: str,
    total: float | None,
    unit: str,
    size: Callable[[Item], float] | None,
) -> Iterator[Item]:
    from tqdm.auto import tqdm

    with tqdm(
        total=total, desc=label, unit=unit, unit_scale=unit == "B", delay=BAR_AFTER, file=sys.stderr
    ) as bar:
        for item in iterable:
            yield item
            bar.update(size(item) if size else 1)


def _with_lines(
    iterable: Iterable[Item],
    label: str,
    total: float | None,
    unit: str,
    size: Callable[[Item], float] | None,
) -> Iterator[Item]:
    start = last = monotonic()
    done = 0.0
    for item in iterable:
        yield item
        done += size(item) if size else 1
        now = monotonic()
        if now - last >= LINE_EVERY:
            last = now
            _print_line(label, done, total, unit, now - start)
    seconds = monotonic() - start
    if seconds >= LINE_EVERY:
        rate = _amount(done / seconds, unit)
        print(
            f"{label}: {_amount(done, unit)} in {seconds:.0f} s, {rate}/s",
            file=sys.stderr,
            flush=True,
        )


def _print_line(label: str, done: float, total: float | None, unit: str, seconds: float) -> None:
    rate = done / seconds
    parts = [f"{_amount(done, unit)}", f"{_amount(rate, unit)}/s"]
    if total:
        parts[0] += f" of {_amount(total, unit)}"
        if rate > 0:
            parts.append(f"{max(0.0, total - done) / rate:.0f} s left")
    print(f"{label}: {', '.join(parts)}", file=sys.stderr, flush=True)


def _amount(value: float, unit: str) -> str:
    if unit == "B":
        for prefix in ("", "k", "M", "G"):
            if value < 1000 or prefix == "G":
                return f"{value:.3g} {prefix}B"
            value /= 1000
    return f"{value:.0f} {unit}" if value == int(value) else f"{value:.3g} {unit}"
