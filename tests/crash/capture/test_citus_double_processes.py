"""A capture and the nodes of a double of a Citus cluster (plain Postgres, not Citus), killed under live writers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.crash.capture.capture_process import CaptureProcess, wait_for
from tests.crash.capture.rounds import Rounds, Victim, seeded, some_steps
from tests.db.citus.writing import Writer
from tests.replay import replay
from tests.sampled import SOAK
from tests.servers.citus_double import CitusDouble, Nodes, log_ends

from headwater.log_store import LogView
from headwater.sources.citus import members
from headwater.sources.citus.offset import CitusOffset
from headwater.state import open_reader

COLUMNS = "id bigint, v text, amount numeric(12,2)"
JOINING = (members.BEFORE_JOIN, members.JOINING_MADE, members.AFTER_JOIN)
LEAVING = (members.BEFORE_RETIRE, members.AFTER_RETIRE)


class ClusterProcess(CaptureProcess):
    """One capture of a cluster."""

    def __init__(self, double: CitusDouble, folder: Path) -> None:
        self._double = double
        super().__init__(double, folder, ["acc"])

    def offset(self) -> CitusOffset | None:
        offset = super().offset()
        assert offset is None or isinstance(offset, CitusOffset)
        return offset

    def catch_up(self) -> None:
        targets = log_ends(self._double)

        def is_there() -> bool:
            offset = self.offset()
            if not self.runs() or offset is None:
                return False
            left = targets.keys() - set(offset.retired)
            return all(group in offset.nodes and offset.nodes[group].at.lsn >= targets[group] for group in left)

        wait_for(is_there, "the capture to come to the end of all logs")

    def assert_exactly_once(self) -> None:
        """The log has every change once, and the table that it tells of is the cluster's."""
        with open_reader(self.store) as reader, reader.snapshot() as view:
            shown = LogView.open(view, "public.acc")
            positions = [
                row for batch in shown.read_range(0, shown.sealed) for row in batch.column("_position").to_pylist()
            ]
            table = replay(view, "public.acc")
        assert len(set(positions)) == len(positions) > 20
        found = {row["id"]: (row["id"], row["v"], row["amount"]) for row in table.to_pylist()}
        assert found == self._double.rows("acc")


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    yield made
    made.close()


@pytest.mark.timeout(900)
def test_every_change_arrives_exactly_once_whichever_node_or_capture_is_killed(nodes: Nodes, tmp_path: Path) -> None:
    _, rng = seeded()
    with CitusDouble([nodes.server(place) for place in range(3)], nodes.name()) as double:
        double.distribute("acc", COLUMNS)
        capture = ClusterProcess(double, tmp_path)
        writer = Writer(double, "acc", keys=500)
        lives = Rounds(capture, [writer], rng)

        def some() -> list[Victim]:
            return rng.sample([capture, *double.servers.values()], rng.choice((1, 2)))

        def move_a_shard() -> None:
            if SOAK and rng.random() < 0.5:
                with writer.may_write:
                    shard, owner = rng.choice(list(double.tables["acc"].shards.items()))
                    double.move("acc", shard, 3 - owner)
                    writer.forget_owners()

        try:
            lives.die_at(some_steps(rng, 2))
            lives.die_at_random(20 if SOAK else 1, some, move_a_shard)
            lives.end()
            capture.assert_exactly_once()
        finally:
            capture.close()


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_node_joins_and_leaves_exactly_once_whichever_step_is_killed(nodes: Nodes, tmp_path: Path) -> None:
    with CitusDouble([nodes.server(place) for place in range(3)], nodes.name()) as double:
        double.distribute("acc", COLUMNS)
        capture = ClusterProcess(double, tmp_path)
        try:
            capture.start()
            capture.wait_until_it_reads()
            with Writer(double, "acc", keys=300) as writer:
                capture.kill9()
                for place, step in enumerate((*JOINING, *LEAVING)):
                    if step in JOINING:
                        joined = double.add_node(nodes.server(3 + place))
                        capture.start(armed=f"{step}=kill@1")
                        capture.killed_by_failpoint()
                        capture.start()
                        wait_for(partial(_follows, capture, joined, True), "the node to be followed")
                        shard = list(double.tables["acc"].shards)[place]
                        with writer.may_write:
                            double.move("acc", shard, joined)
                            writer.forget_owners()
                    else:
                        leaving = max(double.tables["acc"].shards.values())
                        assert leaving > 2
                        with writer.may_write:
                            for shard, owner in list(double.tables["acc"].shards.items()):
                                if owner == leaving:
                                    double.move("acc", shard, 2)
                            writer.forget_owners()
                            double.remove_node(leaving)
                        capture.start(armed=f"{step}=kill@1")
                        capture.killed_by_failpoint()
                        capture.start()
                        wait_for(partial(_follows, capture, leaving, False), "the node to be retired")
                        wait_for(partial(_has_no_slot, double, leaving), "its slot to be dropped")
                    capture.kill9()
                writer.end()
            capture.start()
            capture.catch_up()
            capture.stop()
            capture.assert_exactly_once()
        finally:
            capture.close()


def _follows(capture: ClusterProcess, group: int, wanted: bool) -> bool:
    offset = capture.offset()
    return capture.runs() and offset is not None and (group in offset.nodes) == wanted


def _has_no_slot(double: CitusDouble, group: int) -> bool:
    return not double.execute(group, "SELECT 1 FROM pg_replication_slots WHERE database = current_database()")
