"""Who waits for an epoch is woken when another thread announces it, and looks by itself when nobody does."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from headwater.state import StateStore, WriteBatch, announcements, open_reader, open_writer
from headwater.state.announcements import Announcer
from headwater.state.handle import wait_until
from headwater.stream import Epoch

FIRST, SECOND = Epoch.from_ms(1), Epoch.from_ms(2)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StateStore]:
    with open_writer(tmp_path / "store") as store:
        store.seal(FIRST, WriteBatch())
        yield store


def looks(location: str, seconds: float) -> int:
    """How often a reader looks at a store in which nothing happens."""
    count = 0

    def committed() -> Epoch:
        nonlocal count
        count += 1
        return FIRST

    assert wait_until(committed, location, FIRST, seconds) is None
    return count


def test_an_announced_epoch_wakes_a_reader_that_would_wait_for_an_hour(
    store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcements, "_UNHEARD_SECONDS", 3600.0)
    with (
        ThreadPoolExecutor(1) as threads,
        open_reader(store.location) as reader,
        closing(Announcer(f"file://{store.location}")) as announcer,
    ):
        waiting = threads.submit(reader.wait_for_epoch, FIRST, 3600.0)
        store.seal(SECOND, WriteBatch())
        announcer.announce(SECOND)
        assert waiting.result(60) == SECOND


def test_an_epoch_whose_announcement_was_lost_is_seen_soon(store: StateStore) -> None:
    with closing(Announcer(store.location)), ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(store.wait_for_epoch, FIRST, 3600.0)
        store.seal(SECOND, WriteBatch())
        assert waiting.result(60) == SECOND


def test_a_reader_does_not_wait_for_an_announcer_that_ended(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcements, "_UNHEARD_SECONDS", 3600.0)
    announcer = Announcer(store.location)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(store.wait_for_epoch, FIRST, 3600.0)
        announcer.close()
        store.seal(SECOND, WriteBatch())
        assert waiting.result(60) == SECOND


def test_a_store_whose_epochs_are_announced_is_not_polled(store: StateStore) -> None:
    with closing(Announcer(store.location)):
        assert looks(store.location, 0.1) == 2
    assert looks(store.location, 0.1) > 2


def test_an_announced_epoch_that_is_not_visible_yet_is_looked_for(store: StateStore) -> None:
    with closing(Announcer(store.location)) as announcer:
        announcer.announce(SECOND)
        assert looks(store.location, 0.1) > 2
