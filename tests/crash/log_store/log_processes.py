"""A writer and four consumers of a log, each a process, killed at random and started again.

Run as a process of its own (``-m tests.crash.log_store.log_processes LOCATION FOLDER SECONDS SEED FORMAT``): it forks,
so the parent never opens a store. The ids of an epoch are a function of its number, so that the verifier knows what
must arrive; the names tell which process wrote it, so that all consumers must have
seen the same one.

A consumer delivers by appending to a file: the rows of a range, the line ``end``, then the commit, then the line
``done``. A kill between any two of these leaves a range that was delivered and perhaps committed; the line ``start`` of
the next life tells which. The verifier takes the committed ranges only, and wants every row in exactly one of them.
Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
from tests.logs import KEY, SCHEMA, LogConsumer, epoch

from headwater.log_store.errors import LogNotFound
from headwater.log_store.factory import KvLogStoreFactory
from headwater.log_store.log_view import LogView
from headwater.state import open_reader, open_writer
from headwater.state.errors import StoreNotFound
from headwater.stream import Chunk, EpochPair, Op, VnodeBitmap

LOG = "public.orders"
HALVES = VnodeBitmap.full(256).split(2)
CONSUMERS: dict[str, list[VnodeBitmap | None]] = {
    "one": [None],
    "two": [None],
    "three": list(HALVES),
    "four": list(HALVES),
}


def ids_of(number: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(1 << 40) for _ in range(rng.choice((0, 1, 30, 200, 900)))]


def chunks_of(number: int, name: str) -> list[Chunk]:
    ids = ids_of(number)
    rng = random.Random(number)
    made = []
    while ids:
        part, ids = ids[: (size := rng.randint(1, 300))], ids[size:]
        batch = pa.RecordBatch.from_arrays([pa.array(part, pa.int64()), pa.array([name] * len(part))], schema=SCHEMA)
        made.append(Chunk.build(batch, [Op.INSERT] * len(part), KEY))
    return made


def write(location: str, folder: Path, log_format: int) -> None:
    with open_writer(location) as store:
        factory = KvLogStoreFactory(store, max_bytes=20_000)
        writer = factory.writer(factory.log(LOG, SCHEMA, KEY, log_format))
        number = store.committed_epoch().ms + 1
        writer.init(EpochPair(epoch(number), epoch(number - 1)))
        while not (folder / "stop").exists():
            for chunk in chunks_of(number, f"pid {os.getpid()}"):
                writer.write_chunk(chunk)
            writer.end_epoch(epoch(number + 1))
            if number % 3:
                factory.sealer.seal(epoch(number))
            number += 1
            time.sleep(0.002)
        writer.end_epoch(epoch(number + 1))
        factory.sealer.seal(epoch(number))
        factory.close()
    (folder / "stopped").write_text(str(number))


def consume(location: str, folder: Path, name: str) -> None:
    while True:
        try:
            consumer = LogConsumer.open(location, LOG, name)
            break
        except (LogNotFound, StoreNotFound):
            time.sleep(0.02)
    parts = CONSUMERS[name]
    out = os.open(folder / f"{name}.delivered", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def tell(kind: str, **fields: Any) -> None:
        os.write(out, (json.dumps({"kind": kind} | fields) + "\n").encode())

    def place(part: VnodeBitmap | None) -> int:
        least = consumer.progress.minimum(part or VnodeBitmap.full(256))
        return consumer.delivered().ms if least is None else least.epoch.ms

    os.write(out, b"\n")  # ends a line that a kill has cut
    tell("start", places=[place(part) for part in parts], begun=consumer.started.ms)
    while True:
        stopped = (folder / "stopped").exists()
        after, upto = consumer.wait(0.1)
        if after == upto:
            if stopped and after.ms == int((folder / "stopped").read_text()):
                break
            continue
        for index, part in enumerate(parts):
            if place(part) == upto.ms:
                continue
            for batch in consumer.read(after, upto, part):
                columns = [batch.column(column).to_pylist() for column in ("_epoch", "_vnode", "_seq", "id", "name")]
                tell("rows", part=index, rows=list(zip(*columns, strict=True)))
            tell("end", part=index, after=place(part), upto=upto.ms)
            consumer.commit(upto, part)
            tell("done", part=index, upto=upto.ms)
    consumer.close()


def verify(location: str, folder: Path) -> dict[str, Any]:
    """What went wrong, in words; and how much was looked at."""
    final = int((folder / "stopped").read_text())
    wrong: list[str] = []
    names: dict[tuple[int, int, int], str] = {}
    lives = replayed = total = 0
    for consumer, parts in CONSUMERS.items():
        committed: list[Counter[tuple[int, int, int, int]]] = [Counter() for _ in parts]
        open_rows: list[list[tuple[int, int, int, int]]] = [[] for _ in parts]
        ended: list[tuple[int, int] | None] = [None] * len(parts)
        places = [0] * len(parts)
        begun = 0
        for line in (folder / f"{consumer}.delivered").read_text().splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # a kill inside a write
            part = entry.get("part", 0)
            if entry["kind"] == "start":
                lives += 1
                for index, place in enumerate(entry["places"]):
                    end = ended[index]
                    if end is not None and place == end[1]:
                        committed[index].update(open_rows[index])  # its commit was durable before the kill
                    elif lives > 1 and places[index] and place != places[index]:
                        wrong.append(f"{consumer}: started at {place}, committed {places[index]}")
                    replayed += bool(open_rows[index]) and not (end is not None and place == end[1])
                    places[index], open_rows[index], ended[index] = place, [], None
                begun = begun or entry["begun"]
            elif entry["kind"] == "rows":
                for number, vnode, seq, key, name in entry["rows"]:
                    row = (number >> 16, vnode, seq)
                    if names.setdefault(row, name) != name:
                        wrong.append(f"{consumer}: another row at {row}")
                    open_rows[part].append((*row, key))
            elif entry["kind"] == "end":
                if entry["after"] != places[part]:
                    wrong.append(f"{consumer}: a range after {entry['after']}, committed {places[part]}")
                ended[part] = (entry["after"], entry["upto"])
            else:
                committed[part].update(open_rows[part])
                places[part], open_rows[part], ended[part] = entry["upto"], [], None
        found = sum(committed, Counter())
        twice = [row for row, count in found.items() if count != 1]
        expected = {(number, seq, key) for number in range(begun + 1, final) for seq, key in enumerate(ids_of(number))}
        got = {(number, seq, key) for number, _, seq, key in found}
        got = {row for row in got if row[0] > begun}
        if twice or got != expected:
            wrong.append(
                f"{consumer}: {len(twice)} rows twice, {len(expected - got)} missing, {len(got - expected)} more"
            )
        total += len(found)
    with open_reader(location) as store, store.snapshot() as view:
        shown = LogView.open(view, LOG)
        gone, held = shown.bounds().gone.ms, sum(1 for _ in shown.epochs())
    return {
        "wrong": wrong[:5],
        "lives": lives,
        "replayed": replayed,
        "rows": total,
        "epochs": final,
        "gone": gone,
        "held": held,
    }


def forked(work: Any, *arguments: Any) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work(*arguments)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


def main(location: str, folder: Path, seconds: float, seed: int, log_format: int) -> dict[str, Any]:
    rng = random.Random(seed)
    for number in range(20):
        chunks_of(number, "warm")  # what pyarrow imports at first use is imported once, not in every child
    work: dict[str, tuple[Any, ...]] = {name: (consume, location, folder, name) for name in CONSUMERS}
    work["writer"] = (write, location, folder, log_format)
    running = {name: forked(*what) for name, what in work.items()}
    kills, failed = 0, 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(rng.uniform(0.03, 0.35) * (3 if location.startswith("slatedb") else 1))
        name = rng.choice([*CONSUMERS, "writer", "writer"])
        os.kill(running[name], signal.SIGKILL)
        _, status = os.waitpid(running[name], 0)
        failed += os.WIFEXITED(status)  # it ended by itself before the kill: an error
        kills += 1
        running[name] = forked(*work[name])
    (folder / "stop").touch()
    deadline = time.monotonic() + 60
    for pid in running.values():
        while (done := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.02)
        if done[0] == 0:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        failed += done[0] == 0 or done[1] != 0
    reading, writing = os.pipe()
    pid = forked(lambda: os.write(writing, json.dumps(verify(location, folder)).encode()))
    os.close(writing)
    answer = os.read(reading, 1 << 16)
    os.waitpid(pid, 0)
    found: dict[str, Any] = json.loads(answer)
    return {"kills": kills, "failed": failed} | found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))))
