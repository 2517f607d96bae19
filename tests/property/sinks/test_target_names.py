"""Names of tables as directories, topics and tables of databases: no two tables share one, and none leaves its root."""

from __future__ import annotations

import os
import re

from hypothesis import example, given
from hypothesis import strategies as st

from headwater.sources.target_names import (
    LONGEST_COMPONENT,
    LONGEST_TOPIC,
    catalog_name,
    directory_name,
    fit_identifier,
    path_component,
    table_of_directory,
    topic_name,
)

TABLES = st.tuples(
    st.one_of(st.text("aAbBx20uh.~-_ ", max_size=6), st.text(max_size=6), st.text("aB.é", max_size=300)),
    st.one_of(st.text("aAbBx20uh.~-_ ", min_size=1, max_size=8), st.text(min_size=1), st.text("aB.é", min_size=1)),
)
ROOT = "/lake"


def is_inside(*components: str) -> bool:
    """Each is a directory of its own below the one before."""
    path = os.path.normpath("/".join((ROOT, *components)))
    return path == "/".join((ROOT, *components)) and all("/" not in one and "\0" not in one for one in components)


@given(TABLES, TABLES)
@example(("a.b", "c"), ("a", "b.c"))
@example(("a", "B"), ("a", "b"))
@example(("", "a.b"), ("a", "b"))
@example(("", "0"), ("~", "0"))
def test_two_tables_never_share_a_target(first: tuple[str, str], second: tuple[str, str]) -> None:
    if first == second:
        return
    assert directory_name(*first).casefold() != directory_name(*second).casefold()
    assert tuple(map(path_component, first)) != tuple(map(path_component, second))
    components = ["/".join(map(path_component, one)).casefold() for one in (first, second)]
    assert components[0] != components[1]
    assert tuple(map(catalog_name, first)) != tuple(map(catalog_name, second))
    topics = [topic_name("{namespace}.{table}", *one) for one in (first, second)]
    assert topics[0] != topics[1]


@given(TABLES)
def test_a_directory_gives_the_table_back_and_stays_in_its_root(table: tuple[str, str]) -> None:
    directory = directory_name(*table)
    assert is_inside(directory)
    assert is_inside(*map(path_component, table))
    assert max(map(len, (directory, *map(path_component, table)))) <= LONGEST_COMPONENT
    assert not re.search(r"[^a-z0-9_.~ -]", directory)
    is_cut = re.search(r"~h[0-9a-f]{32}~$", directory)
    assert table_of_directory(directory) == (None if is_cut else table)


@given(st.text("abcdefghijklmnopqrstuvwxyz0123456789_-", min_size=1, max_size=63), st.text("abcxyz019_-", min_size=1))
def test_ordinary_names_stay_as_they_are(namespace: str, name: str) -> None:
    name = name[:63]
    assert directory_name(namespace, name) == f"{namespace}.{name}"
    if not re.search(r"-x[0-9a-f]+-", f"{namespace}.{name}"):
        assert topic_name("{namespace}.{table}", namespace, name) == f"{namespace}.{name}"
    assert fit_identifier(name, 63, len) == name


@given(TABLES)
def test_topics_have_characters_and_lengths_that_kafka_takes(table: tuple[str, str]) -> None:
    for pattern in ("{namespace}.{table}", "{table}", "x-{table}-{namespace}"):
        assert re.fullmatch(rf"[A-Za-z0-9._-]{{1,{LONGEST_TOPIC}}}", topic_name(pattern, *table))
        assert topic_name(pattern, *table) not in (".", "..")


@given(st.lists(st.text("aé_h0", min_size=1, max_size=90), min_size=2, max_size=2, unique=True))
def test_names_in_databases_fit_and_differ(names: list[str]) -> None:
    fitted = [fit_identifier(name, 63, lambda text: len(text.encode())) for name in names]
    assert fitted[0] != fitted[1]
    assert all(len(name.encode()) <= 63 for name in fitted)
