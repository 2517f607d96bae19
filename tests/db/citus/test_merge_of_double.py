"""What waits in a merge of logs, over a double of a Citus cluster: plain Postgres, not Citus."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest
from tests.db.citus.writing import fill, here
from tests.servers.citus_double import CitusDouble, Nodes, log_ends

from headwater.sources.citus.offset import POSITION_DTYPE, CitusOffset
from headwater.sources.citus.source import CitusSource
from headwater.sources.events import Boundary, Changes
from headwater.sources.offset import position_rows
from headwater.sources.table import SourceTable

COLUMNS = "id bigint, v text, amount numeric(12,2)"
LARGE = 70_000  # rows: more than a node tells in one go, and more than fits between it and us
SMALL = 150

Row = tuple[int, int, int]
"""Node, place of the commit there, place in the transaction."""


@dataclass
class Told:
    """:ivar stretches: of rows, with their times, between two boundaries. :ivar places: at their ends.
    :ivar tables: how many rows each had.
    """

    stretches: list[list[tuple[Row, Any]]] = field(default_factory=lambda: [[]])
    places: list[CitusOffset] = field(default_factory=list)
    tables: Counter[str] = field(default_factory=Counter)

    @property
    def rows(self) -> list[Row]:
        return [row for stretch in self.stretches for row, _ in stretch]

    def assert_whole_and_in_order(self) -> None:
        """Nothing twice, no transaction in two stretches, all by their times, and places that tell what was told."""
        rows = self.rows
        assert len(set(rows)) == len(rows)
        times = [at for stretch in self.stretches for _, at in stretch]
        assert times == sorted(times)
        ended: dict[int, int] = {}
        assert not self.stretches[-1]
        for stretch, place in zip(self.stretches, self.places, strict=False):
            for group, commit, _ in {row for row, _ in stretch}:
                assert ended.get(group, 0) <= commit < place.nodes[group].at.lsn
            for group, node in place.nodes.items():
                assert node.at.is_boundary
                assert node.at.lsn >= ended.get(group, 0)
                ended[group] = node.at.lsn


class Reading:
    """The stream of a cluster, read by a test."""

    def __init__(self, double: CitusDouble, folder: Path, *names: str, poll: bool = False) -> None:
        self.double = double
        self.source = CitusSource(double.dsn, spill=folder, poll=poll)
        self.tables = self.source.tables(list(names))
        start, self.identity = self.source.begin(self.tables, resumed=True)
        assert isinstance(start, CitusOffset)
        self.start = start
        self.ends: Mapping[int, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.source.close()

    def stretches(self, start: CitusOffset, told: Told, *, full: int | None = None) -> Iterator[CitusOffset]:
        """Read up to where the logs end now, boundary by boundary.

        :param full: wait until this node cannot send more: then it is inside the large transaction.
        """
        self.ends = log_ends(self.double)
        stream = self.source.open(self.tables, start, self.identity)
        waiting = (
            "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'WalSenderWriteData' AND datname = current_database()"
        )
        try:
            while full is not None and not self.double.execute(full, waiting):
                time.sleep(0.01)
            place = start
            while any(place.nodes[group].at.lsn < end for group, end in self.ends.items()):
                for event in stream.poll(1.0, stop_at_boundary=False):
                    if isinstance(event, Boundary):
                        assert isinstance(event.position, CitusOffset)
                        place = event.position
                        told.places.append(place)
                        told.stretches.append([])
                        yield place
                    elif isinstance(event, Changes):
                        positions = position_rows(event.rows.column("_position"), POSITION_DTYPE)
                        found = zip(positions["group"], positions["commit_lsn"], positions["seq"], strict=True)
                        times = event.rows.column("_commit_timestamp").to_pylist()
                        rows = [tuple(map(int, row)) for row in found]
                        told.tables[event.table.name] += len(rows)
                        told.stretches[-1] += list(zip(rows, times, strict=True))  # type: ignore[arg-type]
        finally:
            stream.close()

    def read(self, start: CitusOffset, *, full: int | None = None) -> Told:
        told = Told()
        for _ in self.stretches(start, told, full=full):
            pass
        return told

    def add(self, name: str) -> SourceTable:
        (table,) = self.source.tables([name])
        self.source.include([table])
        assert self.source._stream is not None
        self.source._stream.add_table(table)
        self.tables.append(table)
        return table


def write_large(double: CitusDouble, group: int, around: str = "SELECT") -> None:
    double.execute(
        group,
        "BEGIN",
        around,
        f"INSERT INTO acc SELECT i, repeat('v', 200), i FROM generate_series(1000, {1000 + LARGE * 3}::bigint) i"
        f" WHERE {here(double, 'acc', group)} LIMIT {LARGE}",
        around,
        "COMMIT",
    )


def write_small(double: CitusDouble, group: int) -> None:
    double.execute(
        group,
        f"""DO $$ DECLARE one bigint; BEGIN
        FOR turn IN 1..{SMALL} LOOP
          SELECT id INTO one FROM acc WHERE id < 200 OFFSET turn % 20 LIMIT 1;
          UPDATE acc SET amount = turn WHERE id = one; COMMIT;
        END LOOP; END $$""",
    )


def write_around(double: CitusDouble) -> None:
    """A large transaction on one node, small ones on the other before and after it; then a shard moves."""
    for group in (1, 2):
        write_small(double, group)
    write_large(double, 1)
    for group in (1, 2):
        write_small(double, group)
    shard, owner = next(iter(double.tables["acc"].shards.items()))
    double.move("acc", shard, 3 - owner)


@pytest.mark.parametrize("poll", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_large_transaction_among_small_ones_is_told_whole_once_and_in_order(
    double: CitusDouble, tmp_path: Path, poll: bool
) -> None:
    """Also when the stream is opened again at any place that it told, one within what a node sent in one go, too."""
    double.everywhere(f"ALTER DATABASE {double.database} SET logical_decoding_work_mem = '64kB'")
    double.distribute("acc", COLUMNS)
    fill(double, "acc", 200)
    with Reading(double, tmp_path, "acc", poll=poll) as reading:
        write_around(double)
        told = reading.read(reading.start, full=None if poll else 1)
        assert len(told.rows) == LARGE + 4 * SMALL
        told.assert_whole_and_in_order()
        assert max(map(len, told.stretches)) >= LARGE
        inside = [
            number
            for number, place in enumerate(told.places)
            if any(node.at.lsn == node.at.commit_lsn + 1 for node in place.nodes.values())
        ]
        assert inside or poll  # what is polled may come so that all nodes end at once
        for number in {*inside[:1], *inside[-1:], *(inside[1:-1:7] if len(inside) < 40 else [])}:
            again = reading.read(told.places[number])
            assert again.rows == [row for stretch in told.stretches[number + 1 :] for row, _ in stretch]
            again.assert_whole_and_in_order()


def test_a_table_that_is_added_while_half_of_a_transaction_waits_begins_after_it(
    double: CitusDouble, tmp_path: Path
) -> None:
    """Nor is a boundary told inside it: the node knows the table by a column of another name, and tells that first."""
    double.everywhere(f"ALTER DATABASE {double.database} SET logical_decoding_work_mem = '64kB'")
    double.distribute("acc", COLUMNS)
    double.distribute("late", "id bigint, v text, old text")
    fill(double, "acc", 200)
    keys = [
        row[0] for row in double.execute(1, f"SELECT i FROM generate_series(1, 99) i WHERE {here(double, 'late', 1)}")
    ]
    with Reading(double, tmp_path, "acc") as reading:
        double.everywhere("ALTER PUBLICATION headwater ADD TABLE late")
        write_small(double, 1)
        write_small(double, 2)
        write_large(double, 1, f"INSERT INTO late VALUES ({keys[0]}, 'v', 'x') ON CONFLICT (id) DO UPDATE SET v = 'w'")
        shard, owner = next(iter(double.tables["acc"].shards.items()))
        double.move("acc", shard, 3 - owner)
        double.everywhere("ALTER TABLE late RENAME COLUMN old TO new")
        told, added = Told(), False
        for place in reading.stretches(reading.start, told, full=1):
            if not added and place.nodes[1].at.lsn == place.nodes[1].at.commit_lsn + 1:
                reading.add("late")
                double.execute(1, *(f"INSERT INTO late VALUES ({key}, 'v')" for key in keys[1:4]))
                reading.ends = log_ends(double)
                added = True
        assert added
        assert told.tables == {"acc": LARGE + 2 * SMALL, "late": 3}
        told.assert_whole_and_in_order()


@pytest.mark.soak
def test_a_node_that_was_promoted_is_followed_on_from_a_place_within_what_it_sent(nodes: Nodes, tmp_path: Path) -> None:
    """Archive recovery of a server that holds its slot stands for a promoted standby."""
    others = [nodes.server(place) for place in range(2)]
    with nodes.start() as server, CitusDouble([others[0], server, others[1]], nodes.name()) as double:
        double.distribute("acc", COLUMNS)
        fill(double, "acc", 200)
        with Reading(double, tmp_path, "acc") as reading:
            reading.source.close()
            server.stop()
            (server.data / "standby.signal").touch()
            server.start()
            server.promote()
            write_around(double)
            told = reading.read(reading.start, full=1)
            inside = next(place for place in told.places if place.nodes[1].at.lsn == place.nodes[1].at.commit_lsn + 1)
            again = reading.read(inside)
            left = told.stretches[told.places.index(inside) + 1 :]
            assert again.rows == [row for stretch in left for row, _ in stretch]
