"""A round of the fuzzer as data: one random script of statements on one table.

Pure and seeded: round *k* of seed *S* follows from the pair alone, on any machine. Each action has its own random
numbers, so that leaving out a kind of statement changes no other action more than it must. ``{t}`` in a text is the
name of the table, and ``{c}`` the prefix of its columns: a script runs on any table.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final

HARNESS: Final = -1
"""The session of steps that are no statements."""
CHECK, KILL, DOWN, UP = "check", "kill", "down", "up"
"""Hold the writers and compare; kill the capture (it is started again); keep it down; let it run again."""
BEGIN, COMMIT, ROLLBACK = "BEGIN", "COMMIT", "ROLLBACK"
SESSIONS: Final = 3
FIRST_ROWS: Final = 40


@dataclass(frozen=True, slots=True)
class Step:
    """One statement of one session. :ivar name: its kind, as ``--without`` takes it."""

    session: int
    name: str
    text: str

    def __str__(self) -> str:
        return f"-- {self.text}" if self.session == HARNESS else f"/* {self.session} */ {self.text};"


@dataclass(frozen=True, slots=True)
class Script:
    """A round. :ivar create: the statements that create the table and its first rows. :ivar names: the kinds in it."""

    source: str
    seed: int
    number: int
    create: tuple[str, ...]
    steps: tuple[Step, ...]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(step.name for step in self.steps)

    def with_steps(self, steps: Collection[Step]) -> Script:
        return replace(self, steps=tuple(steps))

    def __str__(self) -> str:
        return "\n".join([*(f"{text};" for text in self.create), *map(str, self.steps)])


@dataclass(frozen=True, slots=True)
class Type:
    """A type of the database. :ivar family: which changes of type it can take. :ivar literal: a random value."""

    sql: str
    family: str
    literal: Callable[[Random], str]


@dataclass(frozen=True, slots=True)
class Column:
    """A column, as the script believes it to be.

    :ivar written: statements may give it a value. :ivar in_key: no statement drops it.
    """

    name: str
    type: Type
    not_null: bool = False
    written: bool = True
    in_key: bool = False


Action = Callable[[], None]


@dataclass
class Builder:
    """Builds one script: a model of the table, and the statements that change both.

    Subclasses have the actions of a database: a method for each name in :attr:`weights`.
    """

    source: str
    seed: int
    number: int
    without: frozenset[str] = frozenset()
    columns: list[Column] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    create: list[str] = field(default_factory=list)
    key: str = "id"
    keys: int = 0
    names: int = 0
    open: set[int] = field(default_factory=set)
    rng: Random = field(default_factory=Random)

    data_weights: Mapping[str, int] = field(default_factory=dict)
    schema_weights: Mapping[str, int] = field(default_factory=dict)

    def build(self) -> Script:
        """The script."""
        self.rng = self._random("table")
        self.start()
        self.rng = self._random("plan")
        count = self.rng.randint(14, 26)
        events = self._events(count)
        for place in range(count):
            self.rng = self._random(place)
            for event in events.get(place, ()):
                self.harness(event)
            if place == count // 2:
                self.check()
            weights = self.data_weights if self.rng.random() < 0.6 else self.schema_weights
            name = self.rng.choices(list(weights), list(weights.values()))[0]
            if name not in self.without:
                getattr(self, name)()
        for event in events.get(count, ()):
            self.harness(event)
        self.check()
        return Script(self.source, self.seed, self.number, tuple(self.create), tuple(self.steps))

    def start(self) -> None:
        """Fill :attr:`create`."""
        raise NotImplementedError

    def row(self, key: int, columns: Collection[Column]) -> str:
        return "(" + ", ".join([str(key), *(self.value(column) for column in columns)]) + ")"

    def value(self, column: Column) -> str:
        if not column.not_null and self.rng.random() < 0.12:
            return "NULL"
        return column.type.literal(self.rng)

    def _random(self, what: object) -> Random:
        return Random(f"{self.source}/{self.seed}/{self.number}/{what}")

    def _events(self, count: int) -> dict[int, list[str]]:
        """What happens to the capture, by the place of the action that it comes before."""
        drawn = self.rng.random()
        if drawn < 0.12:
            return {self.rng.randrange(1, count): [KILL]}
        if drawn < 0.24:
            first = self.rng.randrange(1, count)
            last = min(count, first + self.rng.randint(1, 5))
            if first < count // 2 <= last:  # a comparison needs the capture
                last = count // 2
            return {first: [DOWN], last: [UP]} if first < last else {first: [DOWN, UP]}
        return {}

    def harness(self, event: str) -> None:
        self.steps.append(Step(HARNESS, event, event))

    def check(self) -> None:
        self.end_open()
        self.harness(CHECK)

    def end_open(self) -> None:
        """End all transactions: what changes the table waits for them."""
        for session in sorted(self.open):
            self.steps.append(Step(session, "commit", COMMIT if self.rng.random() < 0.85 else ROLLBACK))
        self.open.clear()

    def data(self, name: str, text: str, session: int | None = None) -> None:
        """A statement that changes rows, in a transaction or out of one."""
        session = self.rng.randrange(SESSIONS) if session is None else session
        if session not in self.open and self.rng.random() < 0.25:
            self.steps.append(Step(session, "begin", BEGIN))
            self.open.add(session)
        self.steps.append(Step(session, name, text))
        if session in self.open and self.rng.random() < 0.4:
            self.steps.append(Step(session, "commit", COMMIT if self.rng.random() < 0.85 else ROLLBACK))
            self.open.discard(session)

    def schema(self, name: str, *texts: str) -> None:
        """Statements that change the table, by one session, while no transaction is open."""
        self.end_open()
        session = self.rng.randrange(SESSIONS)
        self.steps += [Step(session, name, text) for text in texts]

    def new_name(self) -> str:
        self.names += 1
        return f"{{c}}{self.names}"

    def new_key(self) -> int:
        self.keys += 1
        return self.keys

    def some(self, *families: str) -> Column | None:
        """A random column of these families; of all without any."""
        found = [one for one in self.columns if not families or one.type.family in families]
        return self.rng.choice(found) if found else None

    def changed(self, old: Column, new: Column | None) -> None:
        """*old* is *new* from now on, or is gone."""
        place = self.columns.index(old)
        self.columns[place : place + 1] = [] if new is None else [new]

    def where(self, session: int) -> str:
        """Some rows that no other session writes."""
        low = self.rng.randrange(1, self.keys + 1)
        high = low + self.rng.choice([0, 0, 5, 20, 2000])
        return f"WHERE {self.key} % {SESSIONS} = {session} AND {self.key} BETWEEN {low} AND {high}"

    # Rows: the same on every database.

    def insert(self) -> None:
        columns = [one for one in self.columns if one.written and (one.not_null or self.rng.random() < 0.9)]
        rows = [self.row(self.new_key(), columns) for _ in range(self.rng.choice([1, 1, 3, 10]))]
        names = ", ".join([self.key, *(column.name for column in columns)])
        self.data("insert", f"INSERT INTO {{t}} ({names}) VALUES {', '.join(rows)}")

    def update(self) -> None:
        written = [one for one in self.columns if one.written]
        if not written:
            return
        session = self.rng.randrange(SESSIONS)
        chosen = self.rng.sample(written, self.rng.randint(1, min(2, len(written))))
        values = ", ".join(f"{column.name} = {self.value(column)}" for column in chosen)
        self.data("update", f"UPDATE {{t}} SET {values} {self.where(session)}", session)

    def delete(self) -> None:
        session = self.rng.randrange(SESSIONS)
        self.data("delete", f"DELETE FROM {{t}} {self.where(session)}", session)

    def update_key(self) -> None:
        session = self.rng.randrange(SESSIONS)
        old = self.rng.randrange(1, self.keys + 1)
        text = f"UPDATE {{t}} SET {self.key} = {self.new_key()} WHERE {self.key} % {SESSIONS} = {session}"
        self.data("update_key", f"{text} AND {self.key} = {old}", session)
