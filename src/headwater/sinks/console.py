"""ConsoleSink: rows and changes as text, to look at: on the terminal of the process that commits, or in a file.

At least once: a crash between the text and its token shows a batch again. It is the one sink whose rows are in logs.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, Literal

from headwater.sinks.at_least_once import AtLeastOnceSink
from headwater.sinks.errors import SinkUnwritable
from headwater.sinks.json_rows import json_lines, plain, rows_of
from headwater.sinks.row_batch import RowBatch
from headwater.sinks.sink import Capabilities, Mode
from headwater.sources.table import SourceTable

SHOWN_ROWS: Final = 20
CELL_WIDTH: Final = 40
_LINES: Final = 10_000
_terminal = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class ConsoleSink(AtLeastOnceSink):
    """Text, at least once.

    :param output: ``stdout`` or ``stderr`` of the process that commits.
    :param path: append to this file instead.
    :param format: ``table``, or ``json``: a line for each row.
    :param rows: how many rows of a step a table shows; ``json`` has them all.
    """

    capabilities: ClassVar[Capabilities] = Capabilities((Mode.CHANGES, Mode.MIRROR), readable=False)

    mode: Mode = Mode.CHANGES
    output: Literal["stdout", "stderr"] = "stderr"
    path: str | None = None
    format: Literal["table", "json"] = "table"
    rows: int = SHOWN_ROWS

    @property
    def name(self) -> str:
        return f"console:{self.path or self.output}"

    def send(self, table: SourceTable, key: str, batch: RowBatch) -> None:
        """Write its rows. :raises SinkUnwritable: the file cannot be written."""
        if self.format == "json":
            for lines in json_lines(table, batch, _LINES):
                self._write("\n".join([*lines, ""]))
        else:
            self._write(f"{key}\n{''.join(self._table(batch))}")

    def _table(self, batch: RowBatch) -> list[str]:
        made: list[str] = []
        for step in batch.steps():
            rows = rows_of(step)
            made.append(f"{type(step).__name__.lower()}: {rows.num_rows} rows\n" if rows.num_columns else "clear\n")
            shown = plain(rows.slice(0, self.rows)).to_pydict()
            columns = [[name, *(_cell(value) for value in values)] for name, values in shown.items()]
            widths = [max(map(len, column)) for column in columns]
            for line in zip(*columns, strict=True):
                padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
                made.append(f"  {'  '.join(padded).rstrip()}\n")
            if rows.num_rows > self.rows:
                made.append(f"  … {rows.num_rows - self.rows} more\n")
        return made

    def _write(self, text: str) -> None:
        """As one piece: other tables are committed at the same time."""
        with _terminal:
            if self.path is None:
                stream = sys.stdout if self.output == "stdout" else sys.stderr
                stream.write(text)
                stream.flush()
                return
            try:
                with Path(self.path).open("a", encoding="utf-8") as file:
                    file.write(text)
            except OSError as error:
                raise SinkUnwritable(
                    f"Nothing can be written to {self.path}: {error.strerror or type(error).__name__}.",
                    next_step="Create its directory, or give this user the right to write to it.",
                ) from error


def _cell(value: object) -> str:
    text = "∅" if value is None else str(value).replace("\n", "⏎")
    return text if len(text) <= CELL_WIDTH else f"{text[: CELL_WIDTH - 1]}…"
