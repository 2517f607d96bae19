"""The address of a coordinator: one host, or several of which one answers."""

from __future__ import annotations

import pytest

from headwater.sources.citus.cluster import Cluster


@pytest.mark.parametrize(
    ("text", "address", "host"),
    [
        ("citus://u@h1:5433/db", "h1:5433", "'h1', 5433"),
        ("citus://u@h1:5432,h2:5433/db", "h1,h2:5432,5433", "'h1', 5432"),
        ("citus://u@h1/db", "h1:5432", "'h1', 5432"),
    ],
)
def test_a_coordinator_may_be_named_with_its_standby(text: str, address: str, host: str) -> None:
    cluster = Cluster(text)
    assert cluster.own_address == address
    assert cluster.own_host == host
    assert cluster.dsn_of(cluster.own_address, 0).parameter("host") == cluster.coordinator.parameter("host")
