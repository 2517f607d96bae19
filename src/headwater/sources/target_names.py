"""Names of tables as targets can have them: directories, topics of Kafka, tables of a database. Pure.

One encoding serves every sink. Ordinary names (lower-case letters, digits, ``_``, ``-``, space, and dots inside the
name of the table) stay as they are. In a directory every other character is ``~hex~``, its code point. Upper-case
letters become lower-case, and ``~u<mask>~`` at the end of the name says which ones were upper-case: bit 0 is the first
ASCII letter. So no two tables share a directory, not even on a file system that ignores case, and
:func:`table_of_directory` returns the table.

A name that is too long for its target is cut, and a hash of the whole name follows: ``~h<hash>~`` in directories,
``-h<hash>`` in topics, ``_h<hash>`` in databases. That cannot be reversed: sinks store the full name with the table.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from hashlib import blake2b
from typing import Final

LONGEST_COMPONENT: Final = 255
"""Bytes of a name in common file systems."""
LONGEST_TOPIC: Final = 249
LONGEST_CATALOG_NAME: Final = 255
"""Characters of a name in a SQL catalog of Iceberg."""
OWN_DIRECTORIES: Final = frozenset(("_headwater_staging", "_headwater_tokens", "_replayed"))
"""Directories of Headwater beside those of tables."""
OWN_FILES: Final = frozenset(f"catalog.db{end}" for end in ("", "-journal", "-shm", "-wal"))
"""Files of Headwater in the warehouse of an Iceberg sink."""

_NO_PATH: Final = re.compile(r"[^a-z0-9_. -]|^\.|[. ]\Z")
_NO_PATH_BEFORE: Final = re.compile(r"[^\w. -]", re.ASCII)
_ESCAPE: Final = re.compile(r"~([0-9a-f]+)~")
_TOKEN: Final = re.compile(r"~[^~]*~|[^~]")
_CASE: Final = re.compile(r"~u([0-9a-f]+)~\Z")
_NO_TOPIC: Final = re.compile(r"[^A-Za-z0-9._-]")
_TOPIC_ESCAPE: Final = re.compile(r"-x([0-9a-f]+)-")
_CATALOG_ESCAPE: Final = re.compile(r"~(?:20|2e|7e)~|^~\Z")
_EMPTY: Final = "~"
_HIGHEST: Final = 0x10FFFF


def directory_name(namespace: str, name: str) -> str:
    """The directory of a table: ``namespace.name``, or ``name`` where there is no namespace."""
    parts = [_path_part(namespace, keep_dots=False)] if namespace else []
    text = ".".join([*parts, _path_part(name, keep_dots=bool(namespace))])
    return _fit_component(_unlike(text, OWN_DIRECTORIES), f"{namespace}\0{name}")


def table_of_directory(directory: str) -> tuple[str, str] | None:
    """Namespace and name of the table that has *directory*; ``None``: a hash, or not a directory of a table."""
    first, dot, rest = directory.partition(".")
    namespace, name = (_decoded(first), _decoded(rest)) if dot else ("", _decoded(first))
    if namespace is None or name is None or directory_name(namespace, name) != directory:
        return None
    return namespace, name


def path_component(name: str) -> str:
    """*name* as one component of a path, never empty, ``.`` or ``..``."""
    return _fit_component(_unlike(_path_part(name), OWN_DIRECTORIES | OWN_FILES), name)


def chosen_directory(namespace: str, name: str, exists: Callable[[str], bool]) -> str:
    """:func:`directory_name`, or the name that earlier versions gave to the directory, where only that one *exists*.

    An earlier name that another table can have today is not used: the rows in it can be of either.
    """
    new = directory_name(namespace, name)
    old = ".".join(_before(part) for part in (namespace, name) if part)
    return old if old != new and table_of_directory(old) is None and not exists(new) and exists(old) else new


def chosen_component(name: str, exists: Callable[[str], bool]) -> str:
    """:func:`path_component`, or the one that earlier versions had, where only that one *exists*."""
    new, old = path_component(name), _before(name)
    return old if old != new and not exists(new) and exists(old) else new


def topic_name(pattern: str, namespace: str, name: str) -> str:
    """*pattern* with ``{namespace}`` and ``{table}`` filled in, as the name of a topic.

    Characters that a topic cannot have become ``-x<hex>-``; so do dots in the namespace, which would look like the one
    before the table, and hyphens that would look like the start of such an escape.
    """
    chars: list[tuple[str, bool]] = []
    for literal, field, _, _ in string.Formatter().parse(pattern):
        chars += [(char, False) for char in literal]
        chars += [(char, char == ".") for char in namespace] if field == "namespace" else []
        chars += [(char, False) for char in name] if field == "table" else []
    text = ""
    for char, is_inner_dot in reversed(chars):  # a hyphen depends on what follows it
        is_escape = char == "-" and _TOPIC_ESCAPE.match(char + text)
        text = (f"-x{ord(char):x}-" if is_inner_dot or is_escape or _NO_TOPIC.match(char) else char) + text
    text = text.replace(".", "-x2e-") if text in (".", "..") else text
    return _fit(text, LONGEST_TOPIC, "-h", 16, len, f"{namespace}\0{name}")


def token_topic(query: str, topic: str) -> str:
    """The topic with the tokens of *query* for *topic*."""
    front = _NO_TOPIC.sub(lambda found: f"-x{ord(found[0]):x}-", query)
    return _fit(f"_headwater.{front}.{topic}", LONGEST_TOPIC, "-h", 16, len, f"{query}\0{topic}")


def catalog_name(name: str) -> str:
    """*name* of a namespace or of a table in an Iceberg catalog: as at the source, cut if it is too long.

    Catalogs take dots as separators, and no empty name between two of them: in such a name dots and blanks are escaped.
    """
    if any(not segment.strip() for segment in name.split(".")) or _CATALOG_ESCAPE.search(name):
        name = "".join(f"~{ord(char):x}~" if char in "~. " else char for char in name) or _EMPTY
    return fit_identifier(name, LONGEST_CATALOG_NAME, len)


def fit_identifier(name: str, limit: int, size: Callable[[str], int]) -> str:
    """*name* for a database that keeps names up to *limit*. :param size: of a name: its bytes, or its characters."""
    return _fit(name, limit, "_h", 8, size, name)


def is_cut(identifier: str) -> bool:
    """Whether :func:`fit_identifier` cut it, or it looks so."""
    return re.search(r"_h[0-9a-f]{16}\Z", identifier) is not None


def _path_part(name: str, *, keep_dots: bool = True) -> str:
    letters = [char for char in name if char.isascii() and char.isalpha()]
    mask = sum(1 << place for place, char in enumerate(letters) if char.isupper())
    lowered = "".join(char.lower() if char.isascii() else char for char in name)
    text = _NO_PATH.sub(_hex, lowered) or _EMPTY
    text = text if keep_dots else text.replace(".", "~2e~")
    return f"{text}~u{mask:x}~" if mask else text


def _decoded(part: str) -> str | None:
    """The name whose :func:`_path_part` it may be."""
    if part == _EMPTY:
        return ""
    case = _CASE.search(part)
    text = part if case is None else part[: case.start()]
    if "~" in _ESCAPE.sub("", text) or any(int(code, 16) > _HIGHEST for code in _ESCAPE.findall(text)):
        return None
    chars = list(_ESCAPE.sub(lambda found: chr(int(found[1], 16)), text))
    letters = [place for place, char in enumerate(chars) if char.isascii() and char.isalpha()]
    mask = 0 if case is None else int(case[1], 16)
    for bit, place in enumerate(letters):
        if mask >> bit & 1:
            chars[place] = chars[place].upper()
    return "".join(chars)


def _unlike(component: str, taken: frozenset[str]) -> str:
    """*component* as it cannot be taken for one of our own."""
    return f"~{ord(component[0]):x}~{component[1:]}" if component in taken else component


def _fit_component(component: str, whole: str) -> str:
    if len(component) <= LONGEST_COMPONENT:
        return component
    end = f"~h{_hash(whole, 16)}~"
    kept = ""
    for token in _TOKEN.findall(component):
        if len(kept) + len(token) + len(end) > LONGEST_COMPONENT:
            break
        kept += token
    return kept + end


def _fit(text: str, limit: int, mark: str, digest: int, size: Callable[[str], int], whole: str) -> str:
    """A name that fits and looks as if it were cut gets a hash, too: it could be that of another one."""
    is_like = size(text) > limit - 4 and re.search(f"{mark}[0-9a-f]{{{2 * digest}}}\\Z", text) is not None
    if size(text) <= limit and not is_like:
        return text
    end = mark + _hash(whole, digest)
    while size(text) + len(end) > limit:
        text = text[:-1]
    return text + end


def _hex(found: re.Match[str]) -> str:
    return f"~{ord(found[0]):x}~"


def _before(part: str) -> str:
    """A part of a directory as earlier versions named it."""
    return _NO_PATH_BEFORE.sub(_hex, part)


def _hash(whole: str, size: int) -> str:
    return blake2b(whole.encode("utf-8", "surrogatepass"), digest_size=size).hexdigest()
