"""Upkeep of logs: rewind or drop a consumer; retain, retention, migrate, compact."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from headwater.capture import SourceState
from headwater.cli.log_access import Json, Location, Name, free, next_step, owned, seal, span
from headwater.cli.terminal import amount, err, out
from headwater.control.command import CompactLog, MigrateLog
from headwater.control.request import ask_capture
from headwater.errors import InputError
from headwater.log_store import Compression, EpochGone, KvLogStoreReader, LogNotFound, LogView, RetentionRefused
from headwater.log_store.compaction import RUN_ROWS, Compaction, Saved
from headwater.log_store.migration import EPOCHS_AT_ONCE, Migration, MigrationProgress
from headwater.log_store.retention import Retention, apply_retention, plan_retention, retention_of
from headwater.log_store.status import ConsumerStatus, log_status
from headwater.sources.written import WrittenOffset
from headwater.state import open_reader
from headwater.state.errors import StoreOwned
from headwater.stream import Epoch

Packing = Literal["none", "lz4", "zstd"]
_CHORE_SECONDS = 24 * 3600.0

# -- consumers -----------------------------------------------------------------------------------------------------


def _known(location: str, log: str, consumer: str) -> ConsumerStatus:
    with open_reader(location) as store:
        (found,) = log_status(store, log)
    for one in found.consumers:
        if one.name == consumer:
            return one
    names = ", ".join(one.name for one in found.consumers) or "none"
    raise LogNotFound(f"Log {log!r} has no consumer {consumer!r}; there are: {names}.")


def rewind(
    location: Location,
    log: Name,
    consumer: Annotated[str, typer.Argument(help="Name of the consumer.")],
    to_epoch: Annotated[int, typer.Option("--to-epoch", help="Deliver again what came after this epoch.")],
    as_json: Json = False,
) -> None:
    """Send a consumer back: it gets again what came after an epoch. It must not be running."""
    target = Epoch(to_epoch)
    command = f"headwater log rewind {location} {log} {consumer} --to-epoch"
    with next_step(location, log), free(f"{command} {to_epoch}"):
        try:
            _known(location, log, consumer)
            with KvLogStoreReader.open(location, consumer, [log]) as reader:
                reader.rewind(target)
        except EpochGone as error:
            error.next_step = f"{command} {error.oldest}"
            raise
    if as_json:
        typer.echo(json.dumps({"log": log, "consumer": consumer, "epoch": to_epoch}))
        return
    out.print(f"Consumer [bold]{escape(consumer)}[/] of {escape(log)} gets again what came after epoch {to_epoch}.")


def drop(
    location: Location,
    log: Name,
    consumer: Annotated[str, typer.Argument(help="Name of the consumer.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Forget a consumer: the log waits for it no longer. It must not be running."""
    with next_step(location, log), free(f"headwater log drop {location} {log} {consumer}"):
        known = _known(location, log, consumer)
        if not yes:
            typer.confirm(f"{known.lag_rows:,} rows are not delivered to {consumer}. Forget it?", abort=True, err=True)
        with KvLogStoreReader.open(location, consumer, [log]) as reader:
            reader.drop([log])
    if as_json:
        typer.echo(json.dumps({"log": log, "consumer": consumer, "rows_not_delivered": known.lag_rows}))
        return
    out.print(f"Log {escape(log)} has no consumer [bold]{escape(consumer)}[/] any more.")


# -- retention -----------------------------------------------------------------------------------------------------

_BYTES = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_SECONDS = {"": 1, "S": 1, "MIN": 60, "H": 3600, "D": 86_400}


def _measure(text: str | None, units: dict[str, int], option: str) -> float | None:
    """A number with a unit. :raises InputError: something else."""
    if text is None:
        return None
    number = text.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    unit = units.get(text.removeprefix(number).upper())
    try:
        value = float(number) * unit if unit is not None else -1.0
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        names = ", ".join(f"{name.lower()}" for name in units if name)
        raise InputError(f"Received {option} {text!r}; valid is a number and a unit: {names}.")
    return value


