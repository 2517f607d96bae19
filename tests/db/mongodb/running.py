"""A capture of a MongoDB under test: as that of a Postgres, with the server's own documents as the oracle."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from tests.db.capture.running import RunningCapture
from tests.servers.mongodb import MongoServer

from headwater.capture import SourceState
from headwater.log_store import LogView
from headwater.sources.mongodb.documents.decoder import DocumentDecoder
from headwater.sources.mongodb.offset import MongoOffset
from headwater.sources.mongodb.server import operation_time
from headwater.sources.table import SourceTable
from headwater.state import open_reader


def end_of_log(server: MongoServer) -> MongoOffset:
    """Where the server's log ends now."""
    return MongoOffset(operation_time(server.client))


class MongoCapture(RunningCapture):
    """One capture of *server*; it can be stopped and started again over the same store."""

    def __init__(self, server: MongoServer, folder: Path, tables: Sequence[str], **source: Any) -> None:
        self.server = server
        super().__init__(server, folder, tables, source.pop("dsn", None), **source)  # type: ignore[arg-type]

    def catch_up(self) -> None:
        """Until all that the server has committed by now is durable."""
        target = end_of_log(self.server)
        self.wait_for(lambda: self.failure is not None or self._is_durable(target))
        if self.failure is not None:
            raise self.failure

    def _is_durable(self, target: MongoOffset) -> bool:
        offset = self.offset()
        return offset is not None and offset >= target

    def offset(self) -> MongoOffset | None:
        """The position that the store holds."""
        with contextlib.suppress(LookupError), open_reader(self.store) as reader, reader.snapshot() as view:
            record, _ = SourceState.read(view)
            if record is not None:
                assert isinstance(record.offset, MongoOffset)
                return record.offset
        return None

    def logged(self, name: str) -> SourceTable:
        """The captured table, with the columns that were settled when its capture began."""
        known = self.tables()[name]
        with open_reader(self.store) as reader, reader.snapshot() as view:
            log = LogView.open(view, name).log
        return SourceTable.of_log(known.namespace, known.name, log.schema, log.key_columns, known.source_id)

    def selected(self, table: SourceTable) -> pa.Table:
        """The documents as the server has them now."""
        return selected(self.server, table)

    def assert_equal(self, *names: str) -> None:
        """The table that each log tells of is the collection at the source."""
        self.catch_up()
        for name in names:
            table = self.logged(name)
            expected = self.selected(table)
            found = self.replayed(name).select(expected.schema.names)
            order = [(column, "ascending") for column in table.key_columns]
            assert found.num_rows == expected.num_rows, (name, found.num_rows, expected.num_rows)
            found, expected = found.sort_by(order).cast(expected.schema), expected.sort_by(order)
            assert found.equals(expected), (name, found.to_pylist()[:20], expected.to_pylist()[:20])


def selected(server: MongoServer, table: SourceTable) -> pa.Table:
    """The documents of a collection, as the library gives them to anybody who asks, in the columns of *table*."""
    raw: CodecOptions[RawBSONDocument] = CodecOptions(document_class=RawBSONDocument)
    found = server.client[table.namespace].get_collection(table.name, codec_options=raw).find()
    documents: list[Any] = list(found)
    batch = DocumentDecoder(table).decode([bytes(document.raw) for document in documents]).batch
    return pa.Table.from_batches([batch])


@contextlib.contextmanager
def running(server: MongoServer, folder: Path, *tables: str, **source: Any) -> Iterator[MongoCapture]:
    """A capture that runs, and is stopped at the end."""
    made = MongoCapture(server, folder, tables, **source)
    made.start()
    if made.failure is not None:
        raise made.failure
    try:
        yield made
    finally:
        made.capture.stop()
        made._thread.join(60)
