"""``headwater demo``: a writer, a reader and a crash, on this machine, with nothing to set up.

Until a database is part of it, the demo makes its own orders. A writer process hashes them to vnodes, packs them into
chunks, and seals an epoch every few milliseconds into an embedded state store: rows and position in one batch. It
notes each epoch in a journal. A reader process follows. In the middle the writer is killed with ``kill -9`` and started
again. At the end every order must be in the store, and must have reached the reader, exactly once.
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
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import typer
from rich.table import Table

from headwater.cli.terminal import err, out
from headwater.errors import HeadwaterError
from headwater.journal import FsStore, RunKind, RunLog, verify
from headwater.state import Catalog, Field, FieldType, TableSchema, WriteBatch, open_reader, open_writer
from headwater.stream import Chunk, Epoch, EpochClock

LOG = TableSchema("orders_log", 1, (Field("epoch", FieldType.UINT),), (Field("chunk", FieldType.BYTES),))
POSITION = TableSchema("position", 1, (Field("source", FieldType.TEXT),), (Field("next_id", FieldType.INT),))
ROWS_PER_EPOCH = 2_000
SOURCE = ("orders",)


@dataclass(frozen=True, slots=True)
class Summary:
    """What the demo saw; everything that must be zero is zero when it worked."""

    rows: int
    epochs: int
    rows_per_second: float
    kills: int
    lost: int
    doubled: int
    reader_rows: int
    reader_lost: int
    reader_doubled: int
    journal_entries: int
    journal_damages: int
    journal_gaps: int

    @property
    def worked(self) -> bool:
        wrong = self.lost + self.doubled + self.reader_lost + self.reader_doubled + self.journal_damages
        return self.rows > 0 and wrong == 0 and self.journal_gaps <= self.kills


def demo(
    seconds: Annotated[float, typer.Option(help="How long the writer runs.", min=1.0)] = 8.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object as the last line.")] = False,
    keep: Annotated[Path | None, typer.Option(help="Keep store and journal in this directory.")] = None,
) -> None:
    """Run the main job on this machine: a writer, a reader, a crash, and the proof that nothing was lost."""
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
    begun = time.monotonic()
    with err.status("starting …") as line:
        writer, reader = _child("write", folder), None
        kills = 0
        try:
            _wait_for_store(folder, writer)
            reader = _child("follow", folder)
            with open_reader(folder / "store") as store:
                while (passed := time.monotonic() - begun) < seconds:
                    time.sleep(0.1)
                    with store.snapshot() as view:
                        rows = _next_id(view)
                    if not quiet:
                        line.update(f"epoch {int(view.epoch)} · {rows:,} orders · {rows / passed:,.0f} rows/s")
                    if not kills and passed > seconds / 2:
                        os.kill(writer.pid, signal.SIGKILL)
                        writer.wait()
                        kills += 1
                        if not quiet:
                            err.print("[yellow]kill -9[/] of the writer, in the middle of its work")
                        writer = _child("write", folder)
            os.kill(writer.pid, signal.SIGTERM)
            writer.wait(30)
            line.update("checking …")
            (folder / "done").touch()
            answer, _ = reader.communicate(timeout=60)
            return _check(folder, json.loads(answer), kills, time.monotonic() - begun)
        finally:
            for child in (writer, reader):
                if child is not None and child.poll() is None:
                    child.kill()
                    child.wait()


def _child(role: str, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "headwater.cli.demo", role, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE if role == "follow" else None, text=True)


def _wait_for_store(folder: Path, writer: subprocess.Popen[str]) -> None:
    for _ in range(600):
        if (folder / "started").exists():
            return
        if writer.poll() is not None:
            break
        time.sleep(0.05)
    raise HeadwaterError("The demo's writer did not start.", next_step="Look at its messages above.")


# -- the writer process ------------------------------------------------------------------------------------------


def orders(first: int, count: int) -> pa.RecordBatch:
    """Orders with the ids first … first+count-1."""
    ids = pa.array(range(first, first + count), pa.int64())
    return pa.RecordBatch.from_arrays(
        [ids, pa.array([f"customer {number % 997}" for number in range(first, first + count)])], ["id", "customer"]
    )


def write(folder: Path) -> None:
    """Seal orders until told to stop; a fresh start goes on where the store says."""
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
    journal = FsStore(folder / "journal", durability="flush")
    sessions = journal.list_sessions()
    if sessions:
        run = RunLog.restore(journal, journal.list_segments(sessions[0])[0])
    else:
        run = RunLog.start(journal, "demo", {"rows_per_epoch": ROWS_PER_EPOCH})
    run.begin("start")
    with open_writer(folder / "store") as store:
        clock = EpochClock(lambda: time.time_ns() // 1_000_000, store.committed_epoch())
        batch = WriteBatch()
        with store.snapshot() as view:
            catalog = Catalog.load(view)
            log, position = catalog.open_or_create(LOG, batch), catalog.open_or_create(POSITION, batch)
            first = (position.get(view, 0, SOURCE) or (0,))[0]
        while not stopping:
            chunk, _ = Chunk.inserts(orders(first, ROWS_PER_EPOCH), ["id"]).sort_by_vnode()
            epoch = clock.next()
            log.put(batch, 0, (int(epoch),), (_pack(chunk),))
            first += ROWS_PER_EPOCH
            position.put(batch, 0, SOURCE, (first,))
            store.seal(epoch, batch)
            (folder / "started").touch()
            run.record(RunKind.BARRIER, {"epoch": int(epoch), "rows": chunk.num_rows})
            batch = WriteBatch()
            time.sleep(0.005)
    run.record(RunKind.RUN_COMPLETED, {"result": "stopped"})
    journal.close()


def _pack(chunk: Chunk) -> bytes:
    sink = pa.BufferOutputStream()
    rows = chunk.to_batch()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_batch(rows)
    return bytes(sink.getvalue())


def _ids(data: bytes) -> list[int]:
    chunk = Chunk.from_batch(pa.ipc.open_stream(data).read_next_batch())
    return chunk.rows.column("id").to_pylist()  # type: ignore[no-any-return]


# -- the reader process ------------------------------------------------------------------------------------------


def follow(folder: Path) -> None:
    """Take every epoch once, as soon as it is sealed; print which orders came."""
    seen: dict[int, int] = {}
    last = Epoch(0)
    with open_reader(folder / "store") as store:
        while True:
            done = (folder / "done").exists()
            if store.wait_for_epoch(last, 0.2) is None:
                if done:
                    break
                continue
            with store.snapshot() as view:
                log = Catalog.load(view).open(LOG)
                for _, (data,) in log.scan(view, 0, (int(last) + 1,)):
                    for number in _ids(data):
                        seen[number] = seen.get(number, 0) + 1
                last = view.epoch
    typer.echo(json.dumps({"rows": sum(seen.values()), "distinct": len(seen)}))


# -- the proof ---------------------------------------------------------------------------------------------------


def _next_id(view: Any) -> int:
    position = Catalog.load(view).open(POSITION)
    return int((position.get(view, 0, SOURCE) or (0,))[0])


def _check(folder: Path, reader: dict[str, int], kills: int, seconds: float) -> Summary:
    with open_reader(folder / "store") as store, store.snapshot() as view:
        expected = _next_id(view)
        epochs = [(key[0], _ids(data)) for key, (data,) in Catalog.load(view).open(LOG).scan(view, 0)]
    stored = [number for _, ids in epochs for number in ids]
    journal = FsStore(folder / "journal")
    session = journal.list_sessions()[0]
    segment = journal.list_segments(session)[0]
    entries = journal.read_all(session, segment)
    noted = [entry.fields["epoch"] for entry in entries if entry.kind == RunKind.BARRIER]
    damages = len(verify(journal, session, segment).damages) + (len(noted) != len(set(noted)))
    journal.close()
    return Summary(
        rows=expected,
        epochs=len(epochs),
        rows_per_second=round(expected / seconds, 1),
        kills=kills,
        lost=len(set(range(expected)) - set(stored)),
        doubled=len(stored) - len(set(stored)),
        reader_rows=reader["rows"],
        reader_lost=expected - reader["distinct"],
        reader_doubled=reader["rows"] - reader["distinct"],
        journal_entries=len(entries),
        journal_damages=damages,
        journal_gaps=len({epoch for epoch, _ in epochs} - set(noted)),
    )


def _tell(summary: Summary, keep: Path | None) -> None:
    table = Table(title="What came through", title_justify="left", show_header=False)
    table.add_row("orders sealed", f"{summary.rows:,} in {summary.epochs:,} epochs")
    table.add_row("speed", f"{summary.rows_per_second:,.0f} rows/s")
    table.add_row("kill -9 of the writer", str(summary.kills))
    table.add_row("lost or doubled in the store", f"{summary.lost} / {summary.doubled}")
    table.add_row("lost or doubled at the reader", f"{summary.reader_lost} / {summary.reader_doubled}")
    table.add_row("journal", f"{summary.journal_entries:,} entries, {summary.journal_damages} damaged")
    out.print(table)
    out.print("[bold green]Exactly once.[/]" if summary.worked else "[bold red]That went wrong: see the table.[/]")
    if keep is not None:
        out.print("Look around:", f"  headwater state status {keep}/store", sep="\n")
        out.print(f"  headwater journal list --root {keep}/journal")


if __name__ == "__main__":
    {"write": write, "follow": follow}[sys.argv[1]](Path(sys.argv[2]))
