"""``headwater demo``: a database, a live application, the capture and a crash, on this machine, with nothing to set up.

A real Postgres starts from a wheel. A shop writes to it all the time. ``headwater capture`` follows its log; in the
middle it is killed with ``kill -9`` and started again. At the end the logs are replayed: every table must come out
exactly as it is in the database, and no change may have been told twice.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from headwater.cli.terminal import amount, err, out
from headwater.errors import HeadwaterError
from headwater.sources.open import postgres_driver

_START_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Summary:
    """What the demo saw; everything that must be zero is zero when it worked."""

    source_rows: int
    replayed_rows: int
    changes: int
    transactions: int
    changes_per_second: float
    kills: int
    mismatches: int
    lost: int
    extra: int
    doubled: int
    latency_p50_ms: float
    latency_p99_ms: float
    wal_held_max_bytes: int

    @property
    def worked(self) -> bool:
        return self.changes > 0 and self.mismatches + self.lost + self.extra + self.doubled == 0


def demo(
    seconds: Annotated[float, typer.Option(help="How long the shop writes.", min=1.0)] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object as the last line.")] = False,
    keep: Annotated[Path | None, typer.Option(help="Keep database and logs in this directory.")] = None,
) -> None:
    """Run the main job on this machine: a real database, live changes, a crash, and the proof that nothing was lost."""
    with _folder(keep) as folder:
        summary = _run(folder, seconds, quiet=as_json)
        if as_json:
            typer.echo(json.dumps(asdict(summary)))
        else:
            _tell(summary, keep)
    if not summary.worked:
        raise typer.Exit(1)


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        if any(keep.iterdir()):
            raise HeadwaterError(f"{keep} is not empty.", next_step="Choose another directory for --keep.")
        yield keep
    else:
        with tempfile.TemporaryDirectory(prefix="headwater-demo-") as made:
            yield Path(made)


def _run(folder: Path, seconds: float, *, quiet: bool) -> Summary:
    with postgres_driver():
        from headwater.demo import shop
        from headwater.demo.check import check
        from headwater.demo.server import embedded_postgres

    store = folder / "store"
    with ExitStack() as stack:
        line = stack.enter_context(err.status("starting a Postgres …"))
        dsn = stack.enter_context(embedded_postgres(folder))
        shop.create(dsn)
        capture = _Capture(dsn, store, shop.TABLES)
        stack.callback(capture.kill)
        writer = _process(stack, "-m", "headwater.demo.shop", dsn, "1")
        begun, kills = time.monotonic(), 0
        while (passed := time.monotonic() - begun) < seconds:
            capture.look()
            if not quiet:
                line.update(capture.line())
            if not kills and passed > seconds / 2:
                capture.kill()
                kills += 1
                if not quiet:
                    err.print("[yellow]kill -9[/] of the capture, in the middle of its work")
                capture.start()
        writer.send_signal(signal.SIGTERM)
        told, _ = writer.communicate(timeout=30)
        line.update("the shop rests; the capture catches up …")
        capture.finish(seconds=60)
        line.update("checking …")
        found = check(dsn, store, shop.TABLES)
        if not quiet:
            _show_tail(store)
    return Summary(
        source_rows=found.source_rows,
        replayed_rows=found.replayed_rows,
        changes=found.changes,
        transactions=int(told),
        changes_per_second=round(found.changes / seconds, 1),
        kills=kills,
        mismatches=found.mismatches,
        lost=found.lost,
        extra=found.extra,
        doubled=found.doubled,
        latency_p50_ms=round(found.latency_p50_ms, 1),
        latency_p99_ms=round(found.latency_p99_ms, 1),
        wal_held_max_bytes=capture.held_max,
    )


class _Capture:
    """``headwater capture`` as a process, and what it says of itself."""

    def __init__(self, dsn: str, store: Path, tables: tuple[str, ...]) -> None:
        self._command = ["-m", "headwater.cli.main", "capture", dsn, "--store", str(store), "--json"]
        for table in tables:
            self._command += ["--table", table]
        self.held_max = 0
        self._facts: dict[str, Any] = {}
        self.start()
        end = time.monotonic() + _START_SECONDS
        while self._facts.get("state") != "running":
            self.look()
            if self._process.poll() is not None or time.monotonic() > end:
                raise HeadwaterError("The capture did not start.", next_step="Look at its messages above.")

    def start(self) -> None:
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [sys.executable, *self._command], stdout=subprocess.PIPE, text=True, env=environment
        )

    def look(self) -> None:
        """Its next line."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            self._facts = json.loads(line)
            self.held_max = max(self.held_max, self._facts["wal_held_bytes"] or 0)

    def line(self) -> str:
        facts = self._facts
        return (
            f"{facts['state']} · {facts['rows']:,} changes · lag {facts['lag_seconds']:.1f} s · "
            f"WAL held {amount(facts['wal_held_bytes'] or 0)} · epoch {facts['epoch']}"
        )

    def finish(self, seconds: float) -> None:
        """Until it has everything, then the end."""
        end = time.monotonic() + seconds
        quiet_rows, same = -1, 0
        while same < 4 and time.monotonic() < end:
            self.look()
            same = same + 1 if self._facts["rows"] == quiet_rows and not self._facts["lag_bytes"] else 0
            quiet_rows = self._facts["rows"]
        self._process.send_signal(signal.SIGTERM)
        self._process.communicate(timeout=60)

    def kill(self) -> None:
        """As ``kill -9`` does it."""
        self._process.kill()
        self._process.communicate()


def _process(stack: ExitStack, *arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)

    def end() -> None:
        process.kill()
        process.communicate()

    stack.callback(end)
    return process


def _show_tail(store: Path) -> None:
    command = [sys.executable, "-m", "headwater.cli.main", "log", "show", str(store), "public.orders", "--limit", "5"]
    err.print("[bold]the end of a log[/] (headwater log tail)")
    subprocess.run(command, check=False)


def _tell(summary: Summary, keep: Path | None) -> None:
    table = Table(title="Every change once" if summary.worked else "[red]Something is wrong[/]", show_header=False)
    for name, value in asdict(summary).items():
        shown = amount(value) if name.endswith("bytes") else f"{value:,}"
        table.add_row(name.replace("_", " "), shown)
    out.print(table)
    if keep is not None:
        out.print(f"Kept: {keep}. Look inside: headwater log status {keep / 'store'}")
