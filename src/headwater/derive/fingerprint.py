"""Fingerprint: names what a derived table is made by, so that an edit of it does not go unnoticed.

It covers the code of the function (not its comments, docstrings or lines), its defaults and what it closes over, the
functions and plain values that it uses by name in modules of its own folder, theirs in turn, and its tables. What
libraries do is not covered. Code is compared as it was compiled, so another minor version of Python cannot tell:
fingerprints of two of them are :func:`comparable` never.
"""

from __future__ import annotations

import dis
import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))


def fingerprint(function: Callable[..., Any], tables: Sequence[str]) -> str:
    """Of a function over *tables*: the version of Python, a colon, and digits."""
    digest = hashlib.blake2b(digest_size=16)
    seen: set[int] = set()
    for word in (*tables, *_words(function, _folder(function), seen)):
        digest.update(f"{len(word)}:{word}".encode())
    return f"{sys.implementation.cache_tag}:{digest.hexdigest()}"


def comparable(one: str, other: str) -> bool:
    """Whether two fingerprints are of the same version of Python, and so tell whether code is the same."""
    return one.partition(":")[0] == other.partition(":")[0]


def _folder(function: Any) -> Path | None:
    code = getattr(_plain(function), "__code__", None)
    return None if code is None else Path(code.co_filename).parent


def _plain(function: Any) -> Any:
    while isinstance(function, partial | MethodType):
        function = function.func if isinstance(function, partial) else function.__func__
    return function


def _words(value: Any, folder: Path | None, seen: set[int]) -> Iterator[str]:
    """What tells *value* from another one; objects that are neither code nor plain are told by their type."""
    if isinstance(value, _PLAIN):
        yield f"{type(value).__name__} {value!r}"
    elif isinstance(value, list | dict) and id(value) in seen:
        yield "again"
    elif isinstance(value, tuple | list):
        seen.add(id(value))
        yield f"{type(value).__name__} {len(value)}"
        for one in value:
            yield from _words(one, folder, seen)
    elif isinstance(value, frozenset | set):
        yield f"set {len(value)}"
        yield from sorted(" ".join(_words(one, folder, seen)) for one in value)
    elif isinstance(value, dict):
        seen.add(id(value))
        yield f"dict {len(value)}"
        for key, one in value.items():
            yield from _words(key, folder, seen)
            yield from _words(one, folder, seen)
    elif isinstance(value, partial):
        yield from _words((value.func, value.args, value.keywords), folder, seen)
    elif isinstance(value, MethodType):
        yield from _words(value.__func__, folder, seen)
    elif isinstance(value, CodeType):
        yield from _code(value, folder, seen)
    elif isinstance(value, FunctionType):
        yield from _function(value, folder, seen)
    elif isinstance(value, type):
        yield from _class(value, folder, seen)
    elif callable(getattr(value, "__wrapped__", None)):  # what decorates it is a library's
        yield from _words(value.__wrapped__, folder, seen)
    else:
        yield f"{type(value).__module__}.{type(value).__qualname__}"


def _function(function: FunctionType, folder: Path | None, seen: set[int]) -> Iterator[str]:
    yield f"function {function.__qualname__}"
    if id(function) in seen:
        return
    seen.add(id(function))
    if callable(wrapped := getattr(function, "__wrapped__", None)):  # decorated, as a UDF is
        yield from _words(wrapped, folder, seen)
    code = function.__code__
    if folder is None or not Path(code.co_filename).is_relative_to(folder):
        return  # of a library
    yield from _code(code, folder, seen)
    yield from _words((function.__defaults__, function.__kwdefaults__), folder, seen)
    yield from _words([cell.cell_contents for cell in function.__closure__ or ()], folder, seen)
    used = set(_names(code)) - set(_assigned(code))  # what it assigns itself is no part of how it was written
    for name in sorted(used & function.__globals__.keys()):
        value = function.__globals__[name]
        if isinstance(value, ModuleType):
            yield from _of_module(value, used, folder, seen)
        else:
            yield name
            yield from _words(value, folder, seen)


def _class(made: type, folder: Path | None, seen: set[int]) -> Iterator[str]:
    """A class of its own folder: what it has."""
    yield f"class {made.__qualname__}"
    place = getattr(sys.modules.get(made.__module__), "__file__", None)
    if id(made) in seen or folder is None or place is None or not Path(place).is_relative_to(folder):
        return
    seen.add(id(made))
    for name, value in sorted(vars(made).items()):
        if not name.startswith("__") or isinstance(value, FunctionType):
            yield name
            yield from _words(value, folder, seen)


def _of_module(module: ModuleType, used: set[str], folder: Path | None, seen: set[int]) -> Iterator[str]:
    """What a function may use of a module of its own folder."""
    place = getattr(module, "__file__", None)
    if folder is None or place is None or not Path(place).is_relative_to(folder):
        return
    for name in sorted(used & vars(module).keys()):
        value = vars(module)[name]
        if not isinstance(value, ModuleType):
            yield name
            yield from _words(value, folder, seen)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _assigned(code: CodeType) -> Iterator[str]:
    for step in dis.get_instructions(code):
        if step.opname == "STORE_GLOBAL":
            yield step.argval
        elif isinstance(step.argval, CodeType):
            yield from _assigned(step.argval)


def _code(code: CodeType, folder: Path | None, seen: set[int]) -> Iterator[str]:
    """Its steps, with what they use instead of places in tables: a docstring moves these."""
    yield f"{code.co_argcount} {code.co_posonlyargcount} {code.co_kwonlyargcount} {code.co_flags}"
    yield " ".join(code.co_varnames)
    for step in dis.get_instructions(code):
        yield step.opname
        if step.opcode in dis.hasconst:
            yield from _words(step.argval, folder, seen)
        elif step.arg is not None:
            yield str(step.argval)
