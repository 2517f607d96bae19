"""Fixtures of the journal's tests: a backend, and a segment in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.store.journal.backends import NAMES, Backend

from headwater.journal.entry import new_id
from headwater.journal.store import Store


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    made = Backend(request.param, tmp_path)
    yield made
    made.close()


@pytest.fixture
def fs(tmp_path: Path) -> Iterator[Backend]:
    made = Backend("fs", tmp_path)
    yield made
    made.close()


@pytest.fixture
def store(backend: Backend) -> Store:
    return backend.store


@pytest.fixture
def ids(store: Store) -> tuple[str, str]:
    """An empty segment of the backend under test."""
    session, segment = new_id(), new_id()
    store.create_segment(session, segment)
    return session, segment
