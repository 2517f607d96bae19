"""Tests of the journal. README.md maps every scenario of the specification to its test."""

from __future__ import annotations
