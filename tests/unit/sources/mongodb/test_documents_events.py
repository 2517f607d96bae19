"""Raw events of a change stream into columns."""

from __future__ import annotations

from typing import Any

import bson
import pytest
from tests.unit.sources.mongodb.documents_cases import CODECS, IN_2020, raw, table

from headwater.sources.errors import SourceProtocolError
from headwater.sources.mongodb.documents.decoder import DocumentDecoder
from headwater.sources.mongodb.documents.events import EVENT_SCHEMA, EventDecoder


@pytest.fixture(params=sorted(CODECS))
def decoder(request: pytest.FixtureRequest) -> EventDecoder:
    return EventDecoder(codec_used=CODECS[request.param])


def event(operation: str, **fields: Any) -> dict[str, Any]:
    return {
        "_id": {"_data": "82AB"},
        "operationType": operation,
        "clusterTime": bson.Timestamp(0x80000001, 5),
        "wallTime": IN_2020,
        "ns": {"db": "shop", "coll": "orders"},
        **fields,
    }


def test_each_event_is_a_row_and_its_documents_stay_raw(decoder: EventDecoder) -> None:
    key, after, before = {"_id": 1}, {"_id": 1, "v": "new"}, {"_id": 1, "v": "old"}
    update = {"updatedFields": {"v": "new"}, "removedFields": [], "truncatedArrays": []}
    session = {"id": bson.Binary(b"0123456789abcdef", 4), "uid": b"x"}
    batch = decoder.decode(
        raw(
            [
                event(
                    "insert",
                    documentKey=key,
                    fullDocument=after,
                    lsid=session,
                    txnNumber=bson.Int64(9),
                    commitTimestamp=bson.Timestamp(0, 7),
                ),
                event(
                    "update",
                    documentKey=key,
                    fullDocument=None,
                    fullDocumentBeforeChange=before,
                    updateDescription=update,
                    splitEvent={"fragment": 1, "of": 2},
                ),
                event("rename", to={"db": "shop", "coll": "old_orders"}),
                {"_id": {"_data": "82", "_typeBits": b"\x40"}, "operationType": "invalidate"},
            ]
        )
    )
    assert batch.schema == EVENT_SCHEMA
    batch.validate(full=True)
    rows = batch.to_pylist()
    assert rows[0] == {
        "operation": "insert",
        "token": "82AB",
        "type_bits": None,
        "cluster_time": 0x80000001 << 32 | 5,
        "wall_time": IN_2020,
        "commit_time": 7,
        "transaction": 9,
        "session": bson.encode(session),
        "database": "shop",
        "collection": "orders",
        "to_database": None,
        "to_collection": None,
        "key": bson.encode(key),
        "document": bson.encode(after),
        "before": None,
        "update": None,
        "fragment": None,
        "fragments": None,
    }
    assert rows[1]["document"] is None
    assert rows[1]["before"] == bson.encode(before)
    assert rows[1]["update"] == bson.encode(update)
    assert (rows[1]["fragment"], rows[1]["fragments"]) == (1, 2)
    assert (rows[2]["to_database"], rows[2]["to_collection"]) == ("shop", "old_orders")
    assert (rows[3]["token"], rows[3]["type_bits"], rows[3]["database"]) == ("82", b"\x40", None)


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_the_raw_columns_of_events_are_decoded_as_they_are(codec: str) -> None:
    events = raw(
        [
            event("insert", documentKey={"_id": 1}, fullDocument={"_id": 1, "v": "a"}),
            event("delete", documentKey={"_id": 2}),
            event("insert", documentKey={"_id": 3}, fullDocument={"v": "c", "_id": 3}),
        ]
    )
    batch = EventDecoder(codec_used=CODECS[codec]).decode(events)
    decoder = DocumentDecoder(table({"_id": "long", "v": "string"}), codec_used=CODECS[codec])
    assert decoder.decode(batch.column("document")).batch.to_pylist() == [
        {"_id": 1, "v": "a"},
        {"_id": None, "v": None},
        {"_id": 3, "v": "c"},
    ]
    assert decoder.decode(batch.slice(1).column("key")).batch.column("_id").to_pylist() == [2, 3]


@pytest.mark.parametrize("wrong", [{"_id": 5}, {"operationType": 1}, {"ns": {"db": 1}}, {"fullDocument": "s3cret"}])
def test_what_is_no_event_is_refused_without_a_value_of_it(decoder: EventDecoder, wrong: dict[str, Any]) -> None:
    with pytest.raises(SourceProtocolError, match="change stream") as raised:
        decoder.decode(bson.encode({**event("insert"), **wrong}))
    assert "s3cret" not in str(raised.value)
    with pytest.raises(SourceProtocolError):
        decoder.decode(bson.encode(event("insert"))[:-1])


def test_no_events_are_no_rows(decoder: EventDecoder) -> None:
    assert decoder.decode(b"").num_rows == 0
