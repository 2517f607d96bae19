"""Snapshots of Iceberg tables: how one is written, and what an old one leaves behind. Needs pyiceberg.

**Written**: only manifests that have a file which is removed are written again. Small ones are joined now and then, so
that a table has few of them whatever the batches are. Nothing of it shows before the catalog takes the changes.

**Expired**: the metadata of a table has its newest snapshots, so that a commit stays cheap however many there were.
Files of a snapshot that ends are written down in ``_headwater/<milliseconds>-<uuid>.json`` beside the table, before it
ends; they are removed a *retention* later, when no reader that began with it is left. So every file is in a snapshot,
written down, or of an attempt that failed.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pyiceberg.manifest import (
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    write_manifest,
    write_manifest_list,
)
from pyiceberg.schema import Schema
from pyiceberg.table.refs import MAIN_BRANCH, SnapshotRefType
from pyiceberg.table.snapshots import (
    Operation,
    Snapshot,
    SnapshotSummaryCollector,
    Summary,
    ancestors_of,
    update_snapshot_summaries,
)
from pyiceberg.table.update import (
    AddSnapshotUpdate,
    AssertRefSnapshotId,
    AssertTableUUID,
    RemoveSnapshotsUpdate,
    SetSnapshotRefUpdate,
)

from headwater import failpoints
from headwater.sinks.data_files import DataFile
from headwater.sinks.errors import SinkUnwritable
from headwater.sinks.iceberg_files import to_iceberg
from headwater.sinks.storage import Storage

MANIFEST_ENTRIES: Final = 500
SMALL_MANIFESTS: Final = 8
"""More small ones than that are joined."""
FORMAT_VERSION: Final = 2


@dataclass
class Manifests:
    """The manifests of a table's current snapshot, and what is in them."""

    snapshot_id: int | None = None
    entries: dict[str, list[Any]] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, table: Any, known: Manifests) -> Manifests:
        """Those of the current snapshot; what is *known* of them is not read again."""
        snapshot = table.metadata.current_snapshot()
        if snapshot is None:
            return cls()
        if known.snapshot_id == snapshot.snapshot_id:
            return known
        made = cls(snapshot.snapshot_id)
        for manifest in snapshot.manifests(table.io):
            path = manifest.manifest_path
            made.files[path] = manifest
            if manifest.content == ManifestContent.DATA:
                made.entries[path] = known.entries.get(path) or manifest.fetch_manifest_entry(table.io)
        return made

    def live(self, table: str) -> list[Any]:
        """The data files of the table. :raises SinkUnwritable: rows of them are deleted apart from them."""
        for manifest in self.files.values():
            if manifest.content == ManifestContent.DELETES and (
                manifest.has_added_files() or manifest.has_existing_files()
            ):
                raise SinkUnwritable(
                    f"The Iceberg table of {table} has delete files, with which it cannot be written here.",
                    next_step="Compact it (rewrite_data_files), and let other writers use copy-on-write.",
                )
        return [entry.data_file for entries in self.entries.values() for entry in entries]


@dataclass
class NewSnapshot:
    """A snapshot that is written and not yet committed.

    :ivar updates: make it the current one. :ivar requirements: nobody else was faster.
    :ivar written: the files of it, which are waste if it is not committed.
    """

    snapshot_id: int
    updates: tuple[Any, ...]
    requirements: tuple[Any, ...]
    manifests: Manifests
    written: list[str]


