"""A capture and its MariaDB or MySQL, both killed at random under live writers: every change arrives exactly once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.crash.capture.mysql_shop import MySqlShop
from tests.crash.capture.rounds import STEPS, assert_exactly_once
from tests.crash.capture.shop import ShopProcess
from tests.db.mysql.running import end_of_log
from tests.sampled import SOAK
from tests.servers.mysql_family import start_server

SAFE = {"sync-binlog": "1", "innodb-flush-log-at-trx-commit": "1"}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ["mariadb", "mysql"] if SOAK else ["mariadb"])
def test_every_change_arrives_exactly_once_whoever_is_killed(family: str, tmp_path: Path) -> None:
    with start_server(family, SAFE) as server:
        shop = MySqlShop(server)
        capture = ShopProcess(shop, tmp_path, lambda: end_of_log(server.dsn))

        def begin_a_file(rng: random.Random) -> None:
            if rng.random() < 0.5:
                server.execute("FLUSH LOGS")

        assert_exactly_once(
            shop,
            capture,
            ([capture], [server], [capture, server]),
            steps=len(STEPS),
            rounds=30 if SOAK else 3,
            meanwhile=begin_a_file,
        )
