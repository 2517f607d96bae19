"""UUIDv7: order, uniqueness, spelling (scenario y)."""

from __future__ import annotations

import threading
import time
import uuid

import pytest

from headwater.journal.entry import check_id, is_id, new_id
from headwater.journal.errors import InvalidNameError


def test_an_id_is_a_version_seven_uuid_with_its_time() -> None:
    before = time.time_ns() // 1_000_000
    text = new_id()
    parsed = uuid.UUID(text)
    assert str(parsed) == text
    assert is_id(text)
    assert parsed.version == 7
    assert parsed.variant == uuid.RFC_4122
    assert before <= parsed.int >> 80 <= time.time_ns() // 1_000_000 + 1


def test_ten_thousand_ids_are_unique_and_ordered() -> None:
    """Scenario y: far more than one in a millisecond."""
    ids = [new_id() for _ in range(10_000)]
    assert ids == sorted(set(ids))


def test_threads_never_get_the_same_id() -> None:
    ids: list[str] = []

    def work() -> None:
        mine = [new_id() for _ in range(500)]
        assert mine == sorted(mine)
        ids.extend(mine)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(ids)) == 2000


@pytest.mark.parametrize(
    "change", [str.upper, lambda t: t.replace("-", ""), lambda t: t + "\n", lambda t: "{" + t + "}"]
)
def test_only_the_canonical_spelling_is_an_id(change: object) -> None:
    """Scenario cc."""
    assert callable(change)
    text = "0190b0a0-0000-7000-8000-0000000000ab"
    assert is_id(text)
    assert not is_id(change(text))
    with pytest.raises(InvalidNameError):
        check_id(change(text), "session")
