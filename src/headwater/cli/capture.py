"""``headwater capture``: follow a database into its logs. ``headwater add-table``: one more table of a running one."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from headwater.capture import Capture, CaptureOptions, CaptureState
from headwater.capture.metrics import serve_capture
from headwater.capture.options import OnRewrite
from headwater.cli.terminal import amount, err
from headwater.control.command import AddTables
from headwater.control.request import ask_capture
from headwater.databases.secret_files import in_file
from headwater.databases.timeouts import TIMEOUT_SECONDS
from headwater.errors import InputError
from headwater.sources.dsn import current_dsn, has_password
from headwater.sources.evolution import SchemaPolicy
from headwater.sources.open import open_source
from headwater.sources.table import SpecialValues
from headwater.sources.target_names import path_component
from headwater.state.location import split_location
from headwater.stopping import stop_on_signals
from headwater.system.memory import keep_freed_memory

_LINE_SECONDS = 0.5
_STORE = "headwater-store"
StoreOption = Annotated[
    str, typer.Option("--store", help="Directory or URL of the store (slatedb+s3://bucket/prefix).")
]


def capture(
    dsn: Annotated[
        str | None,
        typer.Argument(
            help="The database: postgresql://user@host/name, or the same with citus, mysql, mongodb or sqlserver. "
            "Other users can see it: with a password, use --dsn-env or --dsn-file."
        ),
    ] = None,
    dsn_env: Annotated[str | None, typer.Option(help="Environment variable with the connection string.")] = None,
    dsn_file: Annotated[
        Path | None, typer.Option(help="File with the connection string; it is read again for each connection.")
    ] = None,
    table: Annotated[list[str] | None, typer.Option(help="A table to capture; again for more.")] = None,
    store: StoreOption = _STORE,
    schema_policy: Annotated[SchemaPolicy, typer.Option(help="When the columns of a table change.")] = (
        SchemaPolicy.EVOLVE
    ),
    on_rewrite: Annotated[
        OnRewrite, typer.Option(help="Read a table again when its rows changed without being logged, or stop it.")
    ] = OnRewrite.REREAD,
    special_values: Annotated[
        list[str] | None,
        typer.Option(help="What Arrow cannot hold: schema.table[.column]=stop|null|text|park; again for more."),
    ] = None,
    columns: Annotated[
        list[str] | None,
        typer.Option(help="Of a collection: database.name=inferred|document|struct<name: type, …>; again for more."),
    ] = None,
    epoch_ms: Annotated[
        int, typer.Option(help="Milliseconds that a change waits for the seal of its epoch at most.", min=1)
    ] = 200,
    slot: Annotated[str, typer.Option(help="The replication slot; made if it is not there.")] = "headwater",
    publication: Annotated[str, typer.Option(help="The publication; made if it is not there.")] = "headwater",
    poll: Annotated[bool, typer.Option(help="By SQL: where a pooler blocks the replication protocol.")] = False,
    takeover: Annotated[bool, typer.Option(help="Fence another capture of the same store.")] = False,
    renew: Annotated[
        bool, typer.Option("--renew", help="Go on after a gap: a new slot, and every table is read once more.")
    ] = False,
    timeout_seconds: Annotated[
        float, typer.Option(help="Reconnect when the database is silent for this many seconds.", min=2.0)
    ] = TIMEOUT_SECONDS,
    seconds: Annotated[float | None, typer.Option(help="Stop after so long.", min=0.0)] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Serve http://127.0.0.1:PORT/metrics for Prometheus.", min=0, max=65535)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line instead of a live line.")] = False,
) -> None:
    """Follow a database's log: every change of the tables, once, durable before the database may forget it."""
    address = _address(dsn, dsn_env, dsn_file)
    keep_freed_memory()
    options = CaptureOptions(epoch_seconds=epoch_ms / 1000, on_rewrite=on_rewrite)
    source = open_source(
        address,
        spill=_spill(store),
        schema_policy=schema_policy,
        special_values=dict(map(_special, special_values or [])),
        slot=slot,
        publication=publication,
        poll=poll,
        columns=dict(map(_columns, columns or [])),
        timeout_seconds=timeout_seconds,
    )
    running = Capture(source, store, table or [], options, takeover=takeover, renew=renew)
    stop_on_signals(running.stop, signal.SIGTERM, signal.SIGINT)
    if seconds is not None:
        timer = threading.Timer(seconds, running.stop)
        timer.daemon = True
        timer.start()
    metrics = None if metrics_port is None else serve_capture(running, store, metrics_port)
    if metrics is not None:
        err.print(f"metrics: http://127.0.0.1:{metrics.port}/metrics")
    line = _Line(running, as_json=as_json)
    line.start()
    try:
        running.run()
    finally:
        line.stop()
        if metrics is not None:
            metrics.close()