def write_snapshot(
    table: Any,
    known: Manifests,
    schema: Schema,
    schema_id: int,
    added: Sequence[DataFile],
    removed: Sequence[DataFile],
    properties: Mapping[str, str],
    prefix: str,
    *,
    is_data_change: bool,
) -> NewSnapshot:
    """Write the manifests of a snapshot with the files of the current one, without *removed* and with *added*."""
    metadata = table.metadata
    parent = metadata.current_snapshot()
    sequence = metadata.next_sequence_number()
    writer = _Writer(table, schema, metadata.new_snapshot_id(), sequence, prefix)
    spec = metadata.spec()
    location = metadata.location
    new = [to_iceberg(file, location, schema, spec) for file in added]
    gone = {f"{location}/{file.path}" if "://" not in file.path else file.path for file in removed}
    kept, rest, deleted = _parted(known, gone)
    made = Manifests(writer.snapshot_id)
    for manifest in kept:
        made.files[manifest.manifest_path] = manifest
        if manifest.manifest_path in known.entries:
            made.entries[manifest.manifest_path] = known.entries[manifest.manifest_path]
    specs = {spec.spec_id, *(entry.data_file.spec_id for entry in (*rest, *deleted))}
    for spec_id in sorted(specs):
        entries = [
            *(writer.added(file) for file in new if file.spec_id == spec_id),
            *(writer.deleted(entry) for entry in deleted if entry.data_file.spec_id == spec_id),
            *(writer.existing(entry) for entry in rest if entry.data_file.spec_id == spec_id),
        ]
        for start in range(0, len(entries), MANIFEST_ENTRIES):
            manifest, live = writer.manifest(entries[start : start + MANIFEST_ENTRIES], metadata.specs()[spec_id])
            made.files[manifest.manifest_path] = manifest
            made.entries[manifest.manifest_path] = live
    summary = SnapshotSummaryCollector()
    for file in new:
        summary.add_file(file, schema, spec)
    for entry in deleted:
        summary.remove_file(entry.data_file, schema, metadata.specs()[entry.data_file.spec_id])
    operation = Operation.OVERWRITE if deleted else Operation.APPEND
    told = update_snapshot_summaries(
        Summary(operation, **summary.build(), **properties), parent.summary if parent is not None else None
    )
    if not is_data_change:
        told = Summary(Operation.REPLACE, **told.additional_properties)
    parent_id = parent.snapshot_id if parent is not None else None
    snapshot = Snapshot.model_validate(
        {
            "snapshot-id": writer.snapshot_id,
            "parent-snapshot-id": parent_id,
            "sequence-number": sequence,
            "manifest-list": writer.manifest_list(made.files.values(), parent_id),
            "summary": told,
            "schema-id": schema_id,
        }
    )
    ref = {"snapshot-id": writer.snapshot_id, "ref-name": MAIN_BRANCH, "type": SnapshotRefType.BRANCH}
    updates = (AddSnapshotUpdate(snapshot=snapshot), SetSnapshotRefUpdate.model_validate(ref))
    requirements = (
        AssertTableUUID(uuid=metadata.table_uuid),
        AssertRefSnapshotId.model_validate({"ref": MAIN_BRANCH, "snapshot-id": parent_id}),
    )
    for manifest in made.files.values():
        if manifest.added_snapshot_id == writer.snapshot_id:
            manifest.sequence_number = sequence  # as readers of the list see it
            if manifest.min_sequence_number < 0:
                manifest.min_sequence_number = sequence
    return NewSnapshot(writer.snapshot_id, updates, requirements, made, writer.written)


def _parted(known: Manifests, gone: set[str]) -> tuple[list[Any], list[Any], list[Any]]:
    """The manifests that stay, the entries of others that stay, and those that go."""
    kept: list[Any] = []
    touched: list[str] = []
    for path, manifest in known.files.items():
        entries = known.entries.get(path)
        if entries is None:
            kept.append(manifest)
        elif any(entry.data_file.file_path in gone for entry in entries):
            touched.append(path)
        elif entries:
            kept.append(manifest)
    small = [one for one in kept if len(known.entries.get(one.manifest_path, ())) * 4 < MANIFEST_ENTRIES]
    small = [one for one in small if one.manifest_path in known.entries]
    if len(small) > SMALL_MANIFESTS:
        joined = {one.manifest_path for one in small}
        touched += joined
        kept = [one for one in kept if one.manifest_path not in joined]
    entries = [entry for path in touched for entry in known.entries[path]]
    rest = [entry for entry in entries if entry.data_file.file_path not in gone]
    return kept, rest, [entry for entry in entries if entry.data_file.file_path in gone]


