"""What an object store holds and nobody needs any more: value objects without pointers, checkpoints of released pins.

Nothing goes at once, because a snapshot may be open that still reads it. A value object goes ``keep_seconds`` after it
lost its last pointer, a checkpoint as long after its pin was released, and a value object that a pin could see not
before that pin's checkpoint. Records, in the database:

    m/garbage/<epoch u64><name>             a value object: views of this epoch and later do not see it
    m/released/<epoch u64><checkpoint>      a released pin

Each holds the time of its making. Left over by crashes, and found when the next writer opens the store: objects that
were written for a batch that was not, checkpoints that were made for a pin that was not answered.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from headwater.state.engines.large_values import OBJECTS
from headwater.state.engines.object_snapshot import scan_cells
from headwater.state.engines.slate import Place, map_errors, run, slate

_GARBAGE = b"m/garbage/"
_RELEASED = b"m/released/"
_NAME = re.compile(re.escape(OBJECTS) + r"(\d+)-(\d+)-\d+")


def object_name(generation: int, epoch: int, attempt: int) -> str:
    """The name of a value object: it says which views can see it, from which epoch on."""
    return f"{OBJECTS}{generation:010}-{epoch:020}-{attempt}"


def _made(name: str) -> tuple[int, int] | None:
    """The generation and the epoch of a value object; ``None`` for an object of somebody else's."""
    found = _NAME.fullmatch(name)
    return (int(found[1]), int(found[2])) if found else None


class Garbage:
    """The garbage of one store; only its writer handles it."""

    def __init__(self, place: Place, database: Any, keep_seconds: float) -> None:
        self._place = place
        self._database = database
        self._keep_seconds = keep_seconds
        self._objects = {key: float(since) for key, since in self._records(_GARBAGE)}
        self._released = {key: float(since) for key, since in self._records(_RELEASED)}

    def _records(self, space: bytes) -> Iterator[tuple[bytes, bytes]]:
        for keys, cells in scan_cells(self._place, self._database, space):
            yield from zip(keys, cells, strict=True)

    # -- what becomes garbage ----------------------------------------------------------------------------------

    def note(self, writes: Any, epoch: int, names: Iterable[str]) -> dict[bytes, float]:
        """File value objects with the batch that ends them; give the result to :meth:`apply` when it is written."""
        now = time.time()
        filed = {epoch.to_bytes(8, "big") + name.encode(): now for name in names}
        for key, since in filed.items():
            writes.put(_GARBAGE + key, str(since).encode())
        return filed

    def apply(self, filed: dict[bytes, float]) -> None:
        """What :meth:`note` filed was written."""
        self._objects.update(filed)

    def find_orphans(self, used: Collection[str], generation: int, epoch: int) -> None:
        """File value objects of earlier writers that nobody points into, for views of *epoch* and later."""
        filed = {key[8:].decode() for key in self._objects}
        lost = [
            name
            for name in self._place.names(OBJECTS)
            if name not in used and name not in filed and (made := _made(name)) and made[0] < generation
        ]
        if lost:
            with map_errors(self._place.location):
                writes = slate.WriteBatch()
                noted = self.note(writes, epoch, lost)
                self._write(writes)
            self.apply(noted)

    def find_checkpoints(self, made: Collection[str], held: Collection[str]) -> None:
        """File checkpoints that were *made* for pins but that no pin holds."""
        filed = {key[8:].decode() for key in self._released}
        self.release((0, checkpoint) for checkpoint in made if checkpoint not in held and checkpoint not in filed)

    def release(self, pins: Iterable[tuple[int, str]]) -> None:
        """File the epochs and checkpoints of released pins."""
        now = time.time()
        filed = {epoch.to_bytes(8, "big") + checkpoint.encode(): now for epoch, checkpoint in pins}
        if filed:
            with map_errors(self._place.location):
                writes = slate.WriteBatch()
                for key in filed:
                    writes.put(_RELEASED + key, str(now).encode())
                self._write(writes)
            self._released.update(filed)

    # -- what goes ---------------------------------------------------------------------------------------------

    def collect(
        self,
        pinned: Collection[int],
        held: Collection[str],
        confirm: Callable[[], None],
        drop: Callable[[str], None],
    ) -> None:
        """Delete what is old enough.

        :param pinned: the epochs that pins hold; *held* their checkpoints.
        :param confirm: raises when this writer no longer owns the store.
        """
        oldest = time.time() - self._keep_seconds
        checkpoints = [key for key, since in self._released.items() if since <= oldest]
        covered = {*pinned, *(int.from_bytes(key[:8], "big") for key in self._released if key not in checkpoints)}
        objects = [key for key, since in self._objects.items() if since <= oldest and not self._visible(key, covered)]
        if not checkpoints and not objects:
            return
        confirm()
        for key in checkpoints:
            if key[8:].decode() not in held:
                drop(key[8:].decode())
        for key in objects:
            self._place.delete(key[8:].decode())
        with map_errors(self._place.location):
            writes = slate.WriteBatch()
            for key in checkpoints:
                writes.delete(_RELEASED + key)
            for key in objects:
                writes.delete(_GARBAGE + key)
            self._write(writes)
        for key in checkpoints:
            del self._released[key]
        for key in objects:
            del self._objects[key]

    @staticmethod
    def _visible(key: bytes, epochs: Collection[int]) -> bool:
        """Whether a view of one of *epochs* can see the value object."""
        made, end = _made(key[8:].decode()), int.from_bytes(key[:8], "big")
        return any((made[1] if made else 0) <= epoch < end for epoch in epochs)

    def _write(self, writes: Any) -> None:
        run(self._database.write(writes))
        run(self._database.flush())
