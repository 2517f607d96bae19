"""Citus: a cluster of Postgres servers, each with a slot of its own; tables that are spread over them are one table."""
