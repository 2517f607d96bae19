"""Somebody who writes to a database while a test looks at it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Writing:
    """:ivar count: how many times something was written. :ivar failure: what ended it before its time."""

    count: int = 0
    failure: BaseException | None = None


@contextmanager
def writing(write: Callable[[int], None], pause: float = 0.002) -> Iterator[Writing]:
    """A thread of its own calls *write* with 1, 2, 3 … until the block ends. What it raises fails the test then."""
    stop, made = threading.Event(), Writing()

    def run() -> None:
        try:
            while not stop.is_set():
                write(made.count + 1)
                made.count += 1
                stop.wait(pause)
        except BaseException as error:
            made.failure = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        stop.set()
        thread.join(60)
    assert made.failure is None, made.failure
