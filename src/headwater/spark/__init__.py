"""Spark: the data source ``headwater``, a session that starts and runs fast, and what both need."""
