"""Staging: rows on their way from the tasks that read them to the process that commits them.

A few rows travel inside the answer of the task; many go into a file in a directory that readers of the sink never
look at. Its name begins with the generation and the batch that it is of: when that batch, or a later one, is committed,
or a later generation has begun, it is waste.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, Protocol
from urllib.parse import quote

import pyarrow as pa

from headwater import failpoints
from headwater.sinks.data_files import DataFile
from headwater.sinks.errors import StagedLost
from headwater.sinks.sink import Staged, Token
from headwater.sinks.storage import Storage
from headwater.sinks.types import by_bytes
from headwater.sources.table import SourceTable
from headwater.sources.target_names import directory_name
from headwater.versioned.run_file import RunInfo

DIRECTORY: Final = "_headwater_staging"
INLINE_BYTES: Final = 256 << 10
PART_BYTES: Final = 64 << 20

BEFORE_PART = failpoints.register("sink.staging.before_part")
AFTER_PART = failpoints.register("sink.staging.after_part")
BEFORE_PROOF = failpoints.register("sink.staging.before_proof")
BEFORE_CLEAN = failpoints.register("sink.staging.before_clean")

_NAME = re.compile(r"(\d+)-(\d+)-(\d+)-\d+-[0-9a-f-]{36}\.arrow")


@dataclass(frozen=True, slots=True)
class Part:
    """Rows that were staged: inside, or in a file."""

    rows: int
    size: int
    inside: bytes | None = None
    path: str | None = None


@dataclass(frozen=True, slots=True)
class StagedFiles:
    """What a task has staged for a table of files, or for a sink that is given rows.

    :ivar files: of the table, which readers do not see yet. :ivar parts: other rows.
    :ivar only_existing: the rows of *parts* change rows that the sink has, and add none.
    :ivar since_us: the time of the first row.
    """

    files: tuple[DataFile, ...] = ()
    parts: tuple[Part, ...] = ()
    only_existing: bool = False
    since_us: int | None = None

    @property
    def pieces(self) -> tuple[DataFile | Part, ...]:
        return (*self.files, *self.parts)


@dataclass(frozen=True, slots=True)
class StagedRuns:
    """What a task has staged for a versioned table."""

    runs: tuple[RunInfo, ...] = ()

    @property
    def pieces(self) -> tuple[RunInfo, ...]:
        return self.runs


def files_of(staged: Iterable[Staged]) -> Iterator[DataFile]:
    """All files of *staged*, of sinks that stage :class:`StagedFiles`."""
    return (file for one in staged for file in one.detail.files)


def parts_of(staged: Iterable[Staged]) -> list[Part]:
    """All parts of *staged*."""
    return [part for one in staged for part in one.detail.parts]


class Staging:
    """The staging of one table by one query."""

    def __init__(self, root: Storage, table: SourceTable, query: str) -> None:
        self._table = table
        directory = directory_name(table.namespace, table.name)
        self._storage = root.within(DIRECTORY, directory, quote(query, safe=""))

    def put(self, token: Token, rows: pa.Table) -> Part:
        """Stage *rows*."""
        if rows.nbytes <= INLINE_BYTES:
            sink = pa.BufferOutputStream()
            _write(sink, rows, None)
            inside = sink.getvalue().to_pybytes()
            return Part(rows.num_rows, len(inside), inside=inside)
        failpoints.hit(BEFORE_PART)
        name = f"{token.generation}-{token.epoch}-{token.plan}-{token.attempt}-{uuid.uuid4()}.arrow"
        with self._storage.create(name) as stream:
            _write(stream, rows, "lz4")
            size = stream.tell()
        failpoints.hit(AFTER_PART)
        return Part(rows.num_rows, size, path=name)

    def put_all(self, token: Token, tables: Iterable[pa.Table]) -> list[Part]:
        """Stage *tables*, small ones together."""
        return [self.put(token, pa.concat_tables(group)) for group in by_bytes(tables, PART_BYTES)]

    def get(self, part: Part) -> pa.Table:
        """The rows of *part*. :raises StagedLost: its file is missing, or has another number of rows."""
        if part.inside is not None:
            return pa.ipc.open_stream(part.inside).read_all()
        try:
            file = self._storage.files.open_input_file(part.path)
        except FileNotFoundError:
            raise _lost(self._table, f"the file {part.path} is missing.") from None
        with file:
            rows = pa.ipc.open_stream(file).read_all()
        if rows.num_rows != part.rows:
            what = f"the file {part.path} has {rows.num_rows:,} of the {part.rows:,} rows that were staged."
            raise _lost(self._table, what)
        return rows

    def prove(self, parts: Iterable[Part]) -> None:
        """:raises StagedLost: the file of one of *parts* is not as it was staged (:func:`prove_files`)."""
        prove_files(self._storage, self._table, ((part.path, part.size) for part in parts if part.path is not None))

    def gather(self, parts: Sequence[Part]) -> Iterator[pa.Table]:
        """The rows of *parts*, small ones together."""
        return map(pa.concat_tables, by_bytes(map(self.get, parts), PART_BYTES))

    def clean(self, token: Token) -> None:
        """Remove what batches up to that of *token*, which is committed, have staged."""
        failpoints.hit(BEFORE_CLEAN)
        for info in self._storage.list():
            found = _NAME.fullmatch(info.base_name)
            if found and int(found[2]) <= token.epoch and int(found[3]) <= token.plan:
                self._storage.remove(info.path)

    def abort(self, generation: int) -> None:
        """Remove what earlier generations have staged."""
        for info in self._storage.list():
            found = _NAME.fullmatch(info.base_name)
            if found and int(found[1]) < generation:
                self._storage.remove(info.path)


def prove_files(storage: Storage, table: SourceTable, files: Iterable[tuple[str, int]]) -> None:
    """Compare staged files with what the tasks reported, before they are committed; nothing is read.

    :param files: the names of files in *storage*, and their sizes in bytes.
    :raises StagedLost: one is missing, or has another size. The batch must be staged again.
    """
    failpoints.hit(BEFORE_PROOF)
    expected = dict(files)
    for (name, size), found in zip(expected.items(), storage.sizes(tuple(expected)), strict=True):
        if found is None:
            raise _lost(table, f"the file {name} is missing.")
        if found != size:
            raise _lost(table, f"the file {name} has {found:,} of the {size:,} bytes that were staged.")


def _lost(table: SourceTable, what: str) -> StagedLost:
    return StagedLost(f"Table {table.full_name}: {what}", next_step="No action needed: the batch is staged again.")


class RowWriter(Protocol):
    """Writes rows into files."""

    def write_all(self, tables: Iterable[pa.Table]) -> list[DataFile]: ...


def stage_rows(
    writer: RowWriter, staging: Staging, token: Token, tables: Iterator[pa.Table]
) -> tuple[list[DataFile], list[Part]]:
    """Files with the rows of *tables*; if they are few a part that travels inside."""
    held: list[pa.Table] = []
    size = 0
    for rows in tables:
        if rows.num_rows:
            held.append(rows)
            size += rows.nbytes
        if size > INLINE_BYTES:
            return writer.write_all(chain(held, tables)), []
    return [], [staging.put(token, pa.concat_tables(held))] if held else []


def _write(stream: object, rows: pa.Table, compression: str | None) -> None:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(stream, rows.schema, options=options) as writer:
        writer.write_table(rows)