def add_table(
    store: Annotated[str, typer.Argument(help="Directory or URL of the store of a running capture.")],
    table: Annotated[list[str], typer.Argument(help="Tables to capture from now on.")],
) -> None:
    """Capture more tables, while the others go on."""
    ask_capture(store, AddTables(tuple(table)))
    err.print(f"captured from now on: {', '.join(table)}")


def _address(dsn: str | None, variable: str | None, file: Path | None) -> str:
    """The connection string, from the one place that has it. :raises InputError: there is none, or more than one."""
    if [dsn, variable, file].count(None) != 2:
        raise InputError(
            "The capture needs one connection string.",
            next_step="Give one of DSN, --dsn-env NAME and --dsn-file PATH.",
        )
    if dsn is not None:
        if has_password(dsn):
            err.print("The password is visible in the list of processes. Use --dsn-env NAME or --dsn-file PATH.")
        return dsn
    if file is not None:
        current_dsn(in_file(file))  # an unreadable file is refused now, not when a connection is opened
        return in_file(file)
    address = os.environ.get(variable or "")
    if not address:
        raise InputError(
            f"The environment variable {variable} is not set.", next_step=f"Run: export {variable}=postgresql://…"
        )
    return address


def _spill(store: str) -> Path:
    """The local directory for large transactions of a capture into *store*."""
    engine, path = split_location(store)
    return Path(path if engine == "embedded" else f"{_STORE}/{path_component(store)}", "spill")


def _special(text: str) -> tuple[str, SpecialValues]:
    column, separator, policy = text.partition("=")
    valid = [value.value for value in SpecialValues]
    if not separator or policy not in valid:
        raise InputError(
            f"Received --special-values {text!r}.", next_step=f"Write schema.table[.column]={'|'.join(valid)}."
        )
    return column, SpecialValues(policy)


def _columns(text: str) -> tuple[str, str]:
    table, separator, columns = text.partition("=")
    if not separator:
        raise InputError(
            f"Received --columns {text!r}.",
            next_step="Write database.collection=inferred|document|struct<name: type, …>.",
        )
    return table, columns


class _Line:
    """The live line of a capture, from a thread of its own: the capture's never waits for a terminal."""

    def __init__(self, running: Capture, *, as_json: bool) -> None:
        self._running = running
        self._as_json = as_json
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show, name="headwater-line", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(5)

    def _show(self) -> None:
        rows, at = 0, time.monotonic()
        if self._as_json:
            while not self._ended.wait(_LINE_SECONDS):
                typer.echo(json.dumps(self._facts()))
            typer.echo(json.dumps(self._facts()))
            return
        with err.status("starting …") as status:
            while not self._ended.wait(_LINE_SECONDS):
                now, count = time.monotonic(), self._running.statistics.rows
                status.update(self._text((count - rows) / (now - at)))
                rows, at = count, now
        err.print(self._text(None))

    def _facts(self) -> dict[str, Any]:
        seen = self._running.statistics
        return {
            "state": self._running.state.value,
            "rows": seen.rows,
            "transactions": seen.transactions,
            "epochs": seen.epochs,
            "epoch": seen.epoch,
            "lag_bytes": seen.behind_bytes,
            "lag_seconds": None if (lag := self._running.lag_seconds()) is None else round(lag, 3),
            "wal_held_bytes": seen.held_bytes,
            "spilled_bytes": seen.spilled_bytes,
            "restarts": seen.restarts,
            "stopped_tables": dict(seen.stopped_tables),
            "last_error": seen.last_error,
        }

    def _text(self, rate: float | None) -> str:
        seen, state = self._running.statistics, self._running.state
        if state is CaptureState.WAITING:
            return f"[yellow]waiting[/] to try again · {seen.last_error}"
        parts = [f"{seen.rows:,} changes" if rate is None else f"{rate:,.0f} changes/s · {seen.rows:,} in all"]
        if seen.behind_bytes is not None:
            lag = self._running.lag_seconds()
            parts.append(f"lag {amount(seen.behind_bytes)} {'unknown' if lag is None else f'{lag:.1f} s'}")
        if seen.held_bytes is not None:
            parts.append(f"WAL held {amount(seen.held_bytes)}")
        if seen.epoch:
            parts.append(f"epoch {seen.epoch}")
        if seen.stopped_tables:
            parts.append(f"[red]stopped: {', '.join(seen.stopped_tables)}[/]")
        return f"{state.value} · " + " · ".join(parts)
