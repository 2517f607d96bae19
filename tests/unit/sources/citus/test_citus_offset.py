"""Positions of a cluster: compared node by node, and numbers of commits that grow with the merged log."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from headwater.sources.citus.numbers import CommitNumbers, commits_of
from headwater.sources.citus.offset import POSITION_DTYPE, CitusMark, CitusOffset, NodePlace, positions_of
from headwater.sources.errors import ForeignOffset, InvalidOffset
from headwater.sources.events import Changes
from headwater.sources.offset import CdcOffset, position_rows
from headwater.sources.postgres.mark import PostgresMark
from headwater.sources.postgres.offset import POSITION_TYPE, PostgresOffset
from headwater.sources.postgres.offset import positions_of as of_postgres
from headwater.sources.postgres.slot import ServerIdentity
from headwater.sources.snapshots import mark_from_json
from headwater.sources.table import SourceColumn, SourceTable

TABLE = SourceTable("public", "t", (SourceColumn("id", pa.int64(), "bigint", 1),), ("id",), 7)


def at(retired: tuple[int, ...] = (), **places: int) -> CitusOffset:
    nodes = {int(name[1:]): NodePlace(PostgresOffset.at(lsn)) for name, lsn in places.items()}
    return CitusOffset(nodes, retired)


def of_node(*commits: int) -> pa.FixedSizeBinaryArray:
    count = len(commits)
    return of_postgres(np.array(commits, np.uint64), np.arange(count, dtype=np.uint32), np.full(count, 5, np.uint32))


def changes(*rows: tuple[int, int]) -> Changes:
    """Rows with commit and time."""
    schema = TABLE.log_schema(POSITION_TYPE)
    columns = [
        pa.array(range(len(rows)), pa.int64()),
        of_node(*(commit for commit, _ in rows)),
        pa.array([when for _, when in rows], pa.timestamp("us", tz="UTC")),
        pa.nulls(len(rows), pa.string()),
    ]
    return Changes(TABLE, pa.RecordBatch.from_arrays(columns, schema=schema), pa.array([1] * len(rows), pa.int8()))


def test_a_place_lies_before_another_only_where_it_does_on_every_node() -> None:
    assert at(n0=1, n1=1) < at(n0=1, n1=2)
    assert at(n0=1, n1=1) <= at(n0=1, n1=1)
    assert at(n0=2, n1=2) > at(n0=1, n1=2)
    one, other = at(n0=1, n1=2), at(n0=2, n1=1)
    assert not any((one < other, one <= other, one > other, one >= other, one == other))
    assert not one.has_passed(other)
    assert not other.has_passed(one)


def test_a_node_that_is_not_followed_yet_is_not_passed_and_a_retired_one_is() -> None:
    assert not at(n0=9).has_passed(at(n0=1, n2=1))
    assert at((2,), n0=9).has_passed(at(n0=1, n2=1))
    assert at(n0=9, n3=1).has_passed(at(n0=1))


def test_the_end_of_the_last_transaction_has_passed_a_place_of_the_same_log() -> None:
    """No commit lies between them: an idle node need not log anything to have come to a snapshot."""
    after = CitusOffset({0: NodePlace(PostgresOffset.end_of(70, 90, 5))})
    assert after.has_passed(at(n0=90))
    assert not after.has_passed(at(n0=91))
    assert not CitusOffset({0: NodePlace(PostgresOffset.of_row(70, 1, 5))}).has_passed(at(n0=71))


def test_a_place_of_another_kind_of_source_has_no_order() -> None:
    with pytest.raises(ForeignOffset):
        _ = at(n0=1) < PostgresOffset.at(1)
    assert at(n0=1) != PostgresOffset.at(1)


def test_json_keeps_all_of_it() -> None:
    place = NodePlace(PostgresOffset.end_of(5, 8, 3), ServerIdentity("7", 1, "shop"), "worker-1:5432")
    offset = CitusOffset({0: place, 12: NodePlace(PostgresOffset.at(4))}, (3,), 99, "4:10:22")
    read = CdcOffset.from_json(offset.to_json())
    assert read == offset
    assert read.to_json() == offset.to_json()
    assert isinstance(read, CitusOffset)
    assert read.nodes[0] == place


@pytest.mark.parametrize(
    "text", ['{"Citus":{}}', '{"Citus":{"nodes":{"a":{}},"retired":[],"number":0,"placements":""}}']
)
def test_a_text_that_lacks_a_field_is_refused(text: str) -> None:
    with pytest.raises(InvalidOffset):
        CdcOffset.from_json(text)


def test_numbers_are_times_that_never_go_back_and_one_for_a_commit() -> None:
    numbers = CommitNumbers(100)
    first = commits_of([changes((10, 500), (10, 500), (30, 400)), changes((20, 450), (30, 400))])
    assert first.lsns.tolist() == [10, 20, 30]
    assert numbers.of({1: first})[1].tolist() == [500, 501, 502]
    goes_on = commits_of([changes((30, 400), (40, 410))])  # the last commit was half way
    assert numbers.of({1: goes_on})[1].tolist() == [502, 503]
    several = {1: commits_of([changes((50, 9000), (60, 9002))]), 2: commits_of([changes((40, 9001))])}
    assert {group: given.tolist() for group, given in numbers.of(several).items()} == {1: [9000, 9002], 2: [9001]}
    assert numbers.of({1: commits_of([])})[1].tolist() == []
    assert numbers.last == 9002


def test_positions_sort_as_numbers_do_and_a_place_after_lies_between() -> None:
    made = positions_of(of_node(90, 90, 10), 3, np.array([5, 5, 6], np.uint64))
    texts = made.to_pylist()
    assert texts == sorted(texts)
    assert position_rows(made.slice(1), POSITION_DTYPE)["commit_lsn"].tolist() == [90, 10]
    after = at(n0=1).position_after(texts[1])
    assert texts[1] < after < texts[2]


def test_a_snapshot_has_all_of_a_node_that_was_removed_before_it_though_no_newer_one_is_left() -> None:
    mark = CitusMark(((0, PostgresMark.parse("1:1:", 50, 50)), (2, PostgresMark.parse("1:1:", 50, 50))), (), 7, 4)
    for group, has in {3: True, 4: True, 5: False}.items():
        positions = positions_of(of_node(30), group, np.array([1], np.uint64))
        assert mark.contains(positions).tolist() == [has], group
        assert mark.unseen(positions).tolist() == [not has]
    assert mark_from_json(mark.to_json()) == mark


def test_a_place_that_has_passed_two_others_is_the_later_one_on_each_node() -> None:
    joined = at(n0=10, n1=30).joined(at((3,), n0=20, n1=20, n2=5))
    assert joined == at((3,), n0=20, n1=30, n2=5)
    assert at((3,), n0=20).joined(at(n0=10, n3=40)) == at((3,), n0=20)
    assert PostgresOffset.at(4).joined(PostgresOffset.at(3)) == PostgresOffset.at(4)


def test_a_snapshot_is_behind_where_one_node_is_and_not_for_a_node_that_it_has_not() -> None:
    assert not at(n0=10, n1=10).is_behind(at(n0=10, n1=10, n2=10))
    assert at(n0=9, n1=20, n2=20).is_behind(at(n0=10, n1=10, n2=10))
    assert not at(n0=10, n1=10, n2=10).is_behind(at((2,), n0=10, n1=10))
    assert not at(n0=90).is_behind(CitusOffset({0: NodePlace(PostgresOffset.end_of(70, 90, 5))}))
    with pytest.raises(ForeignOffset):
        at(n0=1).is_behind(PostgresOffset.at(1))


def test_a_mark_tells_what_it_has_node_by_node() -> None:
    marks = {group: PostgresMark.parse("1:1:", end, end) for group, end in ((0, 50), (2, 20), (5, 9))}
    mark = CitusMark(tuple(marks.items()), (3,), 7)
    groups = {0: True, 2: False, 5: False, 1: True, 3: False, 8: False}  # 1 was removed before, 8 joined after it
    for group, has in groups.items():
        positions = positions_of(of_node(30), group, np.array([1], np.uint64))
        assert mark.contains(positions).tolist() == [has], group
        assert mark.unseen(positions).tolist() == [not has and group != 3]  # no snapshot shows what is not in use
    assert mark_from_json(mark.to_json()) == mark
    assert mark.low <= mark.high
    with pytest.raises(InvalidOffset):
        mark_from_json('{"Citus":{"nodes":{}}}')


def test_places_of_every_release_are_read_and_the_newest_is_written_as_it_was() -> None:
    """Without the servers that left; with them; with the shards of tables; with slots that are left, too."""
    texts = (Path(__file__).parents[3] / "fixtures/positions/citus.jsonl").read_text().splitlines()
    read = [CdcOffset.from_json(text) for text in texts]
    assert [one.to_json() for one in read[-1:]] == texts[-1:]
    first, second, third, fourth = read
    assert isinstance(first, CitusOffset)
    assert isinstance(second, CitusOffset)
    assert isinstance(third, CitusOffset)
    assert isinstance(fourth, CitusOffset)
    assert (first.left, first.shards, first.retired) == ({}, {}, (1,))
    assert first.nodes[2] == NodePlace(
        PostgresOffset.end_of(28479616, 28479720, 0), ServerIdentity("7400000000000000002", 3, "shop"), "worker-2:5432"
    )
    assert (second.left, second.shards) == ({"7400000000000000001": 28479720}, {})
    assert third.shards == {"public.acc": frozenset({*range(102008, 102040), 102050}), "sales.ä": frozenset({102040})}
    assert (third.slots, fourth.slots) == ({}, {"7400000000000000001": "worker-1:5432"})
