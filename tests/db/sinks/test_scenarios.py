"""One suite over every sink in every mode: whatever comes, it has what a small model in Python has."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.sampled import SOAK
from tests.store.sinks.file_sinks import (
    DELETE,
    INSERT,
    OLD,
    ORDERS,
    UPDATE,
    Feed,
    IntegerOrder,
    history_part,
    log_rows,
    many_changes,
    order,
    own_rows,
    table_of,
)

from headwater.sinks.errors import OtherAttempt, SinkInputError, SinkRowError
from headwater.sinks.open import KINDS
from headwater.sinks.sink import Committed, Mode, Sink
from headwater.sinks.types import conform, sink_schema
from headwater.sources.table import SourceColumn, SourceTable
from headwater.stream.vnode import hash_keys

from .cases import COLUMNS_BY_ID, FINITE_FLOATS, FIXED_MESSAGES, KEYLESS, ON_FAMILIES, PLACES, Case, Place, Servers
from .models import TRUNCATED, Change, Part, Row, model_of

EXCHANGED = {"id": pa.int32(), "v": pa.int32(), "w": pa.string(), "x": pa.int64()}
NOTE = SourceColumn("note", pa.string(), "text", 9)
WIDE = replace(ORDERS, columns=(*ORDERS.columns, NOTE))


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with Servers() as started:
        yield started


@pytest.fixture(params=ON_FAMILIES, ids=str)
def place(request: pytest.FixtureRequest, servers: Servers, tmp_path: Path) -> Iterator[Place]:
    case: Case = request.param
    with PLACES[case.kind](case, tmp_path, servers) as made:
        yield made


class Run:
    """Gives a sink and a model the same batches, and compares them."""

    def __init__(
        self,
        place: Place,
        table: SourceTable = ORDERS,
        sink: Sink | None = None,
        query: str = "q",
        backfill: str = "b1",
    ) -> None:
        self.place = place
        self.sink = sink or place.sink()
        self.feed = Feed(self.sink, table, query, backfill)
        self.model = model_of(place.case.mode, table.key_columns, tuple(table.schema.names))

    @property
    def table(self) -> SourceTable:
        return self.feed.table

    def changes(self, epoch: int, *changes: Change, truncated: int | None = None) -> None:
        more = {} if truncated is None else {"truncated": (epoch, truncated)}
        assert self.feed.changes(epoch, *changes, **more)
        self.model.changes(epoch, changes, truncated)

    def history(self, plan: int, rows: Sequence[Row], epoch: int = 0, **part: Any) -> None:
        assert self.feed.history(plan, rows, epoch, **part)
        self.model.history(rows, part_of(part))

    def check(self) -> None:
        """:raises AssertionError: the sink has something else than the model."""
        table = self.table
        expected = self.model.rows()
        own = [{name: row.get(name) for name in table.schema.names} for row in expected]
        typed = conform(pa.Table.from_pylist(own, table.schema), sink_schema(table)).to_pylist()
        added = [name for name in self.place.schema(table).names if name not in table.schema.names]
        wanted = [{**made, **{name: row[name] for name in added}} for made, row in zip(typed, expected, strict=True)]
        found = self.place.rows(self.sink, table)
        if self.place.case.mode is Mode.HISTORY:
            found = _truncated_alike(found, wanted)
        assert shown(found) == shown(wanted)


def part_of(part: dict[str, Any]) -> Part:
    return Part(**{name: value for name, value in part.items() if name in ("ranges", "replaces", "columns")})


def shown(rows: Sequence[Row]) -> list[str]:
    """Rows as texts, in an order; equal for NaN, too."""
    return sorted(repr([(name, _in_utc(row[name])) for name in sorted(row)]) for row in rows)


def _in_utc(value: Any) -> Any:
    return value.astimezone(UTC) if isinstance(value, datetime) and value.tzinfo is not None else value


def _truncated_alike(found: list[Row], wanted: list[Row]) -> list[Row]:
    names = ("_commit_version", "_valid_from")
    ended = {tuple(row[name] for name in names) for row in wanted if row["_valid_to"] == TRUNCATED}
    return [
        {**row, "_valid_to": TRUNCATED}
        if row["_valid_to"] is not None and tuple(row[name] for name in names) in ended
        else row
        for row in found
    ]


def test_every_kind_has_a_place() -> None:
    assert set(KINDS) <= set(PLACES)


# -- changes -----------------------------------------------------------------------------------------------------------


def test_inserts_updates_and_deletes(place: Place) -> None:
    run = Run(place)
    run.changes(1, *((INSERT, order(key)) for key in range(5)))
    run.changes(2, (UPDATE, order(1, "paid")), (DELETE, order(2)), (INSERT, order(9)))
    run.check()
    run.changes(3, (DELETE, order(0)), (DELETE, order(77)), (UPDATE, order(9, None, None)))
    run.check()
    assert run.sink.committed(ORDERS, "q", "b1") == Committed(3)


def test_a_key_that_changes(place: Place) -> None:
    run = Run(place)
    run.changes(1, (INSERT, order(1)), (INSERT, order(2)), (INSERT, order(3)))
    run.changes(2, (DELETE, order(1)), (INSERT, order(9)), (OLD, order(2)), (UPDATE, order(8, "moved")))
    run.changes(3, (OLD, order(3)), (UPDATE, order(1, "into a place that was free")))
    run.check()


def test_delete_and_insert_of_a_key_in_one_epoch(place: Place) -> None:
    run = Run(place)
    run.changes(1, (INSERT, order(1)), (INSERT, order(2)), (DELETE, order(2)), (INSERT, order(2, "again")))
    run.changes(2, (DELETE, order(1)), (INSERT, order(1, "again")), (INSERT, order(3)), (DELETE, order(3)))
    run.check()


def test_update_pairs(place: Place) -> None:
    run = Run(place)
    run.changes(1, (INSERT, order(1, "a")), (INSERT, order(2, "a")))
    run.changes(2, (OLD, order(1, "a")), (UPDATE, order(1, "b")), (OLD, order(1, "b")), (UPDATE, order(1, "c")))
    run.changes(3, (OLD, order(2, "a")), (UPDATE, order(2, "b")), (DELETE, order(2, "b")))
    run.check()


def test_two_rows_exchange_their_keys(place: Place) -> None:
    run = Run(place)
    run.changes(1, (INSERT, order(1, "a")), (INSERT, order(2, "b")))
    run.changes(
        2,
        (OLD, order(1, "a")),
        (UPDATE, order(3, "a")),
        (OLD, order(2, "b")),
        (UPDATE, order(1, "b")),
        (OLD, order(3, "a")),
        (UPDATE, order(2, "a")),
    )
    run.check()


def test_unavailable_values_stay_as_they_are(place: Place) -> None:
    run = Run(place)
    run.changes(1, (INSERT, order(1, "long text")), (INSERT, order(2, "other text")), (INSERT, order(3, "third")))
    run.changes(
        2,
        (UPDATE, order(1, None, "5.00"), "status"),
        (UPDATE, order(2, "told", "6.00")),
        (UPDATE, order(2, None, "7.00"), "status"),
        (UPDATE, order(3, None, None), "status,total"),
        (UPDATE, order(4, None, "8.00"), "status"),
        (INSERT, order(5)),
    )
    run.check()
    run.changes(3, (OLD, order(1, None, "5.00"), "status"), (UPDATE, order(1, None, "9.00"), "status"))
    run.changes(4, (DELETE, order(3)), (INSERT, order(3, "new")), (UPDATE, order(3, None, "2.00"), "status"))
    run.check()


def test_nulls_and_empty_values(place: Place) -> None:
    run = Run(place)
    run.changes(1, (INSERT, order(1, "", "0.00")), (INSERT, order(2, None, None)), (INSERT, order(3, " ", "-0.01")))
    run.changes(2, (UPDATE, order(1, None, None)), (UPDATE, order(2, "", "99999999.99")))
    run.check()


def test_a_key_of_several_columns(place: Place) -> None:
    run = Run(place, table_of({"a": pa.int64(), "b": pa.string(), "n": pa.int32()}, key=("b", "a"), name="lines"))
    keys = [(a, b) for a in range(3) for b in ("", "x", "🦆")]
    run.changes(1, *((INSERT, {"a": a, "b": b, "n": 1}) for a, b in keys))
    run.changes(2, (UPDATE, {"a": 1, "b": "", "n": 2}), (DELETE, {"a": 2, "b": "🦆", "n": None}))
    run.check()


def test_names_of_every_kind(place: Place) -> None:
    odd = table_of({"Id": pa.int64(), "select": pa.string(), "größe": pa.string()}, key=("Id",), name='Bestellung "1"')
    run = Run(place, odd)
    run.changes(1, (INSERT, {"Id": 1, "select": "a", "größe": "b"}))
    run.changes(2, (UPDATE, {"Id": 1, "select": None, "größe": "c"}, "select"))
    run.check()


@pytest.mark.parametrize("size", [100_000 if SOAK else 20_000])
def test_a_transaction_of_many_rows(place: Place, size: int) -> None:
    run = Run(place)
    sink, mode = run.sink, place.case.mode
    keys = np.arange(size)
    token = run.feed.token(1)
    assert sink.commit(ORDERS, token, [sink.stage_changes(ORDERS, token, iter([many_changes(keys, INSERT)]), None)])
    token = run.feed.token(2)
    batches = iter([many_changes(keys[::2], DELETE, 2), many_changes(keys[1::2], UPDATE, 2)])
    assert sink.commit(ORDERS, token, [sink.stage_changes(ORDERS, token, batches, None)])
    found = place.rows(sink, ORDERS, ["id"])
    copies = {Mode.MIRROR: [(1, 2)], Mode.CHANGES: [(0, 1), (0, 1)], Mode.HISTORY: [(0, 1), (1, 2)]}[mode]
    wanted = np.sort(np.concatenate([keys[start::step] for start, step in copies]))
    assert np.array_equal(np.sort([row["id"] for row in found]), wanted)
    assert sink.committed(ORDERS, "q", "b1") == Committed(2)


# -- every type --------------------------------------------------------------------------------------------------------

naive = datetime.fromisoformat
TYPES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "flag": (pa.bool_(), [True, False]),
    "i8": (pa.int8(), [-(1 << 7), (1 << 7) - 1]),
    "i16": (pa.int16(), [-(1 << 15), (1 << 15) - 1]),
    "i32": (pa.int32(), [-(1 << 31), (1 << 31) - 1]),
    "i64": (pa.int64(), [-(1 << 63), (1 << 63) - 1]),
    "u8": (pa.uint8(), [0, (1 << 8) - 1]),
    "u16": (pa.uint16(), [0, (1 << 16) - 1]),
    "u32": (pa.uint32(), [0, (1 << 32) - 1]),
    "u64": (pa.uint64(), [0, (1 << 64) - 1]),
    "half": (pa.float16(), [np.float16(0.5), np.float16(-65504)]),
    "single": (pa.float32(), [0.1, -3.4028234663852886e38]),
    "double": (pa.float64(), [0.1, 1.7976931348623157e308]),
    "cents": (pa.decimal128(10, 2), [Decimal("-99999999.99"), Decimal("0.01")]),
    "huge": (pa.decimal128(38, 10), [Decimal("-9" + "9" * 27 + ".9999999999"), Decimal("0E-10")]),
    "wide": (pa.decimal256(60, 20), [Decimal("9" * 40 + "." + "9" * 20), Decimal("-1E-20")]),
    "text": (pa.string(), ["", 'quote " comma , line\nbreak \\ back\r\t ünï 🦆 {x} NULL \\N %s']),
    "long": (pa.large_string(), ["x" * 70_000, "'"]),
    "bytes": (pa.binary(), [b"", bytes(range(256))]),
    "blob": (pa.large_binary(), [b"\x00", b"\\x00"]),
    "fixed": (pa.binary(4), [b"\x00\x01\xfe\xff", b"abcd"]),
    "guid": (pa.uuid(), [uuid.UUID(int=0).bytes, uuid.UUID(int=(1 << 128) - 1).bytes]),
    "day": (pa.date32(), [date(1, 1, 1), date(9999, 12, 31)]),
    "seconds": (pa.timestamp("s"), [naive("0001-01-01"), naive("9999-12-31T23:59:59")]),
    "millis": (pa.timestamp("ms", tz="UTC"), [datetime(1970, 1, 1, tzinfo=UTC), datetime(2024, 2, 29, tzinfo=UTC)]),
    "micros": (pa.timestamp("us"), [naive("0001-01-01T00:00:00.000001"), naive("9999-12-31T23:59:59.999999")]),
    "zoned": (pa.timestamp("us", tz="Europe/Berlin"), [datetime(2024, 3, 31, 1, 0, 0, 1, UTC), None]),
    "nanos": (pa.timestamp("ns"), [1_700_000_000_123_456_789, -1]),
    "clock": (pa.time64("us"), [time(0), time(23, 59, 59, 999999)]),
    "span": (pa.duration("us"), [timedelta(days=-9), timedelta(microseconds=1)]),
    "list": (pa.list_(pa.int32()), [[], [1, None, -3]]),
    "words": (pa.list_(pa.string()), [["", None, "NULL", 'a"b', "c\\d", "e,f", "{g}"], ["🦆"]]),
    "deep": (pa.list_(pa.list_(pa.int64())), [[[1, 2], [], None, [None]], []]),
    "struct": (
        pa.struct([("a", pa.int64()), ("b", pa.decimal128(9, 2)), ("c", pa.list_(pa.string()))]),
        [{"a": 1 << 60, "b": Decimal("1.10"), "c": ["x"]}, {"a": None, "b": None, "c": None}],
    ),
    "map": (pa.map_(pa.string(), pa.float64()), [[("k", 0.1), ("n", None)], []]),
}
TYPED = table_of({"id": pa.int64(), **{name: kind for name, (kind, _) in TYPES.items()}}, name="typed")


def test_values_of_every_type(place: Place) -> None:
    run = Run(place, TYPED)
    extremes = [{"id": number, **{name: values[number] for name, (_, values) in TYPES.items()}} for number in range(2)]
    rows = [*extremes, {"id": 2, **dict.fromkeys(TYPES)}]
    run.changes(1, *((INSERT, row) for row in rows))
    run.check()
    run.changes(2, *((UPDATE, {**row, "id": (row["id"] + 1) % 3}) for row in rows))
    run.history(1, [{**row, "id": row["id"] + 10} for row in rows], epoch=2)
    run.check()


def test_special_floats(place: Place) -> None:
    run = Run(place, table_of({"id": pa.int64(), "double": pa.float64(), "single": pa.float32()}, name="floats"))
    values = [5e-324]
    if place.case.kind in FINITE_FLOATS:
        with pytest.raises(SinkRowError):
            run.feed.changes(1, (INSERT, {"id": 1, "double": float("nan"), "single": None}))
    else:
        values += [float("nan"), float("inf"), float("-inf"), -0.0]
    rows = [{"id": number, "double": value, "single": value} for number, value in enumerate(values)]
    run.changes(1, *((INSERT, row) for row in rows), (INSERT, {"id": 9, "double": 1.0}))
    run.check()


# -- columns change ----------------------------------------------------------------------------------------------------


def test_a_column_is_added(place: Place) -> None:
    run = Run(place)
    run.changes(1, (INSERT, order(1)), (INSERT, order(2)))
    run.feed.table = WIDE
    run.changes(2, (INSERT, {**order(3), "note": "n"}), (UPDATE, {**order(1, "paid"), "note": "m"}))
    run.check()


def test_a_type_becomes_wider(place: Place) -> None:
    narrow = table_of({"id": pa.int32(), "n": pa.int16(), "d": pa.decimal128(6, 2), "f": pa.float32()})
    wide = table_of({"id": pa.int64(), "n": pa.int64(), "d": pa.decimal128(20, 4), "f": pa.float64()})
    run = Run(place, narrow)
    run.changes(1, (INSERT, {"id": 1, "n": 7, "d": Decimal("1.25"), "f": 0.5}))
    run.feed.table = wide
    run.changes(2, (INSERT, {"id": 1 << 40, "n": 1 << 50, "d": Decimal("1.2345"), "f": 0.1}))
    run.changes(3, (UPDATE, {"id": 1, "n": -(1 << 50), "d": Decimal("2.0001"), "f": 0.25}))
    run.check()


def test_a_column_is_renamed(place: Place) -> None:
    run = Run(place)
    run.changes(1, (INSERT, order(1, "old")), (INSERT, order(2, "old")))
    renamed = replace(ORDERS.columns[1], name="state")
    run.feed.table = replace(ORDERS, columns=(ORDERS.columns[0], renamed, ORDERS.columns[2]))
    kind, mode = place.case.kind, place.case.mode
    if kind in COLUMNS_BY_ID or (mode is not Mode.CHANGES and kind not in FIXED_MESSAGES):
        run.model.copy_column("status", "state")
    run.changes(2, (INSERT, {"id": 3, "state": "new", "total": None}), (DELETE, {"id": 2}))
    run.check()


def test_columns_exchange_their_names_and_one_is_replaced(place: Place) -> None:
    if place.case.mode is Mode.CHANGES or place.case.kind in FIXED_MESSAGES:
        pytest.skip("what was told stays as it was told")
    key, v, w, x = (SourceColumn(name, kind, "", number) for number, (name, kind) in enumerate(EXCHANGED.items(), 1))
    run = Run(place, SourceTable("public", "orders", (key, v, w, x), ("id",)))
    run.changes(1, *((INSERT, {"id": n, "v": n, "w": f"w{n}", "x": n}) for n in (1, 2)))
    columns = (key, replace(v, name="w"), replace(w, name="v"), replace(x, field_id=9))
    run.feed.table = replace(run.table, columns=columns)
    for old, new in (("v", "t"), ("w", "v"), ("t", "w"), ("gone", "x")):
        run.model.copy_column(old, new)
    run.changes(2, (INSERT, {"id": 3, "v": "three", "w": 3, "x": 3}), (UPDATE, {"id": 2, "v": "two", "w": 2, "x": 2}))
    run.check()
    run.changes(3, (DELETE, {"id": 1}))
    run.check()


def test_a_column_is_dropped(place: Place) -> None:
    run = Run(place, WIDE)
    run.changes(1, (INSERT, {**order(1), "note": "n"}), (INSERT, {**order(2), "note": "m"}))
    run.feed.table = replace(WIDE, columns=(*ORDERS.columns, replace(NOTE, dropped=True)))
    run.changes(2, (INSERT, order(3)), (UPDATE, order(1, "paid")))
    run.check()


# -- history -----------------------------------------------------------------------------------------------------------


def test_history_and_then_changes(place: Place) -> None:
    run = Run(place)
    run.history(1, [order(key) for key in range(5)])
    run.history(2, [order(key) for key in range(5, 10)])
    run.changes(1, (UPDATE, order(1, "paid")), (DELETE, order(7)), (INSERT, order(20)))
    run.check()
    assert run.sink.committed(ORDERS, "q", "b1") == Committed(1, 2)


def test_changes_and_history_in_one_batch(place: Place) -> None:
    run = Run(place)
    token = run.feed.token(3, 1, 2)
    changes = [(INSERT, order(50, "older")), (INSERT, order(10))]
    known = hash_keys(own_rows(ORDERS, [order(50), order(7)]), ("id",))
    parts: list[tuple[list[Row], dict[str, Any]]] = [
        ([order(50, "newest"), order(2)], {"changed": known}),
        ([order(5)], {}),
    ]
    staged = [run.feed.stage_history(token, rows, **part) for rows, part in parts]
    staged.append(run.feed.stage_changes(token, changes))
    assert run.sink.commit(ORDERS, token, staged)
    run.model.changes(3, changes)
    for rows, part in parts:
        run.model.history(rows, part_of(part))
    run.check()
    assert run.sink.committed(ORDERS, "q", "b1") == Committed(3, 1, 2)
    assert not run.sink.commit(ORDERS, token, staged)
    run.check()


def test_a_range_that_is_read_again(place: Place) -> None:
    run = Run(place)
    run.history(1, [order(key) for key in range(10)])
    again = [order(3), order(5, "again")]
    if place.case.kind in KEYLESS and place.case.mode is Mode.MIRROR:
        with pytest.raises(SinkInputError, match="does not tell which keys"):
            run.feed.history(2, again, ranges=[(3, 6)], replaces=True, order=IntegerOrder())
        return
    run.history(2, again, ranges=[(3, 6)], replaces=True, order=IntegerOrder())
    run.check()
    run.history(3, [], ranges=[(None, 2), (8, None)], replaces=True, order=IntegerOrder())
    run.check()
    run.history(4, [order(1), order(5, "as a whole")], replaces=True)
    run.check()


def test_a_column_that_is_read_by_itself(place: Place) -> None:
    run = Run(place)
    run.history(1, [order(1, "a"), order(2, "b")])
    run.history(2, [order(1, "x", "9.00"), order(3, "x", "9.00")], columns=("total",))
    run.check()


def test_rows_of_another_backfill(place: Place) -> None:
    run = Run(place)
    run.history(1, [order(1), order(2)])
    run.feed.backfill = "b2"
    run.history(1, [order(1, "b2")], epoch=1)
    run.history(2, [order(2), order(3, "b2")], epoch=2)
    run.check()
    assert run.sink.committed(ORDERS, "q", "b2").plan == 2


def test_the_other_attempt_of_a_plan_is_refused(place: Place) -> None:
    run = Run(place)
    run.history(1, [order(1)])
    token = run.feed.token(0, 1, attempt=1)
    staged = run.feed.stage_history(token, [order(1, "other")])
    with pytest.raises(OtherAttempt):
        run.sink.commit(ORDERS, token, [staged])
    run.check()


# -- batches -----------------------------------------------------------------------------------------------------------


def test_empty_epochs(place: Place) -> None:
    run = Run(place)
    run.changes(1)
    run.changes(2, (INSERT, order(1)))
    run.changes(3)
    run.changes(9)
    run.changes(10, (UPDATE, order(1, "paid")))
    run.check()


def test_an_epoch_that_comes_again_changes_nothing(place: Place) -> None:
    run = Run(place)
    run.changes(5, (INSERT, order(1)))
    run.changes(6, (INSERT, order(2)))
    for epoch in (6, 5, 1):
        assert not run.feed.changes(epoch, (INSERT, order(3)), (DELETE, order(1)), (UPDATE, order(2, "again")))
    run.check()
    run.history(1, [order(7)], epoch=6)
    assert not run.feed.history(1, [order(8)], epoch=6)
    run.check()
    assert run.sink.committed(ORDERS, "q", "b1") == Committed(6, 1)


def test_a_batch_of_which_the_sink_has_a_part(place: Place) -> None:
    run = Run(place)
    first, second = [(INSERT, order(1)), (INSERT, order(2))], [(UPDATE, order(1, "paid")), (DELETE, order(2))]
    run.changes(1, *first)
    run.changes(2, *second)
    third = [(INSERT, order(3)), (UPDATE, order(1, "sent"))]
    token = replace(run.feed.token(3), after=0)
    batches = [log_rows(ORDERS, changes, epoch) for epoch, changes in enumerate((first, second, third), 1)]
    assert run.sink.commit(ORDERS, token, [run.sink.stage_changes(ORDERS, token, iter(batches), None)])
    run.model.changes(3, third)
    run.check()


def test_several_tasks_stage_one_batch(place: Place) -> None:
    run = Run(place)
    run.changes(1, *((INSERT, order(key)) for key in range(8)))
    token = run.feed.token(2)
    parts: list[list[Change]] = [[(UPDATE, order(key, "paid")), (DELETE, order(key + 4))] for key in range(4)]
    staged = [run.feed.stage_changes(token, part) for part in parts]
    again = [run.feed.stage_changes(token, part) for part in parts]
    assert run.sink.commit(ORDERS, token, staged)
    assert not run.sink.commit(ORDERS, token, again)
    for part in parts:
        run.model.changes(2, part)
    run.check()


def test_truncate(place: Place) -> None:
    run = Run(place)
    run.changes(1, (INSERT, order(1)), (INSERT, order(2)))
    run.changes(2, (INSERT, order(3)), (INSERT, order(4)), truncated=1)
    run.check()
    run.changes(3, truncated=0)
    run.check()
    run.changes(4, (INSERT, order(1, "after")))
    run.check()


def test_two_queries_into_one_sink(place: Place) -> None:
    sink = place.sink()
    lines = replace(ORDERS, name="lines")
    runs = [Run(place, ORDERS, sink, "q1"), Run(place, lines, sink, "q2")]
    for epoch in range(1, 4):
        for number, run in enumerate(runs):
            run.changes(epoch * (number + 1), (INSERT, order(epoch, f"{number}")), (DELETE, order(epoch - 2)))
    for run in runs:
        run.check()
    assert [sink.committed(run.table, run.feed.query, "b1").epoch for run in runs] == [3, 6]
    assert [sink.committed(run.table, other.feed.query, "b1").epoch for run, other in (runs, runs[::-1])] == [0, 0]


def test_a_sink_that_is_late_has_the_same_in_the_end(place: Place) -> None:
    fast, late = Run(place, ORDERS, query="fast"), Run(place, replace(ORDERS, name="late"), query="late")
    epochs: list[list[Change]] = [[(INSERT, order(key)) for key in range(6)]]
    epochs += [[(UPDATE, order(epoch, f"{epoch}")), (DELETE, order(5 - epoch))] for epoch in (1, 2)]
    epochs += [[(INSERT, order(5, "back")), (UPDATE, order(0, None, "3.00"), "status")]]
    for epoch, changes in enumerate(epochs, 1):
        fast.changes(epoch, *changes)
    token = replace(late.feed.token(4), after=0)
    batches = [log_rows(late.table, changes, epoch) for epoch, changes in enumerate(epochs, 1)]
    assert late.sink.commit(late.table, token, [late.sink.stage_changes(late.table, token, iter(batches), None)])
    fast.check()
    assert shown(place.rows(late.sink, late.table)) == shown(place.rows(fast.sink, fast.table))


def test_nothing_was_delivered(place: Place) -> None:
    sink = place.sink()
    sink.check()
    assert sink.committed(ORDERS, "q", "b1") == Committed()
    sink.abort(ORDERS, "q", 5)
    assert place.rows(sink, ORDERS) == []
    assert not sink.commit(ORDERS, Feed(sink).token(1), [])


def test_what_was_staged_and_not_committed_is_seen_by_nobody(place: Place) -> None:
    run = Run(place)
    run.changes(1, (INSERT, order(1)))
    sink = run.sink
    old, new = (replace(run.feed.token(2, 1), generation=number) for number in (1, 2))
    rows = pa.Table.from_batches([many_changes(np.arange(5_000), INSERT)]).select(ORDERS.schema.names).combine_chunks()
    for _ in range(2):
        sink.stage_changes(ORDERS, old, iter([many_changes(np.arange(5_000), INSERT, 2)]), None)
        sink.stage_history(ORDERS, old, history_part(), iter(rows.cast(ORDERS.schema).to_batches()))
    run.check()
    sink.abort(ORDERS, "q", 2)
    run.check()
    changes = [(INSERT, order(2))]
    assert sink.commit(ORDERS, new, [sink.stage_changes(ORDERS, new, iter([log_rows(ORDERS, changes, 2)]), None)])
    run.model.changes(2, changes)
    run.check()
