"""``headwater upstream``: deliver a table that others keep to a sink, and show such queries.

``headwater pause``, ``resume``, ``throttle`` and ``resnapshot`` with ``--store`` and ``--query`` are for them, too.
"""

from __future__ import annotations

import json
import signal
import threading
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from headwater.backfill.control import upstream_metrics, upstream_queries
from headwater.cli.terminal import err, out
from headwater.errors import HeadwaterError, InputError, NotFoundError
from headwater.stopping import stop_on_signals
from headwater.system.metrics import MetricsServer
from headwater.system.retry import DELIVERY

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headwater.backfill.claims import Delivery

app = typer.Typer(help="Deliver tables that others keep (Delta), and look after that.", no_args_is_help=True)

Store = Annotated[str, typer.Option("--store", help="Where the query keeps its state.")]
Query = Annotated[str, typer.Option("--query", help="The name of the query.")]


@app.command()
def run(
    upstream: Annotated[str, typer.Argument(help="The table, as delta:PATH.", metavar="UPSTREAM")],
    store: Store,
    key: Annotated[str, typer.Option(help="The columns that name a row, by commas.")],
    sink: Annotated[str, typer.Option(help="The kind of the sink, as in [[sink]].")],
    option: Annotated[
        list[str] | None, typer.Option("--set", help="An option of the sink, as name=value; again for more.")
    ] = None,
    query: Query = "upstream",
    table: Annotated[str, typer.Option(help="What its rows are called at the sink, as namespace.name.")] = "",
    since: Annotated[
        str, typer.Option(help="No snapshot: what changed after a version, or from a time with its zone on.")
    ] = "",
    rows_per_second: Annotated[int | None, typer.Option(help="The most to read per second.")] = None,
    once: Annotated[bool, typer.Option("--once", help="All that there is by now; then end.")] = False,
    metrics_port: Annotated[int | None, typer.Option(help="Serve metrics on this port of loopback.")] = None,
) -> None:
    """Deliver a Delta table to a sink: its rows, then every change, exactly once, until Ctrl-C."""
    from headwater.backfill.claims import Delivery
    from headwater.sinks.open import open_sink
    from headwater.spark.failure import Failure
    from headwater.spark.upstream_options import UpstreamSourceOptions

    given = {"upstream": upstream, "store": store, "key": key, "query": query, "table": table, "since": since}
    if rows_per_second is not None:
        given["rowsPerSecond"] = str(rows_per_second)
    wanted = UpstreamSourceOptions.parse(given).for_query()
    delivery = Delivery(wanted, open_sink(sink, **_options(option or [])))
    stop = threading.Event()
    stop_on_signals(stop.set, signal.SIGINT, signal.SIGTERM)
    server = None if metrics_port is None else MetricsServer(lambda: upstream_metrics(wanted.store), metrics_port)
    look = f"Look: headwater upstream status --store {wanted.store}"
    err.print(f"{wanted.tables[0]} to {delivery.sink.name}. {look}", soft_wrap=True)
    try:
        _deliver(delivery, stop, once=once)
    except HeadwaterError:
        raise
    except Exception as error:
        failure = Failure.of(error)
        next_step = failure.next_step or "Run it again: it goes on from where it was."
        raise HeadwaterError(failure.message, next_step=next_step) from error
    finally:
        if server is not None:
            server.close()


def _deliver(delivery: Delivery, stop: threading.Event, *, once: bool) -> None:
    """Deliver until *stop* is set. What passes is tried again, as a sink of a pipeline does.

    :param once: end with what the table has now. :raises Exception: what needs a person.
    """
    from headwater.backfill.loop import DeliveryLoop
    from headwater.spark.failure import Failure, RestartPolicy
    from headwater.spark.java import forget_java, java_runs
    from headwater.spark.jobs import SparkJobs
    from headwater.spark.session import session

    policy = RestartPolicy(DELIVERY)
    upto: int | None = None
    sessions: list[SparkSession] = []

    def spark() -> SparkSession:
        if not java_runs():  # it was killed
            forget_java()
        sessions[:] = [session("local[*]", app_name=f"headwater {delivery.name}")]
        return sessions[0]

    def turned(delivered: bool) -> None:
        if delivered:
            policy.progressed()

    def attempt() -> None:
        nonlocal upto
        delivery.sink.check()
        with DeliveryLoop(delivery, SparkJobs(spark, delivery.name)) as loop:
            policy.started()
            if once and upto is None:
                upto = loop.planner.newest_epoch()
            end = upto
            loop.run(stop, turned, until=lambda: end is not None and loop.planner.has_reached(end), upto=end)

    try:
        while not stop.is_set():
            try:
                attempt()
            except Exception as error:
                if stop.is_set():
                    return
                failure = Failure.of(error)
                pause = policy.pause(failure)
                if pause is None:
                    raise
                err.print(f"{failure.message} Next attempt in {pause:.1f} s.", soft_wrap=True, markup=False)
                stop.wait(pause)
            else:
                return
    finally:
        if sessions and java_runs():
            sessions[0].stop()


def _options(given: list[str]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not equals:
            raise InputError(f"Received --set {one}.", next_step="Write --set name=value, for example path=/lake.")
        made[name] = value
    return made


@app.command()
def status(
    store: Store, as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False
) -> None:
    """How far the queries are, and what stops them."""
    found = list(upstream_queries(store))
    if as_json:
        typer.echo(json.dumps([one.value for one in found]))
        return
    if not found:
        raise NotFoundError(
            f"No query has told anything at {store} yet.", next_step="Run: headwater upstream run --help"
        )
    shown = Table(box=None, pad_edge=False)
    for title in ("query", "upstream", "phase", "snapshot rows", "version", "newest", "told"):
        shown.add_column(title, overflow="fold")
    for one in found:
        value = one.value
        phase = "paused" if value["paused"] and value["problem"] is None else value["phase"]
        version, newest = value["consumed_version"], value["newest_version"]
        shown.add_row(
            one.query,
            value["upstream"],
            phase,
            f"{value['snapshot_rows']:,}",
            "" if version is None else str(version),
            "" if newest is None else str(newest),
            f"{one.age_seconds:.0f} s ago",
        )
    out.print(shown)
    for one in found:
        if one.value["problem"] is not None:
            err.print(f"{one.query}: {one.value['problem']} {one.value['next_step']}", soft_wrap=True)
