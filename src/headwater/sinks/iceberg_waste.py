"""Waste of an Iceberg table: snapshots that are old, and files that no snapshot has any more.

The metadata of a table has its newest snapshots, so that a commit stays cheap however many there were. Files of a
snapshot that ends are written down in ``_headwater/<milliseconds>-<uuid>.json`` beside the table, before it ends; they
are removed a *retention* later, when no reader that began with it is left. So every file is in a snapshot, written
down, or of an attempt that failed. Needs pyiceberg.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from pyiceberg.manifest import ManifestEntryStatus
from pyiceberg.table.snapshots import ancestors_of
from pyiceberg.table.update import RemoveSnapshotsUpdate

from headwater import failpoints
from headwater.sinks.storage import Storage

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
