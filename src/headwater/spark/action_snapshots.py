"""Which snapshot each task of a DataFrame reads in; the part of the keeper that knows actions.

The first task of an action lets the keeper take a snapshot, the other tasks of that action get the same one, and it is
released when no task is connected any more. A task that comes later is refused.

Spark reads the parts of a table in order, from the first one (``tail``: from the last one). An action that begins
elsewhere asks for parts that Spark did not store, or lost, of what an *earlier* action read: ``df.cache()``, then
``df.show()``, then ``df.count()``. It continues in the snapshot of that action. It is refused if that snapshot is
released, or if several actions have read the DataFrame: which of them stored the other parts is unknown.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from io import BufferedReader
from typing import Any, ClassVar, Final, Protocol, Self
from weakref import WeakValueDictionary

from headwater.errors import HeadwaterError
from headwater.sources.errors import SnapshotExpired

START_SECONDS: Final = 120.0
FIRST_PART_SECONDS: Final = float(os.environ.get("HEADWATER_FIRST_PART_SECONDS", "30"))
"""Tasks that Spark starts together connect within this time, also on a busy machine. Tests set a shorter one."""
IDLE_SECONDS: Final = 1800.0
"""A DataFrame that no task reads is forgotten after this time, and the keeper ends when it has none."""
HANDSHAKE_SECONDS: Final = 10.0
_PAUSE_SECONDS: Final = 0.1
"""After a link that could not be served: files or threads can be free again."""
_CLOSE_SECONDS: Final = 5.0
_MOST_UNPROVEN: Final = 128
"""Links that have not shown the key: more of them wait."""
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""A machine that vanished is noticed after a minute."""
MOST_BYTES: Final = 1 << 16
READ: Final = b"read\n"
LOAD: Final = (
    "Load the table again. To use the rows of one read more than once, store all of them in one action, for example"
    " df.cache().count()."
)
_READ_SHARE: Final = 1 / 20
"""Of the time that a snapshot is kept without a reader: all its parts were read, but an action can read them twice."""
_MOST_IDLE: Final = 16
"""Snapshots that nobody reads in: each is a session, and an application that runs many actions must not use them up."""

_Opened = tuple[Callable[[], None], dict[str, Any]]


class Moments(Protocol):
    """Where the moments of a DataFrame come from. It travels as JSON. Equal ones are of the same table.

    :cvar kind: of :data:`MOMENTS`. :ivar fixed: all actions read at the same moment, so that no rows of two can mix.
    """

    kind: ClassVar[str]

    @property
    def fixed(self) -> bool: ...

    def open(self) -> _Opened:
        """Make a moment readable until the returned function is called; also what tasks need for it, as JSON."""
        ...

    def to_json(self) -> dict[str, Any]: ...

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self: ...


MOMENTS: Final = {
    "table": ("headwater.spark.batch_reader", "TableMoments"),
    "pinned": ("headwater.spark.kept_reader", "PinnedMoment"),
}
"""The classes that a keeper creates from what it is sent, and no others, by their kinds."""


def _moments_of(asked: Mapping[str, Any]) -> Moments:
    module, name = MOMENTS[asked["kind"]]
    moments: Moments = getattr(import_module(module), name).from_json(asked["moments"])
    return moments


