"""Long work says which stage it is in."""

import io
import logging
import re
import time

import pytest

from compiled_fsdp.base import progress
from compiled_fsdp.base.progress import stage
from compiled_fsdp.ranks.waiting import _ranks

SECONDS = 30  # to wait for a line at most


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Any work is long."""
    monkeypatch.setattr(progress, "FIRST", 0.0)
    monkeypatch.setattr(progress, "BETWEEN", 0.01)
    monkeypatch.setattr(progress, "_IN_A_TERMINAL", 0.01)


def until(condition):
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_lines_of_a_log(caplog):
    def said(text):
        lines = [re.sub(r"\d+ s", "N s", message) for message in caplog.messages]
        return f"compiled_fsdp: compiling a graph for N s: {text} for N s" in lines

    with stage("compiling a graph"), stage("planning") as inner:
        until(lambda: said("planning"))
        inner.text = "waiting for rank 1"
        until(lambda: said("waiting for rank 1"))


def test_nothing_is_said_after_the_end(caplog):
    with stage("measuring"):
        until(lambda: caplog.messages)
    said = len(caplog.messages)
    time.sleep(0.1)
    assert len(caplog.messages) <= said + 1  # one that was on its way
    assert not progress._stages


def test_an_error_ends_a_stage(caplog):
    with pytest.raises(KeyError), stage("measuring"):
        raise KeyError
    assert not progress._stages
    assert progress._over is None


def test_one_line_in_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with stage("compiling a graph"):
        until(lambda: terminal.getvalue().count("\r") >= 2)
    until(lambda: terminal.getvalue().endswith("\r\x1b[K"))
    assert "\n" not in terminal.getvalue()
    assert re.match(r"\r\x1b\[Kcompiled_fsdp: compiling a graph for \d+ s\r", terminal.getvalue())


def test_only_rank_0_says_it(caplog, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with stage("compiling a graph"):
        time.sleep(0.1)
    assert not caplog.messages


def test_a_user_can_silence_it(caplog):
    progress.log.setLevel(logging.ERROR)
    try:
        with stage("compiling a graph"):
            time.sleep(0.1)
    finally:
        progress.log.setLevel(logging.NOTSET)
    assert not caplog.messages


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([0, 2], "ranks 0, 2"), (list(range(8)), "ranks 0, 1, 2, 3 and 4 more"), ([], "ranks ")],
)
def test_names_of_ranks(ranks, text):
    assert _ranks(ranks) == text
