"""Open an upstream table by its name.

==================================  =================================================================================
name                                table
==================================  =================================================================================
``delta:PATH``, ``delta:s3://…``    a Delta table, with the columns of its key
``table:NAME``                      a table that we keep ourselves, with the store of its log and its folder
==================================  =================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from headwater.backfill.snapshot.consume_upstream.errors import InvalidUpstream
from headwater.backfill.snapshot.consume_upstream.upstream_table import UpstreamTable
from headwater.stream import DEFAULT_VNODE_COUNT

DELTA, KEPT = "delta", "table"
_VALID: Final = "Valid are delta:PATH and table:NAME."


def open_upstream(
    name: str,
    *,
    key: Sequence[str] = (),
    table: str = "",
    vnodes: int = DEFAULT_VNODE_COUNT,
    store: str = "",
    folder: str = "",
    storage: Mapping[str, str] | None = None,
) -> UpstreamTable:
    """The upstream table *name*; nothing is connected yet.

    :param key: Delta: the columns that name a row. :param table: Delta: what its rows are called downstream.
    :param vnodes: Delta: into how many its rows are hashed.
    :param store: of a table of ours: the store of its log. :param folder: … of the kept tables.
    :raises InvalidUpstream: no such kind, or what it needs is missing.
    """
    kind, colon, rest = name.partition(":")
    if not colon or not rest or kind not in (DELTA, KEPT):
        raise InvalidUpstream(f"Received upstream {name!r}.", next_step=_VALID)
    if kind == DELTA:
        from headwater.backfill.snapshot.consume_upstream.delta import DeltaUpstream

        if not key:
            raise InvalidUpstream(
                "A Delta table has no key of its own.", next_step="Name the columns of its key with option 'key'."
            )
        place = rest if "://" in rest else str(Path(rest).expanduser().absolute())
        return DeltaUpstream(place, tuple(key), table, vnodes, dict(storage or {}))
    from headwater.backfill.snapshot.consume_upstream.versioned import VersionedUpstream

    if not store or not folder:
        raise InvalidUpstream(
            "A table that we keep needs the store of its log and the folder of its tables.",
            next_step="Set both, as the pipeline that keeps it has them.",
        )
    return VersionedUpstream(store, rest, folder)
