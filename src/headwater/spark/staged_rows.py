"""Staged rows: what the tasks of a batch have made ready, on its way to the process that writes the epoch.

A few rows travel inside the answer of the task; many go into a file in ``staging`` beside the store. Its name tells the
stream, the batch and the run that it is of, so that what nobody writes any more is known: files of batches that are
written, and those of other streams.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qs, quote, urlsplit, urlunsplit

import pyarrow as pa

from headwater import failpoints
from headwater.capture.stream_errors import StagedRowsLost
from headwater.capture.stream_records import StreamBatch
from headwater.sinks.storage import Storage
from headwater.state.location import split_location

BEFORE_PART = failpoints.register("stream_log.before_part")
AFTER_PART = failpoints.register("stream_log.after_part")
BEFORE_CLEAN = failpoints.register("stream_log.before_clean")
AFTER_CLEAN = failpoints.register("stream_log.after_clean")

FOLDER: Final = "staging"
INLINE_BYTES: Final = 256 << 10

_NAME: Final = re.compile(r"(?:.*/)?([^/]+)/(\d+)-[^/]+\.arrow")


@dataclass(frozen=True, slots=True)
class StagedPart:
    """Rows that one task has staged: inside, or in a file."""

    rows: int
    inside: bytes | None = None
    path: str | None = None


class StagedRows:
    """The staging of one store."""

    def __init__(self, location: str) -> None:
        self._storage = _storage(location)

    def put(self, batch: StreamBatch, schema: pa.Schema, rows: Iterator[pa.RecordBatch]) -> StagedPart:
        """Stage *rows*, however many."""
        held: list[pa.RecordBatch] = []
        size = 0
        for part in rows:
            held.append(part)
            size += part.nbytes
            if size > INLINE_BYTES:
                return self._file(batch, schema, held, rows)
        sink = pa.BufferOutputStream()
        count = _write(sink, schema, held)
        return StagedPart(count, inside=sink.getvalue().to_pybytes() if count else None)

    def _file(
        self, batch: StreamBatch, schema: pa.Schema, held: list[pa.RecordBatch], rest: Iterator[pa.RecordBatch]
    ) -> StagedPart:
        name = f"{quote(batch.query, safe='')}/{batch.number}-{quote(batch.run, safe='')}-{uuid.uuid4().hex}.arrow"
        failpoints.hit(BEFORE_PART)
        with self._storage.create(name) as stream:
            count = _write(stream, schema, _chained(held, rest), "lz4")
        failpoints.hit(AFTER_PART)
        return StagedPart(count, path=name)

    def get(self, parts: Iterable[StagedPart]) -> Iterator[pa.RecordBatch]:
        """The rows of *parts*, in their order. :raises StagedRowsLost: a file is gone."""
        for part in parts:
            if part.inside is not None:
                yield from pa.ipc.open_stream(part.inside)
            elif part.path is not None:
                try:
                    file = self._storage.files.open_input_file(part.path)
                except FileNotFoundError:
                    raise StagedRowsLost(
                        "Rows that a task has staged are gone: another run of the stream has removed them.",
                        next_step="Start the query again: it makes the batch once more.",
                    ) from None
                with file:
                    yield from pa.ipc.open_stream(file)

    def remove(self, parts: Iterable[StagedPart]) -> None:
        """Remove the files of *parts*, which nobody writes."""
        for part in parts:
            if part.path is not None:
                self._storage.remove(part.path)

    def clean(self, batch: StreamBatch) -> None:
        """*batch* is written: remove what it and those before have staged, and what other streams have."""
        failpoints.hit(BEFORE_CLEAN)
        own = quote(batch.query, safe="")
        for info in self._storage.list():
            found = _NAME.fullmatch(info.path)
            if found and (found[1] != own or int(found[2]) <= batch.number):
                self._storage.remove(info.path)
        failpoints.hit(AFTER_CLEAN)


def _storage(location: str) -> Storage:
    engine, rest = split_location(location)
    if engine == "embedded":
        return Storage(f"{rest}/{FOLDER}", is_private=True)
    parts = urlsplit(rest)
    told = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    options = {f"aws_{name}": value for name, value in told.items()}
    if told.get("endpoint", "").startswith("http://"):
        options["aws_allow_http"] = "true"
    return Storage(urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{FOLDER}", query="")), options)


def _chained(held: list[pa.RecordBatch], rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    while held:
        yield held.pop(0)
    yield from rest


def _write(stream: object, schema: pa.Schema, batches: Iterable[pa.RecordBatch], compression: str | None = None) -> int:
    rows = 0
    with pa.ipc.new_stream(stream, schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        for batch in batches:
            writer.write_batch(batch)
            rows += batch.num_rows
    return rows