def _retention(max_bytes: str | None, max_age: str | None, force: bool) -> Retention:
    size = _measure(max_bytes, _BYTES, "--max-bytes")
    return Retention(None if size is None else int(size), _measure(max_age, _SECONDS, "--max-age"), force)


MaxBytes = Annotated[str | None, typer.Option("--max-bytes", help="The most that the log may hold, such as 50GiB.")]
MaxAge = Annotated[str | None, typer.Option("--max-age", help="How old its epochs may be, such as 90s, 12h or 7d.")]
Force = Annotated[bool, typer.Option("--force", help="Also what a consumer has not read: it stops and says so.")]


def retain(
    location: Location,
    log: Name,
    max_bytes: MaxBytes = None,
    max_age: MaxAge = None,
    force: Force = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would go; the writer may run.")] = False,
    as_json: Json = False,
) -> None:
    """Drop the oldest epochs of a log, once. Its writer must not be running; see also: retention."""
    wanted = _retention(max_bytes, max_age, force)
    if wanted.max_bytes is None and wanted.max_age_seconds is None:
        raise InputError("Received no bound.", next_step="Give --max-bytes, --max-age or both.")
    with next_step(location, log), free(f"headwater log retain {location} {log}"):
        if dry_run:
            with open_reader(location) as store:
                plan = plan_retention(store, log, wanted)
        else:
            with owned(location) as factory:
                try:
                    plan = apply_retention(factory, log, wanted)
                except RetentionRefused as error:
                    error.next_step = f"Let it catch up, or drop it: headwater log drop {location} {log} CONSUMER"
                    raise
                for _ in range(2):  # what nobody needs is announced, then deleted
                    seal(factory)
    if as_json:
        fields = {"upto": int(plan.upto), "epochs": plan.epochs, "rows": plan.rows, "bytes": plan.bytes}
        typer.echo(json.dumps({"log": log, **fields, "needed_by": list(plan.needed_by), "dry_run": dry_run}))
        return
    verb = "Would drop" if dry_run else "Dropped"
    out.print(f"{verb} {plan.epochs:,} epochs of {escape(log)}: {plan.rows:,} rows, {amount(plan.bytes)}.")
    if plan.needed_by:
        names = ", ".join(plan.needed_by)
        out.print(f"[bold yellow]{escape(names)}[/] {'needs' if dry_run else 'missed'} some of them.")


def retention(
    location: Location,
    log: Name,
    max_bytes: MaxBytes = None,
    max_age: MaxAge = None,
    force: Force = False,
    clear: Annotated[bool, typer.Option("--clear", help="Take the policy away.")] = False,
    as_json: Json = False,
) -> None:
    """Show the policy by which a log is limited; with bounds, set it (the writer must not be running then)."""
    wanted = _retention(max_bytes, max_age, force)
    is_set = wanted != Retention()
    if clear and is_set:
        raise InputError("Received bounds and --clear.", next_step="Give one of both.")
    if force and wanted == Retention(force=True):
        raise InputError("Received --force without a bound.", next_step="Give --max-bytes, --max-age or both.")
    with next_step(location, log), free(f"headwater log retention {location} {log}"):
        if clear or is_set:
            with owned(location) as factory:
                factory.retention.put(factory.sealer.batch, log, None if clear else wanted)
                seal(factory)
        with open_reader(location) as store, store.snapshot() as view:
            LogView.open(view, log)
            found = retention_of(view, log)
    if as_json:
        typer.echo(json.dumps({"log": log, "policy": None if found is None else asdict(found)}))
    elif found is None:
        out.print(f"Log {escape(log)} has no policy: it forgets what all its consumers have delivered, nothing else.")
    else:
        bounds = [amount(found.max_bytes)] if found.max_bytes is not None else []
        bounds += [span(found.max_age_seconds)] if found.max_age_seconds is not None else []
        unread = "also what a consumer has not read" if found.force else "but nothing that a consumer needs"
        out.print(f"Log {escape(log)} holds at most {' and '.join(bounds)}; the rest is dropped, {unread}.")


