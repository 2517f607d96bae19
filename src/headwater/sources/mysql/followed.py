"""FollowedTables: the captured tables as a stream follows them, by name.

What happens to a table:

======================================  ====================================================================
in the log                              told
======================================  ====================================================================
rows of another layout                  ``SchemaChanged``, by policy; a change that cannot be followed stops it
columns renamed, dropped, added         ``SchemaChanged`` at once: rows alone would not tell a rename, or a default
columns redefined, values may differ    ``Stopped``, to be read again
``TRUNCATE``                            ``Truncated``
dropped, called otherwise               ``Stopped``; to be read again where another table has its name now
swapped with its copy by gh-ost, pt-osc the copy is followed: it has the same rows
partitions dropped, exchanged, …        ``Stopped``, to be read again: rows came or went untold
rows that a statement changed           ``Stopped``, to be read again: the log has the statement, not the rows
any statement that names it             ``Registered``: its shape after it
rows without all their columns          ``Stopped``, with the setting that mends it
a value that is refused                 the transactions before it, then ``Stopped``
======================================  ====================================================================
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.sources.errors import RefusedValue, RereadNeeded, SchemaStopped, UnsupportedTable
from headwater.sources.events import Changes, Event, Registered, Stopped, Truncated
from headwater.sources.evolution import Projection, SchemaPolicy, follow
from headwater.sources.mysql import ddl
from headwater.sources.mysql.binlog.events import RowsEvent
from headwater.sources.mysql.binlog.rows import DecodedRows, RowsDecoder, make_rows_decoder
from headwater.sources.mysql.binlog.table_map import TableMap
from headwater.sources.mysql.defaults import clause_default
from headwater.sources.mysql.definitions import Definition, Definitions, defaults_of
from headwater.sources.mysql.names import TableName
from headwater.sources.mysql.offset import POSITION_TYPE, MySqlOffset, positions_of
from headwater.sources.mysql.row_statements import RowStatement
from headwater.sources.mysql.sql_reader import words_of
from headwater.sources.mysql.table_shape import ColumnShape, TableShape
from headwater.sources.special_values import told_before
from headwater.sources.table import UNAVAILABLE_COLUMN, SourceColumn, SourceTable, SpecialValues
from headwater.sources.unavailable import unavailable_texts, with_parked
from headwater.stream import Op

_COPIES: Final = (("_{}_gho", "_{}_del"), ("_{}_new", "_{}_old"))
"""How gh-ost and pt-online-schema-change call the copy of a table, and the table that it replaced."""

_SET_FORMAT: Final = "Run: SET GLOBAL binlog_format = ROW; End the sessions that set another format."

_CREATED_SECONDS: Final = 1.0  # a script that renames a table and creates another of its name


@dataclass(slots=True)
class _Followed:
    """A table whose rows have come, and how they are decoded at the moment.

    :ivar held: the events whose rows the decoder holds, each with its place and the number of its first row.
    """

    table_map: TableMap
    definition: Definition
    projection: Projection
    decoder: RowsDecoder
    held: list[tuple[RowsEvent, int, int]] = field(default_factory=list)


class FollowedTables:
    """The captured *tables*.

    :param folds_names: the server takes names of tables in any case (``lower_case_table_names``).
    :param shapes: by full name, as far as they are known; kept as statements come.
    :ivar statements: how many named each table, by its full name.
    :ivar held_rows: rows that were taken and not told yet. :ivar held_bytes: of their events.
    """

    def __init__(
        self,
        definitions: Definitions,
        tables: Iterable[SourceTable],
        policy: SchemaPolicy,
        *,
        folds_names: bool,
        shapes: dict[str, TableShape] | None = None,
    ) -> None:
        self._shapes = {} if shapes is None else shapes
        self.statements: Counter[str] = Counter()
        self._definitions = definitions
        self._folds_names = folds_names
        self._policy = policy
        self._known = {(table.namespace, table.name): table for table in tables}
        self._followed: dict[tuple[str, str], _Followed] = {}
        self._from: dict[tuple[str, str], int] = {}
        self._times: tuple[list[int], list[int]] = ([], [])
        self._void: list[int] = []
        self._told_place = -1
        self.held_rows = self.held_bytes = 0

    def add(self, table: SourceTable, place: int) -> None:
        """Follow one more table; what lies before *place* is not of interest, and may be of any former shape."""
        key = table.namespace, table.name
        self._known[key] = table
        self._from[key] = place

    def remove(self, table: SourceTable) -> None:
        self._forget((table.namespace, table.name))

    def _forget(self, key: tuple[str, str]) -> None:
        for of_key in (self._known, self._followed, self._from):
            of_key.pop(key, None)

    def has(self, database: str, name: str) -> bool:
        return (database, name) in self._known

    # -- rows ------------------------------------------------------------------------------------------------------

    def add_rows(self, event: RowsEvent, place: int, time_us: int, seq: int, events: list[Event]) -> int:
        """Take the rows of *event*, which are at *place* from number *seq* on; the number after them."""
        key = event.table.database, event.table.name
        followed = self._followed.get(key)
        if followed is None or followed.table_map is not event.table:
            if key not in self._known:
                return seq
            if place < self._from.get(key, 0):
                return seq
            self._from.pop(key, None)
            followed = self._describe(key, event.table, events)
            if followed is None:
                return seq
        places, times = self._times
        if not places or places[-1] != place:
            places.append(place)
            times.append(time_us)
        following = followed.decoder.add(event, place, seq)
        followed.held.append((event, place, seq))
        self.held_rows += following - seq
        self.held_bytes += event.end - event.start
        return following

    def _describe(self, key: tuple[str, str], table_map: TableMap, events: list[Event]) -> _Followed | None:
        """How the rows of *table_map* are followed; ``None`` where its table stops."""
        before = self._followed.get(key)
        if before is not None and replace(before.table_map, table_id=0) == replace(table_map, table_id=0):
            before.table_map = table_map
            return before
        self.tell_rows(events)
        known = self._known[key]
        try:
            definition = self._definitions.describe(table_map, known)
            projection, change = follow(known, definition.table, self._policy, definition.defaults)
            if change is not None:
                _require_defaults(known, definition.unknown.intersection(change.added))
        except (SchemaStopped, UnsupportedTable, RefusedValue) as error:
            self._stop(key, error, events)
            return None
        followed = _Followed(table_map, definition, projection, make_rows_decoder(definition.plan(projection)))
        self._followed[key] = followed
        self._known[key] = projection.table
        if change is not None:
            events.append(change)
        return followed

    def tell_rows(self, events: list[Event]) -> None:
        """The rows that were taken, as changes."""
        places = np.array(self._times[0], np.uint64)
        times = np.array(self._times[1], np.int64)
        for key, followed in list(self._followed.items()):
            if not followed.decoder.held_rows:
                continue
            rows, made, refused = self._taken(
                followed, partial(_changes, followed=followed, places=places, times=times)
            )
            lacking = _lacking(rows, followed, self._void)
            if self._void or lacking is not None:
                kept = ~np.isin(rows.transaction, self._void)
                if lacking is not None:
                    kept &= rows.transaction < lacking.place
                made = replace(made, rows=made.rows.filter(pa.array(kept)), ops=made.ops.filter(pa.array(kept)))
            if made.rows.num_rows:
                self._told_place = max(self._told_place, int(rows.transaction[-1]))
                events.append(made)
            if lacking is not None:
                name = followed.projection.table.full_name
                reason = SchemaStopped(
                    name,
                    f"its rows came without column {lacking.column!r}: a session, or the server, logs only parts of"
                    " rows (binlog_row_image).",
                    next_step="Run: SET GLOBAL binlog_row_image = FULL; End the sessions that set another value: open"
                    f" sessions keep theirs. Then run: headwater resnapshot {name}",
                )
                self._stop(key, reason, events)
            elif refused is not None:
                self._stop(key, refused, events)
        self._times, self._void = ([], []), []
        self.held_rows = self.held_bytes = 0

    def _taken(
        self, followed: _Followed, convert: Callable[[DecodedRows], Changes]
    ) -> tuple[DecodedRows, Changes, RefusedValue | SchemaStopped | None]:
        """The rows that are held, also as changes; where a value is refused, the transactions before it, and why."""
        held, followed.held = followed.held, []

        def told(rows: DecodedRows, end: int) -> tuple[DecodedRows, Changes]:
            changes = convert(rows)
            if followed.definition.table.parking:
                changes = _parked(followed, held[:end], rows, changes)
            return rows, changes

        with suppress(RefusedValue, SchemaStopped):
            return *told(followed.decoder.take(), len(held)), None
        held = [one for one in held if one[1] not in self._void]
        decoder = make_rows_decoder(followed.definition.plan(followed.projection))

        def decoded(end: int) -> tuple[DecodedRows, Changes]:
            for event, place, seq in held[:end]:
                decoder.add(event, place, seq)
            return told(decoder.take(), end)

        try:
            return *decoded(len(held)), None
        except (RefusedValue, SchemaStopped) as error:
            ends = [number for number, one in enumerate(held) if not number or held[number - 1][1] != one[1]]
            return *decoded(told_before(ends, decoded)), error

    def void(self, place: int) -> bool:
        """The transaction at *place* was rolled back: its rows are not told; whether none was before."""
        self._void.append(place)
        return self._told_place < place

    # -- statements ------------------------------------------------------------------------------------------------

    def apply_all(self, sql: str, effects: Iterable[ddl.Effect], position: MySqlOffset, events: list[Event]) -> None:
        """What a statement at *position* did, and that it may have rebuilt the tables that it names."""
        words = words_of(sql, ansi_quotes=True)
        named = [key for key in self._known if key[1].lower() in words and position.place >= self._from.get(key, 0)]
        for key in named:
            name = self._known[key].full_name
            self.statements[name] += 1
            if name in self._shapes:
                self._shapes[name] = replace(self._shapes[name], table_id="")
        for effect in effects:
            self.apply(effect, position, events)
        for key in named:
            known = self._known.get(key)
            if known is not None and known.full_name in self._shapes:
                events.append(Registered(known, self._shapes[known.full_name].to_json()))

    def unlogged(
        self, statement: RowStatement, databases: Collection[str] | None, *, uses_temporary: bool
    ) -> list[ddl.Unlogged]:
        """What *statement*, which the log has instead of rows, did to captured tables.

        :param databases: of all tables that it used, where the server says so.
        :param uses_temporary: it may use temporary tables.
        """
        if databases is not None:
            captured = {self._cased(namespace) for namespace, _ in self._known}
            if not captured.intersection(map(self._cased, databases)):
                return []
        what = f"the log has a statement ({statement.verb}) instead of the rows that it changed"
        cause = f"{what}: a session set binlog_format."
        tables: list[TableName | None] = list(statement.tables or ())
        if self._definitions.may_write_others(statement, uses_temporary=uses_temporary):
            cause = f"{what}, and it may have changed this table, by a trigger or a view perhaps: a session set"
            cause += " binlog_format."
            tables = [None] if databases is None else [TableName(database, "") for database in databases]
        effects = [ddl.Unlogged(table, cause, _SET_FORMAT) for table in tables]
        return [effect for effect in effects if self.concerns(effect)]

    def concerns(self, effect: ddl.Effect) -> bool:
        """Whether *effect* is about a captured table."""
        return bool(self._touched(self._folded(effect) if self._folds_names else effect))

    def _cased(self, name: str) -> str:
        return name.lower() if self._folds_names else name

    def apply(self, effect: ddl.Effect, position: MySqlOffset, events: list[Event]) -> None:
        """What a statement at *position* did."""
        if self._folds_names:
            effect = self._folded(effect)
        for key in self._touched(effect):
            if position.place < self._from.get(key, 0):
                continue
            self.tell_rows(events)
            known = self._known.get(key)
            if known is None:
                continue
            name = known.full_name
            try:
                match effect:
                    case ddl.Emptied():
                        events.append(Truncated(known, position))
                    case ddl.Altered():
                        self._alter(key, effect, events)
                    case ddl.Dropped():
                        create = f"Create it again, then run: headwater resnapshot {name}"
                        raise RereadNeeded(name, "the table was dropped at the source.", next_step=create)
                    case ddl.Moved():
                        raise RereadNeeded(name, f"{effect.how}, and the log does not have its rows.")
                    case ddl.Renamed():
                        self._rename(key, effect)
                    case ddl.Unlogged():
                        step = f"{effect.fix} Then run: headwater resnapshot {name}" if effect.fix else None
                        error = RereadNeeded(name, effect.cause, next_step=step)
                        self._stop(key, error, events, is_schema_change=False)
            except (SchemaStopped, UnsupportedTable) as stop:
                self._stop(key, stop, events)

    def _folded(self, effect: ddl.Effect) -> ddl.Effect:
        """*effect* with the names of tables as they were captured."""
        known = {(space.lower(), name.lower()): TableName(space, name) for space, name in self._known}
        spaces = {space.lower(): space for space, _ in self._known}

        def folded(name: TableName) -> TableName:
            whole = TableName(spaces.get(name.namespace.lower(), name.namespace), name.name)
            return known.get((name.namespace.lower(), name.name.lower()), whole)

        if isinstance(effect, ddl.Renamed):
            return ddl.Renamed(tuple((folded(old), folded(new)) for old, new in effect.pairs))
        return effect if effect.table is None else replace(effect, table=folded(effect.table))

    def _touched(self, effect: ddl.Effect) -> list[tuple[str, str]]:
        if isinstance(effect, ddl.Renamed):
            named = {(name.namespace, name.name) for pair in effect.pairs for name in pair}
            return [key for key in self._known if key in named]
        if effect.table is None:
            return list(self._known)
        if isinstance(effect, ddl.Dropped | ddl.Unlogged) and not effect.table.name:
            return [key for key in self._known if key[0] == effect.table.namespace]
        key = effect.table.namespace, effect.table.name
        return [key] if key in self._known else []

    def _alter(self, key: tuple[str, str], effect: ddl.Altered, events: list[Event]) -> None:
        """:raises SchemaStopped: the policy says stop, the key or values changed, or a rename cannot be kept apart."""
        known = self._known[key]
        renamed = {old.lower(): new for old, new in effect.renamed}
        dropped = {name.lower() for name in effect.dropped}
        old_key = [name.lower() for name in known.key_columns]
        new_key = None if effect.key is None else [name.lower() for name in effect.key]
        if dropped.intersection(old_key) or new_key not in (
            None,
            [renamed.get(name, name).lower() for name in old_key],
        ):
            raise RereadNeeded(known.full_name, "its key changed.")
        shape = self._altered_shape(known, effect, renamed, dropped)
        if self._policy is SchemaPolicy.IGNORE and any(column.name.lower() in renamed for column in known.columns):
            raise SchemaStopped(
                known.full_name,
                "a column was renamed, and the policy ignore keeps the old name.",
                next_step="Set schema_policy to evolve, in pipeline.toml ([source]) or with --schema-policy, and"
                f" restart; then run: headwater resnapshot {known.full_name}",
            )
        if self._policy is SchemaPolicy.IGNORE:
            live = {column.name.lower() for column in known.columns if not column.dropped}
            _require_defaults(known, [clause.name for clause in effect.added if clause.name.lower() in live])
        else:
            self._evolve(key, effect, renamed, dropped, events)
        if shape is not None:
            self._shapes[known.full_name] = shape

    def _evolve(
        self,
        key: tuple[str, str],
        effect: ddl.Altered,
        renamed: dict[str, str],
        dropped: set[str],
        events: list[Event],
    ) -> None:
        known = self._known[key]
        modified = {old.lower(): clause for old, clause in effect.modified}
        columns = []
        for column in known.columns:
            name = column.name.lower()
            if column.dropped or name in dropped:
                continue
            column = replace(column, name=renamed.get(name, column.name))
            clause = modified.get(name)
            if clause is not None:
                retyped = self._definitions.of_clause(clause, known, column, 0)
                column = column if retyped.type == column.type else replace(retyped, name=column.name)
            columns.append(column)
        values: dict[SourceColumn, pa.Array] = {}
        next_id = max(column.field_id for column in known.columns) + 1
        present = {column.name.lower() for column in columns}
        for number, clause in enumerate(clause for clause in effect.added if clause.name.lower() not in present):
            added = self._definitions.of_clause(clause, known, None, next_id + number)
            value = clause_default(clause, added) if clause.type else None
            if value is None:
                _require_defaults(known, [clause.name])
            values[added] = value
        now = SourceTable(
            known.namespace,
            known.name,
            (*columns, *values),
            tuple(renamed.get(name.lower(), name) for name in known.key_columns),
        )
        projection, change = follow(known, now, self._policy, defaults_of(values))
        if change is not None:
            events.append(change)
            self._known[key] = projection.table
            self._followed.pop(key, None)

    def _altered_shape(
        self, known: SourceTable, effect: ddl.Altered, renamed: dict[str, str], dropped: set[str]
    ) -> TableShape | None:
        """The shape after a statement. :raises RereadNeeded: values may be others than before."""
        shape = self._shapes.get(known.full_name)
        for old, clause in effect.modified:
            before = None if shape is None else shape.columns.get(old.lower())
            after = None if shape is None else shape.of_clause(clause)
            if after is not None and before is None and shape is not None:
                continue  # MODIFY IF EXISTS
            if before is None or after is None or not before.keeps_values(after) or _recomputes(shape, before, after):
                types = "" if before is None else f" from {before} to {after or 'another definition'}"
                raise RereadNeeded(known.full_name, f"column {clause.name!r} changed{types}: values may differ.")
        if shape is None:
            if effect.converts:
                raise RereadNeeded(known.full_name, "its character set was converted: values may differ.")
            return None
        if effect.converts:
            shape = shape.converted(effect.charset)
            if shape is None:
                raise RereadNeeded(known.full_name, "its character set was converted: values may differ.")
        shape = replace(shape, charset=effect.charset or shape.charset)
        modified = {old.lower(): shape.of_clause(clause) for old, clause in effect.modified}
        columns = {}
        for name, column in shape.columns.items():
            if name not in dropped:
                columns[renamed.get(name, name).lower()] = modified.get(name) or column
        for clause in effect.added:
            column_shape = shape.of_clause(clause)
            if column_shape is not None:
                columns.setdefault(clause.name.lower(), column_shape)
        return replace(shape, columns=columns)

    def _rename(self, key: tuple[str, str], effect: ddl.Renamed) -> None:
        """:raises SchemaStopped: the table of that name is not the captured one any more."""
        own = TableName(*key)
        names: dict[TableName, TableName] = {}  # what each table was called before
        for old, new in effect.pairs:
            names[new] = names.pop(old, old)
        known, came = self._known[key], names.get(own)
        if came == own or (came is None and own not in names.values()):
            return
        if came is not None:
            for copy, replaced in _COPIES:
                if (
                    came == TableName(own.namespace, copy.format(own.name))
                    and names.get(TableName(own.namespace, replaced.format(own.name))) == own
                ):
                    self._followed.pop(key, None)
                    self._follow_copy(known)
                    return
            raise RereadNeeded(known.full_name, f"another table, {came}, took its name.")
        now = next((new for new, old in names.items() if old == own), None)
        what = f"the table is called {now} at the source now"
        end = time.monotonic() + _CREATED_SECONDS
        while self._definitions.catalog(known) is None:
            if time.monotonic() > end:
                step = f"Capture {now} instead, or rename it back, then run: headwater resnapshot {known.full_name}"
                raise SchemaStopped(known.full_name, f"{what}.", next_step=step)
            time.sleep(_CREATED_SECONDS / 10)
        raise RereadNeeded(known.full_name, f"{what}, and another table has its name now.")

    def _follow_copy(self, known: SourceTable) -> None:
        """:raises RereadNeeded: the copy that took the table's name does not have the same values."""
        shape, catalog = self._shapes.get(known.full_name), self._definitions.catalog(known)
        if shape is None or catalog is None:
            return
        now = TableShape.of_catalog(catalog, shape.server, "")
        for name, column in shape.columns.items():
            if name in now.columns and not column.keeps_values(now.columns[name]):
                raise RereadNeeded(known.full_name, f"column {name!r} is another one in the copy that took its name.")
        self._shapes[known.full_name] = now

    def _stop(
        self,
        key: tuple[str, str],
        error: SchemaStopped | UnsupportedTable | RefusedValue,
        events: list[Event],
        *,
        is_schema_change: bool = True,
    ) -> None:
        known = self._known[key]
        if isinstance(error, RereadNeeded):
            error = self._unsupported(known) or error
        if self._policy is SchemaPolicy.STOP and is_schema_change and not isinstance(error, RefusedValue):
            raise error
        self._forget(key)
        events.append(Stopped.by(known, error))

    def _unsupported(self, known: SourceTable) -> UnsupportedTable | None:
        """Why the table cannot be read again as it is now; ``None``: it can, or does not exist."""
        catalog = self._definitions.catalog(known)
        try:
            if catalog is not None:
                catalog.require_capturable()
        except UnsupportedTable as error:
            return error
        return None


