"""``headwater demo``: a database, a live application, a pipeline and a crash, on this machine, with nothing to set up.

A real Postgres starts from a wheel, with a shop of a million rows that is written to all the time. ``headwater run``
brings it into Delta tables: history and live changes together; in the middle the capture is killed with ``kill -9``. At
the end every row of the source is compared with the mirror.
"""

from __future__ import annotations

import json
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from headwater.cli.terminal import amount, err, out
from headwater.errors import HeadwaterError
from headwater.sources.open import Family, driver

if TYPE_CHECKING:
    from headwater.backfill.progress import TableProgress
    from headwater.demo.summary import Summary


def demo(
    rows: Annotated[int, typer.Option(help="Rows of history, in all tables.", min=100)] = 1_000_000,
    seconds: Annotated[float, typer.Option(help="How long live changes flow after the history.", min=1.0)] = 20.0,
    rate: Annotated[float, typer.Option(help="Changes a second, about.", min=1.0)] = 800.0,
    source: Annotated[str, typer.Option(help="postgres, or a mariadb of this machine.")] = "postgres",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object, alone on stdout.")] = False,
    keep: Annotated[Path | None, typer.Option(help="Keep database, logs and tables in this directory.")] = None,
) -> None:
    """Run the main job on this machine: a real database, its history and live changes, a crash, and the proof.

    Ends with 1 where source and mirror differ.
    """
    from headwater.demo.run import DemoOptions, run_demo

    with (
        driver(Family.POSTGRES),
        driver(Family.MYSQL),
        _Interrupts() as interrupts,
        _folder(keep) as folder,
        _Screen() as screen,
    ):
        summary = run_demo(folder, DemoOptions(rows, seconds, rate, source), screen, interrupts.hurry)
    if as_json:
        typer.echo(json.dumps(asdict(summary)))
    else:
        _tell(summary, keep)
    if not summary.worked:
        raise typer.Exit(1)


class _Interrupts:
    """Ctrl-C and SIGTERM: the first ends the demo, which then takes away what it has made; more make it hurry.

    An exception in the middle of that would leave a server running, so only the first one is raised.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.hurry = threading.Event()
        self._asked = False

    def __enter__(self) -> _Interrupts:
        self._before = [signal.signal(number, self._on) for number in self._SIGNALS]
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in zip(self._SIGNALS, self._before, strict=True):
            # who asked asks once more, perhaps, while the process ends: everything is cleared away by now
            signal.signal(number, signal.SIG_IGN if self._asked else before)

    def _on(self, _number: int, _frame: FrameType | None) -> None:
        if self._asked:
            self.hurry.set()
            return
        self._asked = True
        err.print("stopping …")
        raise KeyboardInterrupt


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep = keep.absolute()
        keep.mkdir(parents=True, exist_ok=True)
        if any(keep.iterdir()):
            raise HeadwaterError(f"{keep} is not empty.", next_step="Choose another directory for --keep.")
        yield keep
    else:
        with tempfile.TemporaryDirectory(prefix="headwater-demo-", ignore_cleanup_errors=True) as made:
            yield Path(made)


class _Screen:
    """Lines for what happens, bars for what goes on."""

    def __init__(self) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self._bars = Progress(*columns, console=err, disable=not err.is_terminal, transient=True)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> _Screen:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        self._clear()
        err.print(text)

    def progress(self, tables: Sequence[TableProgress]) -> None:
        """A bar for each table."""
        for one in tables:
            note = one.phase.value
            if one.rows_per_second and one.phase.value == "reading":
                note = f"{one.rows_per_second:,.0f} rows/s"
            self._bar(one.table, one.rows, one.total_rows, note)

    def live(self, text: str) -> None:
        """A line that changes."""
        self._bar(text="live", done=0, total=None, note=text)

    def checked(self, sink: str, table: str, done: int, total: int) -> None:
        """A bar for the comparison of a table."""
        self._bar(f"{table} at {sink}", done, total, "compared")

    def _bar(self, text: str, done: int, total: int | None, note: str) -> None:
        task = self._tasks.get(text)
        if task is None:
            task = self._tasks[text] = self._bars.add_task(text, note=note)
        self._bars.update(task, completed=done, total=total, note=note)

    def _clear(self) -> None:
        for task in self._tasks.values():
            self._bars.remove_task(task)
        self._tasks.clear()


def _tell(summary: Summary, keep: Path | None) -> None:
    title = "Source and mirror are equal" if summary.worked else "[red]Source and mirror differ[/]"
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(justify="left")
    table.add_column(justify="right")
    wrong = ("mismatches", "lost", "extra", "doubled", "unsettled")
    for name, value in asdict(summary).items():
        shown = amount(value) if name.endswith("bytes") else f"{value:,}"
        style = ("red" if value else "green") if name in wrong else ""
        table.add_row(Text(name.replace("_", " ")), Text(shown, style))
    out.print(table)
    if keep is not None:
        out.print(f"Kept: {keep}. Look inside: headwater log status {keep / 'store'}", soft_wrap=True)
