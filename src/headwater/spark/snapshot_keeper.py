"""The keeper of snapshots: each action of a DataFrame reads at one moment, the next action at a later one.

Spark plans the read of a DataFrame once, in a Python worker that ends a minute later, and no code of ours learns when
an action begins or ends. So :func:`keep` starts a process on the driver's machine, the *keeper*, or finds the one that
runs. Tasks connect to it and stay connected while they read (:mod:`headwater.spark.action_snapshots`).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import select
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, Final

from pyspark import TaskContext

from headwater import __version__
from headwater.sources.errors import SnapshotExpired
from headwater.spark import action_snapshots
from headwater.spark.action_snapshots import (
    HANDSHAKE_SECONDS,
    IDLE_SECONDS,
    LOAD,
    MOST_BYTES,
    READ,
    START_SECONDS,
    ActionSnapshots,
    Moments,
    error_line,
    line_of,
    proof_of,
    serve_next,
)
from headwater.spark.errors import SparkError
from headwater.system.child import Child, received, report
from headwater.system.files import make_root, open_private

_LOOK_SECONDS: Final = 0.25
_TRIES: Final = 5
_MOST_PATH: Final = 100
"""Bytes of the path of a Unix socket; macOS takes 103."""


@dataclass(frozen=True, slots=True)
class KeptFrame:
    """How tasks of one DataFrame find its keeper. :ivar machine: of the driver. :ivar key: secret."""

    frame: str
    machine: str
    port: int
    key: str = field(repr=False)

    @contextmanager
    def reading(self, part: int) -> Iterator[dict[str, Any]]:
        """In a task: what it needs to read *part* at the moment of its action, which is kept meanwhile.

        :raises SnapshotExpired: it is over. :raises SparkError: it could not be taken; the message is the source's.
        """
        task = TaskContext.get()
        known = dict[str, str]().get if task is None else task.getLocalProperty
        number = known("spark.sql.execution.id")
        application = known("spark.app.id") or self.frame
        action = f"{application} {number}" if number else ""
        driver = "127.0.0.1" if socket.gethostname() == self.machine else known("spark.driver.host") or self.machine
        gone = SnapshotExpired(
            f"The process that keeps the snapshots of this DataFrame does not answer at {driver}:{self.port}. It ends"
            f" with Spark, or {IDLE_SECONDS / 60:g} minutes after the last read.",
            next_step=f"{LOAD} On a cluster, executors must be able to connect to the driver's machine.",
        )
        try:
            link = socket.create_connection((driver, self.port), HANDSHAKE_SECONDS)
        except OSError:
            raise gone from None
        with link, link.makefile("rb") as lines:
            try:
                proof = proof_of(self.key, lines.readline(MOST_BYTES))
                link.settimeout(START_SECONDS)
                link.sendall(line_of({"frame": self.frame, "action": action, "part": part, "proof": proof}))
                answer = json.loads(lines.readline(MOST_BYTES))
            except (OSError, ValueError):
                raise gone from None
            if "moment" not in answer:
                kind = SnapshotExpired if answer["expired"] else SparkError
                raise kind(answer["error"], next_step=answer["next_step"])
            yield answer["moment"]
            with suppress(OSError):  # it has ended, but all was read
                link.sendall(READ)


def keep(moments: Moments, parts: int, seconds: float) -> KeptFrame:
    """Have the moments of a DataFrame kept, from now on where they are fixed.

    :param parts: how many tasks read.
    :param seconds: how long a snapshot is kept when no task reads in it; much shorter when all parts were read.
    :raises SparkError: it could not be had; the message is the source's.
    """
    frame = secrets.token_hex(8)
    described = {"kind": moments.kind, "moments": moments.to_json()}
    asked = line_of({"frame": frame, **described, "parts": parts, "seconds": seconds})
    path = _address()
    for _ in range(_TRIES):
        answer = _asked(path, asked)
        if answer is not None:
            break
        child = Child.of_module(__name__, {"path": str(path)}, forks=True)
        child.line(START_SECONDS)
        child.leave()
    else:
        raise SparkError(f"The process that keeps snapshots did not start at {path}.", next_step="Is the disk full?")
    if "error" in answer:
        raise SparkError(answer["error"], next_step=answer["next_step"])
    return KeptFrame(frame, socket.gethostname(), answer["port"], answer["key"])


def _address() -> Path:
    """Where the keeper of this user and this installation is asked for: the two sides of a join are planned at once, in
    two processes. A Unix socket in a private directory of this machine.
    """
    program = f"{sys.executable} {__file__} {__version__}".encode() + Path(action_snapshots.__file__).read_bytes()
    name = f"keeper-{hashlib.sha256(program + Path(__file__).read_bytes()).hexdigest()[:12]}"
    folder = Path(tempfile.gettempdir()) / f"headwater-{os.getuid()}"
    if len(os.fsencode(folder / name)) > _MOST_PATH:
        folder = Path("/tmp") / folder.name
    make_root(folder)
    return folder / name


def _asked(path: Path, line: bytes) -> dict[str, Any] | None:
    """The answer of the keeper; ``None`` when none is running.

    :raises SparkError: it does not answer in time.
    """
    try:
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(START_SECONDS)
            link.connect(str(path))
            socket.send_fds(link, [b"."], [_lifeline()])
            link.sendall(line)
            with link.makefile("rb") as answers:
                answer: dict[str, Any] | None = json.loads(answers.readline() or "null")
                return answer
    except (FileNotFoundError, ConnectionError):
        return None
    except TimeoutError:
        raise SparkError(
            f"The process that keeps snapshots did not answer at {path} within {START_SECONDS:g} s.",
            next_step="A lock on the tables, or a slow disk, can hold it up. Load the table again.",
        ) from None


_own_pipe: tuple[int, int] | None = None


def _lifeline() -> int:
    """The end of a pipe that breaks when Spark ends: in its workers standard error, elsewhere one of this process."""
    global _own_pipe
    if "SPARK_AUTH_SOCKET_TIMEOUT" in os.environ and stat.S_ISFIFO(os.fstat(2).st_mode):
        return 2
    _own_pipe = _own_pipe or os.pipe()
    return _own_pipe[1]


def main() -> None:
    """Keep snapshots until no DataFrame needs them. Ends at once where another keeper runs."""
    path = Path(received()["path"])
    key = secrets.token_hex(32)
    with open_private(path.with_suffix(".lock"), "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # two can begin at once
        if _asked(path, b"\n") is not None:
            return
        path.unlink(missing_ok=True)
        asking = socket.socket(socket.AF_UNIX)
        asking.bind(str(path))
        asking.listen(128)
    keeper = ActionSnapshots(key)
    report({})
    answering: list[Thread] = []
    while keeper.release() or answering:
        answering = [thread for thread in answering if thread.is_alive()]  # release() then sees what they have added
        if select.select([asking], [], [], _LOOK_SECONDS)[0]:
            thread = serve_next(asking, partial(_answer, keeper, key))
            answering += [thread] if thread else []
    asking.close()
    keeper.release(everything=True)


def _answer(keeper: ActionSnapshots, key: str, link: socket.socket) -> None:
    """Serve one who plans."""
    try:
        with link, link.makefile("rb") as lines:
            link.settimeout(HANDSHAKE_SECONDS)
            spark = socket.recv_fds(link, 1, 1)[1][0]
            try:
                line = lines.readline().strip()
                if line:
                    keeper.add(json.loads(line), spark)
                else:  # only asks whether a keeper runs
                    os.close(spark)
            except Exception as error:
                os.close(spark)
                link.sendall(error_line(error))
                return
            link.sendall(line_of({"port": keeper.port, "key": key}))
    except (OSError, IndexError):
        pass  # it has ended
