"""FollowedTables: the captured tables as a stream follows them through their capture instances.

Where a table has two instances the older one tells the commits before the first number of the newer one. A column that
the older one lacks is missing in the rows that were changed after the column came and before the newer instance was
made: they are told with the column named in ``_unavailable`` as long as the newer instance is there when they are read,
and the table must be read again where some of them were told before.

======================================================  ===========================================================
at the source                                           told
======================================================  ===========================================================
a newer instance with other columns                     ``SchemaChanged`` at its first number, or where the columns came
a change that cannot be followed                        ``Stopped``, to be read again
the instance was created again, perhaps of a new table  ``Stopped``, to be read again
the last instance, or the table, was removed            ``Stopped``; to be read again where another one took its place
the newest instance lacks the key                       ``Stopped``
the cleanup job removed what was not read yet           :class:`LogPurged`
======================================================  ===========================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pyarrow as pa

from headwater.sources.errors import LogPurged, RefusedValue, RereadNeeded, SchemaStopped, UnsupportedTable
from headwater.sources.events import Event, SchemaChanged, Stopped
from headwater.sources.evolution import Projection, SchemaPolicy, follow
from headwater.sources.special_values import with_policy
from headwater.sources.sqlserver.connection import RESNAPSHOT
from headwater.sources.sqlserver.instances import CaptureInstance
from headwater.sources.sqlserver.names import TableName, literal
from headwater.sources.sqlserver.offset import Lsn
from headwater.sources.sqlserver.types import Ticks, has_special_values, source_column
from headwater.sources.table import SourceColumn, SourceTable, SpecialValues


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of an interval that one instance tells of one table.

    :ivar columns: what is asked for, in this order. :ivar projection: how it becomes rows of the captured table.
    :ivar missing: names of columns that the table has by now and the instance does not tell.
    """

    instance: CaptureInstance
    first: Lsn
    last: Lsn
    columns: tuple[SourceColumn, ...]
    projection: Projection
    missing: tuple[str, ...] = ()


@dataclass(slots=True)
class _Followed:
    table: SourceTable
    begins: Lsn
    instance: int | None = None


