"""``headwater capture`` and ``headwater add-table`` with the URL of a store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DSN = "postgresql://cdc@127.0.0.1:1/nothing"


def headwater(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from headwater.cli.main import run; run()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=folder)


def test_the_store_can_be_a_url(tmp_path: Path) -> None:
    store = f"slatedb+file://{tmp_path}/store"
    added = headwater(tmp_path, "add-table", store, "orders")
    assert f"no state store at {store}" in added.stderr
    ended = headwater(tmp_path, "capture", DSN, "--table", "orders", "--store", store, "--seconds", "0.1", "--json")
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "store").is_dir()
