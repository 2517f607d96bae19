"""VersionRewrite: what the files of a table of versions become by a batch (:mod:`headwater.sinks.versions`).

Versions that are current are in files of their own, as the rows of a mirror are, where rows are parted by
``_is_current``: to close one, files with current versions alone are read and written anew. A version that is closed is
written once more, and never again, but for joining small files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.sinks.data_files import DataFile
from headwater.sinks.fold import DELETED
from headwater.sinks.keys import KeySet, last_rows, same_rows
from headwater.sinks.rewrite import WORKERS, Keeping, Mask, Rewrite
from headwater.sinks.types import conform
from headwater.sinks.versions import ADDED_NAMES, CLOSES, IS_CURRENT, VALID_FROM, VALID_TO

_TIME = pa.timestamp("us", tz="UTC")


class VersionRewrite(Rewrite):
    """The files of a table of versions on their way to its next version."""

    @property
    def _candidates(self) -> list[DataFile]:
        """Those that may have versions that are current."""
        return [file for file in self.files if file.parted.get(IS_CURRENT) != "false"]

    def put(self, part: pa.Table, *, only_changed: bool = False, only_existing: bool = False) -> None:
        """Begin and end versions, in the columns of :func:`headwater.sinks.versions.staged_schema`.

        :param only_changed: a row that is what its key's current version is begins none.
        :param only_existing: nor does one whose key has no current version.
        """
        if not part.num_rows:
            return
        put = _Put(part, self._schema, self._keys, only_changed)
        found = np.zeros(put.keys.count, np.bool_)
        closed: list[pa.Table] = []
        concerned = self._concerned(put.heads)
        with ThreadPoolExecutor(max(1, min(len(concerned), WORKERS))) as pool:
            for ended in pool.map(partial(self._ended, put), concerned):
                found[ended.found] = True
                if ended.made is not None:
                    del self._files[ended.file.path]
                    self.append(ended.made)
                    closed += ended.closed
        rest = put.rows.filter(pa.array(~found[put.ids] & ~put.deleted & (not only_existing)))
        self.append(self._write(pa.concat_tables([*closed, rest])))

    def close(self, chosen: Callable[[pa.Table], Mask], at_us: int) -> None:
        """End the current versions that *chosen* says, given their key columns, at a time."""
        for file in self._candidates:
            gone = chosen(self.read_keys(file))
            if gone.any():
                old = self.read(file)
                gone = gone & _mask(old, IS_CURRENT)
                ended = _ended_at(old.filter(pa.array(gone)), np.full(int(gone.sum()), at_us, np.int64))
                self._replace(file, pa.concat_tables([old.filter(pa.array(~gone)), ended]))

    def _ended(self, put: _Put, file: DataFile) -> _Ended:
        """What becomes of *file*. Of any thread."""
        places = put.keys.find(self.read_keys(file))
        if not (places >= 0).any():
            return _Ended(file, places[:0])
        old = self.read(file)
        places = np.where(_mask(old, IS_CURRENT), places, -1)
        hits = np.flatnonzero(places >= 0)
        found = places[hits]
        if put.only_changed:
            hits = hits[~put.is_same(old.take(pa.array(hits)), found)]
        if not hits.size:
            return _Ended(file, found)
        stays = np.ones(old.num_rows, np.bool_)
        stays[hits] = False
        was = old.take(pa.array(hits))
        ended, begun = put.follow(was, places[hits])
        is_open = _mask(begun, IS_CURRENT)
        made = self._write(pa.concat_tables([old.filter(pa.array(stays)), begun.filter(pa.array(is_open))]))
        return _Ended(file, found, made, [ended, begun.filter(pa.array(~is_open))])


@dataclass(frozen=True, slots=True)
class _Ended:
    """What became of one file.

    :ivar found: the keys of the part that it has. :ivar made: the files that it becomes; ``None``: it stays.
    :ivar closed: versions that are closed, and are in no file yet.
    """

    file: DataFile
    found: NDArray[np.int64]
    made: list[DataFile] | None = None
    closed: Sequence[pa.Table] = ()


class _Put:
    """One part: versions that begin, and for each key the row at which the one before them ends.

    :ivar heads: those rows, one per key. :ivar ids: for each row of the part the number of its key.
    """

    def __init__(self, part: pa.Table, schema: pa.Schema, key_columns: Sequence[str], only_changed: bool) -> None:
        self.only_changed = only_changed
        self.keys = KeySet(part, key_columns)
        self.ids = self.keys.ids
        self.deleted = _mask(part, DELETED)
        self.rows = conform(part, schema)
        firsts = last_rows(self.ids, self.keys.count, np.flatnonzero(_mask(part, CLOSES)))
        self._firsts = np.where(firsts < 0, last_rows(self.ids, self.keys.count), firsts)
        self.heads = self.rows.take(pa.array(self._firsts))
        self._keeping = Keeping(part, schema.names)
        self._own = [name for name in schema.names if name in part.schema.names and name not in ADDED_NAMES]

    def is_same(self, old: pa.Table, places: NDArray[np.int64]) -> Mask:
        """Which of the versions *old* are what the first row of their key, whose number is given, is."""
        firsts = self._firsts[places]
        new = self._keeping.apply(self.rows.take(pa.array(firsts)), old, firsts)
        return same_rows(old, new, self._own) & ~self.deleted[firsts]

    def follow(self, old: pa.Table, places: NDArray[np.int64]) -> tuple[pa.Table, pa.Table]:
        """The versions *old*, of the keys with these numbers, as they end, and those that begin after them."""
        begins = _times(old, VALID_FROM)
        ended = _ended_at(old, _times(self.heads, VALID_FROM)[places])
        last = np.full(self.keys.count, -1, np.int64)
        last[places] = np.arange(places.size)
        rows = np.flatnonzero((last[self.ids] >= 0) & ~self.deleted)
        before = last[self.ids[rows]]
        new = self._keeping.apply(self.rows.take(pa.array(rows)), old.take(pa.array(before)), rows)
        for name in (VALID_FROM, VALID_TO):
            new = _with_times(new, name, np.maximum(_times(new, name), begins[before]))
        return ended, new


def _ended_at(old: pa.Table, times: NDArray[np.int64]) -> pa.Table:
    """*old* as versions that end at *times*, or where they begin if that is later."""
    place = old.schema.get_field_index(IS_CURRENT)
    old = old.set_column(place, old.schema.field(place), pa.repeat(pa.scalar(False), old.num_rows))
    place = old.schema.get_field_index(VALID_TO)
    ends = pa.array(np.maximum(times, _times(old, VALID_FROM)), pa.int64()).cast(_TIME)
    return old.set_column(place, old.schema.field(place), ends)


def _times(rows: pa.Table, name: str) -> NDArray[np.int64]:
    """Times as numbers; 0 where there is none."""
    found: NDArray[np.int64] = pc.fill_null(rows.column(name).cast(pa.int64()), 0).to_numpy()
    return found


def _with_times(rows: pa.Table, name: str, times: NDArray[np.int64]) -> pa.Table:
    """*rows* with *times* in the column *name*, where it has any."""
    place = rows.schema.get_field_index(name)
    is_none = ~_valid(rows.column(name))
    values: Any = pa.array(times, pa.int64(), mask=is_none).cast(_TIME)
    return rows.set_column(place, rows.schema.field(place), values)


def _mask(rows: pa.Table, name: str) -> Mask:
    found: Mask = pc.fill_null(rows.column(name), False).to_numpy().astype(np.bool_)
    return found


def _valid(values: Any) -> Mask:
    found: Mask = values.is_valid().to_numpy().astype(np.bool_)
    return found