class FollowedTables:
    """The captured *tables*.

    :param special_values: policies by ``schema.table.column`` or ``schema.table``.
    :param defaults: one row: what the rows from before have in columns that came, by the newer description.
    :param lost: the error of a table that no instance tells any more, from what happened and what the database has now.
    :param begins: what committed before is not of interest, of tables that came later than the others.
    :param instances: the ``change_id`` of the instance that each was followed through when that was last noted.
    """

    def __init__(
        self,
        tables: Iterable[SourceTable],
        policy: SchemaPolicy,
        special_values: Mapping[str, SpecialValues],
        ticks: Ticks,
        defaults: Callable[[SourceTable, Sequence[SourceColumn]], pa.RecordBatch | None],
        lost: Callable[[SourceTable, str], SchemaStopped],
        begins: Mapping[tuple[str, str], Lsn] | None = None,
        instances: Mapping[tuple[str, str], int] | None = None,
    ) -> None:
        self._policy, self._special, self._ticks = policy, special_values, ticks
        self._defaults, self._lost = defaults, lost
        self._followed = {
            key: _Followed(table, (begins or {}).get(key, Lsn(0)), (instances or {}).get(key))
            for key, table in (((one.namespace, one.name), one) for one in tables)
        }

    @property
    def ids(self) -> list[int]:
        return [one.table.source_id for one in self._followed.values() if one.table.source_id is not None]

    def instance_of(self, table: SourceTable) -> int | None:
        """The ``change_id`` of the instance that tells *table* by now; ``None``: none has yet."""
        followed = self._followed.get((table.namespace, table.name))
        return None if followed is None else followed.instance

    def add(self, table: SourceTable, after: Lsn) -> None:
        """Follow one more; what committed up to *after* is not of interest."""
        self._followed[table.namespace, table.name] = _Followed(table, after.following)

    def remove(self, table: SourceTable) -> None:
        self._followed.pop((table.namespace, table.name), None)

    def stretches(
        self,
        instances: Mapping[int, Sequence[CaptureInstance]],
        first: Lsn,
        last: Lsn,
        altered: Callable[[CaptureInstance, Sequence[str], Lsn], Lsn | None],
        was_told: Callable[[CaptureInstance, Lsn, Lsn], bool],
    ) -> Iterator[Stretch | Event]:
        """What is to be read of the commits from *first* to *last*, and what is told between.

        :param altered: where one of some columns came, before a number, that the instance lacks.
        :param was_told: whether an instance has changes between two numbers.
        :raises LogPurged: some of it was removed. :raises SchemaStopped: by policy.
        """
        for followed in list(self._followed.values()):
            try:
                yield from self._of(followed, instances, first, last, altered, was_told)
            except (SchemaStopped, UnsupportedTable) as error:
                yield self.stopped(followed.table, error)

    def uncovered(self, instances: Mapping[int, Sequence[CaptureInstance]], first: Lsn) -> Iterator[Event]:
        """Stops the tables that no instance tells from *first* on, though nothing of them is to be read.

        :raises LogPurged: it was removed. :raises SchemaStopped: by policy.
        """
        for followed in list(self._followed.values()):
            begin = max(first, followed.begins)
            known = list(instances.get(followed.table.source_id or 0, ()))
            try:
                self._require_covered(followed, known, begin, self._is_purged(instances, first))
            except SchemaStopped as error:
                yield self.stopped(followed.table, error)
            else:
                followed.instance = [one.change_id for one in known if one.start <= begin][-1]

    def removed(self, table: SourceTable) -> Stopped:
        """Stops a table whose instance was removed while it was read. :raises SchemaStopped: by policy."""
        return self.stopped(table, self._lost(table, "its capture instance was removed while it was read."))

    def stopped(self, table: SourceTable, error: SchemaStopped | UnsupportedTable | RefusedValue) -> Stopped:
        """Stops a table. :raises SchemaStopped: by policy."""
        if self._policy is SchemaPolicy.STOP and not isinstance(error, RefusedValue):
            raise error
        self.remove(table)
        return Stopped.by(table, error)

    def _of(
        self,
        followed: _Followed,
        instances: Mapping[int, Sequence[CaptureInstance]],
        first: Lsn,
        last: Lsn,
        altered: Callable[[CaptureInstance, Sequence[str], Lsn], Lsn | None],
        was_told: Callable[[CaptureInstance, Lsn, Lsn], bool],
    ) -> Iterator[Stretch | Event]:
        told_to = first.preceding
        first = max(first, followed.begins)
        if first > last:
            return
        known = list(instances.get(followed.table.source_id or 0, ()))
        self._require_covered(followed, known, first, self._is_purged(instances, first))
        for place, instance in enumerate(known):
            begin = first if not place else max(first, instance.start)
            end = last if place + 1 == len(known) else min(last, known[place + 1].start.preceding)
            if begin > end:
                continue
            described = self._described(followed.table, instance, known)
            if place + 1 < len(known):
                newer = self._described(followed.table, known[place + 1], known)
                gap = self._gap(instance, described, newer, altered, known[place + 1].start)
                if gap is not None and gap <= end:
                    if gap <= told_to and was_told(instance, gap, told_to):
                        raise RereadNeeded(
                            followed.table.full_name,
                            "rows were captured without a column that existed by then: the capture instance with it"
                            " was created later.",
                        )
                    if begin < gap:
                        yield from self._told(followed, instance, described, begin, gap.preceding)
                    yield from self._told_with(followed, instance, described, newer, max(begin, gap), end)
                    continue
            yield from self._told(followed, instance, described, begin, end)

    def _is_purged(self, instances: Mapping[int, Sequence[CaptureInstance]], first: Lsn) -> bool:
        """Whether no table has what follows: the cleanup job removes changes of all tables up to one number."""
        starts = [one.start for number in self.ids for one in instances.get(number, ())]
        return bool(starts) and min(starts) > first

    def _require_covered(
        self, followed: _Followed, known: Sequence[CaptureInstance], first: Lsn, is_purged: bool
    ) -> None:
        name = followed.table.full_name
        if any(instance.start <= first for instance in known):
            return
        is_same = followed.instance is None or followed.instance in {instance.change_id for instance in known}
        if known and is_purged and is_same:
            raise LogPurged(
                f"The cleanup job has removed changes of {name} that were not read: they begin at {known[0].start.hex},"
                f" and we hold all up to {first.preceding.hex}.",
                next_step=RESNAPSHOT,
            )
        if not known:
            raise self._lost(followed.table, "its last capture instance was removed.")
        what = "removed, or cleaned up," if is_same else "created again, or removed,"
        raise RereadNeeded(name, f"its capture instance was {what} before all of it was read.")

    def _gap(
        self,
        instance: CaptureInstance,
        older: SourceTable,
        newer: SourceTable,
        altered: Callable[[CaptureInstance, Sequence[str], Lsn], Lsn | None],
        start: Lsn,
    ) -> Lsn | None:
        """The first commit in which rows may lack a column that the newer instance has."""
        ids = {column.field_id for column in older.columns}
        lacks = [column.name for column in newer.columns if column.field_id not in ids]
        came = altered(instance, lacks, start) if lacks else None
        return None if came is None or came >= start else came.following

    def _told(
        self, followed: _Followed, instance: CaptureInstance, now: SourceTable, begin: Lsn, end: Lsn
    ) -> Iterator[Stretch | Event]:
        projection, change = self._follow(followed.table, now)
        if change is not None:
            followed.table = projection.table
            yield change
        followed.instance = instance.change_id
        yield Stretch(instance, begin, end, now.columns, projection)

    def _told_with(
        self,
        followed: _Followed,
        instance: CaptureInstance,
        older: SourceTable,
        newer: SourceTable,
        begin: Lsn,
        end: Lsn,
    ) -> Iterator[Stretch | Event]:
        """Rows of the older instance after a column came."""
        grown, change = self._follow(followed.table, newer)
        if change is not None:
            followed.table = grown.table
            yield change
        followed.instance = instance.change_id
        places = {column.field_id: place for place, column in enumerate(older.columns)}
        projection = Projection(followed.table, tuple(places.get(one.field_id) for one in followed.table.columns))
        there = {column.field_id for column in newer.columns}
        missing = tuple(
            column.name
            for column in followed.table.columns
            if column.field_id in there and column.field_id not in places
        )
        yield Stretch(instance, begin, end, older.columns, projection, missing)

    def _follow(self, known: SourceTable, now: SourceTable) -> tuple[Projection, SchemaChanged | None]:
        ids = {column.field_id for column in known.columns}
        added = [column for column in now.columns if column.field_id not in ids]
        defaults = self._defaults(known, added) if added and self._policy is SchemaPolicy.EVOLVE else None
        return follow(known, now, self._policy, defaults)

    def _described(
        self, table: SourceTable, instance: CaptureInstance, instances: Sequence[CaptureInstance]
    ) -> SourceTable:
        """The table as *instance*, one of *instances*, tells it. :raises SchemaStopped: without its key."""
        return described(table, instance, self._special, self._ticks, is_only=len(instances) == 1)