class _Action:
    """The moment of one action, or of several that share it. *asked* and *read* are parts of frames."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.frames: set[_Frame] = set()
        self.opening = threading.Lock()
        self.open: _Opened | None = None
        self.failure: tuple[float, Exception] | None = None
        self.readers = 0
        self.asked: set[tuple[_Frame, int]] = set()
        self.read: set[tuple[_Frame, int]] = set()
        self.used = time.monotonic()

    def is_over(self, now: float) -> bool:
        """Whether nobody will read in it any more, as far as one can know."""
        patience: float = max(frame.seconds for frame in self.frames)
        is_fixed = any(frame.moments.fixed for frame in self.frames)
        is_read = len(self.read) == sum(frame.parts for frame in self.frames) and not is_fixed
        return now - self.used >= (patience * _READ_SHARE if is_read else patience)


class _Family:
    """DataFrames of one table: Spark can plan the same one twice, for the two sides of a join.

    :ivar actions: by name. :ivar over: the names of those whose snapshot was released.
    """

    def __init__(self) -> None:
        self.actions: dict[str, _Action] = {}
        self.over: set[str] = set()


class _Frame:
    """A DataFrame. What is read of it without an action (an RDD) counts as one action."""

    def __init__(self, asked: dict[str, Any], spark: int) -> None:
        self.moments = _moments_of(asked)
        self.name, self.parts, self.seconds = asked["frame"], asked["parts"], asked["seconds"]
        self.spark = spark
        self.family = _Family()
        self.known: set[str] = set()
        self.latest: _Action | None = None
        self.moments_read = 0
        self.used = time.monotonic()

    def join(self, name: str, action: _Action) -> _Action:
        """Have the action *name* read at the moment of *action*."""
        if action is not self.latest:
            self.moments_read += 1
        self.family.actions[name] = self.latest = action
        self.known.add(name)
        action.names.add(name)
        action.frames.add(self)
        return action

    def may_begin(self, part: int) -> bool:
        """Whether an action that reads all that it needs can begin with *part*."""
        latest = self.latest
        return part == 0 or latest is None or (part == self.parts - 1 and (self, part) in latest.asked)


class ActionSnapshots:
    """Threads serve tasks and those who plan; the main thread releases what nobody reads in."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._frames: dict[str, _Frame] = {}
        self._families: WeakValueDictionary[Moments, _Family] = WeakValueDictionary()
        self._sparks: dict[tuple[int, int], int] = {}
        self._changed = threading.Condition()
        self._unproven = threading.Semaphore(_MOST_UNPROVEN)
        self._began = time.monotonic()
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._server = socket.create_server(("", 0), family=family, backlog=128, dualstack_ipv6=dual)
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def add(self, asked: dict[str, Any], spark: int) -> None:
        """Know one more DataFrame, for as long as anybody reads what *spark* writes; it is closed later.

        :raises HeadwaterError: its moment is fixed, and gone. The caller closes *spark* after any error.
        """
        status = os.fstat(spark)
        frame = _Frame(asked, spark)
        if frame.moments.fixed:
            frame.join("", _Action()).open = frame.moments.open()
        with self._changed:
            if not frame.moments.fixed:
                frame.family = self._families.setdefault(frame.moments, frame.family)
            frame.spark = self._sparks.setdefault((status.st_dev, status.st_ino), spark)
            self._frames[frame.name] = frame
        if frame.spark != spark:
            os.close(spark)

    def release(self, *, everything: bool = False) -> bool:
        """Release what is not needed any more; whether the keeper still is."""
        broken = select.poll()
        with self._changed:
            for spark in self._sparks.values():
                broken.register(spark, 0)
            gone = {spark for spark, _ in broken.poll(0)}
            now = time.monotonic()
            used = {action for frame in self._frames.values() for action in frame.family.actions.values()}
            used = {action for action in used if action.open or action.readers}
            for name, frame in list(self._frames.items()):
                if frame.spark in gone:
                    frame.seconds, frame.used = 0.0, float("-inf")
                elif any(frame in action.frames for action in used):
                    frame.used = now
                if now - frame.used >= IDLE_SECONDS and not any(frame in action.frames for action in used):
                    del self._frames[name]
            idle = sorted((action for action in used if not action.readers), key=lambda action: -action.used)
            over = [
                self._released(action)
                for place, action in enumerate(idle)
                if everything or place >= _MOST_IDLE or action.is_over(now)
            ]
            needed = {frame.spark for frame in self._frames.values()}
            for pipe, spark in list(self._sparks.items()):
                if spark not in needed:
                    os.close(self._sparks.pop(pipe))
            is_needed = bool(needed) or now - self._began < START_SECONDS
        closing = []
        for close in over:
            thread = threading.Thread(target=_closed, args=(close,), daemon=True)
            try:
                thread.start()
                closing.append(thread)
            except RuntimeError:  # no more threads
                _closed(close)
        end = now + _CLOSE_SECONDS
        for thread in closing if everything else ():
            thread.join(max(end - time.monotonic(), 0.0))
        return is_needed

    def _released(self, action: _Action) -> Callable[[], None]:
        assert action.open is not None
        close, action.open = action.open[0], None
        for frame in action.frames:
            if not frame.moments.fixed:
                frame.family.over |= action.names
                for name in action.names:
                    frame.family.actions.pop(name, None)
        return close

    def _accept(self) -> None:
        while True:
            self._unproven.acquire()
            if serve_next(self._server, self._serve) is None:
                self._unproven.release()

    def _serve(self, link: socket.socket) -> None:
        """One task, for as long as it reads."""
        with link:
            try:
                asked = self._proven(link)
            except (OSError, ValueError):
                asked = None  # it has ended, or is no task
            finally:
                self._unproven.release()
            if asked is None:
                return
            try:
                link.settimeout(None)
                notice_vanished(link)
                with link.makefile("rb") as lines:
                    self._attend(link, lines, asked["frame"], asked["action"], asked["part"])
            except OSError:
                pass  # it has ended

    def _proven(self, link: socket.socket) -> dict[str, Any] | None:
        """What a task asks; ``None`` without the key. :raises ValueError: also when it has taken too long."""
        end = time.monotonic() + HANDSHAKE_SECONDS
        challenge = secrets.token_hex(16).encode() + b"\n"
        line = b""
        link.settimeout(HANDSHAKE_SECONDS)
        link.sendall(challenge)
        while not line.endswith(b"\n") and len(line) < MOST_BYTES:
            link.settimeout(end - time.monotonic())
            received = link.recv(MOST_BYTES)
            if not received:
                return None
            line += received
        asked: Any = json.loads(line)
        proof = str(asked.get("proof")).encode() if isinstance(asked, dict) else b""
        return asked if hmac.compare_digest(proof_of(self._key, challenge).encode(), proof) else None

    def _attend(self, link: socket.socket, lines: BufferedReader, name: str, action_name: str, part: int) -> None:
        is_read = False
        try:
            action, frame = self._enter(name, action_name, part)
        except HeadwaterError as error:
            link.sendall(error_line(error, expired=True))
            return
        try:
            try:
                moment = _opened(action, frame)
            except Exception as error:
                link.sendall(error_line(error, expired=False))
                return
            link.sendall(line_of({"moment": moment}))
            is_read = lines.readline(MOST_BYTES) == READ
        finally:
            with self._changed:
                action.readers -= 1
                action.used = time.monotonic()
                if is_read:
                    action.read.add((frame, part))

    def _enter(self, name: str, action_name: str, part: int) -> tuple[_Action, _Frame]:
        """The action that a task of *part* belongs to; it is not released before the task has left it."""
        with self._changed:
            frame = self._frames.get(name)
            if frame is None:
                raise SnapshotExpired(f"This DataFrame was not read for {IDLE_SECONDS / 60:g} minutes.", next_step=LOAD)
            if frame.moments.fixed:
                action = frame.family.actions[""]
            else:
                action = self._action(frame, action_name or name, part)
            action.readers += 1
            action.asked.add((frame, part))
            return action, frame

    def _action(self, frame: _Frame, name: str, part: int) -> _Action:
        family = frame.family
        if name not in frame.known and not frame.may_begin(part):
            self._changed.wait_for(lambda: name in frame.known, FIRST_PART_SECONDS)
        if name in family.over and name == frame.name:
            raise SnapshotExpired(
                "The rows of df.rdd, and of foreachPartition, are those of one moment, whose snapshot was released.",
                next_step=LOAD,
            )
        if name in family.over:
            raise SnapshotExpired(
                f"Spark reads part {part + 1} of {frame.parts} again, or late, in an action whose snapshot is released:"
                " other rows of the action are from that snapshot.",
                next_step="Run the action again. If its tasks wait for long before they read, load the table with a"
                " higher snapshotSeconds. Rows that were cached are to be read again: load the table, and cache it.",
            )
        if name in frame.known:
            return family.actions[name]
        if frame.may_begin(part):
            action = family.actions.get(name) or _Action()
        else:
            latest = frame.latest
            if (
                latest is None
                or frame.moments_read > 1
                or family.actions.get(name) not in (None, latest)
                or not latest.names & family.actions.keys()
                or (frame, part) in latest.asked
            ):
                raise SnapshotExpired(
                    f"Spark begins an action with part {part + 1} of {frame.parts}: an earlier action stored other"
                    " parts, or it is a tail() after one that read some of them. The snapshot of that action is"
                    " released, or is not the only one that this action would read.",
                    next_step=LOAD,
                )
            action = latest
        self._changed.notify_all()
        return frame.join(name, action)


