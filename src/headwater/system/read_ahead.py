"""Reads ahead: the next batches are made by another thread while those before are taken.

A task of Spark writes to Java and waits for it; without a thread nothing would come from the database meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable
from contextlib import closing, suppress
from queue import Empty, Full, Queue
from typing import Final, TypeAlias

import pyarrow as pa

AHEAD: Final = 2
"""Batches that are held beside the one that is being taken."""
_LOOK_SECONDS: Final = 0.1

Made: TypeAlias = "pa.RecordBatch | BaseException | None"


def ahead(batches: Iterable[pa.RecordBatch], held: int = AHEAD) -> Generator[pa.RecordBatch]:
    """The same batches, in their order; an error comes in its place.

    *batches* is used by the other thread alone, which also closes it. Given up early, it ends with the batch that is
    being made: nobody waits for that.
    """
    made: Queue[Made] = Queue(held)
    stopped = threading.Event()
    thread = threading.Thread(target=_make, args=(_each(batches), made, stopped), name="headwater-ahead", daemon=True)
    thread.start()
    try:
        while True:
            batch = _taken(made, thread)
            if batch is None:
                return
            if isinstance(batch, BaseException):
                raise batch
            yield batch
    finally:
        stopped.set()


def _each(batches: Iterable[pa.RecordBatch]) -> Generator[pa.RecordBatch]:
    yield from batches


def _make(batches: Generator[pa.RecordBatch], made: Queue[Made], stopped: threading.Event) -> None:
    end: Made = None
    try:
        with closing(batches):
            for batch in batches:
                if not _put(made, batch, stopped):
                    return
    except BaseException as error:
        end = error
    _put(made, end, stopped)


def _put(made: Queue[Made], item: Made, stopped: threading.Event) -> bool:
    """Whether it was wanted."""
    while not stopped.is_set():
        with suppress(Full):
            made.put(item, timeout=_LOOK_SECONDS)
            return True
    return False


def _taken(made: Queue[Made], thread: threading.Thread) -> Made:
    while True:
        try:
            return made.get(timeout=_LOOK_SECONDS)
        except Empty:
            if not thread.is_alive() and made.empty():  # a forked copy of this process has no such thread
                raise RuntimeError("The thread that reads ahead is gone.") from None
