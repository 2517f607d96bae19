"""Feeds mutated binlogs to the decoders; a program of its own, because what it looks for would end the process.

``python -m tests.property.sources.binlog_fuzz SEED SECONDS FILE…``: it prints how many files it fed and how many
events and rows were decoded, and fails where anything but our errors was raised, or where the decoders differ.
"""

from __future__ import annotations

import faulthandler
import random
import sys
import time
import zlib
from pathlib import Path
from typing import Any

from tests.db.mysql.binlog_reading import DECODERS, packets_of, plan_of

from headwater.errors import CorruptionError
from headwater.sources.errors import SourceMisconfigured
from headwater.sources.mysql.binlog.decoder import EventDecoder
from headwater.sources.mysql.binlog.events import Event, EventType, RowsEvent, TransactionPayload
from headwater.sources.mysql.binlog.rows import RowsDecoder
from headwater.sources.table import SpecialValues

LONGEST = 20.0
"""Seconds that one file may take before it counts as hanging; all files are a few KB."""
EXTREMES = (0, 1, 0x7F, 0x80, 0xFB, 0xFC, 0xFD, 0xFE, 0xFF)
_counts = {"files": 0, "events": 0, "rows": 0, "refused": 0}


def mutated(packet: bytes, chance: random.Random, *, has_checksum: bool) -> bytes:
    """*packet* with some bytes of its body changed; its size and mostly its checksum fit again."""
    end = len(packet) - 4 if has_checksum else len(packet)
    body = bytearray(packet[19:end])
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        if not body:
            break
        place = chance.randrange(len(body))
        match chance.randrange(6):
            case 0:
                body[place] ^= 1 << chance.randrange(8)
            case 1:
                body[place] = chance.choice(EXTREMES)
            case 2:
                del body[place : place + chance.randrange(1, 5)]
            case 3:
                body[place:place] = chance.randbytes(chance.randrange(1, 5))
            case 4:
                body[place : place + 4] = chance.randbytes(4)
            case _:
                del body[place:]
    header = bytearray(packet[:19])
    if chance.random() < 0.02:
        header[4] = chance.randrange(256)
    header[9:13] = (19 + len(body) + (4 if has_checksum else 0)).to_bytes(4, "little")
    made = bytes(header + body)
    if not has_checksum:
        return made
    checksum = zlib.crc32(made) if chance.random() < 0.97 else chance.randrange(1 << 32)
    return made + checksum.to_bytes(4, "little")


def decode(event: RowsEvent) -> None:
    """Both decoders give the same rows, or both refuse them."""
    outcomes: list[Any] = []
    for make in DECODERS:
        try:
            plan = plan_of(event.table, special=SpecialValues.NULL)
            decoder = RowsDecoder(plan, make)
            try:
                decoder.add(event, 1, 0)
            except CorruptionError:
                assert decoder.held_rows == 0
                raise
            rows = decoder.take()
        except (CorruptionError, SourceMisconfigured) as error:
            outcomes.append(type(error))
            _counts["refused"] += 1
            continue
        columns = [None if column is None else column.values for column in rows.columns]
        for column in columns:
            if column is not None:
                column.validate(full=True)
        outcomes.append((rows.ops.tolist(), columns))
        _counts["rows"] += len(rows)
    first, second = outcomes
    if isinstance(first, type) or isinstance(second, type):
        assert first == second, (first, second)
        return
    assert first[0] == second[0]
    for one, other in zip(first[1], second[1], strict=True):
        # numbers that are none (of a double) are not equal to themselves
        assert one is None or one.equals(other) or one.cast("string").equals(other.cast("string"))


def told(decoder: EventDecoder, event: Event, chance: random.Random) -> None:
    _counts["events"] += 1
    if isinstance(event, RowsEvent):
        decode(event)
    if isinstance(event, TransactionPayload):
        for inner in event.packets:
            if chance.random() < 0.3:
                inner = mutated(inner, chance, has_checksum=False)
            try:
                told(decoder, decoder.feed_inner(inner), chance)
            except (CorruptionError, SourceMisconfigured):
                _counts["refused"] += 1


def run(packets: list[bytes], chance: random.Random) -> None:
    decoder = EventDecoder()
    chosen = {chance.randrange(len(packets)) for _ in range(chance.choice((0, 1, 3, 8)))}
    for place, packet in enumerate(packets):
        if place in chosen and (packet[4] != EventType.FORMAT_DESCRIPTION or chance.random() < 0.1):
            packet = mutated(packet, chance, has_checksum=True)
        try:
            told(decoder, decoder.feed(packet), chance)
        except (CorruptionError, SourceMisconfigured):
            _counts["refused"] += 1


def main(seed: int, seconds: float, paths: list[Path]) -> None:
    faulthandler.enable()
    files = [list(packets_of(path)) for path in paths]
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        faulthandler.dump_traceback_later(LONGEST, exit=True)
        chance = random.Random(f"{seed}:{_counts['files']}")
        run(files[_counts["files"] % len(files)], chance)
        _counts["files"] += 1
    faulthandler.cancel_dump_traceback_later()
    print(*(f"{name}={count}" for name, count in _counts.items()))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), [Path(name) for name in sys.argv[3:]])
