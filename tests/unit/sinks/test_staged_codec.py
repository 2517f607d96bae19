"""What is staged survives its encoding, and nothing but known classes is created from bytes."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest

from headwater.sinks.data_files import DataFile
from headwater.sinks.delivery import packed
from headwater.sinks.sink import Staged, Token
from headwater.sinks.sql_staged import SqlPart, StagedRelations
from headwater.sinks.staged_codec import NotStorable, decode, encode
from headwater.sinks.staging import Part, StagedFiles, StagedRuns
from headwater.sources.splits import Cut, KeyRange
from headwater.sources.table import SourceColumn, SourceTable, SpecialValues
from headwater.versioned.run_file import RunInfo

pytestmark = pytest.mark.unit

COLUMNS = (
    SourceColumn("id", pa.int64(), "bigint", 1, nullable=False),
    SourceColumn("n", pa.list_(pa.decimal128(9, 2)), "numeric(9,2)[]", 2, special_values=SpecialValues.PARK),
    SourceColumn("gone", pa.string(), "text", 3, dropped=True),
)
TABLE = SourceTable("public", "orders", COLUMNS, ("id",), 16384)
TOKEN = Token("q", "b1", 1, 2, 3, 4, 5)
SCHEMA = pa.schema([pa.field("id", pa.int64(), metadata={b"k": b"v"})])
FILE = DataFile("a.parquet", 1, 2, {"id": 1}, {"id": 2}, {"id": 0}, 7, {"day": "2024-05-31", "x": None})
VALUES: dict[str, Any] = {
    "plain": [None, True, 2**70, -1.5, "text ✓ \ud800", float("inf")],
    "bytes": b"\x00\xff",
    "nested": ((1, (2,)), [(), {}], {"a": {1: (2,)}}),
    "times": [
        datetime(2026, 5, 31, 1, 2, 3, 4, tzinfo=UTC),
        datetime.fromisoformat("0001-01-01T00:00:00"),
        date(9999, 12, 31),
        time(1, 2, 3, 4),
    ],
    "others": [Decimal("1.10"), UUID(int=7), timedelta(-1, 2, 3)],
    "files": StagedFiles(
        (DataFile("a.parquet", 1, 2, {"id": 1}, {"id": 2}, {"id": 0}, 7, {"day": "2024-05-31", "x": None}),)
    ),
    "parts": StagedFiles((), (Part(1, 2, inside=b"rows"), Part(1, 2, path="p")), only_existing=True, since_us=3),
    "sql": StagedRelations((SqlPart(1, 2, SCHEMA, "r", unavailable=("a",)),), ("n",), 4),
    "runs": StagedRuns((RunInfo("r", 1, 2, b"\x00", b"\xff", True),)),
    "ranges": (KeyRange(), KeyRange(Cut(("1", "2"), True), None)),
}


def staged(detail: object) -> Staged:
    return Staged(TABLE, TOKEN, True, 5, 6, (7, 8), 9, (KeyRange(),), None, detail)


def test_everything_that_sinks_stage_is_read_back_as_it_was() -> None:
    parts = [staged(VALUES), Staged(replace(TABLE, source_id=1), TOKEN, False, 0), staged({})]
    assert decode(encode(parts)) == parts
    (first, *_) = decode(encode(parts)) or []
    assert first.detail["sql"].parts[0].schema.equals(SCHEMA, check_metadata=True)
    assert type(first.detail["ranges"]) is tuple


def test_a_value_of_another_type_is_not_kept() -> None:
    class Other:
        pass

    with pytest.raises(NotStorable, match="Other"):
        encode([staged({"x": Other()})])
    assert packed([staged({"x": Other()})]) == b""


@pytest.mark.parametrize("data", [b"", b"HWSTAGED", pickle.dumps(("1 0.1.0", [])), b"HWSTAGED\xff\xff\xff\xff[]"])
def test_other_bytes_are_not_read(data: bytes) -> None:
    assert decode(data) is None


def test_only_known_classes_are_created() -> None:
    data = encode([staged({"bytes": b"12345"})])
    length = int.from_bytes(data[8:12], "little")
    text, rest = data[12 : 12 + length], data[12 + length :]
    for before, after in ((b'"Token"', b'"Popen"'), (b'"Staged"', b'"os.system"'), (b'"3 ', b'"2 ')):
        assert before in text
        changed = text.replace(before, after)
        assert decode(b"HWSTAGED" + len(changed).to_bytes(4, "little") + changed + rest) is None
    assert decode(data[:-1]) is None
    json.loads(text)
