"""A Spark driver that writes a stream and is killed, with its JVM, by the process that comes to a failpoint.

Arguments: the folder, and the failpoint or nothing. Each file in ``in`` is a batch.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from headwater import failpoints
from headwater.spark import stream_writer
from headwater.spark.source import HeadwaterDataSource
from headwater.spark.stream_writer import HeadwaterStreamWriter, StagedBatch
from headwater.spark.write_options import WriteOptions

STEP, DRIVER = "KILLED_AT", "KILLED_DRIVER"


class KilledSource(HeadwaterDataSource):
    """Ours, with a failpoint that takes the driver with it."""

    @classmethod
    def name(cls) -> str:
        return "headwater_killed"

    def streamWriter(self, schema: Any, overwrite: bool) -> KilledWriter:  # noqa: N802 - Spark's name
        return KilledWriter(WriteOptions.parse(self.options), schema)


class KilledWriter(HeadwaterStreamWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedBatch:
        arm()
        return super().write(iterator)

    def commit(self, messages: Any, batchId: int) -> None:  # noqa: N803 - Spark's name
        arm()
        super().commit(messages, batchId)


def arm() -> None:
    stream_writer.INLINE_BYTES = 0  # type: ignore[misc]
    failpoints.hit = kill_if_named


def kill_if_named(name: str) -> None:
    if name == os.environ[STEP]:
        driver, pid, chain = int(os.environ[DRIVER]), os.getpid(), []
        while pid not in (0, 1, driver):  # this process, those that started it, the JVM
            chain.append(pid)
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        for one in (*reversed(chain[1:]), driver, chain[0]):
            os.kill(one, signal.SIGKILL)


def main() -> None:
    from headwater.spark.session import session

    folder, step = Path(sys.argv[1]), sys.argv[2]
    os.environ[STEP], os.environ[DRIVER] = step, str(os.getpid())
    spark = session("local[2]", checkpoints=folder)
    spark.dataSource.register(KilledSource)
    rows = spark.readStream.schema("id INT").option("maxFilesPerTrigger", "1").json(f"{folder}/in")
    options = {"store": f"{folder}/store", "table": "shop.orders", "checkpointLocation": f"{folder}/checkpoint"}
    writer = rows.repartition(2).writeStream.format("headwater_killed").options(**options)
    writer.trigger(availableNow=True).start().awaitTermination()


if __name__ == "__main__":
    from tests.crash.spark import killed_driver  # so that workers find its classes by name

    killed_driver.main()
