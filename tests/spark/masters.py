"""Run in a process of its own: a read that is used twice, a stream and a log that is written, under another Spark.

Arguments: the master or remote, the options of the source as JSON, a folder. Prints what was read.
"""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from io import StringIO

import psycopg
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from headwater.spark.session import tuned


def main() -> None:
    kind, options, folder = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
    builder = SparkSession.builder
    if kind.startswith("connect:"):
        spark = builder.remote(kind.removeprefix("connect:")).getOrCreate()
    else:
        spark = tuned(builder.master(kind), checkpoints=folder).getOrCreate()
    frame = spark.read.format("headwater").options(**options).load()
    rows = frame.count()
    with psycopg.connect(options["source"], autocommit=True) as session:
        session.execute("INSERT INTO t VALUES (501, 'new row')")
    with redirect_stdout(StringIO()) as printed:
        frame.show(1000)
    shown = printed.getvalue().count(" row|")
    stream = spark.readStream.format("headwater").options(**options).load()
    writer = stream.writeStream.format("parquet").option("checkpointLocation", f"{folder}/checkpoint")
    query = writer.trigger(availableNow=True).start(f"{folder}/rows")
    query.awaitTermination()
    found = spark.read.parquet(f"{folder}/rows").agg(F.countDistinct("id"), F.count("id")).first()
    assert found is not None
    again = spark.readStream.format("headwater").options(**options, query="again").load()
    written = {"store": f"{folder}/written", "table": "t"}
    writer = again.writeStream.format("headwater").options(**written, key="id")
    writer.option("checkpointLocation", f"{folder}/again").trigger(availableNow=True).start().awaitTermination()
    told = {"rows": rows, "shown": shown, "streamed": found[0], "delivered": found[1]}
    print(json.dumps(told | {"written": spark.read.format("headwater").options(**written).load().count()}))
    spark.stop()


if __name__ == "__main__":
    main()
