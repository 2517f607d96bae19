"""Stored bytes of a log that are not what was written: every reader stops with a clear error, and skips nothing."""

from __future__ import annotations

import random
import struct
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import combinations

import pyarrow as pa
import pytest
from tests.logs import KEY, SCHEMA, LogConsumer, epoch, numbered_chunk

from headwater.log_store import KvLogStoreFactory, LogCorrupt, LogView, UnknownVersion
from headwater.log_store.chunk_codec import Compression, checksum, encode_batch
from headwater.log_store.log import LOGS
from headwater.log_store.progress import LogStoreVnodeProgress
from headwater.log_store.serde import BARRIERS, CHUNKS, ROWS, prefix
from headwater.state import Catalog, StateStore, WriteBatch, open_writer
from headwater.stream import Epoch, EpochPair

Change = Callable[[bytes], bytes]


class Damaged:
    """A log of one sealed epoch, whose records can be replaced."""

    def __init__(self, log_format: int, compression: Compression = Compression.NONE) -> None:
        self.store: StateStore = open_writer(f"memory://{uuid.uuid4()}")
        factory = KvLogStoreFactory(self.store, compression=compression)
        self.log = factory.log("orders", SCHEMA, KEY, log_format)
        writer = factory.writer(self.log)
        writer.init(EpochPair(epoch(1), Epoch(0)))
        for first in (0, 10):
            writer.write_chunk(numbered_chunk(first, 10))
        writer.end_epoch(epoch(2))
        factory.sealer.seal(epoch(1))
        factory.close()
        self.next = 2

    def records(self, space: int) -> list[tuple[bytes, bytes]]:
        with self.store.snapshot() as view:
            found = view.scan_prefix(prefix(self.log.number) + bytes((space,)))
            return [(bytes(key), bytes(value)) for key, value in found]

    def put(self, key: bytes, value: bytes | None) -> None:
        batch = WriteBatch()
        batch.delete(key) if value is None else batch.put(key, value)
        self.store.seal(epoch(self.next), batch)
        self.next += 1

    def range(self) -> list[int]:
        with self.store.snapshot() as view:
            batches = LogView.open(view, "orders").read_range(0, epoch(1))
            return sorted(key for batch in batches for key in batch.column("id").to_pylist())

    def delivered(self) -> list[int]:
        """What a reader with progress of its own gets."""
        with LogConsumer.open(self.store.location, "orders", "sink") as consumer:
            batches = consumer.read(Epoch(0), epoch(1))
            return sorted(key for batch in batches for key in batch.column("id").to_pylist())

    def is_noticed(self, key: bytes, value: bytes | None, *errors: type[Exception]) -> None:
        """Both ways of reading stop; with the right bytes both go on."""
        (good,) = (held for name, held in [pair for space in range(3) for pair in self.records(space)] if name == key)
        self.put(key, value)
        for read in (self.range, self.delivered):
            with pytest.raises(errors):
                read()
        self.put(key, good)
        assert self.range() == self.delivered() == list(range(20))


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def damaged(request: pytest.FixtureRequest) -> Iterator[Damaged]:
    made = Damaged(request.param)
    yield made
    made.store.close()


@pytest.mark.parametrize("compression", list(Compression), ids=lambda how: how.name.lower())
def test_a_chunk_that_is_cut_anywhere(compression: Compression) -> None:
    made = Damaged(2, compression)
    (key, value), _ = made.records(CHUNKS)
    for cut in (*range(64), *range(64, len(value), 37), len(value) - 1):
        made.is_noticed(key, value[:cut], LogCorrupt)
    made.store.close()


def test_a_row_that_is_cut_anywhere_or_has_more() -> None:
    made = Damaged(1)
    key, value = made.records(ROWS)[7]
    for cut in range(len(value)):
        made.is_noticed(key, value[:cut], LogCorrupt)
    made.is_noticed(key, value + b"\0", LogCorrupt)
    made.store.close()


