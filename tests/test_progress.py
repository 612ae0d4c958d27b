import builtins
import io
import sys
import types

import pytest

import lorabench.progress as module
from lorabench.progress import progress


@pytest.fixture
def clock(monkeypatch):
    """A clock that a loop's body moves on by hand."""
    now = [100.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])

    def tick(seconds):
        now[0] += seconds

    return tick


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.delenv("LORABENCH_PROGRESS", raising=False)
    stream = Terminal()
    fake = types.SimpleNamespace(stderr=stream, modules=sys.modules)
    monkeypatch.setattr(module, "sys", fake)
    return stream


@pytest.fixture
def bars(monkeypatch):
    """Records every bar in place of tqdm's."""
    made = []

    class Bar:
        def __init__(self, **options):
            self.options, self.updates = options, []
            made.append(self)

        def __enter__(self):
            return self

        def __exit__(self, *_error):
            return None

        def update(self, amount):
            self.updates.append(amount)

    monkeypatch.setitem(sys.modules, "tqdm.auto", types.SimpleNamespace(tqdm=Bar))
    return made


def test_every_item_comes_through_once_and_in_order():
    assert list(progress(iter("abc"), label="read")) == ["a", "b", "c"]


def test_a_quick_loop_is_silent(clock, capsys):
    for _ in progress(range(100), label="fuse"):
        clock(0.01)
    assert capsys.readouterr() == ("", "")


def test_a_slow_loop_prints_a_line_every_few_seconds_and_one_at_the_end(clock, capsys):
    for _ in progress(range(6), label="fuse"):
        clock(2)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "fuse: 3 it of 6 it, 0.5 it/s, 6 s left",
        "fuse: 6 it of 6 it, 0.5 it/s, 0 s left",
        "fuse: 6 it in 12 s, 0.5 it/s",
    ]


def test_bytes_weigh_the_items_and_are_shown_with_a_prefix(clock, capsys):
    files = [6_000_000_000, 1_000_000_000]
    for _ in progress(files, label="stream", total=sum(files), unit="B", size=lambda n: n):
        clock(6)
    assert capsys.readouterr().err.splitlines()[0] == "stream: 6 GB of 7 GB, 1 GB/s, 1 s left"


def test_an_unknown_total_gives_a_rate_and_no_promise(clock, capsys):
    for _ in progress(iter(range(2)), label="walk"):
        clock(5)
    assert capsys.readouterr().err.splitlines()[0] == "walk: 1 it, 0.2 it/s"


def test_a_terminal_gets_a_bar_that_waits_before_it_shows(terminal, bars):
    assert list(progress([3, 4], label="read", total=7, unit="B", size=lambda n: n)) == [3, 4]
    (bar,) = bars
    assert bar.updates == [3, 4]
    assert bar.options["total"] == 7
    assert bar.options["unit_scale"]
    assert bar.options["delay"] > 0
    assert terminal.getvalue() == ""


def test_the_environment_asks_for_text_where_a_bar_would_go_stale(
    terminal, bars, clock, monkeypatch
):
    monkeypatch.setenv("LORABENCH_PROGRESS", "text")
    for _ in progress(range(2), label="fuse"):
        clock(5)
    assert bars == []
    assert "fuse: 2 it in 10 s" in terminal.getvalue()


def test_a_live_kernel_gets_the_bar_without_a_terminal(bars, monkeypatch):
    monkeypatch.delenv("LORABENCH_PROGRESS", raising=False)
    shell = types.SimpleNamespace(kernel=object())
    ipython = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert list(progress("ab", label="read")) == ["a", "b"]
    assert bars[0].updates == [1, 1]


def test_lines_of_text_need_no_tqdm(clock, monkeypatch):
    real = builtins.__import__

    def without_tqdm(name, *rest):
        assert not name.startswith("tqdm")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_tqdm)
    assert list(progress(range(3), label="fuse")) == [0, 1, 2]
