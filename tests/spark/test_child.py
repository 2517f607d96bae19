"""Children: other Pythons or copies of this process, which get one line and tell lines."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.spark.child import Child, received, tell


def main() -> None:
    """What the children of these tests do."""
    told = received()
    try:
        os.fstat(told["open"])
        has = True
    except OSError:
        has = False
    tell({"pid": os.getpid(), "session": os.getsid(0), "word": told["word"], "has": has})
    if told["word"] == "fail":
        raise RuntimeError
    while os.read(0, 4096):
        pass


@pytest.fixture(params=[True, False], ids=["copy", "python"])
def made(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Child, int]]:
    monkeypatch.setattr(threading, "active_count", lambda: 1 if request.param else 2)
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    kept, other = os.pipe()
    one = Child(__name__, {"word": "hello", "open": other}, forks=True)
    yield one, other
    one.close()
    os.close(kept)
    os.close(other)


def test_a_child_tells_and_ends_with_its_input(made: tuple[Child, int]) -> None:
    one, _ = made
    told = one.line(30)
    assert told is not None
    assert told == {"pid": one.pid, "session": one.pid, "word": "hello", "has": False}
    assert one.is_running()
    one.close()
    assert not one.is_running()


def test_a_copy_that_fails_says_nothing_more_and_is_gone() -> None:
    one = Child(__name__, {"word": "fail", "open": 999_999}, forks=True)
    assert one.line(30) is not None
    assert one.line(30) is None
    end = time.monotonic() + 10
    while one.is_running():
        assert time.monotonic() < end
        time.sleep(0.01)
    one.close()
