"""Derived tables: a PySpark function over kept tables, maintained as a table of its own."""
