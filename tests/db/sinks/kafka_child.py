"""Deliveries to Kafka by a process that is killed, or stopped, at a failpoint."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

from tests.crash.sinks import deliveries

from headwater import failpoints
from headwater.sinks.errors import SinkError
from headwater.sinks.open import open_sink


def deliver(options: str, armed: str = "", generation: int = 0, hits: str | None = None) -> None:
    """Every batch of :mod:`tests.crash.sinks.deliveries`. :param hits: a file for how often each failpoint was passed.

    :param options: of the sink, as JSON.
    """
    failpoints.arm(armed)
    passed: Counter[str] = Counter()
    if hits is not None:
        failpoints.hit = lambda name: passed.update([name])
    sink = open_sink("kafka", **json.loads(options))
    for token, table, staged in deliveries.batches(sink):
        sink.commit(table, replace(token, generation=generation), staged)
    if hits is not None:
        Path(hits).write_text(json.dumps(passed))


def stop_at(step: str, number: int) -> None:
    """Let this process stop itself where it passes *step* for the n-th time, until somebody continues it."""
    left = number

    def hit(name: str) -> None:
        nonlocal left
        left -= name == step
        if name == step and left == 0:
            os.kill(os.getpid(), signal.SIGSTOP)

    failpoints.hit = hit


if __name__ == "__main__":
    stop_at(sys.argv[2], int(sys.argv[3]))
    try:
        deliver(sys.argv[1], generation=1)
    except SinkError as error:
        print(type(error).__name__)