def _opened(action: _Action, frame: _Frame) -> dict[str, Any]:
    """What tasks need for the moment of *action*. Tasks that wait for each other fail together, not one by one."""
    began = time.monotonic()
    with action.opening:
        if action.failure is not None and action.failure[0] >= began:
            raise action.failure[1]
        if action.open is None:
            try:
                action.open = frame.moments.open()
            except Exception as error:
                action.failure = time.monotonic(), error
                raise
        return action.open[1]


def _closed(close: Callable[[], None]) -> None:
    try:
        close()
    except Exception:  # the session was lost, and its snapshot with it
        pass


def serve_next(server: socket.socket, serve: Callable[[socket.socket], None]) -> threading.Thread | None:
    """The thread that serves the next link. After a pause, ``None`` where files or threads are used up."""
    link = None
    try:
        link, _ = server.accept()
        thread = threading.Thread(target=serve, args=(link,), daemon=True)
        thread.start()
        return thread
    except (OSError, RuntimeError):
        if link is not None:
            link.close()
        time.sleep(_PAUSE_SECONDS)
        return None


def notice_vanished(link: socket.socket) -> None:
    """Let reads from *link* fail when its other machine has vanished."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def proof_of(key: str, challenge: bytes) -> str:
    """Of one who has *key*."""
    return hmac.new(key.encode(), challenge, "sha256").hexdigest()


def line_of(fields: dict[str, Any]) -> bytes:
    """A line of JSON."""
    return json.dumps(fields).encode() + b"\n"


def error_line(error: Exception, **fields: Any) -> bytes:
    """An answer that says why there is none."""
    if not isinstance(error, HeadwaterError):
        text = f"The process that keeps snapshots failed with {type(error).__name__}: {error}."
        error = HeadwaterError(text, next_step=LOAD)
    return line_of({"error": error.message, "next_step": error.next_step, **fields})
