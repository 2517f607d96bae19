"""Updates that carry parts of JSON documents (``binlog_row_value_options=PARTIAL_JSON``), made whole.

The after image of such an update has, for a document, what was replaced, inserted and removed in it. Applied to the
before image that gives the document; the event that comes out is an ordinary one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from headwater.sources.errors import SourceMisconfigured
from headwater.sources.mysql.binlog.cursor import Cursor, protocol_error
from headwater.sources.mysql.binlog.events import RowsEvent
from headwater.sources.mysql.binlog.json_text import SIZES, Budget, cut_off, entries, is_inline, length_of
from headwater.sources.mysql.binlog.python_rows import fixed_size
from headwater.sources.mysql.binlog.row_layout import Output, RowLayout, Wire, wire_of
from headwater.sources.mysql.binlog.table_map import ColumnType

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


_PARTIAL_JSON: Final = 1
_REPLACE, _INSERT, _REMOVE = 0, 1, 2


def complete_partial(event: RowsEvent) -> RowsEvent:
    """*event* with whole documents.

    :raises SourceProtocolError: it is malformed.
    :raises SourceMisconfigured: the before image does not have the document.
    """
    assert event.present_after is not None
    data = _Completion(event).run()
    return replace(event, data=data, start=0, end=len(data))


class _Completion:
    def __init__(self, event: RowsEvent) -> None:
        columns = event.table.columns
        assert event.present_after is not None
        self._layouts = [RowLayout(*wire_of(column), Output.SKIP, 0) for column in columns]
        self._is_json = [column.type is ColumnType.JSON for column in columns]
        self._before = [bool(event.present[place >> 3] >> (place & 7) & 1) for place in range(len(columns))]
        self._after = [bool(event.present_after[place >> 3] >> (place & 7) & 1) for place in range(len(columns))]
        self._read = Cursor(event.data, event.start, event.end)

    def run(self) -> bytes:
        parts: list[bytes] = []
        while self._read.left:
            begin = self._read.place
            before = self._image(self._before, [False] * len(self._layouts), None, None)
            parts.append(self._read.data[begin : self._read.place])
            partial = self._partial_columns()
            self._image(self._after, partial, before, parts)
        return b"".join(parts)

    def _partial_columns(self) -> list[bool]:
        """Which columns the after image that follows has in parts: one bit per JSON column of the table."""
        partial = [False] * len(self._layouts)
        if self._read.packed() & _PARTIAL_JSON:
            places = [place for place, is_json in enumerate(self._is_json) if is_json]
            bits = self._read.take((len(places) + 7) // 8)
            for order, place in enumerate(places):
                partial[place] = bool(bits[order >> 3] >> (order & 7) & 1)
        return partial

    def _image(
        self, present: list[bool], partial: list[bool], before: dict[int, bytes] | None, into: list[bytes] | None
    ) -> dict[int, bytes]:
        """The bytes of each value; written whole to *into* where there is one."""
        here = sum(present)
        if not here:
            raise protocol_error("a row has no columns.")
        nulls, order = self._read.take((here + 7) // 8), 0
        if into is not None:
            into.append(nulls)
        values: dict[int, bytes] = {}
        for place, layout in enumerate(self._layouts):
            if not present[place]:
                continue
            is_null, order = bool(nulls[order >> 3] >> (order & 7) & 1), order + 1
            if is_null:
                continue
            size = fixed_size(layout)
            value = self._read.take(self._read.number(layout.size) if size is None else size)
            if partial[place]:
                if before is None or place not in before:
                    raise _needs_documents()
                value = apply_diffs(before[place], value)
            values[place] = value
            if into is not None:
                if layout.wire is Wire.COUNTED:
                    if len(value) >> 8 * layout.size:
                        raise protocol_error("a JSON document is larger than its column allows.")
                    into.append(len(value).to_bytes(layout.size, "little"))
                into.append(value)
        return values


def _needs_documents() -> SourceMisconfigured:
    return SourceMisconfigured(
        "The server writes parts of JSON documents, and not the documents before them.",
        next_step="Run SET GLOBAL binlog_row_value_options = '' (or binlog_row_image = 'FULL') on the server.",
    )


def apply_diffs(document: bytes, diffs: bytes) -> bytes:
    """The document after the changes that *diffs* tells.

    :raises SourceProtocolError: one is malformed, or not of this document.
    """
    root, read = parse_document(document), Cursor(diffs)
    while read.left:
        operation = read.number(1)
        path = parse_path(read.take(read.packed()))
        if operation > _REMOVE:
            raise protocol_error("a change of a JSON document is of a kind that is not known.")
        value = None if operation == _REMOVE else parse_document(read.take(read.packed()))
        if not path:
            if operation != _REPLACE or value is None:
                raise protocol_error("a change of a JSON document is none.")
            root = value
            continue
        _change(root, path, operation, value)
    return print_document(root)


def _change(root: Node, path: list[bytes | int], operation: int, value: Node | None) -> None:
    node = root
    try:
        for step in path[:-1]:
            node = _child(node, step)
        last = path[-1]
        if isinstance(node, dict) and isinstance(last, bytes):
            if operation == _REMOVE:
                del node[last]
            else:
                assert value is not None
                node[last] = value
        elif isinstance(node, list) and isinstance(last, int):
            if operation == _REMOVE:
                del node[last]
            elif operation == _INSERT:
                assert value is not None
                node.insert(last, value)
            else:
                assert value is not None
                node[last] = value
        else:
            raise protocol_error("a change of a JSON document names a place that it does not have.")
    except (KeyError, IndexError) as error:
        raise protocol_error("a change of a JSON document names a place that it does not have.") from error


def _child(node: Node, step: bytes | int) -> Node:
    if isinstance(node, dict) and isinstance(step, bytes):
        return node[step]
    if isinstance(node, list) and isinstance(step, int):
        return node[step]
    raise protocol_error("a change of a JSON document names a place that it does not have.")


def parse_path(text: bytes) -> list[bytes | int]:
    """The steps of a path like ``$.a."b c"[3]``.

    :raises SourceProtocolError: it is none.
    """
    if text[:1] != b"$":
        raise protocol_error("a change of a JSON document has a path that is none.")
    steps: list[bytes | int] = []
    place = 1
    while place < len(text):
        if text[place : place + 1] == b"[":
            end = text.find(b"]", place)
            digits = text[place + 1 : end]
            if end < 0 or not digits.isdigit() or len(digits) > 10:
                raise protocol_error("a change of a JSON document has a path that is none.")
            steps.append(int(digits))
            place = end + 1
        elif text[place : place + 2] == b'."':
            key, place = _quoted_key(text, place + 2)
            steps.append(key)
        elif text[place : place + 1] == b".":
            end = place + 1
            while end < len(text) and text[end] not in b".[":
                end += 1
            steps.append(text[place + 1 : end])
            place = end
        else:
            raise protocol_error("a change of a JSON document has a path that is none.")
    return steps


_UNESCAPED: Final = {
    ord("b"): b"\b",
    ord("f"): b"\f",
    ord("n"): b"\n",
    ord("r"): b"\r",
    ord("t"): b"\t",
    ord('"'): b'"',
    ord("\\"): b"\\",
    ord("/"): b"/",
}


def _quoted_key(text: bytes, place: int) -> tuple[bytes, int]:
    """The key from *place* on, and where it ends."""
    parts: list[bytes] = []
    while place < len(text):
        byte = text[place]
        if byte == ord('"'):
            return b"".join(parts), place + 1
        if byte == ord("\\"):
            if place + 1 >= len(text):
                break
            escaped = text[place + 1]
            if escaped == ord("u"):
                try:
                    parts.append(chr(int(text[place + 2 : place + 6], 16)).encode(errors="surrogatepass"))
                except ValueError:
                    break
                place += 6
                continue
            if escaped not in _UNESCAPED:
                break
            parts.append(_UNESCAPED[escaped])
            place += 2
            continue
        parts.append(text[place : place + 1])
        place += 1
    raise protocol_error("a change of a JSON document has a path that is none.")
