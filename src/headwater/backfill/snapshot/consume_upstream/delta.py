"""DeltaUpstream: a Delta table as an upstream table, by its versions and its change data feed (delta-rs).

Version *v* is the epoch ``(v + 1) << 16``. The key is named by whoever opens the table: Delta has none; rows are in
vnodes by its hash. Rows of a vnode lie in all files, so a vnode is read as a whole and a table has no cuts inside
one: each task reads every file of the version and keeps the rows of its vnodes, in no order.

What a version needs must be there when it is planned: its entry in the log, the change data feed, and every file that
it names, whose rows are counted by their footers on the way. What VACUUM or the clean-up of the log has taken is a
:class:`~.errors.RetentionMiss`. Nothing can be held in a Delta table: its retention must be longer than the
consumer is behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar
from urllib.parse import unquote
from zlib import crc32

import pyarrow as pa

from headwater.backfill.snapshot.consume_upstream.delta_changes import in_vnodes, net_changes
from headwater.backfill.snapshot.consume_upstream.delta_log import FEED, Commit, epoch_of, version_of
from headwater.backfill.snapshot.consume_upstream.errors import (
    ChangeLogGone,
    EpochMismatch,
    InvalidUpstream,
    RetentionMiss,
    UpstreamDropped,
    UpstreamUnreadable,
    VersionExpired,
)
from headwater.backfill.snapshot.consume_upstream.upstream_table import Cut, VnodeRange
from headwater.databases.secret_files import current_options
from headwater.log_store.columns import EPOCH
from headwater.sinks.storage import Storage, endpoint_of, store_error
from headwater.sources.table import SourceColumn, SourceTable
from headwater.stream import DEFAULT_VNODE_COUNT

_LOOK_SECONDS: Final = 0.2
_SMALL_LOG: Final = 64
"""So many entries of the log are remembered."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class DeltaUpstream:
    """A Delta table.

    :ivar uri: a path or the address of a directory in an object store. :ivar key: the columns that name a row.
    :ivar table_name: ``namespace.name`` of its rows downstream; by default ``lake.`` and its directory.
    :ivar storage: options of the object store; never shown.
    """

    uri: str
    key: tuple[str, ...]
    table_name: str = ""
    vnode_count: int = DEFAULT_VNODE_COUNT
    storage: Mapping[str, str] = field(default_factory=dict, repr=False)
    _held: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return DeltaUpstream, (self.uri, self.key, self.table_name, self.vnode_count, dict(self.storage))

    @property
    def name(self) -> str:
        return f"delta:{self.uri}"

    @property
    def identity(self) -> str:
        """Asked anew each time: one that is followed does not notice that it was replaced.

        What is remembered of versions of another table is forgotten.
        """
        self._held.pop("newest", None)
        found = str(self._newest().metadata().id)
        if self._held.get("identity", found) != found:
            self._held.pop("at", None)
            self._held.pop("commits", None)
        self._held["identity"] = found
        return found

    # -- versions --------------------------------------------------------------------------------------------------

    def newest_epoch(self) -> int:
        return epoch_of(self._newest().version())

    def next_epoch(self, after: int, upto: int | None = None) -> int | None:
        """The next version. :raises EpochMismatch: the table has fewer versions than were consumed."""
        newest, version = self._newest().version(), version_of(after) + 1
        if newest < version - 1:
            raise EpochMismatch(
                f"Table {self.name} is at version {newest}, and version {version - 1} was read: it was created again or"
                " restored from a copy.",
                next_step=RESNAPSHOT,
            )
        if newest < version or (upto is not None and epoch_of(version) > upto):
            return None
        return epoch_of(version)

    def wait_for_epoch(self, after: int, timeout: float) -> None:
        end = time.monotonic() + timeout
        while self.newest_epoch() <= after:
            left = end - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, _LOOK_SECONDS))

    def commit_version(self, epoch: int) -> int:
        return version_of(epoch)

    def epoch_of_version(self, version: int) -> int:
        return epoch_of(version)

    def commit_time_us(self, epoch: int) -> int:
        return self._commit(version_of(epoch)).time_ms * 1000

    def epoch_at(self, time_ms: int) -> int | None:
        """Looks back from the newest version until one is before *time_ms*.

        :raises ChangeLogGone: whether one is can no longer be told, or it is the first of all.
        """
        newest = self._newest().version()
        for version in range(newest, -1, -1):
            if self._commit(version).time_ms < time_ms:
                return None if version == newest else epoch_of(version)
        raise ChangeLogGone(f"Table {self.name} has no version from before that time.", next_step=RESNAPSHOT)

    def table(self, epoch: int) -> SourceTable:
        """:raises InvalidUpstream: it has no such key."""
        schema = pa.schema(self._at(version_of(epoch)).schema().to_arrow())
        namespace, _, name = (self.table_name or f"lake.{_directory(self.uri)}").rpartition(".")
        missing = next((column for column in self.key if column not in schema.names), None)
        if missing is not None or not self.key:
            raise InvalidUpstream(
                f"Table {self.name} has no column {missing!r}." if self.key else f"Table {self.name} needs a key.",
                next_step=f"Name the columns of its key with option 'key'; it has {', '.join(schema.names)}.",
            )
        columns = tuple(
            SourceColumn(one.name, one.type, str(one.type), _field_id(one.name), nullable=one.name not in self.key)
            for one in schema
        )
        return SourceTable(namespace, name, columns, self.key)

    # -- planning --------------------------------------------------------------------------------------------------

    def check_snapshot(self, epoch: int) -> None:
        """:raises VersionExpired: the version, or a file of it, is gone. :raises InvalidUpstream: no change feed."""
        at = self._at(version_of(epoch))
        if not _has_feed(at):
            raise InvalidUpstream(
                f"Table {self.name} writes no change data feed: what follows a snapshot could not be known.",
                next_step=f"Run: ALTER TABLE … SET TBLPROPERTIES ({FEED} = true), and begin after that.",
            )
        paths = [unquote(path) for path in at.get_add_actions()["path"].to_pylist()]
        self._require(paths, VersionExpired, f"version {version_of(epoch)}")

    def check_changes(self, after: int) -> None:
        """:raises InvalidUpstream: the version after *after* was, or will be, written without a change data feed."""
        newest, version = self._newest(), version_of(after) + 1
        following = newest if version > newest.version() else self._at(version)
        if not _has_feed(following):
            since = next_step = ""
            if _has_feed(newest):
                since = f" at version {version}: it was turned on later"
                next_step = "Begin at a later version, or leave 'since' out to read the table as it is."
            raise InvalidUpstream(
                f"Table {self.name} writes no change data feed{since}.",
                next_step=next_step
                or f"Run: ALTER TABLE … SET TBLPROPERTIES ({FEED} = true), and begin at a version after that.",
            )

    def snapshot_cuts(self, epoch: int, vnodes: VnodeRange) -> Sequence[Cut]:
        return self._even(int(self._at(version_of(epoch)).count()), vnodes)

    def change_cuts(self, after: int, epoch: int, vnodes: VnodeRange) -> Sequence[Cut]:
        rows = 0
        for version in range(version_of(after) + 1, version_of(epoch) + 1):
            commit = self._commit(version)
            if commit.feed is False:
                raise ChangeLogGone(
                    f"The change data feed of table {self.name} was turned off at version {version}.",
                    next_step=f"Turn it on again ({FEED} = true), then {RESNAPSHOT[0].lower()}{RESNAPSHOT[1:]}",
                )
            self._require(commit.files, ChangeLogGone, f"the change log of version {version}")
            rows += sum(self._rows(name) for name in commit.files)
        return self._even(rows, vnodes)

    def _even(self, rows: int, vnodes: VnodeRange) -> list[Cut]:
        """*rows* over all vnodes, as evenly as it goes."""
        count = self.vnode_count
        return [Cut(vnode, None, rows * (vnode + 1) // count - rows * vnode // count) for vnode in range(*vnodes)]

    def _require(self, names: Sequence[str], error: type[RetentionMiss], what: str) -> None:
        """:raises RetentionMiss: a file is not there. :raises InvalidUpstream: its changes could not be read."""
        import pyarrow.fs as pafs

        if any("%" in name for name in names):  # delta-rs looks for the files of its change data feed elsewhere
            raise InvalidUpstream(
                f"Table {self.name} is partitioned by values that are not plain letters and digits: its change data"
                " feed cannot be read.",
                next_step="Partition it by another column, for example by a date.",
            )
        found = self._files.files.get_file_info(list(names)) if names else []
        if any(one.type == pafs.FileType.NotFound for one in found):
            raise error(
                f"Table {self.name} no longer keeps {what}: its files were removed by VACUUM.", next_step=RESNAPSHOT
            )

    def _rows(self, name: str) -> int:
        import pyarrow.parquet as pq

        with self._files.files.open_input_file(name) as file:
            return int(pq.read_metadata(file).num_rows)

    # -- reading ---------------------------------------------------------------------------------------------------

    def snapshot(
        self, epoch: int, vnodes: VnodeRange, *, start: bytes | None = None, end: bytes | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Whole vnodes only."""
        version, table = version_of(epoch), self.table(epoch)
        reader = self._at(version).scan()
        for batch in _batches(reader, lambda: self._gone(VersionExpired, f"version {version}")):
            rows = in_vnodes(batch, table, self.vnode_count, vnodes)
            if rows.num_rows:
                yield rows

    def change_log(
        self, after: int, upto: int, vnodes: VnodeRange, *, start: bytes | None = None, end: bytes | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Whole vnodes only; version by version, with the columns of the last of them."""
        table = self.table(upto)
        for version in range(version_of(after) + 1, version_of(upto) + 1):
            if not self._commit(version).files:
                continue  # optimised, vacuumed, or other properties

            def gone(version: int = version) -> RetentionMiss:
                return self._gone(ChangeLogGone, f"the change log of version {version}")

            reader = _told(lambda version=version: self._newest().load_cdf(version, version), gone)  # type: ignore[misc]
            for batch in net_changes(_batches(reader, gone), table, self.vnode_count, vnodes):
                epochs = pa.repeat(pa.scalar(epoch_of(version), pa.uint64()), batch.num_rows)
                yield batch.append_column(pa.field(EPOCH, pa.uint64(), False), epochs)

    def hold(self, owner: str, epoch: int) -> None:
        """Nothing: a Delta table keeps what its own retention says."""

    def release(self, owner: str) -> None:
        """Nothing."""

    # -- the table -------------------------------------------------------------------------------------------------

    @property
    def _files(self) -> Storage:
        return Storage(self.uri, current_options(self.storage))

    def _newest(self) -> Any:
        """:raises UpstreamDropped: it is gone."""
        held = self._held.get("newest")
        if held is None:
            self._held["newest"] = held = self._open(None)
        else:
            self._asked(held.update_incremental)
        return held

    def _at(self, version: int) -> Any:
        """:raises VersionExpired: the log no longer knows it."""
        held = self._held.get("at")
        if held is None or held.version() != version:
            if version > self._newest().version():
                raise EpochMismatch(
                    f"Table {self.name} has no version {version}: it was created again or restored from a copy.",
                    next_step=RESNAPSHOT,
                )
            self._held["at"] = held = self._open(version)
        return held

    def _open(self, version: int | None) -> Any:
        from deltalake import DeltaTable

        def opened() -> Any:
            return DeltaTable(self._files.address, version=version, storage_options=self._files.client_options or None)

        if version is None:
            return self._asked(opened)
        return _told(opened, lambda: self._gone(VersionExpired, f"version {version}"))

    def _asked(self, call: Callable[[], _T]) -> _T:
        from deltalake.exceptions import DeltaError, TableNotFoundError

        try:
            return call()
        except TableNotFoundError:
            raise self._dropped() from None
        except (DeltaError, OSError) as error:
            for name in ("newest", "at"):
                self._held.pop(name, None)  # opened with keys that can have expired
            if self._is_gone():
                raise self._dropped() from None
            raise self._unreadable(error) from None

    def _unreadable(self, error: Exception) -> UpstreamUnreadable:
        found = store_error(error, self.uri, endpoint_of(self.storage))
        return UpstreamUnreadable(
            f"Table {self.name} cannot be read: {found.message if found else f'{type(error).__name__}.'}",
            next_step="Look at its storage, then retry.",
        )

    def _is_gone(self) -> bool:
        import pyarrow.fs as pafs

        files = self._files
        return files.is_local and bool(files.files.get_file_info("_delta_log").type == pafs.FileType.NotFound)

    def _dropped(self) -> UpstreamDropped:
        return UpstreamDropped(f"There is no Delta table at {self.uri}.", next_step="Check its path and the rights.")

    def _gone(self, error: type[RetentionMiss], what: str) -> RetentionMiss:
        return error(f"Table {self.name} no longer keeps {what}.", next_step=RESNAPSHOT)

    def _commit(self, version: int) -> Commit:
        """:raises ChangeLogGone: its entry in the log is gone."""
        known: dict[int, Commit] = self._held.setdefault("commits", {})
        if version not in known:
            try:
                with self._files.files.open_input_stream(f"_delta_log/{version:020}.json") as stream:
                    text = stream.read().decode()
            except FileNotFoundError:
                raise self._gone(ChangeLogGone, f"the log of version {version}") from None
            except OSError as error:
                raise self._unreadable(error) from None
            while len(known) >= _SMALL_LOG:
                del known[next(iter(known))]
            known[version] = Commit.read(text)
        return known[version]


RESNAPSHOT: Final = "Read the table once more: headwater resnapshot --store STORE --query NAME"


def _batches(reader: Any, gone: Callable[[], RetentionMiss]) -> Iterator[pa.RecordBatch]:
    """What *reader* gives, as batches of pyarrow."""
    batches = iter(pa.RecordBatchReader.from_stream(reader))
    while True:
        batch = _told(lambda: next(batches, None), gone)
        if batch is None:
            return
        yield batch


def _told(call: Callable[[], _T], gone: Callable[[], RetentionMiss]) -> _T:
    """What *call* gives; where a file or a version is missing, *gone*. The library tells these by texts alone."""
    from deltalake.exceptions import DeltaError

    try:
        return call()
    except FileNotFoundError:
        raise gone() from None
    except Exception as error:  # the readers of the library raise plain ones
        text = str(error).lower()
        if (
            "not found" in text
            or "invalid table version" in text
            or "no such file" in text
            or "no files in log" in text
        ):
            raise gone() from None
        if isinstance(error, DeltaError | OSError):
            raise UpstreamUnreadable(
                f"A Delta table cannot be read: {type(error).__name__}.", next_step="Look at its storage, then retry."
            ) from error
        raise


def _has_feed(table: Any) -> bool:
    return str(table.metadata().configuration.get(FEED, "false")).lower() == "true"


def _directory(uri: str) -> str:
    return uri.rstrip("/").rpartition("/")[2]


def _field_id(name: str) -> int:
    """Delta knows columns by their names."""
    return crc32(name.encode()) & 0x7FFFFFFF


__all__ = ["DeltaUpstream", "epoch_of", "version_of"]
