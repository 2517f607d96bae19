"""The binlog of MySQL and MariaDB, sans I/O: bytes of events to values, and row events to Arrow columns."""

from __future__ import annotations
