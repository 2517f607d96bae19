"""ObjectBoard: an object for each record, in a bucket whose store has put-if-absent and conditional puts."""

from __future__ import annotations

from headwater.state.board import Record
from headwater.state.engines.slate import Place, map_errors, obstore


class ObjectBoard:
    """See :class:`headwater.state.board.Board`. The tag is the ETag: the same data can have the same one."""

    poll_seconds = 2.0

    def __init__(self, url: str) -> None:
        self._place = Place.parse(url, create=False)

    def read(self, name: str, unless: str | None = None) -> Record | None:
        with map_errors(self._place.location):
            try:
                found = obstore.get(self._place.objects, name, options={"if_none_match": unless} if unless else None)
                return Record(found.meta["e_tag"] or "", bytes(found.bytes()))
            except obstore.exceptions.NotModifiedError:
                return Record(unless or "", None)
            except FileNotFoundError:
                return None

    def write(self, name: str, data: bytes, if_tag: str | None = None) -> str | None:
        with map_errors(self._place.location):
            try:
                if if_tag is None:
                    return obstore.put(self._place.objects, name, data)["e_tag"] or ""
                return obstore.put(self._place.objects, name, data, mode={"e_tag": if_tag})["e_tag"] or ""
            except (obstore.exceptions.PreconditionError, FileNotFoundError):
                return None

    def create(self, name: str, data: bytes) -> bool:
        return self._place.create(name, data)

    def list(self, folder: str) -> dict[str, str]:
        return {name: tag or "" for name, tag in self._place.entries(f"{folder}/").items()}

    def remove(self, name: str) -> None:
        self._place.delete(name)
