"""The how-to of synced logs and of limited historical reads works as it is written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.store.log_store.synced_tools import log_keys

GUIDE = Path(__file__).parents[3] / "docs/log_store.md"


def test_the_snippets_of_synced_logs_run_in_order(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    snippets = re.findall(r"```py\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    for snippet in snippets:
        exec(snippet.replace("/var/lib/shop/join", str(tmp_path / "store")), names)
    assert len(snippets) == 2
    with names["store"].snapshot() as view:
        assert view.epoch == names["first"]
        assert view.get(b"\x7f\xff\xff\xffwork") == b"[7]"
    assert log_keys(names["store"]) == 0
    names["factory"].close()
    names["store"].close()
