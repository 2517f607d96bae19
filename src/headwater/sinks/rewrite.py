"""Rewrite: what the files of a table become by a batch, before any of it is visible.

It begins with the files that the table has. Each step leaves some of them out and brings new ones: rows are upserted
and deleted by key, by the range of their key, or all at once. In the end the difference is one commit. A file is read
only if its statistics say that it may have one of the keys, first its key columns, and the rest only if it has one.
One part of a batch and a few files are in memory at a time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.sinks.data_files import EXACT_DIGITS, DataFile, read_file, read_rows, write_files
from headwater.sinks.fold import DELETED
from headwater.sinks.keys import KeySet, last_rows
from headwater.sinks.partitions import NOT_PARTED, Partitioning, with_values
from headwater.sinks.storage import Storage
from headwater.sinks.types import conform
from headwater.sources.table import UNAVAILABLE_COLUMN
from headwater.sources.unavailable import names_column, unavailable_names

WORKERS: Final = 2
"""So many files are written at a time."""
SMALL_FILES: Final = 16
"""So many files of about one size are joined to one."""

Mask = NDArray[np.bool_]


class Rewrite:
    """The files of a table on their way to its next version.

    :param files: those that it has. :param schema: its columns. :param prefix: of the names of new files.
    :param by: what its rows are parted by.
    """

    def __init__(
        self,
        storage: Storage,
        files: Iterable[DataFile],
        schema: pa.Schema,
        key_columns: Sequence[str],
        target_bytes: int,
        prefix: str = "part-",
        by: Partitioning = NOT_PARTED,
    ) -> None:
        self._storage = storage
        self._prefix = prefix
        self._by = by
        self._before = {file.path: file for file in files}
        self._files = dict(self._before)
        self._schema = schema
        self._keys = tuple(key_columns)
        self._target = target_bytes
        self._written: list[DataFile] = []

    @property
    def added(self) -> list[DataFile]:
        """The files that the table did not have."""
        return [file for path, file in self._files.items() if path not in self._before]

    @property
    def removed(self) -> list[DataFile]:
        """The files that it has no longer."""
        return [file for path, file in self._before.items() if path not in self._files]

    @property
    def files(self) -> list[DataFile]:
        return list(self._files.values())

    @property
    def key_columns(self) -> tuple[str, ...]:
        return self._keys

    def read(self, file: DataFile) -> pa.Table:
        """The rows of *file*, in the columns of the table."""
        return read_file(self._storage, file, self._schema)

    def read_keys(self, file: DataFile) -> pa.Table:
        """Their keys."""
        return read_file(self._storage, file, self._key_schema)

    def keys_of(self, tables: Iterable[pa.Table]) -> pa.Table:
        """The keys of all *tables*."""
        found = [conform(rows.select(list(self._keys)), self._key_schema) for rows in tables]
        return pa.concat_tables([self._key_schema.empty_table(), *found])

    def truncate(self) -> None:
        """All rows go."""
        self._files.clear()

    def append(self, files: Iterable[DataFile]) -> None:
        """Rows that are new, in files that are there."""
        self._files.update((file.path, file) for file in files)

    def insert(self, rows: pa.Table) -> None:
        """Rows that are new."""
        self.append(self._write(conform(rows, self._schema)))

    def upsert(self, part: pa.Table, *, only_existing: bool = False) -> None:
        """Apply folded rows: one per key, as :func:`headwater.sinks.fold.fold` makes them.

        :param only_existing: rows whose key the table does not have are left out.
        """
        if not part.num_rows:
            return
        upsert = _Upsert(part, self._schema, self._keys)
        found = np.zeros(upsert.rows.num_rows, np.bool_)
        concerned = self._concerned(upsert.rows)
        with ThreadPoolExecutor(max(1, min(len(concerned), WORKERS))) as pool:
            for file, hits, made in pool.map(partial(self._upserted, upsert), concerned):
                found[hits] = True
                if hits.size:
                    del self._files[file.path]
                    self.append(made)
        if not only_existing:
            self.append(self._write(upsert.rows.filter(pa.array(~found & ~upsert.deleted))))

    def _upserted(self, upsert: _Upsert, file: DataFile) -> tuple[DataFile, NDArray[np.int64], list[DataFile]]:
        """*file*, the places of its keys in the part, and what it becomes if it has any. Of any thread."""
        places = upsert.keys.find(self.read_keys(file))
        hits = places[places >= 0]
        return file, hits, self._write(upsert.apply(self.read(file), places)) if hits.size else []

    def delete(self, chosen: Callable[[pa.Table], Mask]) -> None:
        """Delete the rows that *chosen* says, given their key columns."""
        for file in self.files:
            gone = chosen(self.read_keys(file))
            if gone.any():
                self._replace(file, self.read(file).filter(pa.array(~gone)) if not gone.all() else None)

    def compact(self) -> bool:
        """Join small files of about one size, if there are many; ``False``: there are not."""
        classes: dict[Any, list[DataFile]] = {}
        for file in self.files:
            if file.size * 4 < self._target:
                place = tuple(file.parted.get(name) for name in self._by.names)
                classes.setdefault((file.size.bit_length() // 2, place), []).append(file)
        for small in classes.values():
            if len(small) >= SMALL_FILES:
                rows = pa.concat_tables([self.read(file) for file in small])
                for file in small:
                    self._replace(file, None)
                self.append(self._write(self._sorted(rows)))
                return True
        return False

    def recast(self, renamed: Mapping[str, str | None]) -> None:
        """Write all files anew, with the columns of the schema.

        :param renamed: columns that get the values of others, or of none.
        """
        for file in self.files:
            rows = with_values(read_rows(self._storage, file.path), file.parted, self._schema)
            taken = {name: rows.column(old) for name, old in renamed.items() if old in rows.schema.names}
            rows = rows.drop_columns([name for name in renamed if name in rows.schema.names])
            for name, values in taken.items():
                rows = rows.append_column(name, values)
            self._replace(file, conform(rows, self._schema))

    def discard(self) -> None:
        """Remove the files that were written on the way: all of them if nothing was committed."""
        for file in self._written:
            self._storage.remove(file.path)
        self._written = []

    def settle(self) -> None:
        """Remove those written on the way that the committed version does not have."""
        self._written = [file for file in self._written if file.path not in self._files]
        self.discard()

    @property
    def _key_schema(self) -> pa.Schema:
        return pa.schema([self._schema.field(name) for name in self._keys])

    def _replace(self, file: DataFile, rows: pa.Table | None) -> None:
        made = [] if rows is None else self._write(rows)
        del self._files[file.path]
        self.append(made)

    def _write(self, rows: pa.Table) -> list[DataFile]:
        made = write_files(self._storage, rows, self._target, self._prefix, self._by) if rows.num_rows else []
        self._written.extend(made)
        return made

    def _sorted(self, rows: pa.Table) -> pa.Table:
        """*rows* by key, so that files have ranges of it."""
        return rows.take(pc.sort_indices(rows, [(name, "ascending") for name in self._keys]))

    @property
    def _candidates(self) -> list[DataFile]:
        """The files whose rows can change."""
        return self.files

    def _concerned(self, part: pa.Table) -> list[DataFile]:
        """The files that may have a key of *part*, by the first key column."""
        name = self._keys[0]
        values = part.column(name)
        files = self._candidates
        if values.null_count or not _is_ordered(values.type):
            return files
        ordered = _Lazy(pc.unique(values).sort())
        try:
            return [file for file in files if _may_have(file, name, ordered)]
        except (OverflowError, ValueError, TypeError):  # a date that Python does not have
            return files


class _Lazy:
    """Values of an Arrow array, made when they are looked at."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, place: int) -> Any:
        return self._values[place].as_py()


