"""Any range of epochs × any set of vnodes: the same bytes each time, and just those rows of the whole log.

Each engine holds a log in format 1, one in format 2, and one in the midst of a migration, with epochs of both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.logs import epoch
from tests.store.log_store.tools import Table

from headwater.log_store import LogView
from headwater.log_store.columns import EPOCH, VNODE
from headwater.log_store.migration import Migration
from headwater.state import Snapshot, StateReader, open_reader
from headwater.stream import VnodeBitmap

EPOCHS = 6
SHAPES = ("format 1", "format 2", "migrating")
ENGINES = {"embedded": "{}", "object store": "slatedb+file://{}"}

RANGE = st.tuples(st.integers(0, EPOCHS), st.integers(0, EPOCHS)).map(sorted)
VNODES = st.one_of(
    st.tuples(st.integers(0, 255), st.integers(1, 256)).map(lambda cut: set(range(cut[0], cut[1]))),
    st.sets(st.integers(0, 255), max_size=20),
    st.sampled_from([set(range(256)), set(range(64, 128)), set(range(1, 256, 2))]),
).map(VnodeBitmap.of)


def written(location: str, shape: str) -> None:
    """Two writers; one epoch has chunks of several blocks, one is empty."""
    table = Table(location, log_format=2 if shape == "format 2" else 1)
    for number in range(1, EPOCHS + 1):
        if number == 4 and shape == "migrating":
            Migration(table.factory, "orders").step(1)
        if number == 3:
            table.seal()
        else:
            table.write(rows=9000 if number == 5 and shape != "format 1" else 40)
    if shape == "migrating":
        assert set(table.formats().values()) == {(1,), (2,)}
    table.close()


@pytest.fixture(scope="module", params=[(engine, shape) for engine in ENGINES for shape in SHAPES], ids=" ".join)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StateReader]:
    engine, shape = request.param
    location = ENGINES[engine].format(tmp_path_factory.mktemp("range") / "store")
    written(location, shape)
    with closing(open_reader(location)) as reader:
        yield reader


@pytest.fixture(scope="module")
def whole(store: StateReader) -> pa.Table:
    with store.snapshot() as view:
        return pa.Table.from_batches(batches(view, 0, EPOCHS, None))


def batches(view: Snapshot, after: int, upto: int, wanted: VnodeBitmap | None) -> list[pa.RecordBatch]:
    shown = LogView.open(view, "orders")
    return list(shown.read_range(epoch(after) if after else 0, epoch(upto) if upto else 0, wanted))


def as_bytes(found: list[pa.RecordBatch]) -> list[bytes]:
    return [batch.serialize().to_pybytes() for batch in found]


def table_of(found: list[pa.RecordBatch], schema: pa.Schema) -> pa.Table:
    return pa.Table.from_batches(found, schema).combine_chunks()


@settings(max_examples=20)
@given(RANGE, VNODES)
def test_a_range_is_the_same_bytes_each_time_and_a_filter_of_the_whole_log(
    store: StateReader, whole: pa.Table, bounds: list[int], wanted: VnodeBitmap
) -> None:
    after, upto = bounds
    with ExitStack() as views:
        first = batches(views.enter_context(store.mapped_snapshot()), after, upto, wanted)
        again = batches(views.enter_context(store.snapshot()), after, upto, wanted)
    assert as_bytes(first) == as_bytes(again)
    low, high = (pa.scalar(epoch(number) if number else 0, pa.uint64()) for number in bounds)
    in_range = pc.and_(pc.greater(whole[EPOCH], low), pc.less_equal(whole[EPOCH], high))
    owned = pa.array(wanted.mask_of(whole[VNODE].to_numpy()))
    assert table_of(first, whole.schema).equals(whole.filter(pc.and_(in_range, owned)).combine_chunks())


def test_rows_outlive_the_snapshot_and_the_store_that_they_were_read_from(tmp_path: Path) -> None:
    location = str(tmp_path / "store")
    written(location, "format 2")
    with open_reader(location) as reader, reader.mapped_snapshot() as view:
        found = batches(view, 0, EPOCHS, None)
        before = as_bytes(found)
    table = Table(location)  # which may write over what no snapshot holds
    for _ in range(3):
        table.write(rows=9000)
    table.close()
    assert as_bytes(found) == before
