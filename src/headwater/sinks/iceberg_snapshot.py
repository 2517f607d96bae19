"""Snapshots of Iceberg tables: the manifests that one batch writes, and the changes of metadata that make it visible.

Only manifests that have a file which goes are written anew. Small ones are joined now and then, so that a table has few
of them whatever the batches are. Nothing of it shows before the catalog takes the changes. Needs pyiceberg.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
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
    update_snapshot_summaries,
)
from pyiceberg.table.update import AddSnapshotUpdate, AssertRefSnapshotId, AssertTableUUID, SetSnapshotRefUpdate

from headwater.sinks.data_files import DataFile
from headwater.sinks.errors import SinkUnwritable
from headwater.sinks.iceberg_files import to_iceberg

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
