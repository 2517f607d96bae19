"""A start that removes files of the processes before it keeps these from committing what is gone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from headwater.sinks.errors import SinkFenced
from headwater.sinks.open import open_sink
from headwater.sinks.sink import Sink, Staged, Token

from .file_sinks import INSERT, ORDERS, Feed, history_part, order

CASES = [("delta", "mirror"), ("delta", "history"), ("delta", "changes"), ("parquet", "changes"), ("iceberg", "mirror")]
MANY = 20_000


@pytest.fixture(params=CASES, ids="-".join)
def sink(request: pytest.FixtureRequest, tmp_path: Path) -> Sink:
    kind, mode = request.param
    return open_sink(kind, mode=mode, **{"warehouse" if kind == "iceberg" else "path": str(tmp_path / "lake")})


def staged_files(sink: Sink, token: Token) -> Staged:
    """Rows that are files before they are committed."""
    columns = {
        "id": np.arange(MANY),
        "status": pa.repeat(pa.scalar("some text that is long enough"), MANY),
        "total": pa.nulls(MANY, ORDERS.columns[2].type),
    }
    rows = pa.RecordBatch.from_pydict(columns, schema=ORDERS.schema)
    return sink.stage_history(ORDERS, token, history_part(), iter([rows]))


def count(sink: Sink) -> int:
    return sum(part.num_rows for part in sink.shown(ORDERS, ["id"]))


def test_what_was_removed_is_not_committed_by_who_wrote_it(sink: Sink) -> None:
    feed = Feed(sink)
    feed.changes(1, (INSERT, order(-1)))
    late = replace(feed.token(1, 1), generation=3)
    staged = staged_files(sink, late)
    sink.abort(ORDERS, "q", 4)
    with pytest.raises(SinkFenced, match="generation 4 delivers"):
        sink.commit(ORDERS, late, [staged])
    assert count(sink) == 1
    again = replace(late, generation=4)
    assert sink.commit(ORDERS, again, [staged_files(sink, again)])
    assert count(sink) == MANY + 1


def test_a_batch_that_is_there_is_no_reason_to_complain(sink: Sink) -> None:
    feed = Feed(sink)
    early = replace(feed.token(0, 1), generation=3)
    staged = staged_files(sink, early)
    assert sink.commit(ORDERS, early, [staged])
    staged_files(sink, early)
    sink.abort(ORDERS, "q", 4)
    assert not sink.commit(ORDERS, early, [staged])
    assert count(sink) == MANY


def test_a_query_whose_state_was_removed_begins_with_the_first_generation_again(sink: Sink) -> None:
    feed = Feed(sink)
    feed.changes(1, (INSERT, order(-1)))
    staged_files(sink, feed.token(1, 1))
    sink.abort(ORDERS, "q", 9)
    sink.abort(ORDERS, "q", 1)
    first = replace(feed.token(2), generation=1)
    assert sink.commit(ORDERS, first, [feed.stage_changes(first, [(INSERT, order(-2))])])
    assert count(sink) == 2
