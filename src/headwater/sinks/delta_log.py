"""DeltaLog: the log of one Delta table, as the sink needs it: its columns, files and tokens, and one commit at a time.

delta-rs reads and writes the log. A commit is made on top of the version that was read, or not at all: whoever was
faster is seen first. Handles are kept per process, since reading on is cheaper than opening; who has one has it alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Self

import pyarrow as pa

from headwater import failpoints
from headwater.sinks.data_files import DataFile
from headwater.sinks.errors import SinkDriverMissing, SinkError, SinkSchemaError, SinkUnwritable
from headwater.sinks.storage import Storage

logger = logging.getLogger(__name__)

BEFORE_CREATE = failpoints.register("sink.delta.before_create")
AFTER_CREATE = failpoints.register("sink.delta.after_create")
BEFORE_COLUMNS = failpoints.register("sink.delta.before_columns")
AFTER_COLUMNS = failpoints.register("sink.delta.after_columns")
BEFORE_COMMIT = failpoints.register("sink.delta.before_commit")
AFTER_COMMIT = failpoints.register("sink.delta.after_commit")
BEFORE_CHECKPOINT = failpoints.register("sink.delta.before_checkpoint")

CHECKPOINT_COMMITS: Final = 50
HELD_HANDLES: Final = 256
_UNDERSTOOD = frozenset(
    ("timestampNtz", "appendOnly", "invariants", "changeDataFeed", "v2Checkpoint", "vacuumProtocolCheck")
)

_handles: dict[str, Any] = {}
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


class DeltaLog:
    """The log of the table at *storage*.

    :param name: of the table, for messages.
    """

    def __init__(self, storage: Storage, name: str) -> None:
        self._delta = delta_library()
        self._storage = storage
        self._name = name
        self._handle: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the handle to who opens the table next; until then it is this one's alone."""
        if self._handle is None:
            return
        with _lock:
            _handles[self._storage.address] = self._handle
            while len(_handles) > HELD_HANDLES:
                del _handles[next(iter(_handles))]
        self._handle = None

    def open(self) -> bool:
        """Read the newest version; ``False``: there is no table."""
        handle = self._handle
        if handle is None:
            with _lock:
                handle = _handles.pop(self._storage.address, None)
        self._handle = self._read_on(handle) or self._open()
        if self._handle is None:
            return False
        self._check_features(self._handle)
        return True

    def _read_on(self, handle: Any) -> Any:
        """*handle* at the newest version; ``None`` if its table is not there any more."""
        if handle is None:
            return None
        try:
            handle.update_incremental()
            return handle if self._storage.has(_entry(handle.version())) else None
        except self._delta.exceptions.DeltaError:
            return None

    def _open(self) -> Any:
        try:
            return self._delta.DeltaTable(self._storage.address, storage_options=dict(self._storage.options))
        except self._delta.exceptions.TableNotFoundError:
            return None

    def create(self, schema: pa.Schema, configuration: Mapping[str, str]) -> None:
        """Make the table; one that another process made meanwhile is opened."""
        failpoints.hit(BEFORE_CREATE)
        try:
            self._delta.DeltaTable.create(
                self._storage.address,
                self._delta.Schema.from_arrow(schema),
                configuration=dict(configuration),
                storage_options=dict(self._storage.options),
            )
        except self._delta.exceptions.DeltaError:
            if not self.open():
                raise
            return
        failpoints.hit(AFTER_CREATE)
        self.open()
        self._sync()

    @property
    def version(self) -> int:
        return int(self._handle.version())

    def schema(self) -> pa.Schema:
        """The columns of the table."""
        return pa.schema(self._handle.schema().to_arrow())

    def transaction(self, app: str) -> int | None:
        """The version that the application *app* committed last."""
        found = self._handle.transaction_version(app)
        return None if found is None else int(found)

    def files(self, key_columns: Sequence[str]) -> list[DataFile]:
        """The files of the table, with what is known of their *key_columns*."""
        actions = pa.table(self._handle.get_add_actions(flatten=True))
        paths, sizes = actions.column("path").to_pylist(), actions.column("size_bytes").to_pylist()
        counts = actions.column("num_records").to_pylist()
        bounds = {
            which: {
                name: actions.column(f"{which}.{name}")
                for name in key_columns
                if f"{which}.{name}" in actions.schema.names
            }
            for which in ("min", "max")
        }
        return [
            DataFile(
                path,
                size,
                rows or 0,
                {name: _value(values, place) for name, values in bounds["min"].items()},
                {name: _value(values, place) for name, values in bounds["max"].items()},
            )
            for place, (path, size, rows) in enumerate(zip(paths, sizes, counts, strict=True))
        ]

    def add_columns(self, fields: Iterable[pa.Field]) -> None:
        """Add columns at the end."""
        failpoints.hit(BEFORE_COLUMNS)
        delta_fields = self._delta.Schema.from_arrow(pa.schema(list(fields))).fields
        self._handle.alter.add_columns(delta_fields)
        failpoints.hit(AFTER_COLUMNS)
        self.open()
        self._sync()

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
                file.path, file.size, {}, file.written_ms or now, is_data_change, file.statistics
            )
            for file in added
        ]
        if schema is None:
            remove = self._delta.transaction.RemoveAction
            actions += [remove(file.path, is_data_change, now, file.size, {}) for file in removed]
        properties = self._delta.CommitProperties(
            app_transactions=[self._delta.Transaction(app, version) for app, version in transactions.items()],
            max_commit_retries=0,
        )
        before = self.version
        failpoints.hit(BEFORE_COMMIT)
        try:
            self._handle.create_write_transaction(
                actions,
                "append" if schema is None else "overwrite",
                self._handle.schema() if schema is None else self._delta.Schema.from_arrow(schema),
                [],
                commit_properties=properties,
                post_commithook_properties=self._delta.PostCommitHookProperties(
                    create_checkpoint=False, cleanup_expired_logs=False
                ),
            )
        except self._delta.exceptions.CommitFailedError as error:
            self.open()
            if self.version == before:
                raise SinkError(
                    f"The Delta table {self._name} took no commit: {type(error).__name__}.",
                    next_step="Look at the storage of the table: is it full, may this user write there?",
                ) from error
            return False
        failpoints.hit(AFTER_COMMIT)
        self.open()
        self._sync()
        return True

    def tidy(self, retention_hours: int) -> None:
        """When it is due: a checkpoint of the log, and away with old entries and files. Nothing depends on it."""
        if self.version % CHECKPOINT_COMMITS:
            return
        failpoints.hit(BEFORE_CHECKPOINT)
        try:
            self._handle.create_checkpoint()
            self._handle.cleanup_metadata()
            self.vacuum(retention_hours, all_files=False)
        except self._delta.exceptions.DeltaError as error:
            logger.warning("The Delta table %s could not be tidied: %s.", self._name, type(error).__name__)

    def vacuum(self, retention_hours: int, *, all_files: bool) -> list[str]:
        """Remove files that no version since *retention_hours* has; with *all_files* also those that never had one."""
        return list(
            self._handle.vacuum(
                retention_hours=retention_hours, dry_run=False, enforce_retention_duration=False, full=all_files
            )
        )

    def _sync(self) -> None:
        self._storage.sync(_entry(self.version), "_delta_log", ".")

    def _check_features(self, handle: Any) -> None:
        protocol = handle.protocol()
        features = set(protocol.reader_features or ()) | set(protocol.writer_features or ())
        foreign = sorted(features - _UNDERSTOOD)
        if foreign:
            raise SinkUnwritable(
                f"The Delta table {self._name} uses {', '.join(foreign)}, with which it cannot be written here.",
                next_step="Drop the feature from the table, or deliver to another directory.",
            )
        if handle.metadata().partition_columns:
            raise SinkSchemaError(
                self._name, "its Delta table is partitioned.", next_step="Deliver to another directory."
            )


def _entry(version: int) -> str:
    return f"_delta_log/{version:020}.json"


def _value(values: Any, place: int) -> Any:
    try:
        return values[place].as_py()
    except (OverflowError, ValueError):  # a date that Python does not have
        return None
