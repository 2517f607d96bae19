"""Binary JSON of MySQL as a tree that can be changed and written again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from headwater.sources.mysql.binlog.cursor import Cursor, protocol_error
from headwater.sources.mysql.binlog.json_container import SIZES, Budget, cut_off, entries, is_inline, length_of

_OBJECT, _ARRAY = 1, 3
_WIDTH: Final = 4


@dataclass(frozen=True, slots=True)
class Scalar:
    """A value that is no container. :ivar data: its bytes, as they lie in a document."""

    kind: int
    data: bytes


Node = dict[bytes, "Node"] | list["Node"] | Scalar


def parse_document(document: bytes) -> Node:
    """:raises SourceProtocolError: it is malformed."""
    if not document:
        return Scalar(4, b"\0")
    return _Reader(Budget(document)).value(document[0], document[1:], 0)


class _Reader:
    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    def value(self, kind: int, data: bytes, depth: int) -> Node:
        if kind in (0, 1, 2, 3):
            return self._container(data, 4 if kind & 1 else 2, depth, is_object=kind < 2)
        if kind in SIZES:
            size = SIZES[kind]
            if len(data) < size:
                raise cut_off()
            if kind > 8:
                self._budget.pay(size)
            return Scalar(kind, data[:size])
        if kind not in (12, 15):
            raise protocol_error("a JSON document has a value of a type that is not known.")
        read = Cursor(data, 1 if kind == 15 else 0)
        read.skip(length_of(read))
        self._budget.pay(read.place)
        return Scalar(kind, data[: read.place])

    def _container(self, data: bytes, width: int, depth: int, *, is_object: bool) -> Node:
        found = [
            (key, self.value(kind, value, depth + 1))
            for key, kind, value in entries(data, width, depth, self._budget, is_object=is_object)
        ]
        return dict(found) if is_object else [node for _, node in found]


def print_document(root: Node) -> bytes:
    """The document of *root*, always in the layout for large ones."""
    kind, data = _printed(root)
    return bytes([kind]) + data


def _printed(node: Node) -> tuple[int, bytes]:
    if isinstance(node, Scalar):
        return node.kind, node.data
    if isinstance(node, dict):
        # The server keeps keys by their length, then by their bytes.
        items = sorted(node.items(), key=lambda item: (len(item[0]), item[0]))
        return _OBJECT, _container([key for key, _ in items], [value for _, value in items])
    return _ARRAY, _container(None, node)


def _container(keys: list[bytes] | None, nodes: list[Node]) -> bytes:
    key_entry = _WIDTH + 2 if keys is not None else 0
    place = 2 * _WIDTH + len(nodes) * (key_entry + _WIDTH + 1)
    key_entries, value_entries, content = [], [], []
    for key in keys or ():
        key_entries.append(place.to_bytes(_WIDTH, "little") + len(key).to_bytes(2, "little"))
        content.append(key)
        place += len(key)
    for node in nodes:
        kind, data = _printed(node)
        if is_inline(kind, _WIDTH):
            value_entries.append(bytes([kind]) + data.ljust(_WIDTH, b"\0"))
            continue
        value_entries.append(bytes([kind]) + place.to_bytes(_WIDTH, "little"))
        content.append(data)
        place += len(data)
    head = len(nodes).to_bytes(_WIDTH, "little") + place.to_bytes(_WIDTH, "little")
    return b"".join((head, *key_entries, *value_entries, *content))