def test_a_barrier_that_is_cut_anywhere(damaged: Damaged) -> None:
    ((key, value),) = damaged.records(BARRIERS)
    for cut in (*range(0, len(value), 5), len(value) - 1):
        damaged.is_noticed(key, value[:cut], LogCorrupt)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda value: value.replace(b'"v":1', b'"v":2'), UnknownVersion),
        (lambda value: value.replace(b'"format":', b'"format":9'), LogCorrupt),
        (lambda value: value[: value.rindex(b',"crc"')].replace(b'"format":', b'"format":9') + b"}", UnknownVersion),
        (lambda value: value.replace(b'"rows":20', b'"rows":21'), LogCorrupt),
        (lambda value: value[: value.rindex(b',"crc"')].replace(b'"rows":20', b'"rows":21') + b"}", LogCorrupt),
        (lambda value: value.replace(b'"ms":', b'"ms":1'), LogCorrupt),
        (lambda value: value.replace(b'"count":256', b'"count":0'), LogCorrupt),
        (lambda value: value.replace(b'"count":256', b'"count":"x"'), LogCorrupt),
        (lambda value: value.replace(b'"vnodes"', b'"others"'), LogCorrupt),
        (lambda _: b"", LogCorrupt),
        (lambda _: b"[]", LogCorrupt),
        (lambda _: b"7", LogCorrupt),
        (lambda _: b"\xff\xfe", LogCorrupt),
    ],
)
def test_a_barrier_of_another_shape(damaged: Damaged, change: Change, error: type[Exception]) -> None:
    ((key, value),) = damaged.records(BARRIERS)
    damaged.is_noticed(key, change(value), error)


def test_a_value_of_another_version(damaged: Damaged) -> None:
    space = ROWS if damaged.log.format == 1 else CHUNKS
    key, value = damaged.records(space)[0]
    for version in (0, 3 - damaged.log.format, 3, 255):
        damaged.is_noticed(key, bytes((version,)) + value[1:], UnknownVersion)
    for schema in (0, 2, 65_535):
        damaged.is_noticed(key, value[:2] + struct.pack("<H", schema) + value[4:], UnknownVersion, LogCorrupt)


def test_a_log_of_another_version(damaged: Damaged) -> None:
    with damaged.store.snapshot() as view:
        table = Catalog.load(view).open(LOGS)
        row = table.get(view, 0, ("orders",))
    assert row is not None
    batch = WriteBatch()
    table.put(batch, 0, ("orders",), (row[0], 3, *row[2:]))
    damaged.store.seal(epoch(damaged.next), batch)
    with pytest.raises(UnknownVersion, match="Upgrade"):
        damaged.range()


def test_lengths_that_are_claimed_and_not_there() -> None:
    made = Damaged(2)
    (key, value), _ = made.records(CHUNKS)
    (start,) = struct.unpack_from("<Q", value, 24)
    lies: list[Change] = [
        lambda good: good[:4] + b"\xff" * 4 + good[8:],  # rows
        lambda good: good[:12] + b"\xff\xff" + good[14:],  # blocks
        lambda good: good[:20] + b"\xff" * 4 + good[24:],  # rows of a block
        lambda good: good[:24] + b"\xff" * 8 + good[32:],  # where a block is
        lambda good: good[:32] + b"\xff" * 8 + good[40:],  # and how long
        lambda good: good[: start + 4] + b"\xff\xff\xff\x7f" + good[start + 8 :],  # its metadata
        lambda good: good[:1] + b"\x07" + good[2:],  # a compression that there is not
    ]
    for lie in lies:
        made.is_noticed(key, lie(value), LogCorrupt)
    made.store.close()
    rows = Damaged(1)
    key, value = rows.records(ROWS)[0]
    rows.is_noticed(key, value[:13] + b"\xff\xff\xff\xff" + value[17:], LogCorrupt)
    rows.store.close()


@pytest.mark.parametrize("log_format", [1, 2])
def test_a_key_that_is_none(log_format: int) -> None:
    made = Damaged(log_format)
    key, value = made.records(ROWS if log_format == 1 else CHUNKS)[0]
    made.put(key + b"x", value)
    try:
        for read in (made.range, made.delivered):
            with pytest.raises(LogCorrupt):
                read()
    finally:
        made.store.close()


