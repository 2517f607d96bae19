"""From format 1 to format 2 while the log is written and read.

======================  =====================================================================  ==============
state                   what a step does                                                        goes to
======================  =====================================================================  ==============
old                     registers format 2; the writer takes it up at its next barrier            rewriting
rewriting               rewrites the oldest sealed epochs of format 1, a few at a time          rewriting, new
new                     nothing
======================  =====================================================================  ==============

A step writes into the seal that the writer makes anyway. Each epoch's rows and its barrier, which names the format,
change in one seal, so a reader sees every epoch in exactly one format, and ``kill -9`` leaves whole epochs of either
kind: the next step goes on with those that are still old. Rows keep their epoch, vnode and seq, and come in the same
order within a vnode.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby, islice
from operator import itemgetter

from headwater import failpoints
from headwater.log_store import chunk_codec, row_codec
from headwater.log_store.chunk_codec import Compression
from headwater.log_store.factory import KvLogStoreFactory
from headwater.log_store.log_view import LogView
from headwater.log_store.rewrite import STAGE_BYTES, rewrite_epoch
from headwater.log_store.serde import ROWS, BarrierRecord, rows_from, space_end
from headwater.stream import Epoch

BEFORE_SWITCH = failpoints.register("log_store.migrate_before_switch")
BEFORE_EPOCH = failpoints.register("log_store.migrate_before_epoch")
AFTER_EPOCH = failpoints.register("log_store.migrate_after_epoch")
BEFORE_END = failpoints.register("log_store.migrate_before_end")

EPOCHS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class MigrationProgress:
    """How far a migration is, for progress bars."""

    epochs: int
    rows: int
    bytes_before: int
    bytes: int
    epochs_left: int


class Migration:
    """The migration of one log to format 2, in the process that writes the store.

    Call :meth:`step` from the loop that writes, at any time between two seals, best after an epoch has ended; what it
    did is durable with the next seal, be it in the background or not. A step takes as long as *max_epochs* need::

        ended = writer.epoch
        writer.end_epoch(clock.next())
        migrated = migrated or migration.step(max_epochs=4)
        factory.sealer.seal_in_background(ended)
    """

    def __init__(
        self,
        factory: KvLogStoreFactory,
        log: str,
        *,
        compression: Compression = Compression.NONE,
        stage_bytes: int = STAGE_BYTES,
    ) -> None:
        self._factory = factory
        self._name = factory.existing(log).name
        self._compression = compression
        self._stage_bytes = stage_bytes
        self._after = Epoch(0)
        self._first_new: Epoch | None = None
        self._counted: int | None = None
        self._done = MigrationProgress(0, 0, 0, 0, 0)

    @property
    def progress(self) -> MigrationProgress:
        return self._done

    def step(self, max_epochs: int = EPOCHS_AT_ONCE) -> bool:
        """Rewrite up to *max_epochs* epochs in the next seal; whether the log is whole in format 2 with it."""
        if self._is_new():
            return True
        self._switch()
        left = self._rewrite(max_epochs)
        if left or not self._writer_is_new():
            return False
        failpoints.hit(BEFORE_END)
        self._end()
        return True

    def _is_new(self) -> bool:
        log = self._factory.existing(self._name)
        writer = self._factory.live_writer(self._name)
        return not log.may_hold_rows and (writer is None or not writer.log.may_hold_rows)

    def _switch(self) -> None:
        log = self._factory.existing(self._name)
        if log.format != chunk_codec.FORMAT:
            failpoints.hit(BEFORE_SWITCH)
            self._factory.registry.update(self._factory.sealer.batch, log.in_format(chunk_codec.FORMAT))
        writer = self._factory.live_writer(self._name)
        if writer is not None and writer.log.format != chunk_codec.FORMAT:
            # An epoch has one format: it changes with the next barrier.
            writer.store_state.next_format = chunk_codec.FORMAT

    def _rewrite(self, max_epochs: int) -> bool:
        """Whether sealed epochs of format 1 are left."""
        log = self._factory.existing(self._name)
        # What was truncated since the last seal is still in the snapshot; written again it would come back to life.
        after = max(self._after, self._factory.truncation.gone(self._name))
        with self._factory.store.snapshot() as view:
            shown = LogView(view, log)
            if self._counted is None:
                self._counted = sum(1 for _ in groupby(_old(shown, after), key=itemgetter(0)))
            old = _old(shown, after)
            for epoch, group in islice(groupby(old, key=itemgetter(0)), max_epochs):
                failpoints.hit(BEFORE_EPOCH)
                for _, writer, record in group:
                    batches = shown.batches(epoch, [(writer, record)], record.vnodes)
                    made = rewrite_epoch(
                        self._factory.sealer,
                        log,
                        epoch,
                        writer,
                        record,
                        batches,
                        chunk_codec.FORMAT,
                        compression=self._compression,
                        stage_bytes=self._stage_bytes,
                    )
                    self._count(made.rows, made.bytes_before, made.bytes)
                self._after = epoch
                self._done = replace(self._done, epochs=self._done.epochs + 1)
                failpoints.hit(AFTER_EPOCH)
            has_more = next(_old(shown, max(after, self._after)), None) is not None
        # Those that were truncated meanwhile, or written before the writer changed over, were not counted.
        left = max(1, self._counted - self._done.epochs) if has_more else 0
        self._done = replace(self._done, epochs_left=left)
        return has_more

    def _count(self, rows: int, before: int, after: int) -> None:
        done = self._done
        self._done = replace(
            done, rows=done.rows + rows, bytes_before=done.bytes_before + before, bytes=done.bytes + after
        )

    def _writer_is_new(self) -> bool:
        """Whether no epoch of format 1 can come any more: the writer switched, what it wrote before is sealed."""
        writer = self._factory.live_writer(self._name)
        if writer is not None and writer.log.format != chunk_codec.FORMAT:
            return False
        if self._first_new is None:
            self._first_new = Epoch(0) if writer is None else writer.epoch
        return self._factory.store.committed_epoch() >= self._first_new

    def _end(self) -> None:
        log = replace(self._factory.existing(self._name), rows_held=False)
        self._factory.registry.update(self._factory.sealer.batch, log)
        writer = self._factory.live_writer(self._name)
        if writer is not None:
            writer.store_state.log = replace(writer.log, rows_held=False)
        batch = self._factory.sealer.batch  # what a writer that died had staged in format 1 goes, too
        batch.delete_range(rows_from(log.number, 0), space_end(log.number, ROWS))


def _old(shown: LogView, after: Epoch) -> Iterator[tuple[Epoch, int, BarrierRecord]]:
    return (found for found in shown.records(after) if found[2].format == row_codec.FORMAT)
