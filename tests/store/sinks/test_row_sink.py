"""A sink of your own, exactly the one that the documentation shows, and what its base does for it."""

from __future__ import annotations

import os
import pickle
import random
import re
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headwater.sinks.errors import OtherAttempt, SinkInputError
from headwater.sinks.open import open_sink, sink_class
from headwater.sinks.row_sink import RowSink
from headwater.sinks.sink import Committed, Staged, Token
from headwater.sources.table import SourceTable
from headwater.stream.vnode import hash_keys

from .file_sinks import (
    DELETE,
    INSERT,
    OLD,
    ORDERS,
    UPDATE,
    Feed,
    IntegerOrder,
    deliver_any_batches,
    order,
    own_rows,
    table_of,
)

ROOT = Path(__file__).parents[3]
KIND = "my_sinks:SqliteSink"


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where Python finds the module of the documentation."""
    found = re.search(r'```python title="my_sinks.py"\n(.*?)```', (ROOT / "docs/sinks.md").read_text(), re.DOTALL)
    assert found is not None
    place = tmp_path_factory.mktemp("modules")
    (place / "my_sinks.py").write_text(found[1])
    sys.path.insert(0, str(place))
    yield place
    sys.path.remove(str(place))
    sys.modules.pop("my_sinks", None)
    sink_class.cache_clear()


@pytest.fixture
def sink(modules: Path, tmp_path: Path) -> RowSink:
    made = open_sink(KIND, path=str(tmp_path / "mirror.db"), staging=str(tmp_path / "staging"))
    assert isinstance(made, RowSink)
    return made


@pytest.fixture
def feed(sink: RowSink) -> Feed:
    return Feed(sink)


def rows_of(sink: Any, table: SourceTable = ORDERS) -> list[dict[str, Any]]:
    db = sqlite3.connect(sink.path)
    db.row_factory = sqlite3.Row
    try:
        found = [dict(row) for row in db.execute(f'SELECT * FROM "{table.full_name}"')]
    finally:
        db.close()
    for row in found:
        if "total" in row and row["total"] is not None:
            row["total"] = Decimal(row["total"])
    return sorted(found, key=lambda row: tuple(row[name] for name in table.key_columns))


def test_the_example_is_as_short_as_it_says(modules: Path) -> None:
    lines = [line for line in (modules / "my_sinks.py").read_text().splitlines() if line.strip()]
    assert len(lines) < 72


def test_it_can_be_pickled_and_says_what_it_is(sink: RowSink) -> None:
    sink.check()
    assert pickle.loads(pickle.dumps(sink)) == sink
    assert sink.name.startswith("sqlite:")
    assert sink.is_exactly_once


def test_a_mode_that_it_does_not_have_is_refused(modules: Path) -> None:
    with pytest.raises(SinkInputError, match="mode"):
        open_sink(KIND, path="x", staging="y", mode="changes")


def test_inserts_updates_deletes_and_keys_that_change(feed: Feed, sink: RowSink) -> None:
    assert feed.changes(1, (INSERT, order(1)), (INSERT, order(2)), (INSERT, order(3)))
    assert feed.changes(2, (OLD, order(1)), (UPDATE, order(1, "paid")), (DELETE, order(2)), (INSERT, order(4)))
    assert feed.changes(3, (DELETE, order(4)), (INSERT, order(9)), (DELETE, order(3)), (INSERT, order(3, "again")))
    assert rows_of(sink) == [order(1, "paid"), order(3, "again"), order(9)]


def test_a_batch_that_comes_again_changes_nothing(feed: Feed, sink: RowSink) -> None:
    assert feed.changes(5, (INSERT, order(1)))
    assert not feed.changes(5, (INSERT, order(1, "other")))
    assert not feed.changes(4, (INSERT, order(2)))
    assert rows_of(sink) == [order(1)]
    assert sink.committed(ORDERS, "q", "b1") == Committed(5, 0, 0)
    assert sink.committed(ORDERS, "other", "b1") == Committed()


def test_history_and_changes_in_one_batch(feed: Feed, sink: RowSink) -> None:
    token = feed.token(3, 1, 2)
    changed = hash_keys(own_rows(ORDERS, [order(1)]), ("id",))
    staged = [
        feed.stage_history(token, [order(1, "newest"), order(2)], changed=changed),
        feed.stage_changes(token, [(INSERT, order(1, "older")), (INSERT, order(10))]),
    ]
    assert sink.commit(ORDERS, token, staged)
    assert not sink.commit(ORDERS, token, staged)
    assert rows_of(sink) == [order(1, "newest"), order(2), order(10)]
    assert sink.committed(ORDERS, "q", "b1") == Committed(3, 1, 2)
    assert sink.committed(ORDERS, "q", "b2") == Committed(3, 0, 0)


def test_the_other_attempt_of_a_plan_is_refused(feed: Feed, sink: RowSink) -> None:
    feed.history(1, [order(1)])
    token = feed.token(0, 1, attempt=1)
    with pytest.raises(OtherAttempt):
        sink.commit(ORDERS, token, [feed.stage_history(token, [order(1, "other")])])
    assert rows_of(sink) == [order(1)]


def test_truncate_voids_what_was_before_it(feed: Feed, sink: RowSink) -> None:
    feed.changes(1, (INSERT, order(1)), (INSERT, order(2)))
    feed.changes(2, (INSERT, order(3)), (INSERT, order(4)), truncated=(2, 1))
    assert rows_of(sink) == [order(4)]
    feed.changes(3, truncated=(3, 0))
    assert rows_of(sink) == []


def test_unavailable_columns_keep_what_is_there(feed: Feed, sink: RowSink) -> None:
    feed.changes(1, (INSERT, order(1, "long text")), (INSERT, order(2, "other")), (INSERT, order(3, "third")))
    feed.changes(
        2,
        (UPDATE, order(1, None, "5.00"), "status"),
        (UPDATE, order(3, None, None), "status,total"),
        (UPDATE, order(4, None, "8.00"), "status"),
    )
    assert rows_of(sink) == [
        order(1, "long text", "5.00"),
        order(2, "other"),
        order(3, "third"),
        order(4, None, "8.00"),
    ]


def test_a_new_column_of_rows_that_are_there(feed: Feed, sink: RowSink) -> None:
    feed.history(1, [order(1, "a"), order(2, "b")])
    feed.history(2, [order(1, "x", "9.00"), order(3, "x", "9.00")], columns=("total",))
    assert rows_of(sink) == [order(1, "a", "9.00"), order(2, "b")]


def test_a_column_that_comes_later(feed: Feed, sink: RowSink) -> None:
    feed.changes(1, (INSERT, order(1)))
    wide = table_of({"id": pa.int64(), "status": pa.string(), "total": pa.decimal128(10, 2), "a b": pa.date32()})
    Feed(sink, wide).changes(2, (INSERT, {**order(2), "a b": 1}))
    assert [row["a b"] for row in rows_of(sink)] == [None, "1970-01-02"]


def test_the_whole_table_read_again_replaces_it_and_a_part_needs_its_keys(feed: Feed, sink: RowSink) -> None:
    feed.history(1, [order(key) for key in range(10)])
    with pytest.raises(SinkInputError, match="which keys"):
        feed.history(2, [order(3, "again")], ranges=[(3, 6)], replaces=True, order=IntegerOrder())
    assert len(rows_of(sink)) == 10
    assert feed.history(2, [order(3, "again")], replaces=True)
    assert rows_of(sink) == [order(3, "again")]


def test_a_part_that_is_read_again_has_those_rows_and_no_others(modules: Path, tmp_path: Path) -> None:
    class Keyed(sink_class(KIND)):  # type: ignore[misc]
        def keys(self, table: SourceTable) -> Iterator[pa.Table]:
            yield pa.table({"id": pa.array([row["id"] for row in rows_of(self)], pa.int64())})

    sink = Keyed(path=str(tmp_path / "mirror.db"), staging=str(tmp_path))
    feed = Feed(sink)
    feed.history(1, [order(key) for key in range(10)])
    token = feed.token(1, 2)
    part = {"ranges": [(3, 6), (9, None)], "replaces": True, "order": IntegerOrder()}
    staged = [
        feed.stage_changes(token, [(INSERT, order(20)), (INSERT, order(5, "gone by then"))]),
        feed.stage_history(token, [order(4, "again"), order(30)], **part),
    ]
    assert sink.commit(ORDERS, token, staged)
    kept = [order(key) for key in (0, 1, 2, 6, 7, 8)]
    assert rows_of(sink) == sorted([*kept, order(4, "again"), order(30)], key=lambda row: row["id"])


def test_two_processes_at_once_commit_a_batch_once(sink: RowSink) -> None:
    feed = Feed(sink)
    results: list[bool] = []

    def commit(token: Token, staged: list[Staged]) -> None:
        results.append(sink.commit(ORDERS, token, staged))

    for epoch in range(1, 11):
        token = feed.token(epoch)
        staged = [feed.stage_changes(token, [(INSERT, order(epoch))])]
        both = [
            threading.Thread(target=lambda t=token, s=staged: results.append(sink.commit(ORDERS, t, s))) for _ in "12"
        ]
        for one in both:
            one.start()
        for one in both:
            one.join()
    assert sorted(results) == [False] * 10 + [True] * 10
    assert [row["id"] for row in rows_of(sink)] == list(range(1, 11))


def test_large_batches_go_through_files_that_are_removed(sink: RowSink, tmp_path: Path) -> None:
    feed = Feed(sink)
    token = feed.token(1)
    staged = feed.stage_changes(token, [(INSERT, order(key, "x" * 200)) for key in range(5000)])
    assert staged.rows == 5000
    assert list(tmp_path.rglob("*.arrow"))
    assert sink.commit(ORDERS, token, [staged])
    assert len(rows_of(sink)) == 5000
    assert not list(tmp_path.rglob("*.arrow"))
    feed.stage_changes(feed.token(2), [(INSERT, order(key, "x" * 200)) for key in range(5000)])
    sink.abort(ORDERS, "q", 0)
    assert list(tmp_path.rglob("*.arrow"))
    sink.abort(ORDERS, "q", 1)
    assert not list(tmp_path.rglob("*.arrow"))


@pytest.mark.parametrize("seed", range(3))
def test_any_batches_give_what_a_dictionary_gives(seed: int, feed: Feed, sink: RowSink) -> None:
    expected = deliver_any_batches(feed, random.Random(seed), truncates=False)
    assert rows_of(sink) == expected


_CHILD = """
import sys
from tests.store.sinks.file_sinks import INSERT, UPDATE, Feed, order
from headwater.sinks.open import open_sink
sink = open_sink("my_sinks:SqliteSink", path=sys.argv[1], staging=sys.argv[2])
feed = Feed(sink)
feed.history(1, [order(key, "x" * 200) for key in range(3000)])
for epoch in (1, 2):
    changes = [(UPDATE, order(key, f"{epoch} " + "x" * 200)) for key in range(3000)]
    feed.changes(epoch, *changes, (INSERT, order(epoch + 9000)))
"""


@pytest.mark.parametrize(
    ("step", "at"), [("before_part", 1), ("after_part", 2), ("before_clean", 1), ("before_clean", 3)]
)
def test_killed_and_begun_again_it_has_each_row_once(step: str, at: int, modules: Path, tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", _CHILD, str(tmp_path / "mirror.db"), str(tmp_path / "staging")]
    places = {**os.environ, "PYTHONPATH": f"{ROOT}:{modules}"}
    killed = subprocess.run(
        arguments, env={**places, "HEADWATER_FAILPOINTS": f"sink.staging.{step}=kill@{at}"}, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert subprocess.run(arguments, env=places, check=False).returncode == 0
    sink = open_sink(KIND, path=str(tmp_path / "mirror.db"), staging=str(tmp_path / "staging"))
    found = rows_of(sink)
    assert [row["id"] for row in found] == [*range(3000), 9001, 9002]
    assert {row["status"][:2] for row in found} == {"2 ", "ne"}
    assert sink.committed(ORDERS, "q", "b1") == Committed(2, 1, 0)
