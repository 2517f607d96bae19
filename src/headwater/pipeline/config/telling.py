"""Where something is wrong in the settings: the line, the key, what is valid there; never the value of a secret."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from types import UnionType
from typing import Any, Final, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from headwater.pipeline.config.pipeline_config import PipelineConfig
from headwater.pipeline.errors import ConfigError
from headwater.pipeline.toml_text import line_of

KeyPath = tuple[str | int, ...]
"""The way to a setting: keys, and places in arrays."""
_SECRET_KEYS: Final = frozenset({"dsn"})


class Teller:
    """Says where something is wrong in the settings, without the values of secret keys."""

    def __init__(self, origin: str, text: str) -> None:
        self._origin, self._text = origin, text

    def error(self, path: KeyPath, problem: str, next_step: str | None = None) -> ConfigError:
        line = line_of(self._text, path) if self._text else None
        where = f"{self._origin}, line {line}: " if line else f"{self._origin}: " if self._origin else ""
        return ConfigError(f"{where}{_shown(path)} {problem}.", key=_dotted(path), next_step=next_step)

    def unset(self, path: KeyPath, variable: str) -> ConfigError:
        return self.error(
            path, f"names the environment variable {variable}, which is not set", f"Run: export {variable}=…"
        )

    def surplus(self, path: KeyPath, known: Sequence[str]) -> ConfigError:
        """A key that nobody knows."""
        valid = sorted(set(known))
        near = difflib.get_close_matches(str(path[-1]), valid, 1)
        step = f"Did you mean {near[0]}? " if near else ""
        return self.error(path, "is no key that is known", f"{step}Valid here: {', '.join(valid)}.")

    def unknown(self, path: KeyPath, given: str, valid: Sequence[str]) -> ConfigError:
        """A word that is none of those that are valid."""
        near = difflib.get_close_matches(given, valid, 1)
        step = f"Did you mean {near[0]!r}? " if near else ""
        return self.error(path, f"is {given!r}", f"{step}Valid are {', '.join(map(repr, valid))}.")

    def first(self, error: ValidationError) -> ConfigError:
        """One of the errors that pydantic found, in our words; a key too many explains one that is missing."""
        errors = error.errors(include_url=False, include_context=False)
        found = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
        path, kind = tuple(found["loc"]), found["type"]
        if kind == "extra_forbidden":
            return self.surplus(path, keys_at(path[:-1]))
        if kind == "missing":
            return self.error(path, "is missing", _EXAMPLES.get(str(path[-1]), "Write it."))
        if kind == "literal_error":
            return self.unknown(path, str(found["input"]), list(_choices_at(path)))
        received = "" if path and path[-1] in _SECRET_KEYS else f"; received {_shape(found['input'])}"
        if kind == "string_pattern_mismatch":
            return self.error(path, f"is no name{received}", "Write letters, digits, _ and -, a letter or digit first.")
        if path == ("sink",) and kind == "list_type":
            return self.error(path, "is one table, and a pipeline may have several sinks", "Write [[sink]].")
        example = _EXAMPLES.get(str(path[-1])) if path else None
        step = example or "docs/pipeline.md has what each setting may be."
        return self.error(path, f"is wrong: {_lowered(found['msg'])}{received}", step)


_EXAMPLES: Final = {
    "source": "Add a table [source] with dsn_env and tables.",
    "tables": 'Write tables = ["public.orders"] in [source].',
    "kind": 'Write kind = "delta" in [[sink]].',
}


def _lowered(text: str) -> str:
    return text[:1].lower() + text[1:]


def _shape(value: Any) -> str:
    if isinstance(value, bool | int | float):
        return repr(value).lower()
    names = {str: "a text", list: "an array", dict: "a table", type(None): "nothing"}
    return names.get(type(value), f"a {type(value).__name__}")


def _dotted(path: Sequence[str | int]) -> str:
    return ".".join(map(str, path))


def _shown(path: Sequence[str | int]) -> str:
    """The key for a person: ``[source] slot``, ``[[sink]] number 2, path``."""
    if not path:
        return "The pipeline"
    section, *rest = path
    if section in ("sink", "derive") and rest and isinstance(rest[0], int):
        return " ".join([f"[[{section}]] number {rest[0] + 1},", *map(str, rest[1:])]).rstrip(",")
    if section == "table" and rest:
        return " ".join([f'[table."{rest[0]}"]', *map(str, rest[1:])])
    return " ".join([f"[{section}]" if section in PipelineConfig.model_fields else str(section), *map(str, rest)])


def _annotations(path: Sequence[str | int]) -> Iterator[Any]:
    """The types that the value at *path* may have."""
    types: list[Any] = [PipelineConfig]
    for part in path:
        following = []
        for kind in types:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                named = {one.alias or name: one for name, one in kind.model_fields.items()}
                field = named.get(str(part))
                following += [] if field is None else _unpacked(field.annotation)
            elif get_args(kind):
                following += _unpacked(get_args(kind)[-1])
        types = following
    yield from types


def _unpacked(annotation: Any) -> list[Any]:
    """The members of a union; the type itself otherwise."""
    if get_origin(annotation) in (UnionType, Union):
        return [part for part in get_args(annotation) if part is not type(None)]
    return [annotation]


def keys_at(path: Sequence[str | int]) -> list[str]:
    return [
        key
        for kind in _annotations(path)
        if isinstance(kind, type) and issubclass(kind, BaseModel)
        for key in (field.alias or name for name, field in kind.model_fields.items())
    ]


def _choices_at(path: Sequence[str | int]) -> Iterator[str]:
    for kind in _annotations(path):
        yield from (value for value in get_args(kind) if isinstance(value, str))
