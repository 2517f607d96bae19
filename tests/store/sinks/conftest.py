from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headwater import failpoints
from headwater.state import StateStore, open_writer

from .lakes import LAKES, At, Lake

Reopen = Callable[[], StateStore]


@pytest.fixture
def reopen(tmp_path: Path) -> Iterator[Reopen]:
    """Opens the store, and opens it again as after a crash of the process that had it."""
    opened: list[StateStore] = []

    def open_again() -> StateStore:
        opened.append(open_writer(str(tmp_path / "store"), takeover=bool(opened)))
        return opened[-1]

    yield open_again
    for store in opened:
        store.close()


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def log_format(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(params=LAKES, ids=[one.name for one in LAKES])
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> Lake:
    kind: type[Lake] = request.param
    return kind(str(tmp_path / "lake"))


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> At:
    """Do something when a failpoint is passed, once."""

    def arrange(name: str, action: Callable[[], object]) -> None:
        left = [action]

        def hit(passed: str) -> None:
            if passed == name and left:
                left.pop()()

        monkeypatch.setattr(failpoints, "hit", hit)

    return arrange