# -- migrate and compact ---------------------------------------------------------------------------------------------


def migrate(
    location: Location,
    log: Name,
    at_once: Annotated[int, typer.Option(min=1, help="Epochs that are rewritten in one seal.")] = EPOCHS_AT_ONCE,
    compression: Annotated[Packing, typer.Option(help="Of the rewritten chunks.")] = "none",
    as_json: Json = False,
) -> None:
    """Rewrite a log of format 1 in format 2, also while its capture runs and it is read."""
    try:
        made = asdict(_migrate(location, log, at_once, Compression[compression.upper()], quiet=as_json))
    except StoreOwned as held:
        made = _asked_of_capture(location, MigrateLog(log), held)
    if as_json:
        typer.echo(json.dumps(made))
    elif not made["epochs"]:
        out.print(f"Log {escape(log)} is in format 2; nothing had to be rewritten.")
    else:
        out.print(
            f"Migrated {escape(log)} to format 2: {made['epochs']:,} epochs, {made['rows']:,} rows, "
            f"{amount(made['bytes_before'])} → {amount(made['bytes'])}."
        )


def _migrate(location: str, log: str, at_once: int, compression: Compression, *, quiet: bool) -> MigrationProgress:
    with next_step(location, log), free(f"headwater log migrate {location} {log}"), owned(location) as factory:
        migration = Migration(factory, log, compression=compression)
        bar = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), console=err, disable=quiet)
        with bar:
            task = bar.add_task("epochs", total=None)
            done = False
            while not done:
                done = migration.step(at_once)
                seal(factory)
                made = migration.progress
                bar.update(task, completed=made.epochs, total=made.epochs + made.epochs_left)
    return migration.progress


def compact(
    location: Location,
    log: Name,
    rows: Annotated[int, typer.Option(min=1, help="Rows of one run, whose keys are held in memory.")] = RUN_ROWS,
    as_json: Json = False,
) -> None:
    """Keep only the newest row of each key in the backlog, also while its capture runs and it is read."""
    try:
        saved = _compact(location, log, rows)
    except StoreOwned as held:
        saved = Saved(**_asked_of_capture(location, CompactLog(log), held))
    if as_json:
        typer.echo(json.dumps(asdict(saved)))
        return
    out.print(
        f"Compacted {escape(log)}: {saved.rows_before:,} → {saved.rows:,} rows, "
        f"{amount(saved.bytes_before)} → {amount(saved.bytes)} in {saved.epochs:,} epochs."
    )
    if saved.epochs_left_alone:
        out.print(
            f"{saved.epochs_left_alone:,} epochs were left alone: a pin shows them, or a consumer is inside of them."
        )


def _compact(location: str, log: str, rows: int) -> Saved:
    with next_step(location, log), free(f"headwater log compact {location} {log}"), owned(location) as factory:
        compaction = Compaction(factory, log)
        done = False
        while not done:
            done = compaction.step(rows)
            seal(factory)
    return compaction.saved


def _asked_of_capture(location: str, command: MigrateLog | CompactLog, held: StoreOwned) -> dict[str, Any]:
    """What the capture that has the store made of it, little by little with its seals.

    :raises StoreOwned: what has the store is no capture.
    """
    with next_step(location, command.log), open_reader(location) as store, store.snapshot() as view:
        LogView.open(view, command.log)
        record, _ = SourceState.read(view)
    if record is None or isinstance(record.offset, WrittenOffset):
        raise held
    with err.status("The running capture does it beside its work …"):
        return ask_capture(location, command, seconds=_CHORE_SECONDS)