@dataclass(frozen=True, slots=True)
class _Lacking:
    """A column that new rows came without. :ivar place: of the first transaction that wrote such a row."""

    column: str
    place: int


def _lacking(rows: DecodedRows, followed: _Followed, void: list[int]) -> _Lacking | None:
    """What new rows came without; those of transactions that were rolled back do not count."""
    is_new = (rows.ops == Op.INSERT) | (rows.ops == Op.UPDATE_INSERT)
    if void:
        is_new &= ~np.isin(rows.transaction, void)
    found: _Lacking | None = None
    for place, column in zip(followed.definition.places, followed.definition.table.columns, strict=True):
        decoded = rows.columns[place]
        if decoded is None or decoded.missing is None:
            continue
        lacks = np.flatnonzero(decoded.missing & is_new)
        if lacks.size and (found is None or rows.transaction[lacks[0]] < found.place):
            found = _Lacking(column.name, int(rows.transaction[lacks[0]]))
    return found


def _parked(
    followed: _Followed, held: Sequence[tuple[RowsEvent, int, int]], rows: DecodedRows, changes: Changes
) -> Changes:
    """*changes* with the rows marked that a special value parks: it is null, and its text is not."""
    definition, parking = followed.definition, followed.definition.table.parking
    places = dict(zip(definition.table.columns, definition.places, strict=True))
    nulls = {column: rows.columns[places[column]] for column in parking}
    if not any(decoded is not None and decoded.values.null_count for decoded in nulls.values()):
        return changes
    plan = definition.plan(followed.projection)
    names = {column.name for column in parking}
    columns = tuple(
        replace(one, type=pa.string(), special_values=SpecialValues.TEXT)
        if one.type is not None and one.name in names
        else replace(one, type=None)
        for one in plan.columns
    )
    decoder = make_rows_decoder(replace(plan, columns=columns))
    for event, place, seq in held:
        decoder.add(event, place, seq)
    texts = decoder.take()
    is_new = (rows.ops == Op.INSERT) | (rows.ops == Op.UPDATE_INSERT)
    masks: dict[str, NDArray[np.bool_]] = {}
    for column, typed in nulls.items():
        text = texts.columns[places[column]]
        if typed is not None and text is not None:
            special = pc.and_(typed.values.is_null(), text.values.is_valid())
            masks[column.name] = is_new & special.to_numpy(zero_copy_only=False)
    place = changes.rows.schema.get_field_index(UNAVAILABLE_COLUMN)
    told = with_parked(changes.rows.column(place), masks)
    return replace(changes, rows=changes.rows.set_column(place, changes.rows.schema.field(place), told))


