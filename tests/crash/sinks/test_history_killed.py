"""Files of versions whose delivery is killed: each version is there once, with the times that it has without a kill."""

from __future__ import annotations

from pathlib import Path

from .file_killed import killed_at_any_step


def test_a_delta_table_of_versions_is_killed_at_any_step(tmp_path: Path) -> None:
    killed_at_any_step("delta", "history", tmp_path)