class _Writer:
    """Writes the manifests of one snapshot."""

    def __init__(self, table: Any, schema: Schema, snapshot_id: int, sequence: int, prefix: str) -> None:
        self._table = table
        self._schema = schema
        self.snapshot_id = snapshot_id
        self._sequence = sequence
        self._name = f"{prefix}{uuid.uuid4()}"
        self._compression = table.metadata.properties.get("write.avro.compression-codec", "gzip")
        self.written: list[str] = []

    def added(self, file: Any) -> Any:
        return ManifestEntry.from_args(
            status=ManifestEntryStatus.ADDED,
            snapshot_id=self.snapshot_id,
            sequence_number=None,
            file_sequence_number=None,
            data_file=file,
        )

    def deleted(self, entry: Any) -> Any:
        return self._again(entry, ManifestEntryStatus.DELETED, self.snapshot_id)

    def existing(self, entry: Any) -> Any:
        return self._again(entry, ManifestEntryStatus.EXISTING, entry.snapshot_id)

    def _again(self, entry: Any, status: ManifestEntryStatus, snapshot_id: int) -> Any:
        return ManifestEntry.from_args(
            status=status,
            snapshot_id=snapshot_id,
            sequence_number=entry.sequence_number,
            file_sequence_number=entry.file_sequence_number,
            data_file=entry.data_file,
        )

    def manifest(self, entries: Iterable[Any], spec: Any) -> tuple[ManifestFile, list[Any]]:
        """A manifest with *entries*, and those of them that are in the table, with the numbers that they inherit."""
        output = self._output(f"m{len(self.written)}.avro")
        live: list[Any] = []
        with write_manifest(FORMAT_VERSION, spec, self._schema, output, self.snapshot_id, self._compression) as writer:
            for entry in entries:
                writer.add_entry(entry)
                if entry.status == ManifestEntryStatus.DELETED:
                    continue
                if entry.sequence_number is None:
                    entry.sequence_number = entry.file_sequence_number = self._sequence
                live.append(entry)
        return writer.to_manifest_file(), live

    def manifest_list(self, manifests: Iterable[ManifestFile], parent_id: int | None) -> str:
        output = self._output("snap.avro")
        with write_manifest_list(
            FORMAT_VERSION,
            output,
            self.snapshot_id,
            parent_id,
            self._sequence,
            self._compression,
        ) as writer:
            writer.add_manifests(list(manifests))
        return str(output.location)

    def _output(self, name: str) -> Any:
        path = self._table.location_provider().new_metadata_location(f"{self._name}-{name}")
        self.written.append(path)
        return self._table.io.new_output(path)


logger = logging.getLogger(__name__)

DIRECTORY: Final = "_headwater"
KEPT_SNAPSHOTS: Final = 50
EXPIRED_SNAPSHOTS: Final = 20
"""So many are ended at once, or some when the last commit is :data:`SLOW_SECONDS` ago."""
SLOW_SECONDS: Final = 60

BEFORE_NOTE = failpoints.register("sink.iceberg.before_note")
AFTER_NOTE = failpoints.register("sink.iceberg.after_note")
BEFORE_REMOVE = failpoints.register("sink.iceberg.before_remove")


