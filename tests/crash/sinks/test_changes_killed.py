"""Files of changes whose delivery is killed: each change is there once."""

from __future__ import annotations

from pathlib import Path

import pytest

from .file_killed import killed_at_any_step


@pytest.mark.parametrize("kind", ["delta", pytest.param("parquet", marks=pytest.mark.soak)])
def test_changes_are_killed_at_any_step(kind: str, tmp_path: Path) -> None:
    killed_at_any_step(kind, "changes", tmp_path)