def _is_ordered(kind: pa.DataType) -> bool:
    if pa.types.is_decimal(kind):
        return bool(kind.precision <= EXACT_DIGITS)
    ordered = (pa.types.is_integer, pa.types.is_string, pa.types.is_date, pa.types.is_timestamp)
    return any(is_one(kind) for is_one in ordered)


def _may_have(file: DataFile, name: str, ordered: Any) -> bool:
    low, high = file.lows.get(name), file.highs.get(name)
    if low is None or high is None:
        return True
    if isinstance(high, datetime):
        high += timedelta(milliseconds=1)  # other writers cut off what is less
    return bisect_left(ordered, low) < bisect_right(ordered, high)


class _Upsert:
    """One part that is upserted: a row for each key."""

    def __init__(self, part: pa.Table, schema: pa.Schema, key_columns: Sequence[str]) -> None:
        self.keys = KeySet(part, key_columns)
        if self.keys.count < part.num_rows:
            part = part.take(pa.array(np.sort(last_rows(self.keys.ids, self.keys.count))))
            self.keys = KeySet(part, key_columns)
        self.deleted: Mask = part.column(DELETED).combine_chunks().to_numpy(zero_copy_only=False)
        self.rows = conform(part, schema)
        self._keeping = Keeping(part, schema.names)

    def apply(self, old: pa.Table, places: NDArray[np.int64]) -> pa.Table:
        """What the rows *old* become, given the places of their keys in the part; -1 where it has none."""
        hits = places >= 0
        updated = hits.copy()
        updated[hits] = ~self.deleted[places[hits]]
        new = self.rows.take(pa.array(places[updated]))
        if self._keeping.columns:
            new = self._keeping.apply(new, old.filter(pa.array(updated)), places[updated])
        return pa.concat_tables([old.filter(pa.array(~hits)), new])


class Keeping:
    """Columns whose value a part does not tell for some rows: the table keeps those that it has."""

    def __init__(self, part: pa.Table, names: Sequence[str]) -> None:
        told = part.column(UNAVAILABLE_COLUMN)
        self.columns: dict[str, Mask] = {name: names_column(told, name) for name in unavailable_names(told, names)}

    def apply(self, new: pa.Table, old: pa.Table, places: NDArray[np.int64]) -> pa.Table:
        for name, mask in self.columns.items():
            kept = mask[places]
            if kept.any():
                place = new.schema.get_field_index(name)
                values: Any = _choose(kept, old.column(name), new.column(name))
                new = new.set_column(place, new.schema.field(place), values)
        return new


def _choose(mask: Mask, chosen: Any, other: Any) -> Any:
    """*chosen* where *mask* is set, else *other*; of any type."""
    both = pa.chunked_array([*chosen.chunks, *other.chunks], type=other.type)
    rows = np.arange(mask.size)
    return both.take(pa.array(np.where(mask, rows, rows + mask.size)))
