r"""One entry as one line of bytes, and back. Pure.

A line is compact JSON in UTF-8::

    {"v":1,"seq":7,"ts":1700000000000,"kind":"barrier","batch":[1,2],"key":"k","epoch":5,"crc":"0a1b2c3d"}\n

`batch` and `key` stand there only when used; `crc` is always the last 18 bytes before the newline. It is
CRC-32 of all bytes before it, started with the checksum of the line before (0 for the first), so it vouches
for the whole prefix of the segment, and a line cannot be moved, dropped or doubled unseen.

Python's `json` writes numeric mapping keys as text and takes tuples for lists; an entry must come back as it
was given, so the first is refused. The second is allowed: a tuple comes back as a list.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from json import JSONDecodeError, JSONDecoder, JSONEncoder
from typing import Any, NamedTuple, NoReturn
from zlib import crc32

from headwater.journal.entry import EMPTY, RESERVED, SEGMENT_START, Entry, Head, Limits
from headwater.journal.errors import EntryTooLargeError, InvalidEntryError

VERSION = 1
MAX_DEPTH = 128
CRC_TAIL = len(',"crc":"00000000"}')
_CARRIED_DEPTH = 4  # a fork carries the fields of its parent's entries so much deeper, inside its first entry
_SHAPE = "not an entry: v, seq, ts, kind, batch, key or crc is missing or of another type"
NO_CRC = "does not end in a checksum"
_MAX_KIND = 200
_SCALARS = frozenset({str, int, float, bool, type(None)})
_TEXT = frozenset({str})
_CRC_TAIL_PATTERN = re.compile(rb',"crc":"([0-9a-f]{8})"\}$')
_SEQ_PATTERN = re.compile(rb'\{"v":\d{1,9},"seq":(\d{1,20}),')
_VERSION_PATTERN = re.compile(rb'\{"v":(\d{1,9})[,}]')


class DamagedLineError(Exception):
    """A line is not what an encoder wrote; the text says why. The reader that knows its position adds that."""


class NewerLineError(DamagedLineError):
    """A line of a later format version; the text is the version."""


# -- entries to lines ----------------------------------------------------------------------------------------------


class Prepared(NamedTuple):
    """An entry, checked and encoded as far as possible without knowing its position."""

    ts: int | None
    kind: bytes
    rest: bytes


def _make_encoder() -> Callable[[object], str]:
    """`JSONEncoder.encode` builds its C encoder again for each call, a third of the price of an append; keep one."""
    slow = JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return slow.encode
    text = json.encoder.encode_basestring
    fast = make(None, slow.default, text, None, ":", ",", False, False, False)
    return lambda value: "".join(fast(value, 0))


_to_json = _make_encoder()


def _check_nested(value: object, depth: int) -> None:
    """Refuse what `json` would change or what a reader could not take: other keys than text, endless nesting."""
    if depth > MAX_DEPTH:
        raise InvalidEntryError(f"The entry is nested deeper than {MAX_DEPTH} levels.")
    if isinstance(value, dict):
        if not _TEXT.issuperset(map(type, value)):
            raise InvalidEntryError("Received a mapping key that is not a text, which JSON cannot keep.")
        value = value.values()
    elif not isinstance(value, list | tuple):
        return  # the encoder takes it (a subclass of str, say) or refuses it
    if not _SCALARS.issuperset(map(type, value)):
        for item in value:
            if type(item) not in _SCALARS:
                _check_nested(item, depth + 1)


@functools.lru_cache(maxsize=512)
def _kind_bytes(kind: str) -> bytes:
    if not kind or len(kind) > _MAX_KIND:
        raise InvalidEntryError(f"Received a kind of {len(kind)} characters; valid is 1 … {_MAX_KIND}.")
    return _to_json(kind).encode()


def _check_type(entry: object) -> None:
    match entry:
        case Entry(kind=str(), fields=dict() | Mapping()):
            return
    raise InvalidEntryError(
        f"Received an entry of type {type(entry).__name__}; valid is Entry with a text as kind, a mapping as fields."
    )


def prepare(entry: Entry, limits: Limits, key: str | None = None) -> Prepared:
    """Check and encode *entry*; what a store set in it (seq, crc, key, batch) does not count.

    :raises InvalidEntryError: a reserved field name, a bad kind, time or key; not JSON: NaN, lone surrogates, foreign
        types, too deep.
    :raises EntryTooLargeError: above `limits.entry_bytes`.
    """
    _check_type(entry)
    fields = entry.fields if isinstance(entry.fields, dict) else dict(entry.fields)
    if not RESERVED.isdisjoint(fields):
        names = ", ".join(sorted(RESERVED & fields.keys()))
        raise InvalidEntryError(
            f"Received field names {names}, which the journal uses itself.", next_step="Rename them."
        )
    ts = entry.ts
    if ts is not None and (type(ts) is not int or not 0 <= ts < 1 << 63):
        raise InvalidEntryError("Received a ts that is not milliseconds since 1970.")
    if key is not None and (type(key) is not str or not 0 < len(key) <= _MAX_KIND):
        raise InvalidEntryError(f"Received an idempotency key that is not a text of 1 … {_MAX_KIND} characters.")
    try:
        _check_nested(fields, 1 if entry.kind != SEGMENT_START else 1 - _CARRIED_DEPTH)
        kind, text = _kind_bytes(entry.kind), _to_json(fields)
        rest = b"" if text == "{}" else b"," + text[1:-1].encode()
        if key is not None:
            rest = b',"key":' + _to_json(key).encode() + rest
    except InvalidEntryError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidEntryError(f"The entry is not JSON: {error}.") from None
    if len(rest) > limits.entry_bytes:
        raise EntryTooLargeError(
            f"The entry has {len(rest)} bytes, the limit is {limits.entry_bytes}.",
            next_step="Keep large content outside the journal and its location in the entry.",
        )
    return Prepared(ts, kind, rest)


def prepare_all(entry: Entry | Sequence[Entry], limits: Limits, key: str | None = None) -> list[Prepared]:
    """One entry, or all of a batch; the idempotency *key* is in its last line.

    :raises InvalidEntryError: it is empty, or holds something else than entries.
    :raises EntryTooLargeError: also when the batch together is above `limits.batch_bytes`.
    """
    if isinstance(entry, Entry) or not isinstance(entry, Sequence):
        return [prepare(entry, limits, key)]
    if not entry:
        raise InvalidEntryError("Received an empty batch; an append needs at least one entry.")
    prepared = [prepare(each, limits) for each in entry[:-1]] + [prepare(entry[-1], limits, key)]
    total = sum(len(item.rest) for item in prepared)
    if total > limits.batch_bytes:
        raise EntryTooLargeError(
            f"The batch has {total} bytes, the limit is {limits.batch_bytes}.", next_step="Append it in parts."
        )
    return prepared


def line(item: Prepared, seq: int, now: int, crc: int, batch: bytes = b"") -> tuple[bytes, int]:
    """The finished line, and its checksum, which is the *crc* of the next."""
    ts = now if item.ts is None else item.ts
    body = b'{"v":1,"seq":%d,"ts":%d,"kind":%b%b%b' % (seq, ts, item.kind, batch, item.rest)
    crc = crc32(body, crc)
    return b'%b,"crc":"%08x"}\n' % (body, crc), crc


def lines(items: Sequence[Prepared], after: Head, now: int) -> tuple[bytes, Head]:
    """Lines that continue a segment at *after*, and its head then; more than one become visible together (`batch`)."""
    count, crc = len(items), after.crc
    done: list[bytes] = []
    for number, item in enumerate(items, start=1):
        mark = b',"batch":[%d,%d]' % (number, count) if count > 1 else b""
        data, crc = line(item, after.seq + number, now, crc, mark)
        done.append(data)
    return b"".join(done), Head(after.seq + count, crc)


class NewSegment:
    """Lines of a new segment, encoded as they are taken; `head` is right when all were.

    Idempotency keys are kept; batch marks are not, as the creation is one step.

    :raises InvalidEntryError: while iterating: the first entry is a `segment_start` of other ids.
    """

    def __init__(self, session: str, segment: str, entries: Iterable[Entry], limits: Limits, now: int) -> None:
        self.head = EMPTY
        self._ids, self._entries, self._limits, self._now = (session, segment), entries, limits, now

    def __iter__(self) -> Iterator[bytes]:
        for entry in self._entries:
            item = prepare(entry, self._limits, getattr(entry, "key", None))
            other = foreign_id(entry, *self._ids) if self.head == EMPTY else None
            if other is not None:
                raise InvalidEntryError(f"The {SEGMENT_START} entry states another {other} than that of the segment.")
            data, crc = line(item, self.head.seq + 1, self._now, self.head.crc)
            self.head = Head(self.head.seq + 1, crc)
            yield data


def foreign_id(first: Entry, session: str, segment: str) -> str | None:
    """The name of the id in which the first entry of a segment contradicts its path, if there is one."""
    if first.kind == SEGMENT_START:
        for name, value in (("session_id", session), ("segment_id", segment)):
            if first.fields.get(name, value) != value:
                return name
    return None


# -- lines to entries ----------------------------------------------------------------------------------------------


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name stands there twice")
    return fields


_from_json = JSONDecoder(parse_constant=_no_constant, object_pairs_hook=_no_duplicates).raw_decode

# A frozen dataclass pays 1.8 µs for its __init__; setting its slots directly takes a third of that, and
# `read_all` is mostly this.
_new = object.__new__
_set_kind, _set_fields, _set_ts, _set_seq, _set_crc, _set_key, _set_batch = (
    Entry.__dict__[name].__set__ for name in ("kind", "fields", "ts", "seq", "crc", "key", "batch")
)


def _key(key: object) -> str:
    if type(key) is not str:
        raise DamagedLineError(_SHAPE)
    return key


def _batch(mark: object) -> tuple[int, int]:
    match mark:
        case [int(number), int(count)] if 1 <= number <= count:
            return number, count
    raise DamagedLineError(_SHAPE)


def _entry(data: bytes, seq: int, crc: int) -> Entry:
    """The entry of a line whose checksum was found right."""
    try:
        text = data.decode()
        fields, end = _from_json(text)
        if end != len(text):
            raise DamagedLineError("more than one JSON value on the line")
        version = fields.pop("v")
        if version != VERSION:
            raise NewerLineError(str(version))
        stated, ts, kind = fields.pop("seq"), fields.pop("ts"), fields.pop("kind")
        del fields["crc"]
    except UnicodeDecodeError:
        raise DamagedLineError("not UTF-8") from None
    except RecursionError:
        raise DamagedLineError("nested too deep") from None
    except (AttributeError, TypeError, KeyError):
        raise DamagedLineError(_SHAPE) from None
    except ValueError as error:
        reason = error.msg if isinstance(error, JSONDecodeError) else str(error)
        raise DamagedLineError(f"not JSON: {reason}") from None
    if stated != seq:
        raise DamagedLineError("holds another seq than the one that belongs here")
    if type(kind) is not str or type(ts) is not int:
        raise DamagedLineError(_SHAPE)
    entry: Entry = _new(Entry)
    _set_kind(entry, kind)
    _set_fields(entry, fields)
    _set_ts(entry, ts)
    _set_seq(entry, seq)
    _set_crc(entry, crc)
    _set_key(entry, _key(fields.pop("key")) if "key" in fields else None)
    _set_batch(entry, _batch(fields.pop("batch")) if "batch" in fields else None)
    return entry


def decode(data: bytes, seq: int, crc: int) -> Entry:
    """The entry of one line (without its newline) that should hold *seq* and follow the checksum *crc*.

    :raises DamagedLineError: it does not.
    """
    actual = crc32(data[:-CRC_TAIL], crc)
    if data[-CRC_TAIL:] == b',"crc":"%08x"}' % actual:
        return _entry(data, seq, actual)
    if stated_crc(data) is not None:
        raise DamagedLineError("the checksum does not match the line and those before it")
    # A later version keeps this checksum or does not end like one; a flipped version digit does end like one.
    version = _VERSION_PATTERN.match(data)
    if version is not None and int(version[1]) > VERSION:
        raise NewerLineError(version[1].decode())
    raise DamagedLineError(NO_CRC)


def decode_unchained(data: bytes, seq: int) -> Entry:
    """The entry of a line whose predecessor is lost: its checksum is taken as stated, only its form is checked.

    :raises DamagedLineError: it cannot be read as an entry.
    """
    crc = stated_crc(data)
    if crc is None:
        raise DamagedLineError(NO_CRC)
    return _entry(data, seq, crc)


def stated_crc(data: bytes) -> int | None:
    """The checksum that a line states, unchecked; None when it states none."""
    match = _CRC_TAIL_PATTERN.search(data)
    return int(match[1], 16) if match else None


def stated_seq(data: bytes) -> int | None:
    """The seq that a line (or its first 40 bytes) states, unchecked."""
    match = _SEQ_PATTERN.match(data)
    return int(match[1]) if match else None


def batch_after(entry: Entry) -> tuple[int, int] | None:
    """The batch mark that must follow *entry*; None outside a batch."""
    batch = entry.batch
    return (batch[0] + 1, batch[1]) if batch is not None and batch[0] < batch[1] else None


def fits(entry: Entry, mark: tuple[int, int] | None) -> bool:
    """Can *entry* stand where *mark* must follow?"""
    return entry.batch == mark if mark is not None else entry.batch is None or entry.batch[0] == 1
