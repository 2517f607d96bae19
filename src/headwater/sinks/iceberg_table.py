"""IcebergTable: one table in its catalog, as the sink needs it: its columns, files and tokens, one commit at a time.

A commit is one swap of the table's metadata, with the snapshot, new columns, tokens and the end of old snapshots in it.
It is made on top of the snapshot that was read, or not at all. pyiceberg would try again by itself, which could append
twice; so the catalog is asked directly. Handles are kept per process; who has one has it alone. Needs pyiceberg.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Self

import pyarrow as pa
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError, TableAlreadyExistsError
from pyiceberg.table.update import (
    AddSchemaUpdate,
    AssertCurrentSchemaId,
    AssertLastAssignedFieldId,
    SetCurrentSchemaUpdate,
    SetPropertiesUpdate,
)

from headwater import failpoints
from headwater.sinks.data_files import DataFile
from headwater.sinks.errors import SinkSchemaError, SinkUnwritable
from headwater.sinks.iceberg_catalog import IcebergCatalog, reaching
from headwater.sinks.iceberg_client import storage_of
from headwater.sinks.iceberg_files import IcebergPartitioning, from_iceberg, partition_spec
from headwater.sinks.iceberg_schema import Layout, Plan, new_layout, plan
from headwater.sinks.iceberg_snapshot import FORMAT_VERSION, Manifests, NewSnapshot, Waste, write_snapshot
from headwater.sinks.sink import Mode
from headwater.sinks.storage import Storage

logger = logging.getLogger(__name__)

BEFORE_CREATE = failpoints.register("sink.iceberg.before_create")
AFTER_CREATE = failpoints.register("sink.iceberg.after_create")
BEFORE_SNAPSHOT = failpoints.register("sink.iceberg.before_snapshot")
BEFORE_COMMIT = failpoints.register("sink.iceberg.before_commit")
AFTER_COMMIT = failpoints.register("sink.iceberg.after_commit")

HELD_HANDLES: Final = 256
PREVIOUS_METADATA: Final = 50
SOURCE: Final = "headwater.table"
MODE: Final = "headwater.mode"
COLUMNS: Final = "headwater.columns"

_lock = threading.Lock()


class _Known:
    """A handle of a table, and what was found out with it."""

    def __init__(self, table: Any) -> None:
        self.table = table
        self.manifests = Manifests()
        self.files: dict[str, DataFile] = {}


_handles: dict[tuple[Any, ...], _Known] = {}


class IcebergTable:
    """The table *identifier*.

    :param name: of the source's table. :param mode: what it has of it.
    """

    def __init__(self, catalog: IcebergCatalog, identifier: tuple[str, ...], name: str, mode: Mode) -> None:
        self._address = catalog
        self._catalog = catalog.open()
        self._identifier = identifier
        self._name = name
        self._mode = mode.value
        self._known: _Known | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the handle to who opens the table next; until then it is this one's alone."""
        if self._known is None:
            return
        with _lock:
            _handles[self._key] = self._known
            while len(_handles) > HELD_HANDLES:
                del _handles[next(iter(_handles))]
        self._known = None

    @property
    def _key(self) -> tuple[Any, ...]:
        return os.getpid(), self._address.warehouse, self._address.uri, self._address.name, self._identifier

    def open(self, *, newest: bool = True) -> bool:
        """Read the newest metadata, or what this process read before; ``False``: there is no table."""
        known = self._known
        if known is None:
            with _lock:
                known = _handles.pop(self._key, None)
        if known is None or newest or known.table.catalog is not self._catalog:
            known = self._read(known)
        self._known = known
        if known is None:
            return False
        self._check(known.table.metadata)
        return True

    def _read(self, known: _Known | None) -> _Known | None:
        try:
            with reaching(self._address.label):
                found = self._catalog.load_table(self._identifier)
        except NoSuchTableError:
            return None
        if known is None or known.table.metadata.table_uuid != found.metadata.table_uuid:
            return _Known(found)
        known.table = found
        return known

    def _check(self, metadata: Any) -> None:
        if metadata.format_version != FORMAT_VERSION:
            raise SinkUnwritable(
                f"The Iceberg table of {self._name} has format version {metadata.format_version}; "
                f"{FORMAT_VERSION} is written here.",
                next_step="Deliver to another namespace or warehouse.",
            )
        source = metadata.properties.get(SOURCE, self._name)
        if source != self._name:
            raise SinkUnwritable(
                f"The Iceberg table {'.'.join(self._identifier)} has the rows of {source}, not of {self._name}.",
                next_step="Give each source its own namespace, or its own warehouse.",
            )
        mode = metadata.properties.get(MODE, self._mode)
        if mode != self._mode:
            raise SinkUnwritable(
                f"The Iceberg table of {self._name} was made with mode {mode!r}; this sink has mode {self._mode!r}.",
                next_step="Give each mode its own namespace, or its own warehouse.",
            )

    def create(self, wanted: pa.Schema, partition_by: Sequence[str]) -> None:
        """Make the table; one that another process made meanwhile is opened."""
        layout = new_layout(wanted)
        spec = partition_spec(self._name, partition_by, layout.schema)
        properties = {
            SOURCE: self._name,
            MODE: self._mode,
            COLUMNS: layout.sources_text,
            "format-version": str(FORMAT_VERSION),
            "write.parquet.compression-codec": "zstd",
            "write.metadata.delete-after-commit.enabled": "true",
            "write.metadata.previous-versions-max": str(PREVIOUS_METADATA),
        }
        failpoints.hit(BEFORE_CREATE)
        try:
            with reaching(self._address.label):
                self._make_namespace()
                location = self._address.location(self._identifier)
                self._catalog.create_table(self._identifier, layout.schema, location, spec, properties=properties)
        except TableAlreadyExistsError:
            pass
        failpoints.hit(AFTER_CREATE)
        self.open()

    def is_ours(self) -> bool:
        """Whether Headwater created the table or has written to it."""
        summaries = [one.summary.additional_properties for one in self._table.metadata.snapshots if one.summary]
        names = (name for some in (self._table.metadata.properties, *summaries) for name in some)
        return any(name.startswith("headwater.") for name in names)

    def _make_namespace(self) -> None:
        for end in range(1, len(self._identifier)):
            namespace = self._identifier[:end]
            try:
                self._catalog.create_namespace_if_not_exists(namespace)
            except Exception:  # a SQL catalog tells by an error of its database that another process was faster
                if not self._catalog.namespace_exists(namespace):
                    raise

    @property
    def _table(self) -> Any:
        assert self._known is not None
        return self._known.table

    @property
    def location(self) -> str:
        return str(self._table.metadata.location)

    @property
    def storage(self) -> Storage:
        """The directory of the table."""
        return storage_of(self.location, dict(self._table.io.properties))

    @property
    def layout(self) -> Layout:
        return Layout.of(self._name, self._table.schema(), self._table.metadata.properties.get(COLUMNS))

    @property
    def partitioning(self) -> IcebergPartitioning:
        return IcebergPartitioning(spec=self._table.spec(), schema=self._table.schema())

    def plan(self, wanted: pa.Schema, *, emptied: bool = False) -> Plan:
        """What its columns become for rows of *wanted*."""
        last_id = self._table.metadata.last_column_id
        made = plan(self._name, self.layout, wanted, last_id, Mode(self._mode), emptied=emptied)
        parting = {one.source_id for one in self._table.spec().fields}
        if made.must_rewrite and parting - {one.field_id for one in made.layout.schema.fields}:
            raise SinkSchemaError(
                self._name,
                "a column by which its Iceberg table is partitioned became another type.",
                next_step="Deliver it to another namespace, or remove the table there and take a new snapshot.",
            )
        return made

    def token(self, key: str) -> str | None:
        """What was committed with *key*: a property of the table; if that is gone, of its newest snapshot with it."""
        found = self._table.metadata.properties.get(key)
        snapshot = self._table.metadata.current_snapshot()
        while found is None and snapshot is not None:
            found = snapshot.summary.additional_properties.get(key) if snapshot.summary else None
            parent = snapshot.parent_snapshot_id
            snapshot = self._table.metadata.snapshot_by_id(parent) if parent is not None else None
        return None if found is None else str(found)

    def files(self, key_columns: Sequence[str]) -> list[DataFile]:
        """The files of the table, with what is known of their *key_columns*."""
        known = self._known
        assert known is not None
        known.manifests = self._manifests()
        schema, specs, location = self._table.schema(), self._table.metadata.specs(), self.location
        before, known.files = known.files, {}
        for file in known.manifests.live(self._name):
            path = file.file_path
            if not path.startswith(f"{location}/"):
                raise SinkUnwritable(
                    f"The Iceberg table of {self._name} has files outside of its directory.",
                    next_step="Rewrite its data files, or deliver to another namespace.",
                )
            known.files[path] = before.get(path) or from_iceberg(
                file, location, schema, specs[file.spec_id], key_columns
            )
        return list(known.files.values())

    def _manifests(self) -> Manifests:
        assert self._known is not None
        with reaching(f"The Iceberg table of {self._name}"):
            return Manifests.read(self._table, self._known.manifests)

    def commit(
        self,
        added: Sequence[DataFile],
        removed: Sequence[DataFile],
        tokens: Mapping[str, str],
        prefix: str,
        retention_hours: int,
        *,
        plan: Plan | None = None,
        is_data_change: bool = True,
    ) -> bool:
        """Commit on top of the snapshot that was read; ``False``: another commit was faster, and nothing is changed.

        :param plan: of its columns. :param prefix: of the names of files.
        """
        known = self._known
        assert known is not None
        metadata = self._table.metadata
        new_schema = plan.layout.schema if plan is not None and plan.is_changed else metadata.schema()
        schema_id, schema_updates, requirements = self._schema_updates(new_schema)
        failpoints.hit(BEFORE_SNAPSHOT)
        if added:
            self.storage.sync("data")
        known.manifests = self._manifests()
        with reaching(f"The Iceberg table of {self._name}"):
            made = write_snapshot(
                self._table,
                known.manifests,
                new_schema,
                schema_id,
                added,
                removed,
                tokens,
                prefix,
                is_data_change=is_data_change,
            )
            properties = dict(tokens)
            if plan is not None and plan.is_changed:
                properties[COLUMNS] = plan.layout.sources_text
            updates = (
                *schema_updates,
                *made.updates,
                *((SetPropertiesUpdate(updates=properties),) if properties else ()),
                *self._waste(retention_hours).expire(),
            )
            failpoints.hit(BEFORE_COMMIT)
            if not self._swap(made, (*made.requirements, *requirements), updates):
                return False
        failpoints.hit(AFTER_COMMIT)
        known.manifests = made.manifests
        return True

    def _schema_updates(self, schema: Any) -> tuple[int, tuple[Any, ...], tuple[Any, ...]]:
        metadata = self._table.metadata
        if schema == metadata.schema():
            return metadata.current_schema_id, (), ()
        requirements = (
            AssertCurrentSchemaId.model_validate({"current-schema-id": metadata.current_schema_id}),
            AssertLastAssignedFieldId.model_validate({"last-assigned-field-id": metadata.last_column_id}),
        )
        same = next((one for one in metadata.schemas if one == schema), None)
        if same is not None:
            return same.schema_id, (SetCurrentSchemaUpdate.model_validate({"schema-id": same.schema_id}),), requirements
        number = max(one.schema_id for one in metadata.schemas) + 1
        made = schema.model_copy(update={"schema_id": number})
        return number, (AddSchemaUpdate(schema=made), SetCurrentSchemaUpdate()), requirements

    def _swap(self, made: NewSnapshot, requirements: tuple[Any, ...], updates: tuple[Any, ...]) -> bool:
        """The commit itself. After an error the table is asked whose commit it has, before anything is removed.

        A refusal counts as little as a lost answer: a gateway can repeat a request, which its own success refuses.
        """
        before = self._table.metadata
        try:
            answer = self._catalog.commit_table(self._table, requirements, updates)
        except Exception as error:
            self.open()
            if self._table.metadata.snapshot_by_id(made.snapshot_id) is not None:
                return True
            if not isinstance(error, CommitFailedException):
                raise  # it can still arrive: its files stay
            for path in made.written:  # who took over may have removed them already
                _delete(self._table.io, path)
            return False
        self._table.metadata, self._table.metadata_location = answer.metadata, answer.metadata_location
        kept = {one.metadata_file for one in answer.metadata.metadata_log}
        for one in before.metadata_log:
            if one.metadata_file not in kept:
                _delete(self._table.io, one.metadata_file)
        return True

    def tidy(self, retention_hours: int) -> None:
        """Remove what no reader needs any more. Nothing depends on it."""
        try:
            self._waste(retention_hours).remove(self._paths())
        except (OSError, SinkUnwritable) as error:
            logger.warning("The Iceberg table of %s could not be tidied: %s.", self._name, type(error).__name__)

    def has_orphans(self, is_left: Callable[[str], bool]) -> bool:
        """Whether there are any that :meth:`remove_orphans` removes."""
        return any(True for _ in self._waste(0).orphans(self._paths(), is_left))

    def remove_orphans(self, is_left: Callable[[str], bool]) -> None:
        """Remove files that *is_left* chooses by their names and that were never committed."""
        waste = self._waste(0)
        for path in waste.orphans(self._paths(), is_left):
            self.storage.remove(path)
        if not self._address.is_remote:
            for path in waste.lost_metadata(self._table.metadata_location):
                self.storage.remove(path)

    def _paths(self) -> set[str]:
        """The data files of the current snapshot."""
        assert self._known is not None
        self._known.manifests = self._manifests()
        return {one.data_file.file_path for entries in self._known.manifests.entries.values() for one in entries}

    def _waste(self, retention_hours: int) -> Waste:
        return Waste(self._table, self.storage, retention_hours)


def _delete(files: Any, path: str) -> None:
    try:
        files.delete(path)
    except FileNotFoundError:
        pass
