"""A campaign: many rounds of one seed, their failures, and the shortest scripts that still fail."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any, Final

from tests.fuzz.mirrors import MIRRORS
from tests.fuzz.mysql_script import SCHEMA as MYSQL_SCHEMA
from tests.fuzz.mysql_script import MySqlBuilder
from tests.fuzz.postgres_script import SCHEMA as POSTGRES_SCHEMA
from tests.fuzz.postgres_script import PostgresBuilder
from tests.fuzz.rounds import VERDICTS, Fuzzer, Outcome, Say
from tests.fuzz.script import CHECK, HARNESS, Builder, Script, Step
from tests.fuzz.shrink import shrink
from tests.fuzz.sources import FuzzSource, open_source

SOURCES: Final = ("postgres", "mariadb", "mysql")
KINDS: Final = frozenset({*POSTGRES_SCHEMA, *MYSQL_SCHEMA})
"""Of statements that change a table."""
WIDTH: Final = 20
_TRIALS: Final = 2
_LONG: Final = 120
"""Characters of a statement that an example shows."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Which rounds are run.

    :ivar shrink_seconds: how long each failure may be shrunk; 0: not at all.
    :ivar each: instead of rounds with all kinds of statements, *rounds* of them for each kind alone, into every mirror.
    """

    seed: int
    rounds: int
    first: int = 0
    sources: Sequence[str] = SOURCES
    mirrors: Sequence[str] = MIRRORS
    without: frozenset[str] = frozenset()
    width: int = WIDTH
    shrink_seconds: float = 600.0
    each: bool = False


@dataclass
class Summary:
    """What came of a campaign."""

    seed: int
    rounds: int = 0
    statements: int = 0
    refused: int = 0
    repairs: int = 0
    reread: int = 0
    seconds: float = 0.0
    failures: list[dict[str, Any]] = field(default_factory=list)
    kinds: dict[str, dict[str, str]] = field(default_factory=dict)
    """Of rounds with one kind of statement alone and no TRUNCATE: by kind, database and mirror, what came of it."""

    def add(self, mirror: str, outcome: Outcome) -> None:
        kinds = outcome.script.names & KINDS
        if len(kinds) == 1 and (outcome.wrong or "truncate" not in outcome.script.names):  # which has new files, too
            of_kind = self.kinds.setdefault(next(iter(kinds)), {})
            where = f"{outcome.script.source} {mirror}"
            of_kind[where] = max(of_kind.get(where, ""), outcome.verdict, key=VERDICTS.index)
        self.rounds += 1
        self.statements += outcome.done
        self.refused += len(outcome.refused)
        self.repairs += len(outcome.repairs)
        self.reread += outcome.reread


def build(source: str, seed: int, number: int, without: Collection[str] = ()) -> Script:
    """Round *number* of *seed*."""
    builder: type[Builder] = PostgresBuilder if source == "postgres" else MySqlBuilder
    return builder(source, seed, number, frozenset(without)).build()


def kinds_of(source: str) -> Mapping[str, int]:
    """The kinds of schema changes of a database."""
    return POSTGRES_SCHEMA if source == "postgres" else MYSQL_SCHEMA


def example(source: str, seed: int, kind: str) -> str:
    """The statements of *kind* in the first round of *seed* that has them, on a table ``orders``."""
    script = next(_with_kind(source, seed, kind))
    start = next(place for place, step in enumerate(script.steps) if step.name == kind)
    texts = []
    for step in script.steps[start:]:
        if step.name in ("begin", "commit"):
            continue
        if step.name != kind or step.text in texts:
            break
        texts.append(step.text.replace("{t}", "orders").replace("{c}", "c"))
    return "; ".join(text if len(text) < _LONG else f"{text[:_LONG]}…" for text in texts).replace("|", "\\|")


def _with_kind(source: str, seed: int, kind: str, first: int = 0) -> Iterator[Script]:
    """The rounds from *first* on that have schema changes of *kind*, and of no other."""
    scripts = (build(source, seed, number, KINDS - {kind}) for number in count(first))
    return (script for script in scripts if kind in script.names)


def mirror_of(number: int, mirrors: Sequence[str]) -> str:
    """The mirror of a round: they take turns, each for as many rounds as a pipeline has tables."""
    return mirrors[number // WIDTH % len(mirrors)]


def run(plan: Plan, say: Say) -> Summary:
    """Run the rounds of a plan: on each database, into each mirror in turn."""
    began = time.monotonic()
    summary = Summary(plan.seed)
    with ExitStack() as stack:
        for kind in plan.sources:
            with ExitStack() as opened:
                source = open_source(kind)
                opened.callback(source.close)
                for mirror in plan.mirrors:
                    _run_mirror(plan, source, mirror, summary, say, stack)
    summary.seconds = round(time.monotonic() - began, 1)
    return summary


def _run_mirror(plan: Plan, source: FuzzSource, mirror: str, summary: Summary, say: Say, stack: ExitStack) -> None:
    scripts = list(_scripts(plan, source.kind, mirror))
    fuzzer = Fuzzer(source, mirror, min(plan.width, max(len(scripts), 1)), say, stack)
    try:
        for batch in _batches(scripts, len(fuzzer.tables)):
            failed = []
            for outcome in fuzzer.run(batch):
                summary.add(mirror, outcome)
                say(_line(mirror, outcome))
                failed += [outcome] if outcome.wrong is not None else []
            for outcome in failed:
                small = _shrunk(fuzzer, outcome, plan.shrink_seconds, say) if plan.shrink_seconds else outcome.script
                summary.failures.append(_failure(mirror, outcome, small))
    finally:
        fuzzer.close()


def _scripts(plan: Plan, source: str, mirror: str) -> Iterator[Script]:
    numbers = range(plan.first, plan.first + plan.rounds)
    if not plan.each:
        for number in numbers:
            if mirror_of(number, plan.mirrors) == mirror:
                yield build(source, plan.seed, number, plan.without)
        return
    for kind in sorted(set(kinds_of(source)) - plan.without):
        yield from islice(_with_kind(source, plan.seed, kind, plan.first), max(1, plan.rounds))


def _batches(scripts: Sequence[Script], size: int) -> Iterator[Sequence[Script]]:
    for start in range(0, len(scripts), size):
        yield scripts[start : start + size]


def _line(mirror: str, outcome: Outcome) -> str:
    script = outcome.script
    facts = f"{outcome.done} statements, {len(outcome.refused)} refused, {outcome.reread} rows read again"
    facts += f" (first: {outcome.refused[0]})" if outcome.refused else ""
    facts += f", {len(outcome.repairs)} repairs" if outcome.repairs else ""
    facts += f", late {outcome.late:.0f} s" if outcome.late >= 1 else ""
    verdict = "ok" if outcome.wrong is None else f"FAILED: {outcome.wrong}"
    return f"{script.source} {mirror} seed {script.seed} round {script.number} on {outcome.table}: {facts}: {verdict}"


def _failure(mirror: str, outcome: Outcome, small: Script) -> dict[str, Any]:
    return {
        "source": small.source,
        "mirror": mirror,
        "seed": small.seed,
        "round": small.number,
        "wrong": outcome.wrong,
        "statements": sorted({step.name for step in small.steps if step.session != HARNESS}),
        "script": str(small).splitlines(),
    }


def _shrunk(fuzzer: Fuzzer, outcome: Outcome, seconds: float, say: Say) -> Script:
    """The shortest script that was found to fail within *seconds*."""
    script, end = outcome.script, time.monotonic() + seconds

    def failing(tried: list[list[Step]]) -> int | None:
        if time.monotonic() > end:
            return None
        scripts = [script.with_steps(steps) for steps in tried]
        groups = [[place] for place in range(len(scripts))] if outcome.of_run else [list(range(len(scripts)))]
        for group in groups:
            found = fuzzer.run([scripts[place] for place in group])
            for place, one in zip(group, found, strict=True):
                if one.wrong is not None and not one.wrong.startswith("before the script"):
                    outcome.wrong = one.wrong
                    say(f"  round {script.number}: {len(tried[place])} steps fail, too: {one.wrong}")
                    return place
        return None

    steps = [step for step in script.steps if step.session != HARNESS or step.text != CHECK]
    for first in (steps, list(script.steps)):
        if failing([first] * (1 if outcome.of_run else _TRIALS)) is not None:
            return script.with_steps(shrink(first, failing, len(fuzzer.tables)))
    say(f"  round {script.number}: it did not fail again")
    return script
