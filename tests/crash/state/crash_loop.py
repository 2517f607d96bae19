"""Kill a sealing writer at random points, again and again, and look at what is there.

Run as a script of its own (``python crash_loop.py LOCATION ROUNDS SEED``), because it forks and SlateDB does not
survive a fork: the parent never opens the store. Each round forks a writer, lets it seal for a random time, kills it
with SIGKILL, then forks a verifier. The content of an epoch is a function of its number, so the verifier can tell
exactly: every acknowledged epoch is there, and what is there is one whole epoch. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time
import traceback

from headwater.state import WriteBatch, open_reader, open_writer
from headwater.state.errors import StoreNotFound
from headwater.stream.epoch import Epoch


def rows_of(number: int) -> dict[bytes, bytes]:
    """What the store holds when epoch *number* is the newest: three epochs' rows and a counter."""
    rows = {b"counter": str(number).encode()}
    for epoch in range(max(1, number - 2), number + 1):
        rng = random.Random(epoch)
        for place in range(rng.randint(1, 40)):
            size = rng.choice((0, 10, 300, 300, 9000))
            rows[b"row/%08d/%04d" % (epoch, place)] = rng.randbytes(size)
    return rows


def batch_of(number: int) -> WriteBatch:
    batch = WriteBatch()
    batch.put(b"counter", str(number).encode())
    batch.put_many((key, value) for key, value in rows_of(number).items() if key.startswith(b"row/%08d/" % number))
    if number > 3:
        batch.delete_range(None, b"counter")
        batch.delete_prefix(b"row/%08d/" % (number - 3))
    return batch


def write_until_killed(location: str, acknowledge: int) -> None:
    with open_writer(location) as store:
        number = store.committed_epoch().ms
        while True:
            number += 1
            store.seal(Epoch.from_ms(number), batch_of(number))
            os.write(acknowledge, number.to_bytes(8, "big"))


def verify(location: str, report: int) -> None:
    try:
        with open_reader(location) as store, store.snapshot() as view:
            number, found = view.epoch.ms, dict(view.scan())
    except StoreNotFound:
        number, found = 0, {}
    good = found == (rows_of(number) if number else {})
    os.write(report, json.dumps([number, good]).encode())


def forked(work: object, *arguments: object) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work(*arguments)  # type: ignore[operator]
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


def main(location: str, rounds: int, seed: int) -> dict[str, int]:
    rng = random.Random(seed)
    acknowledged, sealed, violations, killed_unacknowledged = 0, 0, 0, 0
    for _ in range(rounds):
        reading, writing = os.pipe()
        writer = forked(write_until_killed, location, writing)
        os.close(writing)
        if rng.random() < 0.8:  # else: killed while it opens
            select.select([reading], [], [], 20)
        time.sleep(rng.random() ** 2 * 0.03)
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        answers = b""
        while piece := os.read(reading, 1 << 16):
            answers += piece
        os.close(reading)
        if answers:
            acknowledged = int.from_bytes(answers[-8:], "big")

        reading, writing = os.pipe()
        verifier = forked(verify, location, writing)
        os.close(writing)
        answer = os.read(reading, 1000)
        os.close(reading)
        os.waitpid(verifier, 0)
        number, good = json.loads(answer) if answer else (0, False)
        violations += (not good) or number < acknowledged or number > acknowledged + 1
        killed_unacknowledged += number == acknowledged + 1
        acknowledged = sealed = number
    return {
        "rounds": rounds,
        "sealed": sealed,
        "violations": violations,
        "sealed_but_not_acknowledged": killed_unacknowledged,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
