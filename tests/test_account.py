"""A pass's account: every span once, whoever nests in whom and whichever thread books it."""

import threading
import time

import pytest
import torch

from lorabench.account import OPERATIONS, Account, Row
from lorabench.fuse import Pair, Term
from lorabench.kernels import Scratch, get_kernel


def fuse(scratch):
    """Fuse two terms into a weight of several tiles, as the caller's scratch has it."""
    g = torch.Generator().manual_seed(3)
    weight = torch.randn(64, 48, generator=g).bfloat16()
    pair = Pair(torch.randn(8, 48, generator=g), torch.randn(64, 8, generator=g), 1.0)
    get_kernel("gemm", torch.device("cpu"))(weight, [Term(pair, 1.0), Term(pair, 0.5)], scratch)
    return weight


def test_an_accounts_rows_add_up_what_was_booked(monkeypatch):
    clock = iter([0.0, 1.0, 1.0, 3.0, 3.0, 6.0, 10.0, 30.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    account = Account()
    for _ in range(3):
        with account.book("add", nbytes=10):
            pass
    with account.book("product", nbytes=1, flops=7):
        pass
    assert account.rows() == [
        Row("product", count=1, nbytes=1, flops=7, seconds=20.0),
        Row("add", count=3, nbytes=30, flops=0, seconds=6.0),
    ]


def test_time_inside_an_inner_span_is_the_inner_ones_alone(monkeypatch):
    clock = iter([0.0, 1.0, 4.0, 6.0, 10.0, 15.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    account = Account()
    with account.book("restore"), account.book("product"), account.book("add"):
        pass
    seconds = {row.operation: row.seconds for row in account.rows()}
    assert seconds == {"add": 2.0, "product": 3.0 + 4.0, "restore": 1.0 + 5.0}


def test_a_span_that_fails_is_booked_and_the_next_one_is_not_inside_it():
    account = Account()
    with pytest.raises(KeyboardInterrupt), account.book("restore"), account.book("read"):
        raise KeyboardInterrupt
    with account.book("add"):
        time.sleep(0.01)
    rows = {row.operation: row for row in account.rows()}
    assert {name: row.count for name, row in rows.items()} == {"read": 1, "restore": 1, "add": 1}
    assert rows["add"].seconds >= 0.01


def test_spans_of_two_threads_do_not_nest_in_each_other():
    account, entered = Account(), threading.Barrier(2)

    def work(operation):
        with account.book(operation):
            entered.wait(10)
            time.sleep(0.02)
            entered.wait(10)

    threads = [threading.Thread(target=work, args=(op,)) for op in ("read", "product")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(row.seconds >= 0.02 for row in account.rows())


def test_no_span_of_many_threads_is_lost():
    account = Account()

    def work():
        for _ in range(500):
            with account.book("copy", nbytes=2), account.book("add", flops=1):
                pass

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    copy, add = account.rows()
    assert (copy.count, copy.nbytes, add.count, add.flops) == (4000, 8000, 4000, 4000)


def test_rows_come_in_the_order_of_the_operations_and_only_of_what_was_booked():
    account = Account()
    assert account.rows() == []
    for operation in ("write", "add", "read"):
        with account.book(operation):
            pass
    assert [row.operation for row in account.rows()] == ["read", "add", "write"]
    assert {"read", "add", "write"} < set(OPERATIONS)


class StreamEvent:
    """A CUDA event on a stream that a test moves on by hand."""

    now_ms = 0.0
    waited = 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at_ms = StreamEvent.now_ms

    def synchronize(self):
        StreamEvent.waited += 1

    def elapsed_time(self, end):
        return end.at_ms - self.at_ms


def test_on_a_gpu_spans_are_timed_by_events_and_waited_for_when_rows_are_asked_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", StreamEvent)
    account = Account("cuda")
    with account.book("restore"):
        StreamEvent.now_ms += 5
        with account.book("add"):
            StreamEvent.now_ms += 20
        with account.book("read"):  # a file's, by the host's clock
            time.sleep(0.003)
    assert StreamEvent.waited == 0
    seconds = {row.operation: row.seconds for row in account.rows()}
    assert StreamEvent.waited > 0
    assert seconds["add"] == pytest.approx(0.020)
    assert seconds["read"] >= 0.003
    assert 0 <= seconds["restore"] <= 0.005


def test_a_fuse_accounts_for_its_products_and_additions():
    scratch = Scratch()
    scratch.account = Account()
    fuse(scratch)
    rows = {row.operation: row for row in scratch.account.rows()}
    assert rows["product"].flops == 2 * (2 * 64 * 8 * 48)
    assert (
        rows["add"].nbytes >= 3 * 2 * 64 * 48
    )  # the weight and the delta read, the weight written


def test_accounting_changes_no_bit():
    accounted = Scratch()
    accounted.account = Account()
    assert torch.equal(fuse(accounted), fuse(Scratch()))


def test_without_an_account_a_span_is_one_object_that_does_nothing():
    scratch = Scratch()
    assert scratch.span("add", nbytes=1) is scratch.span("product", flops=9)
