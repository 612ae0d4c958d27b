"""Rows are cut where what touches them changes, and nowhere else."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from lorabench.rows import stretches

RANGES = st.tuples(st.integers(0, 12), st.integers(0, 12)).map(lambda ends: range(*sorted(ends)))


@given(touched=st.lists(RANGES, max_size=5))
def test_each_row_is_in_one_stretch_with_what_touches_it(touched):
    cut = list(stretches(touched))
    found = {row: mine for rows, mine in cut for row in rows}
    assert sum(len(rows) for rows, _ in cut) == len(found)
    for row in range(12):
        mine = tuple(i for i, rows in enumerate(touched) if row in rows)
        assert found.get(row, ()) == mine


@given(touched=st.lists(RANGES, max_size=5))
def test_stretches_are_in_order_and_as_long_as_can_be(touched):
    cut = list(stretches(touched))
    for (rows, mine), (after, others) in pairwise(cut):
        assert rows.stop <= after.start
        assert rows.stop < after.start or mine != others


def test_one_thing_that_touches_all_rows_leaves_them_together():
    assert list(stretches([range(0, 4096)])) == [(range(0, 4096), (0,))]
    assert list(stretches([range(0, 8), range(0, 8)])) == [(range(0, 8), (0, 1))]
    assert list(stretches([range(3, 3)])) == list(stretches([])) == []