def test_an_op_that_is_none(damaged: Damaged) -> None:
    if damaged.log.format == 1:
        key, value = damaged.records(ROWS)[0]
        damaged.is_noticed(key, value[:1] + b"\x09" + value[2:], LogCorrupt)
        return
    (key, _), _ = damaged.records(CHUNKS)
    with damaged.store.snapshot() as view:
        batch = next(LogView.open(view, "orders").read_range(0, epoch(1))).drop_columns(["_epoch"])
    place = batch.schema.get_field_index("_op")
    batch = batch.set_column(place, batch.schema.field(place), pa.array([9] * batch.num_rows, pa.int8()))
    value = encode_batch(batch, batch.column("_vnode").to_numpy(), 0, 1, 256, Compression.NONE)
    damaged.is_noticed(key, without_checksums(value), LogCorrupt)


def without_checksums(value: bytes) -> bytes:
    """A chunk as earlier releases wrote it."""
    return value[:14] + b"\0\0" + value[16:]


def test_a_record_that_is_gone(damaged: Damaged) -> None:
    key, _ = damaged.records(ROWS if damaged.log.format == 1 else CHUNKS)[0]
    damaged.is_noticed(key, None, LogCorrupt)


def flipped(value: bytes, at: int, bit: int) -> bytes:
    return value[:at] + bytes((value[at] ^ 1 << bit,)) + value[at + 1 :]


@pytest.mark.parametrize("compression", list(Compression), ids=lambda how: how.name.lower())
def test_a_flipped_bit_anywhere_in_a_chunk(compression: Compression) -> None:
    made = Damaged(2, compression)
    (key, value), _ = made.records(CHUNKS)
    (start,) = struct.unpack_from("<Q", value, 24)
    head = 16 + 24 + 4 + 4
    for at in (*range(head), *range(start, len(value), 7)):
        if at in (14, 15):
            continue  # without its checksums it is a chunk of an earlier release, with the same values
        made.is_noticed(key, flipped(value, at, at % 8), LogCorrupt, UnknownVersion)
    made.store.close()


def test_a_chunk_of_an_earlier_release_cannot_end_the_process() -> None:
    made = Damaged(2)
    (key, value), _ = made.records(CHUNKS)
    plain = without_checksums(value)
    made.put(key, plain)
    assert made.range() == made.delivered() == list(range(20))
    (start,) = struct.unpack_from("<Q", value, 24)
    for at in range(start, len(value), 3):
        made.put(key, flipped(plain, at, 7))
        with suppress(LogCorrupt):
            made.range()
    made.store.close()


@pytest.mark.parametrize("size", [0, 1, 4071, 4072, 4073, 100_000])
def test_a_checksum_notices_bits_pages_and_their_order(size: int) -> None:
    data = bytes(random.Random(size).randbytes(size))
    found = checksum(data)
    assert checksum(memoryview(bytearray(data))) == found
    for at in range(0, size, max(1, size // 200)):
        assert checksum(flipped(data, at, at % 8)) != found
    pages = [data[at : at + 4096] for at in range(0, size, 4096)]
    for first, second in combinations(range(len(pages) - 1), 2):
        moved = list(pages)
        moved[first], moved[second] = pages[second], pages[first]
        assert checksum(b"".join(moved)) != found


@pytest.mark.parametrize(
    "stored",
    [
        {},
        {"count": 256},
        {"count": 256, "places": [[1]]},
        {"count": 256, "places": [[-1, None, {"count": 256, "ranges": [[0, 9]]}]]},
        {"count": 256, "places": [[1, None, {"count": 256, "ranges": [[0, 999]]}]]},
        {"count": 256, "places": [[1, None, {"count": 8, "ranges": [[0, 8]]}]]},
        {"count": 256, "places": 7},
    ],
    ids=str,
)
def test_progress_that_is_none(stored: dict[str, object]) -> None:
    with pytest.raises(LogCorrupt):
        LogStoreVnodeProgress.from_json(stored)
