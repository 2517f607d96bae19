"""The pin of a kept table in whose epoch all tasks of a batch read: a process of its own keeps it.

Nobody is told when the tasks of a read are done, and the process in which Spark plans is gone a minute later. So this
one looks at the marks that tasks leave in a folder, as for snapshots of a database
(:mod:`headwater.spark.snapshot_process`), and releases the pin when all parts were read, when none has been touched for
long, or when Spark is gone.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Final

from headwater.errors import HeadwaterError
from headwater.process import start_ticks
from headwater.spark.child import Child, received
from headwater.spark.kept_rows import KeptPlace
from headwater.versioned import Pin

OWNER: Final = "spark read"
_LOOK_SECONDS: Final = 0.5
_READ: Final = ".read"
"""How the mark of a part that was read ends."""
_GRACE_SECONDS: Final = 5.0
"""After all parts were read: a task may be tried again."""


def keep_pin(place: KeptPlace, pin: Pin, parts: int, seconds: int) -> str:
    """Have *pin* kept until *parts* parts were read; the folder for the marks of tasks.

    It is this process's own until the other one has it: nobody waits for that.

    :param seconds: how long it is kept when no task on this machine reads.
    """
    folder = tempfile.mkdtemp(prefix="headwater-read-")
    Child(
        __name__,
        {
            "place": [place.store, place.folder, place.table],
            "epoch": pin.epoch,
            "pin": pin.id,
            "parts": parts,
            "seconds": seconds,
            "folder": folder,
            "watched": os.getppid(),
        },
    ).leave()
    return folder


def main() -> None:
    """Keep a pin."""
    told = received()
    watched, ticks = told["watched"], start_ticks(told["watched"])
    folder = Path(told["folder"])
    try:
        with closing(KeptPlace(*told["place"]).open()) as table, table.pin(OWNER, told["epoch"]):
            table.release(told["pin"])
            while _is_needed(folder, told["parts"], told["seconds"]) and start_ticks(watched) == ticks:
                time.sleep(_LOOK_SECONDS)
    except HeadwaterError:
        pass  # the tasks say it: their epoch is gone
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_needed(folder: Path, parts: int, seconds: float) -> bool:
    marks = [path.stat().st_mtime for path in folder.iterdir()]
    read = sum(1 for _ in folder.glob(f"*{_READ}"))
    last = max(marks, default=folder.stat().st_mtime)
    return time.time() - last < (_GRACE_SECONDS if read >= parts else seconds)
