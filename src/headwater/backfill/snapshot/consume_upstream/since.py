"""Since: where a query begins that wants no snapshot, only what changed after an epoch or a time."""

from __future__ import annotations

from headwater.backfill.snapshot.consume_upstream.errors import RetentionMiss, SinceOutOfRange
from headwater.backfill.snapshot.consume_upstream.upstream_table import UpstreamTable


def resolve_since(table: UpstreamTable, epoch: int | None, time_ms: int | None) -> int | None:
    """The epoch after which changes are read: *epoch*, or the last that was committed before *time_ms*.

    :raises SinceOutOfRange: it is not there yet, or the changes after it are no longer kept.
    :raises InvalidUpstream: the changes after it are not written.
    """
    if epoch is None and time_ms is None:
        return None
    newest = table.newest_epoch()
    found = epoch
    if found is None:
        assert time_ms is not None
        try:
            found = table.epoch_at(time_ms)
        except RetentionMiss as miss:
            raise SinceOutOfRange(
                f"What changed from that time on is not all there: {miss.message}",
                next_step="Begin later, or leave 'since' out to read the table as it is.",
            ) from None
        if found is None:
            raise SinceOutOfRange(
                f"Table {table.name} has nothing from that time on; its newest version is"
                f" {table.commit_version(newest)}.",
                next_step="Begin at an earlier time, or leave 'since' out to read the table as it is.",
            )
    if found > newest:
        raise SinceOutOfRange(
            f"Table {table.name} has no version {table.commit_version(found)} yet; its newest is"
            f" {table.commit_version(newest)}.",
            next_step="Begin at one that is there, or leave 'since' out to read the table as it is.",
        )
    try:
        table.check_changes(found)
        following = table.next_epoch(found)
        if following is not None:
            table.change_cuts(found, following, (0, table.vnode_count))
    except RetentionMiss as miss:
        raise SinceOutOfRange(
            f"What changed after version {table.commit_version(found)} cannot be read: {miss.message}",
            next_step="Begin later, or leave 'since' out to read the table as it is.",
        ) from None
    return found
