"""Databases: what sources and sinks need of a database alike: addresses, secrets in files, how long to wait."""

from __future__ import annotations
