"""Random schema changes and rows on real databases, and every value of the mirror compared with its source."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

from tests.fuzz.campaign import KINDS, SOURCES, WIDTH, Plan, Summary, example, kinds_of, run
from tests.fuzz.mirrors import MIRRORS
from tests.fuzz.rounds import VERDICTS

PAGE = Path(__file__).parent.parent / "docs/schema_changes.md"
SHOWN = {"": "not run", "read again": "re-read", "stopped, repaired": "stops, one command repairs"}


def page(text: str, seed: int, summary: Summary) -> str:
    """*text* with its tables replaced by what *summary* found; a database that was not run keeps its table."""
    for source in sorted({where.partition(" ")[0] for verdicts in summary.kinds.values() for where in verdicts}):
        rows = [f"<!-- {source} -->", "", "| statement | for example | what happens |", "|---|---|---|"]
        for kind in sorted(kinds_of(source)):
            found = [one for where, one in summary.kinds.get(kind, {}).items() if where.startswith(f"{source} ")]
            verdict = max(["", *found], key=VERDICTS.index)
            shown = SHOWN.get(verdict, verdict)
            rows.append(f"| {kind.replace('_', ' ')} | `{example(source, seed, kind)}` | {shown} |")
        end = f"<!-- end of {source} -->"
        before, _, rest = text.partition(f"<!-- {source} -->")
        text = "".join([before, "\n".join(rows), f"\n\n{end}", rest.partition(end)[2]])
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="a round follows from the seed and its number alone")
    parser.add_argument("--rounds", type=int, default=WIDTH * len(MIRRORS), help="rounds for each database")
    parser.add_argument("--first", type=int, default=0, help="the first round: to go on, or to run one again")
    parser.add_argument("--source", action="append", choices=SOURCES, help="again for more; all by default")
    parser.add_argument("--mirror", action="append", choices=MIRRORS, help="again for more; all by default, in turn")
    parser.add_argument("--without", action="append", default=[], help="a kind of statement to leave out; again")
    parser.add_argument("--only", action="append", default=[], help="of schema changes only this kind; again for more")
    parser.add_argument("--tables", type=int, default=WIDTH, help="tables of a pipeline, and rounds side by side")
    parser.add_argument("--shrink-seconds", type=float, default=600, help="for each failure; 0: do not shrink")
    parser.add_argument("--each", action="store_true", help="rounds with one kind of statement alone, for each kind")
    parser.add_argument("--page", action="store_true", help="with --each: write the outcomes to docs/schema_changes.md")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    given = parser.parse_args()
    without = {*given.without, *(KINDS - set(given.only) if given.only else ())}
    if unknown := {*without, *given.only} - KINDS:
        parser.error(f"no such kinds: {', '.join(sorted(unknown))}; there are {', '.join(sorted(KINDS))}")
    began = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # servers and files are removed on the way out

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {text}", file=sys.stderr, flush=True)

    summary = run(
        Plan(
            seed=given.seed,
            rounds=given.rounds,
            first=given.first,
            sources=given.source or SOURCES,
            mirrors=given.mirror or MIRRORS,
            without=frozenset(without),
            width=given.tables,
            shrink_seconds=given.shrink_seconds,
            each=given.each,
        ),
        say,
    )
    if given.page and given.each and not summary.failures:
        PAGE.write_text(page(PAGE.read_text(), given.seed, summary))
    if given.json:
        print(json.dumps(asdict(summary)))
    else:
        for failure in summary.failures:
            print(
                "\n".join(["", f"-- {failure['source']}, {failure['mirror']}: {failure['wrong']}", *failure["script"]])
            )
        for kind, verdicts in sorted(summary.kinds.items()):
            print(f"{kind:24} " + ", ".join(f"{where}: {verdict}" for where, verdict in verdicts.items()))
        print(
            f"{summary.rounds} rounds, {len(summary.failures)} failures, {summary.statements} statements, "
            f"{summary.repairs} repairs, {summary.reread} rows read again, {summary.seconds:.0f} s"
        )
    sys.exit(bool(summary.failures))


if __name__ == "__main__":
    main()
