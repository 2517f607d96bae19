"""A capture and its MongoDB, both killed at random under live writers: every change arrives exactly once."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.crash.capture.mongodb_shop import MongoShop
from tests.crash.capture.rounds import Victim, assert_exactly_once
from tests.crash.capture.shop import ShopProcess
from tests.db.mongodb.conftest import started_or_skipped
from tests.db.mongodb.running import end_of_log
from tests.sampled import SOAK


@pytest.mark.timeout(900)
def test_every_change_arrives_exactly_once_whoever_is_killed(tmp_path: Path) -> None:
    with started_or_skipped() as server:
        shop = MongoShop(server)
        capture = ShopProcess(shop, tmp_path, lambda: end_of_log(server))
        both: list[Victim] = [capture, server]
        victims: list[list[Victim]] = [[capture], [server], both] if SOAK else [both]
        assert_exactly_once(shop, capture, victims, steps=1, rounds=30 if SOAK else 1)
