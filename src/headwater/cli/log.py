"""``headwater log``: look into the logs of a store; rewind or drop a consumer; limit, migrate, compact."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from typing import Annotated, Any, Literal

import typer
from rich import box
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from headwater.capture import CapturedTable, SourceState
from headwater.capture.requests import COMPACT, MIGRATE, ask
from headwater.cli.terminal import amount, err, out
from headwater.errors import InputError
from headwater.log_store import (
    Compression,
    EpochEnd,
    EpochGone,
    InvalidOffset,
    KvLogStoreFactory,
    LogConsumer,
    LogNotFound,
    LogView,
    RetentionRefused,
)
from headwater.log_store.columns import RESERVED
from headwater.log_store.compaction import RUN_ROWS, Compaction, Saved
from headwater.log_store.log_events import LogEvent, events_of
from headwater.log_store.migration import EPOCHS_AT_ONCE, Migration, MigrationProgress
from headwater.log_store.retention import Retention, apply_retention, plan_retention, retention_of
from headwater.log_store.status import ConsumerStatus, LogStatus, log_status
from headwater.sources.written import WrittenOffset
from headwater.state import StateReader, open_reader, open_writer
from headwater.state.errors import StoreOwned
from headwater.stream import Epoch, EpochClock, Op, VnodeBitmap

app = typer.Typer(
    help="Look inside the logs of a store: epochs, rows, consumers; rewind, drop, limit, migrate, compact.",
    no_args_is_help=True,
)

Location = Annotated[str, typer.Argument(help="Directory or URL of the store (slatedb+s3://bucket/prefix).")]
Name = Annotated[str, typer.Argument(metavar="LOG", help="Name of the log, such as public.orders.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Packing = Literal["none", "lz4", "zstd"]
Values = Annotated[bool, typer.Option("--values", help="Show the values of the rows, which may be private.")]

_COMMAND = "headwater log"
_CHORE_SECONDS = 24 * 3600.0


@contextmanager
def _next_step(location: str, log: str) -> Iterator[None]:
    """Errors end with the next command."""
    try:
        yield
    except (EpochGone, InvalidOffset) as error:
        error.next_step = (
            error.next_step if _COMMAND in (error.next_step or "") else f"{_COMMAND} show {location} {log}"
        )
        raise
    except LogNotFound as error:
        error.next_step = f"headwater log status {location}"
        raise


# -- status --------------------------------------------------------------------------------------------------------


@app.command()
def status(
    location: Location,
    log: Annotated[str | None, typer.Argument(metavar="[LOG]", help="Only this log.")] = None,
    as_json: Json = False,
) -> None:
    """What each log holds, and how far its consumers are."""
    with open_reader(location) as store:
        try:
            found = log_status(store, log)
        except LogNotFound as error:
            error.next_step = f"headwater log status {location}" if log else f"headwater state status {location}"
            raise
        with store.snapshot() as view:
            _, captured = SourceState.read(view)
    if as_json:
        typer.echo(json.dumps([{**_status_fields(one), **_captured(captured.get(one.name))} for one in found]))
        return
    for one in found:
        _print_status(one)
        table = captured.get(one.name)
        if table is not None and table.reason:
            out.print(f"  [bold red]Captured no longer:[/] {escape(table.reason)}\n")


def _captured(table: CapturedTable | None) -> dict[str, Any]:
    return {} if table is None else {"capture": table.state.value, "capture_stopped_because": table.reason or None}


def _status_fields(log: LogStatus) -> dict[str, Any]:
    fields = {name: value for name, value in _fields(log).items() if name != "consumers"}
    fields["held_back_by"] = log.held_back_by
    fields["consumers"] = [
        {**{name: value for name, value in _fields(one).items() if name != "progress"}, "progress": one.progress.kind}
        for one in log.consumers
    ]
    return fields


def _fields(value: LogStatus | ConsumerStatus) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def _print_status(log: LogStatus) -> None:
    formats = str(log.format)
    if log.formats_held not in ((), (log.format,)):
        formats += f" (held: {', '.join(map(str, log.formats_held))}; a migration is under way)"
    table = Table(title=f"Log {escape(log.name)}", title_justify="left", show_header=False, box=box.SIMPLE_HEAD)
    table.add_row("format", formats)
    table.add_row("vnodes", str(log.vnode_count))
    table.add_row(
        "epochs held", f"{log.epochs:,}" + (f"  ({_when(log.oldest)} to {_when(log.newest)} UTC)" * bool(log.epochs))
    )
    table.add_row("rows", f"{log.rows:,}")
    table.add_row("bytes", amount(log.bytes))
    table.add_row("oldest epoch", f"{_span(log.oldest_age_seconds)} old" if log.epochs else "none")
    if log.dropped:
        table.add_row("dropped by retention", f"up to epoch {int(log.dropped)}")
    out.print(table)
    if not log.consumers:
        out.print("  No consumers: this log forgets nothing.\n", style="dim")
        return
    lags = Table(title="Consumers, and what they have not delivered", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("consumer", "delivered epoch", "epochs", "rows", "bytes", "seconds"):
        lags.add_column(column, justify="left" if column == "consumer" else "right", no_wrap=column != "consumer")
    for one in log.consumers:
        name = escape(one.name) + (" [dim](remote)[/]" if one.is_remote else "")
        lag = (f"{one.lag_epochs:,}", f"{one.lag_rows:,}", amount(one.lag_bytes), f"{one.lag_seconds:,.1f}")
        lags.add_row(name, str(int(one.delivered)), *lag)
    out.print(lags)
    for one in log.consumers:
        if one.missed:
            out.print(f"  [bold red]{escape(one.name)}[/] missed epochs that retention dropped.\n")
        elif one.holds_back:
            out.print(f"  [bold yellow]{escape(one.name)}[/] holds the log back.\n")


def _when(epoch: Epoch | None) -> str:
    return "" if epoch is None else f"{epoch.to_datetime():%Y-%m-%d %H:%M:%S}"


def _span(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [f"{count} {unit}" for count, unit in ((days, "d"), (hours, "h"), (minutes, "min")) if count]
    return " ".join(parts[:2]) or f"{rest} s"


# -- show and tail ---------------------------------------------------------------------------------------------------


@app.command()
def show(
    location: Location,
    log: Name,
    epoch: Annotated[int | None, typer.Option(help="The rows of this epoch.")] = None,
    vnode: Annotated[int | None, typer.Option(min=0, help="The rows of this vnode.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many epochs or rows.")] = 20,
    values: Values = False,
    as_json: Json = False,
) -> None:
    """The newest epochs of a log; with --epoch, --vnode or --values the rows, oldest first."""
    with _next_step(location, log), open_reader(location) as store, store.snapshot() as view:
        shown = LogView.open(view, log)
        if epoch is None and vnode is None and not values:
            ends = list(shown.epochs())[-limit:]
            if as_json:
                for end in ends:
                    typer.echo(json.dumps(_end_fields(end)))
            else:
                _print_epochs(log, ends)
                _print_events(list(events_of(view, log, 0, int(view.epoch)))[-limit:])
            return
        rows = list(islice(_rows(shown, epoch, vnode, values), limit))
    if as_json:
        for row in rows:
            typer.echo(json.dumps(row, default=_plain))
        return
    table = Table(title=f"Log {escape(log)}", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("epoch", "vnode", "seq", "op", *(("values",) if values else ())):
        table.add_column(column, justify="right" if column in ("epoch", "vnode", "seq") else "left")
    for row in rows:
        cells = [str(row["epoch"]), str(row["vnode"]), str(row["seq"]), str(row["op"])]
        shown_values = [Text(json.dumps(row["values"], default=_plain, ensure_ascii=False))] if values else []
        table.add_row(*cells, *shown_values)
    out.print(table)


def _print_events(events: Sequence[LogEvent]) -> None:
    """What happened to the table beside its rows."""
    for event in events:
        told = {name: value for name, value in event.detail.items() if value and name not in ("defaults", "position")}
        shown = f": {json.dumps(told, ensure_ascii=False)}" if told else ""
        out.print(f"  epoch {int(event.epoch)}, before seq {event.seq}: [bold]{event.kind}[/]{escape(shown)}")


def _rows(shown: LogView, epoch: int | None, vnode: int | None, values: bool) -> Iterator[dict[str, Any]]:
    wanted = None
    if vnode is not None:
        if vnode >= shown.log.vnode_count:
            raise InputError(
                f"Received vnode {vnode}; log {shown.log.name!r} has {shown.log.vnode_count} vnodes.",
                next_step=f"Use 0 to {shown.log.vnode_count - 1}.",
            )
        wanted = VnodeBitmap.of([vnode], shown.log.vnode_count)
    after, upto = shown.bounds().gone, shown.sealed
    if epoch is not None:
        upto = Epoch(epoch)
        after = upto.prev()
    for batch in shown.read_range(after, upto, wanted):
        payload = [name for name in batch.schema.names if name not in RESERVED]
        for place in range(batch.num_rows):
            row: dict[str, Any] = {name[1:]: batch.column(name)[place].as_py() for name in RESERVED}
            row = {name: row[name] for name in ("epoch", "vnode", "seq", "op")}
            row["op"] = Op(row["op"]).change_type
            if values:
                row["values"] = {name: batch.column(name)[place].as_py() for name in payload}
            yield row


def _plain(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def _end_fields(end: EpochEnd) -> dict[str, Any]:
    return {
        "epoch": int(end.epoch),
        "time": end.epoch.to_datetime().isoformat(),
        "rows": end.rows,
        "bytes": end.size,
        "formats": list(end.formats.numbers),
        "checkpoint": end.is_checkpoint,
        "schema_version": end.schema_version,
        "vnodes": len(end.vnodes),
        "compacted": end.compacted,
        "stop": end.is_stop,
    }


def _print_epochs(log: str, ends: list[EpochEnd]) -> None:
    if not ends:
        out.print(f"Log {escape(log)} holds no epochs.")
        return
    table = Table(title=f"Log {escape(log)}", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("epoch", "time (UTC)", "rows", "bytes", "format", "schema", ""):
        table.add_column(column, justify="left" if column in ("time (UTC)", "") else "right", no_wrap=True)
    for end in ends:
        notes = ((end.compacted, "compacted"), (not end.is_checkpoint, "no checkpoint"), (end.is_stop, "stop"))
        formats = ", ".join(map(str, end.formats.numbers))
        note = ", ".join(text for is_so, text in notes if is_so)
        time_ = f"{end.epoch.to_datetime():%Y-%m-%d %H:%M:%S.%f}"[:-3]
        table.add_row(
            str(int(end.epoch)), time_, f"{end.rows:,}", amount(end.size), formats, str(end.schema_version), note
        )
    out.print(table)


@app.command()
def tail(
    location: Location,
    log: Name,
    after: Annotated[
        int | None, typer.Option("--after", help="Begin after this epoch; by default with what comes.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="End after so many epochs.")] = None,
    values: Values = False,
    as_json: Json = False,
) -> None:
    """Follow a log: a line for each epoch as it is sealed, until Ctrl-C."""
    with _next_step(location, log), open_reader(location) as store:
        for end, rows in islice(_follow(store, log, after, values), limit):
            if as_json:
                typer.echo(json.dumps({**_end_fields(end), **({"values": rows} if values else {})}, default=_plain))
            else:
                when = f"{end.epoch.to_datetime():%Y-%m-%d %H:%M:%S.%f}"[:-3]
                typer.echo(f"{int(end.epoch)}  {when}  {end.rows:,} rows  {amount(end.size)}")
                for row in rows:
                    typer.echo(f"  {row['op']:<16} {json.dumps(row['values'], default=_plain, ensure_ascii=False)}")


def _follow(
    store: StateReader, log: str, after: int | None, values: bool
) -> Iterator[tuple[EpochEnd, list[dict[str, Any]]]]:
    with store.snapshot() as view:
        shown = LogView.open(view, log)
        place = shown.sealed if after is None else Epoch(after)
        shown.check_range(place, shown.sealed)
    while True:
        if store.wait_for_epoch(place, 1.0) is None:
            continue
        with store.snapshot() as view:  # closed before anything waits for the terminal
            shown = LogView.open(view, log)
            shown.check_range(place, shown.sealed)
            ends = [(end, list(_rows(shown, end.epoch, None, True)) if values else []) for end in shown.epochs(place)]
            place = shown.sealed
        yield from ends


# -- consumers -----------------------------------------------------------------------------------------------------


@contextmanager
def _free(command: str) -> Iterator[None]:
    """Who is refused because a process has the store is told what to do."""
    try:
        yield
    except StoreOwned as error:
        error.next_step = f"Stop that process, then: {command}"
        raise


def _known(location: str, log: str, consumer: str) -> ConsumerStatus:
    with open_reader(location) as store:
        (found,) = log_status(store, log)
    for one in found.consumers:
        if one.name == consumer:
            return one
    names = ", ".join(one.name for one in found.consumers) or "none"
    raise LogNotFound(f"Log {log!r} has no consumer {consumer!r}; there are: {names}.")


@app.command()
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
    with _next_step(location, log), _free(f"{command} {to_epoch}"):
        try:
            if _known(location, log, consumer).is_remote:
                with LogConsumer.open(location, log, consumer) as remote:
                    remote.rewind(target)
            else:
                with _owned(location) as factory:
                    factory.consumers.rewind(factory.existing(log), consumer, target)
                    _seal(factory)
        except EpochGone as error:
            error.next_step = f"{command} {error.oldest}"
            raise
    if as_json:
        typer.echo(json.dumps({"log": log, "consumer": consumer, "epoch": to_epoch}))
        return
    out.print(f"Consumer [bold]{escape(consumer)}[/] of {escape(log)} gets again what came after epoch {to_epoch}.")


@app.command()
def drop(
    location: Location,
    log: Name,
    consumer: Annotated[str, typer.Argument(help="Name of the consumer.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Forget a consumer: the log waits for it no longer. It must not be running."""
    with _next_step(location, log), _free(f"headwater log drop {location} {log} {consumer}"):
        known = _known(location, log, consumer)
        if not yes:
            typer.confirm(f"{known.lag_rows:,} rows are not delivered to {consumer}. Forget it?", abort=True, err=True)
        if known.is_remote:
            with LogConsumer.open(location, log, consumer) as remote:
                remote.drop()
        else:
            with _owned(location) as factory:
                factory.consumers.drop(factory.sealer.batch, log, consumer)
                _seal(factory)
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


