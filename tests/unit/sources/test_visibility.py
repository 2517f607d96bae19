"""Which transactions a snapshot of Postgres sees, by the 32 bits of their ids that the log has."""

from __future__ import annotations

import pytest

from headwater.sources.postgres.visibility import _invisible

_EPOCH = 1 << 32


@pytest.mark.parametrize(
    ("snapshot", "xids", "invisible"),
    [
        ("100:105:100,102", [99, 100, 101, 102, 104], [100, 102]),
        ("100:105:", [104, 105, 106], [105, 106]),
        (f"{_EPOCH - 2}:{_EPOCH + 3}:{_EPOCH - 2},{_EPOCH + 1}", [_EPOCH - 2, _EPOCH - 1, 0, 1, 3], [_EPOCH - 2, 1, 3]),
        (f"{_EPOCH - 2}:{_EPOCH - 2}:", [_EPOCH - 3, _EPOCH - 2, 4], [_EPOCH - 2, 4]),
        (f"{7 * _EPOCH + 5}:{7 * _EPOCH + 5}:", [4, _EPOCH - 1, 6], [6]),
    ],
)
def test_a_snapshot_sees_what_ended_before_it(snapshot: str, xids: list[int], invisible: list[int]) -> None:
    assert _invisible(snapshot, xids) == invisible
