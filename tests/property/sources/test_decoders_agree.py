"""The compiled decoder gives what the Python decoder gives, whatever comes: rows, stops, errors and all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.unit.sources.postgres import pgoutput_bytes as wire
from tests.unit.sources.postgres.pgoutput_bytes import UNCHANGED

from headwater.sources.errors import SourceProtocolError
from headwater.sources.postgres import array_text
from headwater.sources.postgres.decoder import CompiledDecoder, PythonDecoder, RawRows, RowDecoder, is_compiled

pytestmark = pytest.mark.skipif(not is_compiled(), reason="the compiled decoder was not built")

TABLES = {5: (1, [0]), 6: (3, [0, 2]), 7: (4, [])}
IGNORED = 8
KINDS = ("insert", "update", "update key", "same key", "update old", "delete key", "delete old")

values = st.one_of(st.none(), st.just(UNCHANGED), st.text(max_size=12), st.just("a" * 300))


@st.composite
def row_messages(draw: st.DrawFn, xid: int | None) -> bytes:
    oid = draw(st.sampled_from([*TABLES, IGNORED]))
    columns = TABLES[oid][0] if oid in TABLES else 2
    tuples = st.lists(values, min_size=columns, max_size=columns)
    match draw(
        st.sampled_from(["insert", "update", "update key", "same key", "update old", "delete key", "delete old"])
    ):
        case "insert":
            return wire.insert(oid, draw(tuples), xid)
        case "update":
            return wire.update(oid, draw(tuples), xid=xid)
        case "update key":
            return wire.update(oid, draw(tuples), key=draw(tuples), xid=xid)
        case "same key":
            row = draw(tuples)
            new = [value if draw(st.booleans()) else UNCHANGED for value in row]
            return wire.update(oid, new, key=row, xid=xid)
        case "update old":
            return wire.update(oid, draw(tuples), old=draw(tuples), xid=xid)
        case "delete key":
            return wire.delete(oid, key=draw(tuples), xid=xid)
        case _:
            return wire.delete(oid, old=draw(tuples), xid=xid)


@st.composite
def streams(draw: st.DrawFn) -> list[tuple[int | None, list[bytes]]]:
    """Transactions: the xid of a streamed one and its rows, or whole messages of a plain one."""
    made: list[tuple[int | None, list[bytes]]] = []
    for number in range(draw(st.integers(0, 6))):
        xid = draw(st.one_of(st.none(), st.integers(0, 2**32 - 1)))
        rows = draw(st.lists(row_messages(xid), max_size=8))
        lsn, time = draw(st.integers(0, 2**64 - 1)), draw(st.integers(-(2**63), 2**63 - 1))
        if xid is None:
            rows = [wire.begin(lsn, time, number), *rows, wire.commit(lsn, lsn // 2, time)]
        made.append((xid, rows))
    return made


def observed(rows: RawRows) -> Any:
    columns = []
    for column in rows.columns:
        assert column.text.type == pa.string()
        column.text.validate(full=True)
        marks = None if column.unchanged is None else column.unchanged.tolist()
        columns.append((column.text.to_pylist(), column.text.null_count, marks))
    stamps = (rows.ops, rows.commit_lsn, rows.seq, rows.xid, rows.commit_time)
    return rows.oid, [(array.dtype, array.tolist()) for array in stamps], columns


def state(decoder: RowDecoder) -> Any:
    return (
        decoder.held_rows,
        decoder.held_bytes,
        decoder.in_transaction,
        decoder.transaction,
        decoder.last_commit,
        decoder.next_seq,
    )


def run(make: Callable[[], RowDecoder], stream: list[tuple[int | None, list[bytes]]], limits: dict[str, Any]) -> Any:
    """All that can be seen of a decoder on its way through *stream*, up to its first error."""
    decoder = make()
    for oid, (columns, keys) in TABLES.items():
        decoder.add_relation(oid, columns, keys)
    decoder.ignore_relation(IGNORED)
    return list(_steps(decoder, stream, limits))


def _steps(decoder: RowDecoder, stream: list[tuple[int | None, list[bytes]]], limits: dict[str, Any]) -> Iterator[Any]:
    for xid, messages in stream:
        try:
            if xid is not None:
                decoder.begin_streamed(xid * 3, -xid, xid)
            place = 0
            while place < len(messages):
                stopped = decoder.feed(messages, place, **limits)
                yield stopped, state(decoder)
                if stopped == place and not decoder.held_rows:
                    place += 1  # a message that is not for decoders
                    continue
                place = stopped
                yield [observed(rows) for rows in decoder.take()]
            if xid is not None:
                decoder.end_streamed()
        except SourceProtocolError:
            yield "error", state(decoder)
            try:
                yield [observed(rows) for rows in decoder.take()]
            except SourceProtocolError:
                yield "no text"
            return


limits = st.fixed_dictionaries(
    {"max_rows": st.integers(1, 6), "max_bytes": st.sampled_from([1, 200, 1 << 30]), "stop_at_commit": st.booleans()}
)


@given(streams(), limits)
def test_decoders_agree_on_what_servers_send(stream: Any, limits: dict[str, Any]) -> None:
    seen = run(PythonDecoder, stream, limits)
    assert seen == run(CompiledDecoder, stream, limits)
    assert not any(step[0] == "error" for step in seen if isinstance(step, tuple))


@given(streams(), limits, st.data())
def test_decoders_agree_on_damaged_messages(stream: Any, limits: dict[str, Any], data: st.DataObject) -> None:
    flat = [(part, place) for part, (_, messages) in enumerate(stream) for place in range(len(messages))]
    if not flat:
        return
    part, place = data.draw(st.sampled_from(flat))
    messages = stream[part][1]
    message = bytearray(messages[place])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(message)))
        match data.draw(st.sampled_from(["cut", "set", "insert", "drop"])):
            case "cut":
                del message[at:]
            case "set" if at < len(message):
                message[at] = data.draw(st.one_of(st.integers(0, 255), st.sampled_from(b"NKOtnubIUDBC\0\xff")))
            case "insert":
                message[at:at] = data.draw(st.binary(min_size=1, max_size=3))
            case _:
                del message[at : at + 1]
    messages[place] = bytes(message)
    assert run(PythonDecoder, stream, limits) == run(CompiledDecoder, stream, limits)


@given(st.lists(st.tuples(st.sampled_from(b"IUDBCRx"), st.binary(max_size=40)), max_size=6), st.booleans())
def test_decoders_agree_on_random_bytes(bodies: list[tuple[int, bytes]], streamed: bool) -> None:
    messages = [wire.raw(bytes([kind]) + body) for kind, body in bodies]
    stream = [(9 if streamed else None, messages if streamed else [wire.begin(1), *messages])]
    options = {"max_rows": 100, "max_bytes": 1 << 20, "stop_at_commit": False}
    assert run(PythonDecoder, stream, options) == run(CompiledDecoder, stream, options)


elements = st.lists(
    st.one_of(st.none(), st.text(max_size=8), st.sampled_from(["NULL", "null", "", "{", '"', "\\", ","]))
)


def written(array: list[str | None]) -> str:
    """The text of an array, each element quoted."""
    parts = ["NULL" if e is None else '"' + e.replace("\\", "\\\\").replace('"', '\\"') + '"' for e in array]
    return "{" + ",".join(parts) + "}"


def split(way: Callable[[pa.StringArray], Any], text: pa.StringArray) -> Any:
    offsets, states, found = way(text)
    found.validate(full=True)
    return offsets.to_pylist(), states.tolist(), found.to_pylist()


@given(st.lists(st.one_of(st.none(), elements), max_size=6))
def test_arrays_are_what_was_written(arrays: list[list[str | None] | None]) -> None:
    text = pa.array([None if array is None else written(array) for array in arrays], pa.string())
    for way in (array_text._split_python, array_text._split_compiled):
        offsets, states, found = split(way, text)
        assert states == [0] * len(arrays)
        assert found == [element for array in arrays for element in array or []]
        assert [after - before for before, after in pairwise(offsets)] == [len(array or []) for array in arrays]


@given(
    st.lists(st.one_of(st.none(), st.text(alphabet='{}",\\[]=:NULab é', max_size=12)), max_size=6),
    st.integers(0, 6),
    st.integers(0, 6),
)
@example(["{{", "[", "{{}", "{", "}", "{}", "[1:1]={1}"], 0, 7)
def test_array_parsers_agree_on_any_text(texts: list[str | None], start: int, length: int) -> None:
    text = pa.array(texts, pa.string()).slice(start, length)
    assert split(array_text._split_python, text) == split(array_text._split_compiled, text)
