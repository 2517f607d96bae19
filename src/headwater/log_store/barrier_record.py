"""The record that ends an epoch of a log: what the epoch holds, for readers that were not there. Pure."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headwater.log_store.errors import LogCorrupt, UnknownVersion
from headwater.stream import VnodeBitmap

_CRC = b',"crc":'


@dataclass(frozen=True, slots=True)
class BarrierRecord:
    """One instance's end of one epoch.

    :ivar format: of the rows of this epoch: the one place where a reader looks for it.
    :ivar schema_version: of its last rows, and of all unless there is a *first_schema_version*, of the first ones.
    :ivar compacted: rows that a newer row of their key made needless were left out later.
    """

    is_checkpoint: bool
    rows: int
    size: int
    chunks: int
    schema_version: int
    vnodes: VnodeBitmap
    sealed_ms: int
    format: int
    is_stop: bool = False
    compacted: bool = False
    first_schema_version: int | None = None

    def to_bytes(self) -> bytes:
        fields = {
            "v": 1,
            "checkpoint": self.is_checkpoint,
            "rows": self.rows,
            "bytes": self.size,
            "chunks": self.chunks,
            "schema": self.schema_version,
            "vnodes": self.vnodes.to_json(),
            "ms": self.sealed_ms,
            "format": self.format,
            "stop": self.is_stop,
        }
        if self.compacted:
            fields["compacted"] = True
        if self.first_schema_version is not None:
            fields["first_schema"] = self.first_schema_version
        data = json.dumps(fields, separators=(",", ":")).encode()
        return b"%b%b%d}" % (data[:-1], _CRC, zlib.crc32(data))

    @classmethod
    def from_bytes(cls, data: bytes) -> BarrierRecord:
        """:raises UnknownVersion: of a later release. :raises LogCorrupt: not a barrier record."""
        return next(cls.from_many((data,)))

    @classmethod
    def from_many(cls, stored: Sequence[bytes]) -> Iterator[BarrierRecord]:
        """As :meth:`from_bytes`, for less: records are parsed together, and neighbours mostly own the same vnodes."""
        owned, vnodes = None, VnodeBitmap.empty()
        for data, fields in zip(stored, _parsed(stored), strict=True):
            try:
                if fields["v"] != 1:
                    raise UnknownVersion(f"A barrier record has version {fields['v']}.", next_step="Upgrade headwater.")
                if "crc" in fields and zlib.crc32(data[: data.rindex(_CRC)] + b"}") != fields["crc"]:
                    raise ValueError("crc")
                if fields["vnodes"] != owned:
                    owned, vnodes = fields["vnodes"], VnodeBitmap.from_json(fields["vnodes"])
                record = cls(
                    fields["checkpoint"],
                    fields["rows"],
                    fields["bytes"],
                    fields["chunks"],
                    fields["schema"],
                    vnodes,
                    fields["ms"],
                    fields["format"],
                    fields["stop"],
                    fields.get("compacted", False),
                    fields.get("first_schema"),
                )
            except UnknownVersion:
                raise
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise LogCorrupt("A barrier record cannot be read.") from error
            yield record


def _parsed(stored: Sequence[bytes]) -> Iterator[Any]:
    """The fields of all records; when one of them is damaged, those before it come first."""
    try:
        together = json.loads(b"[%b]" % b",".join(stored))
    except ValueError:
        together = []
    if len(together) == len(stored):
        yield from together
        return
    for data in stored:
        try:
            yield json.loads(data)
        except ValueError as error:
            raise LogCorrupt("A barrier record cannot be read.") from error