def described(
    table: SourceTable,
    instance: CaptureInstance,
    special_values: Mapping[str, SpecialValues],
    ticks: Ticks,
    *,
    is_only: bool,
) -> SourceTable:
    """*table* with the columns that *instance* tells. :raises SchemaStopped: its key is not among them."""
    known = {column.field_id: column for column in table.columns}
    columns = []
    for column in instance.columns:
        if column.computed:
            continue
        was = known.get(column.number)
        make = partial(source_column, column.name, column.type, column.number, ticks=ticks)
        before = None if was is None else was.special_values
        columns.append(with_policy(special_values, table.full_name, column.name, make, has_special_values, before))
    names = {column.field_id: column.name for column in columns}
    keys = [table.column(name).field_id for name in table.key_columns]
    if any(key not in names for key in keys):
        raise SchemaStopped(
            table.full_name,
            f"the capture instance {instance.name} does not have its key.",
            next_step=f"Run: {with_key(table, instance, is_only=is_only)}"
            f" Then run: headwater resnapshot {table.full_name}",
        )
    return replace(table, columns=tuple(columns), key_columns=tuple(names[key] for key in keys))


def enable_table(table: SourceTable | TableName, suffix: str = "") -> str:
    """The statement that makes a capture instance of all columns."""
    named = f", @capture_instance = {literal(_instance_name(table, suffix))}" if suffix else ""
    return (
        f"EXEC sys.sp_cdc_enable_table @source_schema = {literal(table.namespace)},"
        f" @source_name = {literal(table.name)}, @role_name = NULL, @supports_net_changes = 0{named};"
    )


def with_key(table: SourceTable | TableName, instance: CaptureInstance, *, is_only: bool) -> str:
    """The statement after which the newest instance has the key, which *instance* lacks: a table has two at most."""
    return enable_table(table, "with_key") if is_only else disable_table(table, instance.name)


def _instance_name(table: SourceTable | TableName, suffix: str) -> str:
    """At most 100 characters: servers take no more."""
    return f"{table.namespace}_{table.name}"[: 99 - len(suffix)] + f"_{suffix}"


def disable_table(table: SourceTable | TableName, instance: str) -> str:
    """The statement that removes a capture instance."""
    return (
        f"EXEC sys.sp_cdc_disable_table @source_schema = {literal(table.namespace)},"
        f" @source_name = {literal(table.name)}, @capture_instance = {literal(instance)};"
    )
