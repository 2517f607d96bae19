"""A derived table that is made anew: what its life before left in the sink is replaced in one commit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headwater.derive.frames import NEW, OLD, SIDE, Staging, _stage_changes, _stage_history
from headwater.sinks.errors import SinkFenced
from headwater.sinks.open import open_sink
from headwater.sinks.sink import Sink, Staged, Token
from headwater.sources.table import SourceColumn, SourceTable

TABLE = SourceTable(
    "derived",
    "totals",
    (SourceColumn("k", pa.int64(), "bigint", 1), SourceColumn("v", pa.int64(), "bigint", 2)),
    ("k",),
)


def rows(result: Mapping[int, int], side: int) -> pa.RecordBatch:
    columns = {"k": list(result), "v": list(result.values()), SIDE: [side] * len(result)}
    return pa.RecordBatch.from_pydict(columns, pa.schema([*TABLE.schema, pa.field(SIDE, pa.int32())]))


def staging(sink: Sink, life: str, after: int, epoch: int, generation: int) -> Staging:
    return Staging(sink, TABLE, Token("shop-totals", life, after << 16, epoch << 16, 1, generation=generation))


def first(made: Staging, result: Mapping[int, int]) -> Staged:
    return _stage_history(made, iter([rows(result, NEW)]))


def shown(sink: Sink) -> dict[int, int]:
    found = [row for batch in sink.shown(TABLE, ["k", "v"]) for row in batch.to_pylist()]
    return {row["k"]: row["v"] for row in found}


@pytest.mark.parametrize(("kind", "place"), [("delta", "path"), ("iceberg", "warehouse")])
def test_the_first_result_of_a_new_life_replaces_the_old_table(kind: str, place: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {place: str(tmp_path / "lake")}
    sink = open_sink(kind, **options, mode="mirror")
    sink.abort(TABLE, "shop-totals", 2)
    begun = staging(sink, "a", 0, 5, 2)
    assert sink.commit(TABLE, begun.token, [first(begun, {1: 1, 2: 2, 3: 3})])
    on = staging(sink, "a", 5, 6, 2)
    changes = _stage_changes(on, iter([pa.concat_batches([rows({2: 2}, OLD), rows({2: 9}, NEW)])]))
    assert sink.commit(TABLE, on.token, [changes])
    assert not sink.commit(TABLE, on.token, [changes]), "once"
    assert shown(sink) == {1: 1, 2: 9, 3: 3}

    sink.fence(TABLE, "shop-totals", 3)
    anew = staging(sink, "b", 0, 9, 1)  # its state was removed: it counts from 1 again
    with pytest.raises(SinkFenced):
        sink.commit(TABLE, anew.token, [first(anew, {7: 7}), anew.emptied()])
    sink.abort(TABLE, "shop-totals", 1)
    assert sink.commit(TABLE, anew.token, [first(anew, {7: 7}), anew.emptied()])
    assert shown(sink) == {7: 7}
    assert sink.committed(TABLE, "shop-totals", "b").plan == 1
