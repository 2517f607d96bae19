"""DeltaLog: the log of one Delta table, as the sink needs it: its columns, files and tokens, and one commit at a time.

delta-rs reads and writes the log. A commit is made on top of the version that was read, or not at all: whoever was
faster is seen first. Handles are kept per process, since reading on is cheaper than opening; who has one has it alone.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Self

import pyarrow as pa

from headwater import failpoints
from headwater.errors import HeadwaterError
from headwater.sinks.data_files import DataFile
from headwater.sinks.errors import SinkDriverMissing, SinkError, SinkSchemaError, SinkUnwritable
from headwater.sinks.partitions import value_texts
from headwater.sinks.storage import Storage, endpoint_of, store_error

logger = logging.getLogger(__name__)

BEFORE_CREATE = failpoints.register("sink.delta.before_create")
AFTER_CREATE = failpoints.register("sink.delta.after_create")
BEFORE_COLUMNS = failpoints.register("sink.delta.before_columns")
AFTER_COLUMNS = failpoints.register("sink.delta.after_columns")
BEFORE_COMMIT = failpoints.register("sink.delta.before_commit")
AFTER_COMMIT = failpoints.register("sink.delta.after_commit")
BEFORE_CHECKPOINT = failpoints.register("sink.delta.before_checkpoint")

COMMIT_MARK: Final = "headwater.commit"
"""In the ``commitInfo`` of each of our commits: a value that no other commit has."""
CHECKPOINT_COMMITS: Final = 50
HELD_HANDLES: Final = 256
_READ_ENTRIES: Final = 8
"""So many new entries are read for their transactions; to look for one in the whole log costs more."""
CREATED: Final = "headwater.table"
"""The property of tables that Headwater created: the name of the table at the source."""
_OURS: Final = re.compile(r"(?:^|/)part-[0-9a-f]{8}-\d+-[^/]*$")
_UNDERSTOOD = frozenset(
    ("timestampNtz", "appendOnly", "invariants", "changeDataFeed", "v2Checkpoint", "vacuumProtocolCheck")
)

_lock = threading.Lock()


def delta_library() -> Any:
    """:raises SinkDriverMissing: it is not installed."""
    try:
        import deltalake
    except ImportError as error:
        raise SinkDriverMissing(
            "A Delta sink needs the library deltalake.", next_step="Run: pip install 'headwater[delta]'"
        ) from error
    return deltalake


class _Known:
    """A handle of a table, and what was found out with it.

    :ivar version: up to which *transactions* are true; ``None`` is one that the table does not have.
    :ivar options: of the object store, when it was opened.
    """

    def __init__(self, handle: Any, options: Mapping[str, str]) -> None:
        self.handle = handle
        self.options = options
        self.version = -1
        self.transactions: dict[str, int | None] = {}
        self.files: dict[str, DataFile] = {}


_handles: dict[str, _Known] = {}


class DeltaLog:
    """The log of the table at *storage*.

    :param name: of the table, for messages. :param partition_by: the columns by which its rows are parted.
    """

    def __init__(self, storage: Storage, name: str, partition_by: Sequence[str] = ()) -> None:
        self._delta = delta_library()
        self.storage = storage
        self._name = name
        self._partition_by = list(partition_by)
        self._known: _Known | None = None
        self._begun: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the handle to who opens the table next; until then it is this one's alone."""
        if self._known is None:
            return
        with _lock:
            _handles[self.storage.address] = self._known
            while len(_handles) > HELD_HANDLES:
                del _handles[next(iter(_handles))]
        self._known = None

    def open(self, *, newest: bool = True) -> bool:
        """Read the newest version, or one that this process read before; ``False``: there is no table."""
        known = self._known
        if known is None:
            with _lock:
                known = _handles.pop(self.storage.address, None)
        if known is None or known.options != self.storage.options or not self._is_there(known, newest):
            known = self._open()
        self._known = known
        if known is None:
            return False
        self._check_features(known.handle)
        if known.version != known.handle.version():
            known.transactions = self._newer_transactions(known)
            known.version = known.handle.version()
        if self._begun is None:
            self._begun = known.version
        return True

    def _is_there(self, known: _Known, newest: bool) -> bool:
        try:
            if newest and not self._is_newest(known.handle.version()):
                known.handle.update_incremental()
            return self.storage.has(_entry(known.handle.version()))
        except self._delta.exceptions.DeltaError:
            return False

    def _is_newest(self, version: int) -> bool:
        """Whether no entry follows *version*, where that is cheaper to see than to read on."""
        return self.storage.is_local and not self.storage.has(_entry(version + 1))

    def _newer_transactions(self, known: _Known) -> dict[str, int | None]:
        """What *known* has of them, and what the entries since then say; nothing if those cannot be read."""
        found = dict(known.transactions)
        version = known.handle.version()
        if not found or not 0 < version - known.version <= _READ_ENTRIES:
            return {}
        try:
            for newer in range(known.version + 1, version + 1):
                found.update((one["appId"], one["version"]) for one in self._actions(newer, "txn"))
        except OSError:
            return {}
        return found

    def _actions(self, version: int, kind: str) -> list[dict[str, Any]]:
        """The actions of one kind in the entry of *version*."""
        with self.storage.files.open_input_stream(_entry(version)) as stream:
            lines = stream.read().splitlines()
        found = (json.loads(line).get(kind) for line in lines if f'"{kind}"'.encode() in line)
        return [action for action in found if action]

    def _open(self) -> _Known | None:
        try:
            handle = self._delta.DeltaTable(self.storage.address, storage_options=self.storage.client_options)
            return _Known(handle, self.storage.options)
        except self._delta.exceptions.TableNotFoundError:
            return None
        except self._delta.exceptions.DeltaError as error:
            if store_error(error, self.storage.root, "") is not None:
                raise
            raise SinkUnwritable(
                f"What is at {self.storage.root} is no Delta table that can be read: {type(error).__name__}.",
                next_step="Move it away, or deliver to another directory.",
            ) from error

    @property
    def _handle(self) -> Any:
        assert self._known is not None
        return self._known.handle

    def create(self, schema: pa.Schema, configuration: Mapping[str, str]) -> None:
        """Make the table; one that another process made meanwhile is opened."""
        failpoints.hit(BEFORE_CREATE)
        try:
            self._delta.DeltaTable.create(
                self.storage.address,
                self._delta.Schema.from_arrow(schema),
                partition_by=self._partition_by or None,
                configuration={**configuration, CREATED: self._name},
                storage_options=self.storage.client_options,
                raise_if_key_not_exists=False,
            )
        except self._delta.exceptions.DeltaError:
            if not self.open():
                raise
            return
        failpoints.hit(AFTER_CREATE)
        self.open()
        self._sync(self.version)

    @property
    def owner(self) -> str | None:
        """The table at the source that it was created for; ``None``: it does not say."""
        found: str | None = self._handle.metadata().configuration.get(CREATED)
        return found

    def is_ours(self, apps: Iterable[str]) -> bool:
        """Whether Headwater created the table or has written to it. :param apps: of the query that asks."""
        properties = self._handle.metadata().configuration
        if CREATED in properties or any(self.transaction(app) is not None for app in apps):
            return True
        kept = [properties.get(f"delta.{what}Duration") for what in ("logRetention", "deletedFileRetention")]
        if properties.get("delta.checkpointInterval") == "100" and None not in kept and len(set(kept)) == 1:
            return True  # created by a version of Headwater that did not name the table
        paths = pa.table(self._handle.get_add_actions()).column("path").to_pylist()
        return any(_OURS.search(path) for path in paths)

    @property
    def version(self) -> int:
        return int(self._handle.version())

    def is_behind(self) -> bool:
        """Read on; whether there was a newer version."""
        before = self.version
        self.open()
        return self.version != before

    def schema(self) -> pa.Schema:
        """The columns of the table."""
        return pa.schema(self._handle.schema().to_arrow())

    def transaction(self, app: str) -> int | None:
        """The version that the application *app* committed last."""
        assert self._known is not None
        known = self._known.transactions
        if app not in known:
            known[app] = self._handle.transaction_version(app)
        return known[app]

    def files(self, key_columns: Sequence[str]) -> list[DataFile]:
        """The files of the table, with what is known of their *key_columns*."""
        assert self._known is not None
        actions = pa.table(self._handle.get_add_actions(flatten=True))
        before = self._known.files if key_columns else {}
        paths = actions.column("path").to_pylist()
        self._known.files = {
            path: before.get(path) or _data_file(actions, place, key_columns, self._partition_by)
            for place, path in enumerate(paths)
        }
        return list(self._known.files.values())

    def paths(self) -> frozenset[str]:
        """The files of the table, and those that it had as far as its log remembers."""
        found = set(pa.table(self._handle.get_add_actions()).column("path").to_pylist())
        for info in self.storage.list("_delta_log"):
            if info.path.endswith(".json"):
                with self.storage.files.open_input_stream(info.path) as stream:
                    lines = stream.read().splitlines()
                removed = (json.loads(line).get("remove") for line in lines if b'"remove"' in line)
                found.update(one["path"] for one in removed if one)
        return frozenset(found)

    def add_columns(self, fields: Iterable[pa.Field]) -> None:
        """Add columns at the end."""
        failpoints.hit(BEFORE_COLUMNS)
        delta_fields = self._delta.Schema.from_arrow(pa.schema(list(fields))).fields
        self._handle.alter.add_columns(delta_fields)
        failpoints.hit(AFTER_COLUMNS)
        self.open()
        self._sync(self.version)

    def commit(
        self,
        added: Sequence[DataFile],
        removed: Sequence[DataFile],
        transactions: Mapping[str, int],
        *,
        schema: pa.Schema | None = None,
        is_data_change: bool = True,
    ) -> bool:
        """Commit on top of the version that was read; ``False``: another commit was faster, and nothing is changed.

        :param schema: the table gets these columns, and *added* are all its files.
        """
        now = int(time.time() * 1000)
        actions: list[Any] = [
            self._delta.transaction.AddAction(
                file.path, file.size, file.parted, file.written_ms or now, is_data_change, file.statistics
            )
            for file in added
        ]
        if schema is None:
            remove = self._delta.transaction.RemoveAction
            actions += [remove(file.path, is_data_change, now, file.size, dict(file.parted)) for file in removed]
        mark = uuid.uuid4().hex
        properties = self._delta.CommitProperties(
            custom_metadata={COMMIT_MARK: mark},
            app_transactions=[self._delta.Transaction(app, version) for app, version in transactions.items()],
            max_commit_retries=0,
        )
        if schema is not None and not self._allow(schema):
            return False
        before = self.version
        if added:
            self.storage.sync(".")
        failpoints.hit(BEFORE_COMMIT)
        try:
            self._handle.create_write_transaction(
                actions,
                "append" if schema is None else "overwrite",
                self._handle.schema() if schema is None else self._delta.Schema.from_arrow(schema),
                self._partition_by,
                commit_properties=properties,
                post_commithook_properties=self._delta.PostCommitHookProperties(
                    create_checkpoint=False, cleanup_expired_logs=False
                ),
            )
        except self._delta.exceptions.DeltaError as error:
            self.open()
            # Where the answer to a put is lost, the client tries again, and is refused by its own commit.
            is_ours = self.version > before and self._has_mark(before + 1, mark)
            if not is_ours and self.version > before and isinstance(error, self._delta.exceptions.CommitFailedError):
                return False
            if not is_ours:
                raise self._refused(error) from error
        failpoints.hit(AFTER_COMMIT)
        known = self._known
        assert known is not None
        known.transactions.update(transactions)
        known.version = before + 1
        self.open()
        self._sync(before + 1)
        return True

    def _has_mark(self, version: int, mark: str) -> bool:
        """Whether the commit of *version* is the one that was given *mark*."""
        return any(one.get(COMMIT_MARK) == mark for one in self._actions(version, "commitInfo"))

    def _refused(self, error: Exception) -> HeadwaterError:
        found = store_error(error, self.storage.root, endpoint_of(self.storage.options))
        return found or SinkError(
            f"The Delta table {self._name} took no commit: {type(error).__name__}.",
            next_step="Look at the storage of the table: is it full, may this user write there?",
        )

    def tidy(self, retention_hours: int) -> None:
        """Write a checkpoint of the log and remove old entries and files, if it is due since this handle was opened.

        Nothing depends on it.
        """
        if self.version // CHECKPOINT_COMMITS == (self._begun or 0) // CHECKPOINT_COMMITS:
            return
        failpoints.hit(BEFORE_CHECKPOINT)
        try:
            self.vacuum(retention_hours, all_files=False)  # before the checkpoint, which forgets old removals
            self._handle.create_checkpoint()
            self._handle.cleanup_metadata()
            self._known = self._open()  # a handle from before the checkpoint reads the whole log again and again
        except self._delta.exceptions.DeltaError as error:
            logger.warning("The Delta table %s could not be tidied: %s.", self._name, type(error).__name__)

    def vacuum(self, retention_hours: int, *, all_files: bool) -> list[str]:
        """Remove files that no version since *retention_hours* has; with *all_files* also those that never had one."""
        return list(
            self._handle.vacuum(
                retention_hours=retention_hours, dry_run=False, enforce_retention_duration=False, full=all_files
            )
        )

    def _sync(self, version: int) -> None:
        self.storage.sync(_entry(version), "_delta_log")

    def _allow(self, schema: pa.Schema) -> bool:
        """Let the table have the types of *schema*: other commits than an overwrite see to that by themselves.

        ``False``: another commit was faster.
        """
        protocol = self._handle.protocol()
        has_wall_clock = "timestamp_ntz" in self._delta.Schema.from_arrow(schema).to_json()
        if not has_wall_clock or "timestampNtz" in (protocol.writer_features or ()):
            return True
        before = self.version
        if self.is_behind():
            return False
        self._handle.alter.add_feature(
            self._delta.TableFeatures.TimestampWithoutTimezone, allow_protocol_versions_increase=True
        )
        self.open()
        return self.version == before + 1

    def _check_features(self, handle: Any) -> None:
        protocol = handle.protocol()
        features = set(protocol.reader_features or ()) | set(protocol.writer_features or ())
        foreign = sorted(features - _UNDERSTOOD)
        if foreign:
            raise SinkUnwritable(
                f"The Delta table {self._name} uses {', '.join(foreign)}, with which it cannot be written here.",
                next_step="Drop the feature from the table, or deliver to another directory.",
            )
        found = list(handle.metadata().partition_columns)
        if found != self._partition_by:
            told, wanted = (", ".join(names) or "nothing" for names in (found, self._partition_by))
            raise SinkSchemaError(
                self._name,
                f"its Delta table is partitioned by {told}, and this sink by {wanted}.",
                next_step="Deliver to another directory, or set mode and partition_by as they were.",
            )


def _entry(version: int) -> str:
    return f"_delta_log/{version:020}.json"


def _data_file(actions: pa.Table, place: int, key_columns: Sequence[str], partition_by: Sequence[str]) -> DataFile:
    lows, highs = (
        {
            name: _value(actions.column(column), place)
            for name in key_columns
            for column in (f"{which}.{name}", f"partition.{name}")
            if column in actions.schema.names
        }
        for which in ("min", "max")
    )
    path, size, rows = (actions.column(name)[place].as_py() for name in ("path", "size_bytes", "num_records"))
    partition = {name: value_texts(actions.column(f"partition.{name}").slice(place, 1))[0] for name in partition_by}
    return DataFile(path, size, rows or 0, lows, highs, parted=partition)


def _value(values: Any, place: int) -> Any:
    try:
        return values[place].as_py()
    except (OverflowError, ValueError):  # a date that Python does not have
        return None
