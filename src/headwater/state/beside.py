"""Stores beside a store: small ones of other owners, found from the store that they belong to.

``beside(location, "consumers", log, name)`` is a place under the store's own: a folder of an embedded store, a longer
prefix of an object store, a longer name in memory. Each is a whole store with a writer of its own.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from headwater.state.location import split_location


def beside(location: str, *parts: str) -> str:
    """The location of the store *parts* beside the one at *location*."""
    names = "/".join(quote(part, safe="") for part in parts)
    engine, rest = split_location(location)
    if engine == "memory":
        return f"memory://{rest}/{names}"
    if engine == "slatedb":
        url = urlsplit(rest)
        return "slatedb+" + urlunsplit(url._replace(path=f"{url.path.rstrip('/')}/{names}"))
    return f"{rest}/{names}"


def stores_beside(location: str, first: str, depth: int) -> list[tuple[str, ...]]:
    """The names of the stores at ``beside(location, first, …)`` with *depth* names more."""
    engine, rest = split_location(location)
    if engine == "memory":
        from headwater.state.engines.memory import memory_names

        front = f"{rest}/{quote(first, safe='')}/"
        found = [name.removeprefix(front).split("/") for name in memory_names() if name.startswith(front)]
    elif engine == "slatedb":
        from headwater.state.engines.slate import Place

        names = Place.parse(rest, create=False).names(f"{quote(first, safe='')}/")
        found = [name.split("/")[1 : 1 + depth] for name in names if "/owner/" in name]
    else:
        root = Path(rest) / quote(first, safe="")
        pattern = "/".join(["*"] * depth) + "/data.mdb"
        found = [list(path.relative_to(root).parts[:depth]) for path in root.glob(pattern)]
    return sorted({tuple(map(unquote, parts)) for parts in found if len(parts) == depth})
