"""The how-to works as it is written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

GUIDE = Path(__file__).parents[3] / "docs/log_store.md"


def test_every_snippet_of_the_guide_runs_in_order(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    snippets = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    for snippet in snippets:
        exec(snippet.replace("/var/lib/shop/state", str(tmp_path / "store")), names)
    assert len(snippets) == 8
    assert names["compaction"].saved.rows == 2
    assert names["reader"].consumer("public.orders").delivered() == names["sealed"].after
    names["store"].close()
