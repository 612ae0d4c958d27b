"""Row ranges of a weight, and where what touches its rows changes."""

from collections.abc import Iterator, Sequence
from itertools import pairwise


def stretches(touched: Sequence[range]) -> Iterator[tuple[range, tuple[int, ...]]]:
    """Cut rows where what touches them changes.

    Parameters
    ----------
    touched
        The rows that each of some things touches: ranges of step 1, in any order.

    Yields
    ------
    tuple
        The longest runs of rows that the same things touch, from the first row on, and the numbers
        of those things. Rows that nothing touches are in none of them.

    Examples
    --------
    >>> list(stretches([range(0, 8), range(2, 4)]))
    [(range(0, 2), (0,)), (range(2, 4), (0, 1)), (range(4, 8), (0,))]
    """
    edges = sorted({edge for rows in touched if rows for edge in (rows.start, rows.stop)})
    for top, end in pairwise(edges):
        if mine := tuple(i for i, rows in enumerate(touched) if top in rows):
            yield range(top, end), mine