class Waste:
    """What the table *table*, of which this is the newest metadata, does not need any more."""

    def __init__(self, table: Any, storage: Storage, retention_hours: int) -> None:
        self._table = table
        self._storage = storage
        self._retention_ms = int(retention_hours * 3_600_000)

    def expire(self) -> tuple[Any, ...]:
        """Changes of metadata that end old snapshots, if it is due; their files are written down before."""
        metadata = self._table.metadata
        old = self._old_snapshots()
        current = metadata.current_snapshot()
        is_slow = current is not None and _now_ms() - current.timestamp_ms > SLOW_SECONDS * 1000
        if len(old) < (1 if is_slow else EXPIRED_SNAPSHOTS):
            return ()
        failpoints.hit(BEFORE_NOTE)
        name = f"{DIRECTORY}/{_now_ms():013}-{uuid.uuid4()}.json"
        with self._storage.create(name) as stream:
            stream.write(json.dumps(sorted(self._files_of(old))).encode())
        failpoints.hit(AFTER_NOTE)
        return (RemoveSnapshotsUpdate.model_validate({"snapshot-ids": [one.snapshot_id for one in old]}),)

    def _old_snapshots(self) -> list[Any]:
        """Those that are older than the retention, or of which there are too many; none that has a name."""
        metadata = self._table.metadata
        named = {one.snapshot_id for one in metadata.refs.values()}
        found = sorted(metadata.snapshots, key=lambda one: one.sequence_number or 0)
        limit = _now_ms() - self._retention_ms
        return [
            one
            for place, one in enumerate(found)
            if one.snapshot_id not in named and (one.timestamp_ms < limit or place < len(found) - KEPT_SNAPSHOTS)
        ]

    def _files_of(self, old: list[Any]) -> set[str]:
        """The manifests that only the snapshots *old* have, and the data files that they removed."""
        table = self._table
        ended = {one.snapshot_id for one in old}
        found: set[str] = set()
        for snapshot in old:
            found.add(snapshot.manifest_list)
            found |= {one.manifest_path for one in self._manifests(snapshot)}
            found |= set(self._removed_by(snapshot))
        for snapshot in table.metadata.snapshots:
            if snapshot.snapshot_id not in ended:
                found -= {one.manifest_path for one in self._manifests(snapshot)}
        return found

    def _manifests(self, snapshot: Any) -> Sequence[Any]:
        try:
            found: Sequence[Any] = snapshot.manifests(self._table.io)
        except FileNotFoundError:  # others clean up, too
            return ()
        return found

    def _removed_by(self, snapshot: Any) -> Iterator[str]:
        for manifest in self._manifests(snapshot):
            if manifest.added_snapshot_id == snapshot.snapshot_id and manifest.deleted_files_count:
                for entry in manifest.fetch_manifest_entry(self._table.io, discard_deleted=False):
                    if entry.status == ManifestEntryStatus.DELETED:
                        yield entry.data_file.file_path

    def remove(self, live: set[str]) -> None:
        """Remove files that were written down a retention ago, but none that a snapshot has.

        :param live: the data files of the current one.
        """
        limit = _now_ms() - self._retention_ms
        due = [info.path for info in self._storage.list(DIRECTORY) if _noted_ms(info.path) < limit]
        if not due:
            return
        failpoints.hit(BEFORE_REMOVE)
        needed = live | self._named_files() | self._remembered()
        for path in due:
            for file in self._noted(path):
                if file not in needed:
                    self._storage.remove(self._relative(file))
            self._storage.remove(path)

    def _named_files(self) -> set[str]:
        """The files of the snapshots that have a name, and are not the current one."""
        metadata = self._table.metadata
        names = {one.snapshot_id for one in metadata.refs.values()} - {metadata.current_snapshot_id}
        snapshots = [metadata.snapshot_by_id(one) for one in names]
        return {file for one in snapshots if one is not None for file in self._all_of(one)}

    def _all_of(self, snapshot: Any) -> Iterator[str]:
        yield snapshot.manifest_list
        for manifest in self._manifests(snapshot):
            yield manifest.manifest_path
            for entry in manifest.fetch_manifest_entry(self._table.io):
                yield entry.data_file.file_path

    def orphans(self, live: set[str], is_left: Callable[[str], bool]) -> list[str]:
        """Files whose names *is_left* chooses and that no snapshot ever had; paths in the table's directory."""
        listed = [info for name in ("data", "metadata") for info in self._storage.list(name)]
        left = [info.path for info in listed if is_left(info.base_name)]
        if not left:
            return []
        known = live | self._named_files() | self._remembered()
        for info in self._storage.list(DIRECTORY):
            known |= set(self._noted(info.path))
        paths = {self._relative(path) for path in known}
        return [path for path in left if path not in paths]

    def lost_metadata(self, current: str) -> list[str]:
        """Metadata files of commits that failed: older than the *current* one, and not among those before it."""
        known = {one.metadata_file.rpartition("/")[2] for one in self._table.metadata.metadata_log}
        known.add(current.rpartition("/")[2])
        newest = _number(current.rpartition("/")[2])
        listed = [info for info in self._storage.list("metadata") if info.base_name.endswith(".metadata.json")]
        return [info.path for info in listed if info.base_name not in known and 0 <= _number(info.base_name) <= newest]

    def _remembered(self) -> set[str]:
        """What the snapshots of the metadata have or had."""
        metadata = self._table.metadata
        line = {one.snapshot_id for one in ancestors_of(metadata.current_snapshot(), metadata)}
        found: set[str] = set()
        for snapshot in metadata.snapshots:
            if snapshot.snapshot_id not in line:  # somebody went back behind it
                found |= set(self._all_of(snapshot))
                continue
            found.add(snapshot.manifest_list)
            found |= {one.manifest_path for one in self._manifests(snapshot)}
            found |= set(self._removed_by(snapshot))
        return found

    def _noted(self, path: str) -> list[str]:
        with self._storage.files.open_input_stream(path) as stream:
            found: list[str] = json.loads(stream.read())
        return found

    def _relative(self, path: str) -> str:
        return path.removeprefix(f"{self._table.metadata.location}/")


def _noted_ms(path: str) -> int:
    return int(path.rpartition("/")[2].partition("-")[0])


def _number(name: str) -> int:
    digits = name.partition("-")[0]
    return int(digits) if digits.isdigit() else -1


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
