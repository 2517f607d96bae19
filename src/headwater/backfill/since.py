"""Since: where a query begins that delivers no history: an epoch, or a time.

An epoch stands for the changes after it, a time for those that were committed from then on. Epochs are never divided:
what was committed just before the time, in the same epoch, comes with it. An upstream table reads the same text, of a
version instead of an epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from headwater.backfill.errors import InvalidQuery, SinceGone
from headwater.backfill.snapshot.consume_upstream.errors import RetentionMiss, SinceOutOfRange
from headwater.backfill.snapshot.consume_upstream.upstream_table import UpstreamTable
from headwater.log_store import LogView
from headwater.log_store.log import LogRegistry
from headwater.log_store.truncation import announced
from headwater.state import Snapshot
from headwater.stream import Epoch, EpochError

_ORIGIN: Final = Epoch(0).to_datetime().astimezone(UTC)
"""No epoch is of an earlier time; who names one wants everything."""
_EXAMPLE: Final = "2026-05-31T12:00:00Z"


def parse_since(name: str, text: str, number: str = "an epoch") -> int | datetime:
    """The number, or the time with its zone, that option *name* was given.

    :param number: what a number stands for, for errors.
    :raises InvalidQuery: *text* is neither, or a time without a zone.
    """
    if text.isdecimal():
        return int(text)
    return parse_time(name, text, f"neither {number} nor a time", f"{number}, or a time")


def parse_time(name: str, text: str, problem: str = "not a time", valid: str = "a time") -> datetime:
    """The time with its zone that option *name* was given.

    :param problem: what *text* is if it is no time, for errors. :param valid: what is valid, for errors.
    :raises InvalidQuery: *text* is not a time, or has no zone.
    """
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidQuery(
            f"Received {name}={text!r}, which is {problem}.", next_step=f"Write {valid} with its zone: {_EXAMPLE}."
        ) from None
    if moment.tzinfo is None:
        raise InvalidQuery(
            f"Received {name}={text!r}, a time without its zone.",
            next_step=f"Write the time with its zone: {moment.isoformat()}Z if it is in UTC.",
        )
    return moment


def epoch_since(text: str) -> tuple[Epoch, bool]:
    """The epoch that *text* names or falls into, and whether it is a time.

    :raises InvalidQuery: it is neither an epoch nor a time with its zone.
    """
    wanted = _epoch_or_time(text)
    if isinstance(wanted, datetime):
        return Epoch.from_datetime(max(wanted, _ORIGIN)), True
    return wanted, False


def _epoch_or_time(text: str) -> Epoch | datetime:
    """:raises InvalidQuery: it is neither an epoch nor a time with its zone."""
    start = parse_since("since", text)
    try:
        return Epoch(start) if isinstance(start, int) else start
    except EpochError:
        raise InvalidQuery(
            f"Received since={text!r}, which is neither an epoch nor a time.",
            next_step=f"Write an epoch as headwater status shows it, or a time with its zone: {_EXAMPLE}.",
        ) from None


def resolve_since(view: Snapshot, text: str, tables: Sequence[str], now_ms: int) -> Epoch:
    """The epoch after which a new query over *tables* begins, at the time *now_ms*.

    :raises SinceGone: a log of them no longer holds what came since then. :raises InvalidQuery: it is not yet.
    """
    wanted, is_time = epoch_since(text)
    registry = LogRegistry.load(view)
    logs = [LogView(view, registry.get(name)) for name in tables]
    after = wanted
    if is_time and wanted <= view.epoch:
        # an epoch bears the time of its beginning: the one that the time falls into began before it
        began = [int(end.epoch) for log in logs for end in log.epochs(0, int(wanted))]
        after = Epoch(max(began)).prev() if began else wanted
    oldest = max((announced(view, name) for name in tables), default=Epoch(0))
    newest = view.epoch
    now = Epoch.from_unix_ms(now_ms)
    if after > (max(newest, now) if is_time else newest):
        raise InvalidQuery(
            f"What comes since {text} is not there yet: the newest epoch is {int(newest)} ({_when(newest)}).",
            next_step=f"Use {int(newest)} for all that comes from now on.",
        )
    if wanted < oldest:
        raise SinceGone(
            f"The logs hold the epochs after {int(oldest)} ({_when(oldest)}) up to {int(newest)} ({_when(newest)}); "
            f"what came since {text} is not all there any more.",
            int(oldest),
            next_step=f"Use since = {int(oldest)}, or take the history, too: leave since out.",
        )
    return min(max(after, oldest), newest)


def resolve_upstream_since(table: UpstreamTable, text: str) -> int:
    """The epoch after which changes are read: that of *text*, or the last that was committed before its time.

    :raises SinceOutOfRange: it is not there yet, or the changes after it are no longer kept.
    :raises InvalidUpstream: the changes after it are not written.
    """
    wanted, newest = _epoch_or_time(text), table.newest_epoch()
    if isinstance(wanted, datetime):
        try:
            at = table.epoch_at(int(wanted.timestamp() * 1000))
        except RetentionMiss as miss:
            raise SinceOutOfRange(
                f"What changed from that time on is not all there: {miss.message}",
                next_step="Begin later, or leave 'since' out to read the table as it is.",
            ) from None
        if at is None:
            raise SinceOutOfRange(
                f"Table {table.name} has nothing from that time on; its newest version is"
                f" {table.commit_version(newest)}.",
                next_step="Begin at an earlier time, or leave 'since' out to read the table as it is.",
            )
        found = at
    else:
        found = int(wanted)
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


def _when(epoch: Epoch) -> str:
    return epoch.to_datetime().astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
