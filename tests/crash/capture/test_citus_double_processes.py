"""A capture and the nodes of a double of a Citus cluster (plain Postgres, not Citus), killed under live writers.

``HEADWATER_SEED`` gives the seed that a failed run has printed; ``HEADWATER_SOAK=1`` makes it 20 rounds.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.crash.capture.capture_process import CaptureProcess, wait_for
from tests.db.citus.writing import Writer
from tests.sampled import SOAK
from tests.servers.citus_double import CitusDouble, Nodes, log_ends

from headwater.capture import SourceState
from headwater.capture import session as capture_session
from headwater.capture.replay import replay
from headwater.log_store import LogView, sealer
from headwater.sources.citus import members
from headwater.sources.citus.offset import CitusOffset
from headwater.state import open_reader

COLUMNS = "id bigint, v text, amount numeric(12,2)"
STEPS = (
    (capture_session.AFTER_BEGIN, 1),
    (sealer.BEFORE_SEAL, 3),
    (sealer.AFTER_SEAL, 3),
    (capture_session.BEFORE_ACKNOWLEDGE, 2),
)
JOINING = (members.BEFORE_JOIN, members.JOINING_MADE, members.AFTER_JOIN)
LEAVING = (members.BEFORE_RETIRE, members.AFTER_RETIRE)


class ClusterProcess(CaptureProcess):
    """One capture of a cluster."""

    def __init__(self, double: CitusDouble, folder: Path) -> None:
        self._double = double
        super().__init__(double, folder, ["acc"])  # type: ignore[arg-type]

    def offset(self) -> CitusOffset | None:
        try:
            with open_reader(self.store) as reader, reader.snapshot() as view:
                record, _ = SourceState.read(view)
        except LookupError:
            return None
        if record is None:
            return None
        assert isinstance(record.offset, CitusOffset)
        return record.offset

    def catch_up(self) -> None:
        """Until all that the nodes have committed by now is durable."""
        targets = log_ends(self._double)

        def is_there() -> bool:
            assert self.process.poll() is None, self.said
            offset = self.offset()
            if offset is None:
                return False
            left = targets.keys() - set(offset.retired)
            return all(group in offset.nodes and offset.nodes[group].at.lsn >= targets[group] for group in left)

        wait_for(is_there, "the capture to come to the end of all logs")

    def wait_until_it_reads(self) -> None:
        """Until it holds a position."""
        wait_for(lambda: self.process.poll() is not None or self.offset() is not None, "the capture to begin")

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
    seed = os.environ.get("HEADWATER_SEED") or str(time.time_ns())
    print(f"HEADWATER_SEED={seed}")
    rng = random.Random(seed)
    with CitusDouble([nodes.server(place) for place in range(3)], nodes.name()) as double:
        double.distribute("acc", COLUMNS)
        capture = ClusterProcess(double, tmp_path)
        writer = Writer(double, "acc", keys=500)
        try:
            for step, hit in STEPS if SOAK else STEPS[1::2]:
                capture.start(armed=f"{step}=kill@{hit}")
                capture.wait_until_it_reads()
                if capture.offset() is not None and not writer.is_alive():
                    writer.start()
                capture.killed_by_failpoint()
            capture.start()
            for _ in range(20 if SOAK else 1):
                capture.wait_until_it_reads()
                time.sleep(rng.uniform(0.0, 1.0))
                victims = rng.sample(["capture", 0, 1, 2], rng.choice((1, 2)))
                if "capture" in victims:
                    capture.kill9()
                for victim in victims:
                    if isinstance(victim, int):
                        double.servers[victim].kill9()
                for victim in victims:
                    if isinstance(victim, int):
                        double.servers[victim].start()
                if SOAK and rng.random() < 0.5:
                    with writer.may_write:
                        shard, owner = rng.choice(list(double.tables["acc"].shards.items()))
                        double.move("acc", shard, 3 - owner)
                        writer.forget_owners()
                if "capture" in victims:
                    capture.start()
            writer.end()
            capture.catch_up()
            capture.stop()
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
                    capture.kill9()
                writer.end()
            capture.start()
            capture.catch_up()
            capture.stop()
            capture.assert_exactly_once()
        finally:
            capture.close()


def _follows(capture: ClusterProcess, group: int, wanted: bool) -> bool:
    assert capture.process.poll() is None, capture.said
    offset = capture.offset()
    return offset is not None and (group in offset.nodes) == wanted
