"""Each folder of tests is a marker: ``pytest -m unit`` runs tests/unit."""

from __future__ import annotations

from pathlib import Path

import pytest

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(_HERE).parts[0]
        if folder in ("unit", "property", "crash", "db", "spark"):
            item.add_marker(folder)
