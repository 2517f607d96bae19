"""A stream of fixed batches, written by a process that can be killed at any failpoint and goes on where it was.

It keeps a checkpoint as Spark does: a batch that is not in it comes again.
"""

from __future__ import annotations

import json
import uuid
from collections import Counter
from pathlib import Path

from tests.spark.driven_writer import DrivenWriter

from headwater import failpoints
from headwater.spark import stream_writer

BATCHES = 4


def rows_of(number: int) -> list[list[tuple[int, str]]]:
    """The partitions of a batch."""
    return [[(10 * number + place, "row") for place in part] for part in (range(3), range(3, 5))]


def write(folder: Path) -> None:
    stream_writer.INLINE_BYTES = 0  # type: ignore[misc]
    checkpoint = folder / "committed"
    writer = DrivenWriter(folder, run=uuid.uuid4().hex)
    done = int(checkpoint.read_text()) if checkpoint.exists() else -1
    for number in range(done + 1, BATCHES):
        writer.batch(number, *rows_of(number))
        checkpoint.write_text(str(number))


def child(folder: str, armed: str) -> None:
    Path(folder).mkdir(exist_ok=True)
    failpoints.arm(armed)
    write(Path(folder))


def count_hits(folder: str) -> None:
    """Write all, and leave in the folder how often each failpoint was hit."""
    hits: Counter[str] = Counter()
    failpoints.hit = lambda name: hits.update([name])
    child(folder, "")
    (Path(folder) / "hits.json").write_text(json.dumps(hits))
