"""``headwater log``: look into the logs of a store; rewind or drop a consumer; limit, migrate, compact."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from headwater.capture import CapturedTable, SourceState
from headwater.cli import log_upkeep
from headwater.cli.log_access import Json, Location, Name, next_step, span
from headwater.cli.terminal import amount, out
from headwater.errors import InputError
from headwater.log_store import (
    EpochEnd,
    LogNotFound,
    LogView,
)
from headwater.log_store.columns import RESERVED
from headwater.log_store.log_events import LogEvent, events_of
from headwater.log_store.status import ConsumerStatus, LogStatus, log_status
from headwater.state import StateReader, open_reader
from headwater.stream import Epoch, Op, VnodeBitmap

app = typer.Typer(
    help="Look inside the logs of a store: epochs, rows, consumers; rewind, drop, limit, migrate, compact.",
    no_args_is_help=True,
)

Values = Annotated[bool, typer.Option("--values", help="Show the values of the rows, which may be private.")]


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
    table.add_row("oldest epoch", f"{span(log.oldest_age_seconds)} old" if log.epochs else "none")
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
        name = escape(one.name)
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
    with next_step(location, log), open_reader(location) as store, store.snapshot() as view:
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
    with next_step(location, log), open_reader(location) as store:
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


# -- upkeep --------------------------------------------------------------------------------------------------------

for _command in (
    log_upkeep.rewind,
    log_upkeep.drop,
    log_upkeep.retain,
    log_upkeep.retention,
    log_upkeep.migrate,
    log_upkeep.compact,
):
    app.command()(_command)