@app.command()
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
    with _next_step(location, log), _free(f"headwater log retain {location} {log}"):
        if dry_run:
            with open_reader(location) as store:
                plan = plan_retention(store, log, wanted)
        else:
            with _owned(location) as factory:
                try:
                    plan = apply_retention(factory, log, wanted)
                except RetentionRefused as error:
                    error.next_step = f"Let it catch up, or drop it: headwater log drop {location} {log} CONSUMER"
                    raise
                for _ in range(2):  # what nobody needs is announced, then deleted
                    _seal(factory)
    if as_json:
        fields = {"upto": int(plan.upto), "epochs": plan.epochs, "rows": plan.rows, "bytes": plan.bytes}
        typer.echo(json.dumps({"log": log, **fields, "needed_by": list(plan.needed_by), "dry_run": dry_run}))
        return
    verb = "Would drop" if dry_run else "Dropped"
    out.print(f"{verb} {plan.epochs:,} epochs of {escape(log)}: {plan.rows:,} rows, {amount(plan.bytes)}.")
    if plan.needed_by:
        names = ", ".join(plan.needed_by)
        out.print(f"[bold yellow]{escape(names)}[/] {'needs' if dry_run else 'missed'} some of them.")


@app.command()
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
    with _next_step(location, log), _free(f"headwater log retention {location} {log}"):
        if clear or is_set:
            with _owned(location) as factory:
                factory.retention.put(factory.sealer.batch, log, None if clear else wanted)
                _seal(factory)
        with open_reader(location) as store, store.snapshot() as view:
            LogView.open(view, log)
            found = retention_of(view, log)
    if as_json:
        typer.echo(json.dumps({"log": log, "policy": None if found is None else asdict(found)}))
    elif found is None:
        out.print(f"Log {escape(log)} has no policy: it forgets what all its consumers have delivered, nothing else.")
    else:
        bounds = [amount(found.max_bytes)] if found.max_bytes is not None else []
        bounds += [_span(found.max_age_seconds)] if found.max_age_seconds is not None else []
        unread = "also what a consumer has not read" if found.force else "but nothing that a consumer needs"
        out.print(f"Log {escape(log)} holds at most {' and '.join(bounds)}; the rest is dropped, {unread}.")


