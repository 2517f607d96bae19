"""Kill or freeze every sink in every mode at every durable step of a delivery, and write docs/crash_matrix.md."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from tests.crash.sinks.matrix import EXACT, GROUPS, Cell, How, Matrix, group_of, tried
from tests.db.sinks.cases import Servers

DOCUMENT = Path(__file__).parents[1] / "docs" / "crash_matrix.md"
TEXT = """\
Every sink in every mode delivers nine batches: history and changes together, 3000 rows at once, columns that are added
and become wider, history of keys that are there, a range that is read again, a TRUNCATE. Its process is killed
(`kill -9`) at a failpoint, the first and the last time that it passes it, and started again with the next
[generation](exactly_once.md). *ok*: the sink then has exactly what it has without a kill; in mode `changes` no
(`_commit_version`, key) is there twice; its token is that of the last batch; the coordinator has one COMMITTED row; the
log waits for nobody; nothing is left in staging. *In a recovery*: a process was killed with a batch PENDING, and the
one that takes over was killed there, too. *Staged files damaged*: a process was killed with a batch PENDING, then its
staged files were cut to half their size; the one that takes over stages the batch again. *Frozen*: the process is
stopped (`SIGSTOP`) at the step; the next one takes over and delivers everything; then the first is continued. It must
be refused, and what the sink has must not change. *Everything forgotten*: the next process forgets the state of the
query before it begins, as `headwater sink drop` and `resume` do: no token of then helps, only its generation does.
"""


def document(results: dict[Cell, str | None], seconds: float) -> str:
    """The page of the documentation."""
    lines = [
        "# Crash matrix",
        "",
        *TEXT.splitlines(),
        "",
        f"Made by `make crash-matrix` on {datetime.now(UTC):%Y-%m-%d}: {len(results)} rows, "
        f"{sum(wrong is not None for wrong in results.values())} failures, {seconds:.0f} s.",
        "`console` and `webhook` promise less, [at least once](sinks.md), and are not in it.",
    ]
    for kind in dict.fromkeys(cell.case.kind for cell in results):
        of_kind = {cell: wrong for cell, wrong in results.items() if cell.case.kind == kind}
        modes = list(dict.fromkeys(cell.case.mode for cell in of_kind))
        lines += [
            "",
            f"## {kind.capitalize()}",
            "",
            "| step | killed at | " + " | ".join(m.value for m in modes) + " |",
        ]
        lines.append("|---" * (2 + len(modes)) + "|")
        order = {name: place for place, (name, _) in enumerate(GROUPS)}
        hows = list(How)
        rows = {(hows.index(cell.how), order[group_of(cell.step)], cell.step) for cell in of_kind}
        for how, _, step in sorted(rows):
            shown = [
                [
                    wrong
                    for cell, wrong in of_kind.items()
                    if (cell.how, cell.step, cell.case.mode) == (hows[how], step, m)
                ]
                for m in modes
            ]
            name = ", ".join(filter(None, (group_of(step), hows[how].value)))
            lines.append(f"| {name} | `{step}` | " + " | ".join(map(_verdict, shown)) + " |")
    return "\n".join(lines) + "\n"


def _verdict(problems: list[str | None]) -> str:
    if not problems:
        return ""
    wrong = [one for one in problems if one is not None]
    return f"**FAILED**: {wrong[0]}" if wrong else "ok" if len(problems) == 1 else f"ok ×{len(problems)}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill every sink at every durable step of a delivery.")
    parser.add_argument("--only", default="", help="cases whose name has this text, for example delta-mirror")
    parser.add_argument("--how", default="", help="rows whose kind has this text, for example frozen")
    parser.add_argument("--jobs", type=int, default=2, help="so many at a time")
    parser.add_argument("--no-document", action="store_true", help="leave docs/crash_matrix.md as it is")
    arguments = parser.parse_args()
    began = time.monotonic()
    results: dict[Cell, str | None] = {}
    with tempfile.TemporaryDirectory(prefix="headwater-matrix-") as folder, Servers() as servers:
        matrix = Matrix(servers, Path(folder))
        for case in EXACT:
            if arguments.only not in str(case):
                continue
            cells = [cell for cell in matrix.cells(case) if arguments.how in cell.how.value]
            for cell, wrong in tried(matrix, cells, arguments.jobs):
                results[cell] = wrong
                verdict = "ok" if wrong is None else f"FAILED: {wrong}"
                how = f"{cell.how.value or 'pass'} {cell.at}"
                print(
                    f"{case.kind:9} {case.mode.value:8} {group_of(cell.step):19} {cell.step:36} {how:30} {verdict}",
                    flush=True,
                )
    failures = sum(wrong is not None for wrong in results.values())
    print(f"{len(results)} rows, {failures} failures, {time.monotonic() - began:.0f} s")
    if not arguments.no_document:
        DOCUMENT.write_text(document(results, time.monotonic() - began))
    sys.exit(bool(failures or not results))


if __name__ == "__main__":
    main()
