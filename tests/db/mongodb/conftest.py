"""A real MongoDB: a replica set of one, and a sharded cluster, per test session; without databases at the start of a
test."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import pytest
from tests.servers.mongodb import MongoServer
from tests.servers.mongodb_cluster import MongoCluster

StartServer = Callable[..., MongoServer]
Server = TypeVar("Server", bound=MongoServer)


@pytest.fixture(scope="session")
def mongo_server() -> Iterator[MongoServer]:
    """The session's server."""
    with started_or_skipped() as server:
        yield server


@pytest.fixture
def server(mongo_server: MongoServer) -> Iterator[MongoServer]:
    """It, with no databases but its own."""
    with mongo_server.fresh():
        yield mongo_server


@pytest.fixture(scope="session")
def mongo_cluster() -> Iterator[MongoCluster]:
    """The session's cluster."""
    with cluster_or_skipped() as cluster:
        yield cluster


@pytest.fixture
def cluster(mongo_cluster: MongoCluster) -> Iterator[MongoCluster]:
    """It, with no databases but its own."""
    with mongo_cluster.fresh():
        yield mongo_cluster


@pytest.fixture
def start_mongodb() -> Iterator[StartServer]:
    """Starts servers of the test's own, to be killed, restarted or set up as it likes."""
    with contextlib.ExitStack() as servers:

        def start(settings: Mapping[str, str] | None = None, *, beside: MongoServer | None = None) -> MongoServer:
            return servers.enter_context(started_or_skipped(settings, beside=beside))

        yield start


def started_or_skipped(settings: Mapping[str, str] | None = None, *, beside: MongoServer | None = None) -> MongoServer:
    """A server; where it is not on this machine the test is skipped, but never in CI."""
    return _or_skipped(lambda: MongoServer(settings, beside=beside))


def cluster_or_skipped() -> MongoCluster:
    """A cluster, likewise."""
    return _or_skipped(MongoCluster)


def _or_skipped(start: Callable[[], Server]) -> Server:
    try:
        return start()
    except FileNotFoundError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
