"""Rows as text, on the terminal or in a file."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from headwater.sinks.errors import SinkInputError, SinkUnwritable
from headwater.sinks.open import open_sink
from headwater.sinks.sink import Committed

from .file_sinks import DELETE, INSERT, ORDERS, UPDATE, Feed, order, table_of


def feed_of(tmp_path: Path, **options: Any) -> Feed:
    return Feed(open_sink("console", staging=str(tmp_path / "staging"), **options))


def test_changes_as_a_table_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    feed = feed_of(tmp_path)
    assert feed.changes(1, (INSERT, order(1)), (UPDATE, order(10, None)))
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert lines[:2] == ["q/public.orders/1/0", "append: 2 rows"]
    assert lines[2].split() == [
        "id",
        "status",
        "total",
        "_change_type",
        "_commit_version",
        "_commit_timestamp",
        "_unavailable",
    ]
    assert lines[3].split()[:4] == ["1", "new", "1.00", "insert"]
    assert lines[4].split()[:4] == ["10", "∅", "1.00", "update_postimage"]


def test_changes_as_json_lines_on_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    feed = feed_of(tmp_path, output="stdout", format="json")
    feed.changes(1, (INSERT, order(1)), (DELETE, order(1)))
    captured = capsys.readouterr()
    assert captured.err == ""
    rows = [json.loads(line) for line in captured.out.splitlines()]
    assert [(row["_table"], row["id"], row["_change_type"]) for row in rows] == [
        ("public.orders", 1, "insert"),
        ("public.orders", 1, "delete"),
    ]


def test_a_mirror_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    feed = feed_of(tmp_path, path=str(path), mode="mirror")
    feed.changes(1, (INSERT, order(1)), (DELETE, order(2)))
    feed.changes(2, truncated=(2, 0))
    assert [line.strip() for line in path.read_text().splitlines()] == [
        "q/public.orders/1/0",
        "delete: 1 rows",
        "id",
        "2",
        "upsert: 1 rows",
        "id  status  total",
        "1   new     1.00",
        "q/public.orders/2/0",
        "clear",
    ]


def test_long_values_and_many_rows_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    feed = feed_of(tmp_path, path=str(path), rows=3)
    feed.changes(1, *[(INSERT, order(key, "two\nlines " * 20)) for key in range(10)])
    text = path.read_text()
    assert "… 7 more" in text
    assert max(map(len, text.splitlines())) < 160
    assert "two⏎lines" in text


def test_a_batch_that_comes_again_is_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    feed = feed_of(tmp_path, path=str(path), format="json")
    assert feed.changes(3, (INSERT, order(1)))
    assert not feed.changes(3, (INSERT, order(1)))
    assert feed.history(1, [order(2)], epoch=3)
    assert len(path.read_text().splitlines()) == 2
    assert feed.sink.committed(ORDERS, "q", "b1") == Committed(3, 1, 0)


def test_tables_at_the_same_time_do_not_mix_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    tables = [table_of({"id": ORDERS.column("id").type}, name=f"t{number}") for number in range(4)]

    def deliver(number: int) -> None:
        feed = Feed(open_sink("console", staging=str(tmp_path), path=str(path), format="json"), tables[number])
        for epoch in range(1, 6):
            feed.changes(epoch, *[(INSERT, {"id": key}) for key in range(200)])

    threads = [threading.Thread(target=deliver, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 4 * 5 * 200


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(SinkUnwritable, match="No such file"):
        feed_of(tmp_path, path=str(tmp_path / "none" / "out.txt")).changes(1, (INSERT, order(1)))


def test_options_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SinkInputError, match="output"):
        feed_of(tmp_path, output="printer")
    with pytest.raises(SinkInputError, match="cannot be read"):
        next(iter(feed_of(tmp_path).sink.shown(ORDERS, ["id"])))
