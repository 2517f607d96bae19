"""A table is parked only where it can be read once more later."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.store.sinks.file_sinks import ORDERS
from tests.store.sinks.test_parking import LINES, NAMES, QUERY, PickySink, staged

from headwater.backfill.query import QueryOptions
from headwater.sinks.delivery_look import read_parked
from headwater.spark.claim_check import ClaimDelivery, ClaimWriter, StagedClaims
from headwater.spark.failure import ToldError
from headwater.state import open_writer


@pytest.mark.parametrize("history", [True, False])
def test_a_query_without_history_stops_instead(history: bool, tmp_path: Path) -> None:
    sink = PickySink(str(tmp_path / "lake"))
    sink.refuse("lines")
    options = QueryOptions(str(tmp_path / "store"), "postgres://nowhere", QUERY, NAMES, history=history)
    writer = ClaimWriter(ClaimDelivery(options, sink, str(tmp_path / "stop")))
    message = StagedClaims(1, [staged(sink, ORDERS, 1, 1), staged(sink, LINES, 1, 1)])
    with open_writer(str(tmp_path / "store")):
        if history:
            writer.commit([message], 0)
            assert list(read_parked(options.store, QUERY)) == [LINES.full_name]
            return
        with pytest.raises(ToldError, match="SinkRefuses"):
            writer.commit([message], 0)
        assert not read_parked(options.store, QUERY)
