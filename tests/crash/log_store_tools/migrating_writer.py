"""Writes a log and migrates it at its barriers, until it is killed or done. Run as a script by the crash tests.

    migrating_writer.py LOCATION FORMAT EPOCHS MIGRATE STAGE_BYTES

The content of an epoch is a function of its number, so anybody can tell what must be there. Prints each sealed epoch.
"""

from __future__ import annotations

import random
import sys

from tests.logs import KEY, SCHEMA, LogConsumer, epoch, random_chunk

from headwater.log_store import KvLogStoreFactory
from headwater.log_store.compaction import Compaction
from headwater.log_store.migration import Migration
from headwater.state import open_writer
from headwater.stream import Chunk, EpochPair


def chunks_of(number: int) -> list[Chunk]:
    rng = random.Random(number)
    return [random_chunk(rng, rng.randint(1, 300)) for _ in range(rng.randint(1, 3))]


def rows_of(number: int) -> set[tuple[int, int, int, str]]:
    """Seq, op, id and name of each row of an epoch."""
    rows: list[tuple[int, int, str]] = []
    for chunk in chunks_of(number):
        columns = (chunk.ops, chunk.rows.column("id"), chunk.rows.column("name"))
        rows += zip(*(column.to_pylist() for column in columns), strict=True)
    return {(seq, *row) for seq, row in enumerate(rows)}


def main(location: str, log_format: int, epochs: int, tool: str, stage_bytes: int) -> None:
    with open_writer(location) as store:
        factory = KvLogStoreFactory(store)
        log = factory.log("orders", SCHEMA, KEY, log_format)
        writer = factory.writer(log)
        number = store.committed_epoch().ms + 1
        writer.init(EpochPair(epoch(number), epoch(number - 1)))
        migration = Migration(factory, "orders", stage_bytes=stage_bytes)
        compaction = Compaction(factory, "orders")
        for ended in range(number, number + epochs):
            for chunk in chunks_of(ended):
                writer.write_chunk(chunk)
            writer.end_epoch(epoch(ended + 1))
            if tool == "migrate":
                migration.step(2)
            elif tool == "compact":
                compaction.step(1000)
            factory.sealer.seal(epoch(ended))
            print(ended, flush=True)
        factory.close()


def consume(location: str) -> None:
    """A consumer in a process of its own: prints what it delivers, then commits it."""
    with LogConsumer.open(location, "orders", "sink") as consumer:
        while True:
            after, upto = consumer.wait(0.2)
            found: dict[int, int] = {}
            for batch in consumer.read(after, upto):
                for at in batch.column("_epoch").to_pylist():
                    found[at >> 16] = found.get(at >> 16, 0) + 1
            if after != upto:
                consumer.commit(upto)
                print(" ".join(f"{at}:{count}" for at, count in sorted(found.items())), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "consume":
        consume(sys.argv[2])
    else:
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
