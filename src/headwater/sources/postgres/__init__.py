"""Postgres: changes from logical replication (pgoutput), snapshots by COPY."""

from __future__ import annotations