def _changes(rows: DecodedRows, followed: _Followed, places: NDArray[np.uint64], times: NDArray[np.int64]) -> Changes:
    """:param times: when the transactions at *places* committed."""
    times = times[np.searchsorted(places, rows.transaction)]
    columns = []
    missing: dict[str, NDArray[np.bool_]] = {}
    for place, column in zip(followed.definition.places, followed.definition.table.columns, strict=True):
        decoded = rows.columns[place]
        columns.append(pa.nulls(len(rows)) if decoded is None else decoded.values)
        if decoded is not None and decoded.missing is not None:
            missing[column.name] = decoded.missing
    table = followed.projection.table
    made = pa.RecordBatch.from_arrays(
        [
            *followed.projection.apply(columns, len(rows)),
            positions_of(rows.transaction, rows.seq),
            pa.Array.from_buffers(pa.timestamp("us", tz="UTC"), len(rows), [None, pa.py_buffer(times)]),
            unavailable_texts(missing, len(rows)),
        ],
        schema=table.log_schema(POSITION_TYPE),
    )
    return Changes(table, made, pa.array(rows.ops))


def _recomputes(shape: TableShape | None, before: ColumnShape, after: ColumnShape) -> bool:
    """Whether columns that are computed from a redefined one may be others now."""
    return shape is not None and shape.is_generating and before.type != after.type


def _require_defaults(known: SourceTable, unknown: Collection[str]) -> None:
    """:raises RereadNeeded: what older rows have in columns that are new, *unknown*, is not known."""
    if unknown:
        names = ", ".join(sorted(unknown))
        raise RereadNeeded(known.full_name, f"what older rows have in new columns is not in the log: {names}.")
