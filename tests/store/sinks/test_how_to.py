"""The how-to works as it is written."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from headwater.log_store import KvLogStoreFactory
from headwater.log_store.testing import KEY, SCHEMA, numbered_chunk
from headwater.state import open_writer
from headwater.stream import EpochClock

GUIDE = Path(__file__).parents[3] / "docs/sinks.md"


def test_every_snippet_of_the_guide_runs_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_writer(str(tmp_path / "store"))
    factory = KvLogStoreFactory(store)
    names: dict[str, Any] = {
        "factory": factory,
        "log": factory.log("public.orders", SCHEMA, KEY),
        "clock": EpochClock(lambda: time.time_ns() // 1_000_000),
    }
    snippets = re.findall(r"```python\n(.*?)```", GUIDE.read_text().partition("## Without Spark")[2], re.DOTALL)
    sink, loop, move = snippets
    for snippet in (sink, loop):
        exec(snippet, names)
    writer = names["writer"]
    ended = writer.epoch
    writer.write_chunk(numbered_chunk(0, 20))
    exec(move, names)
    factory.sealer.seal(ended)
    deadline = time.monotonic() + 20
    while "Chunk(" not in (shown := capsys.readouterr().out) and time.monotonic() < deadline:
        time.sleep(0.01)
    names["control"].stop()
    names["thread"].join(20)
    assert not names["thread"].is_alive()
    assert names["loop"].status.failures == 0
    assert "Chunk(" in shown
    factory.close()
    store.close()