# -- migrate and compact ---------------------------------------------------------------------------------------------


@contextmanager
def _owned(location: str) -> Iterator[KvLogStoreFactory]:
    open_reader(location).close()  # a store that does not exist is not made
    with open_writer(location) as store:
        factory = KvLogStoreFactory(store)
        try:
            yield factory
        finally:
            factory.close()


def _seal(factory: KvLogStoreFactory) -> None:
    clock = EpochClock(lambda: time.time_ns() // 1_000_000, factory.store.committed_epoch())
    factory.sealer.seal(clock.next())


@app.command()
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
    except StoreOwned as owned:
        made = _asked_of_capture(location, MIGRATE, log, owned)
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
    with _next_step(location, log), _free(f"headwater log migrate {location} {log}"), _owned(location) as factory:
        migration = Migration(factory, log, compression=compression)
        bar = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), console=err, disable=quiet)
        with bar:
            task = bar.add_task("epochs", total=None)
            done = False
            while not done:
                done = migration.step(at_once)
                _seal(factory)
                made = migration.progress
                bar.update(task, completed=made.epochs, total=made.epochs + made.epochs_left)
    return migration.progress


@app.command()
def compact(
    location: Location,
    log: Name,
    rows: Annotated[int, typer.Option(min=1, help="Rows of one run, whose keys are held in memory.")] = RUN_ROWS,
    as_json: Json = False,
) -> None:
    """Keep only the newest row of each key in the backlog, also while its capture runs and it is read."""
    try:
        saved = _compact(location, log, rows)
    except StoreOwned as owned:
        saved = Saved(**_asked_of_capture(location, COMPACT, log, owned))
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
    with _next_step(location, log), _free(f"headwater log compact {location} {log}"), _owned(location) as factory:
        compaction = Compaction(factory, log)
        done = False
        while not done:
            done = compaction.step(rows)
            _seal(factory)
    return compaction.saved


def _asked_of_capture(location: str, chore: str, log: str, owned: StoreOwned) -> dict[str, Any]:
    """What the capture that has the store made of it, little by little with its seals.

    :raises StoreOwned: what has the store is no capture.
    """
    with _next_step(location, log), open_reader(location) as store, store.snapshot() as view:
        LogView.open(view, log)
        record, _ = SourceState.read(view)
    if record is None or isinstance(record.offset, WrittenOffset):
        raise owned
    with err.status(f"the capture that runs does it beside its work ({chore}) …"):
        return ask(location, chore, {"log": log}, seconds=_CHORE_SECONDS)
