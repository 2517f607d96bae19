"""The doctor of a cluster: what each node needs, as a server of Postgres and as a part of the cluster."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from headwater.sources.citus.cluster import COORDINATOR, Cluster, Node, TableKind
from headwater.sources.citus.offset import CitusOffset
from headwater.sources.diagnosis import Diagnosis, Finding, Level, statement_of
from headwater.sources.errors import SourceError, SourceMisconfigured
from headwater.sources.offset import CdcOffset
from headwater.sources.postgres import doctor as of_postgres
from headwater.sources.postgres.connection import connect, server_errors
from headwater.sources.postgres.names import TableName
from headwater.sources.postgres.slot import read_slot

SKEW_SECONDS: Final = 0.1
"""Clocks that differ by more may order the changes around a move of a shard wrongly."""


def examine(
    dsn: str,
    tables: Sequence[str] = (),
    *,
    slot: str = "headwater",
    publication: str = "headwater",
    told: CdcOffset | None = None,
) -> Diagnosis:
    """Look at the coordinator, at every node, and at *tables* where their rows are. Nothing is changed.

    :param told: up to where the cluster was captured: it knows servers that left with a slot of ours.
    :raises InputError: a text is no table name.
    """
    cluster = Cluster(dsn)
    names = [str(TableName.parse(text)) for text in tables]
    shards = frozenset() if names else _shards(cluster)
    coordinator = cluster.dsn_of("", COORDINATOR)
    own = of_postgres.examine(coordinator, names, slot=slot, publication=publication, hidden=shards)
    findings = [*own.findings, *(_left(told, slot) if isinstance(told, CitusOffset) else ())]
    try:
        cluster.require_coordinator()
        nodes, inactive = cluster.nodes()
        kinds = dict(_kinds(cluster, names))
        findings += _cluster(nodes, inactive)
        findings += _tables(cluster, kinds)
        distributed = [name for name, (kind, _) in kinds.items() if kind is TableKind.DISTRIBUTED]
        has_slot = _has_slot(cluster, nodes[0], slot)
        for node in nodes:
            about = list(_node(cluster, node))
            findings += about
            if node.group == COORDINATOR or any(finding.check == "connection" for finding in about):
                continue
            if distributed or not names:
                there = cluster.dsn_of(node.address, node.group)
                found = of_postgres.examine(there, distributed, slot=slot, publication=publication, hidden=shards)
                findings += [_on(node, finding) for finding in found.findings if finding.level is not Level.OK]
            if has_slot and not _has_slot(cluster, node, slot):
                findings.append(_lost(node, slot))
    except SourceError as error:
        findings.append(Finding("cluster", Level.PROBLEM, error.message, statement_of(error.next_step)))
    finally:
        cluster.close()
    return Diagnosis(str(cluster), own.version, findings)


def _shards(cluster: Cluster) -> frozenset[TableName]:
    """The tables of shards, which are parts of tables; none where the coordinator cannot be asked."""
    try:
        cluster.require_coordinator()
        return cluster.all_shards()
    except SourceError:
        return frozenset()


def _kinds(cluster: Cluster, names: Sequence[str]) -> Iterator[tuple[str, tuple[TableKind, list[tuple[int, int]]]]]:
    known = cluster.kinds()
    for name in names:
        parsed = TableName.parse(name)
        rows = cluster.ask("SELECT pg_catalog.to_regclass(%s)::oid::bigint AS oid", [parsed.sql])
        oid = rows[0].oid
        kind = known.get(oid, TableKind.LOCAL)
        yield name, (kind, [] if kind is TableKind.LOCAL else cluster.shard_groups(oid))


def _cluster(nodes: Sequence[Node], inactive: Sequence[int]) -> Iterator[Finding]:
    told = ", ".join(node.address for node in nodes)
    yield Finding("cluster", Level.OK, f"The cluster has {len(nodes)} nodes: {told}.")
    if inactive:
        text = f"{len(inactive)} nodes are not active; they are followed once they are."
        yield Finding("cluster", Level.WARNING, text, "SELECT * FROM pg_dist_node WHERE NOT isactive;")


def _tables(cluster: Cluster, kinds: dict[str, tuple[TableKind, list[tuple[int, int]]]]) -> Iterator[Finding]:
    for name, (kind, placed) in kinds.items():
        if kind is TableKind.REFERENCE and COORDINATOR not in (group for _, group in placed):
            fix = f"SELECT citus_set_coordinator_host({cluster.own_host});"
            yield Finding("placement", Level.PROBLEM, "The coordinator has no copy of this reference table.", fix, name)
        elif kind is TableKind.DISTRIBUTED and len({shard for shard, _ in placed}) < len(placed):
            text = "Its shards have copies, each of which would tell every change."
            yield Finding(
                "placement", Level.PROBLEM, text, "-- distribute it with citus.shard_replication_factor = 1", name
            )
        else:
            where = len({group for _, group in placed}) or 1
            shards = f", {len(placed)} shards" if kind is TableKind.DISTRIBUTED else ""
            told = where if kind is TableKind.DISTRIBUTED else 1
            yield Finding("placement", Level.OK, f"It is {kind.value}{shards}; told by {told} nodes.", None, name)


def _node(cluster: Cluster, node: Node) -> Iterator[Finding]:
    try:
        before = time.time()
        there = cluster.clock_us(node) / 1e6
        skew = there - (before + time.time()) / 2
    except SourceError as error:
        text = f"Node {node.address}: {error.message}"
        yield Finding("connection", Level.PROBLEM, text, statement_of(error.next_step))
        return
    if abs(skew) > SKEW_SECONDS:
        text = f"Node {node.address}: its clock is {skew:+.1f} s away from ours."
        yield Finding("clock", Level.WARNING, text, "-- keep the clocks of all nodes in step (NTP)")
    try:
        cluster.require_decoder(node.group, node.address)
    except SourceMisconfigured as error:
        yield Finding("citus", Level.PROBLEM, error.message, (error.next_step or "").removeprefix("Run there: "))
    else:
        yield Finding("citus", Level.OK, f"Node {node.address} tells changes under the names of its tables.")


def _has_slot(cluster: Cluster, node: Node, slot: str) -> bool:
    dsn = cluster.dsn_of(node.address, node.group)
    with server_errors(dsn), connect(dsn) as session:
        return read_slot(session, slot) is not None


def _lost(node: Node, slot: str) -> Finding:
    text = f"Node {node.address} has no replication slot {slot!r}, and the coordinator has."
    return Finding("slot", Level.PROBLEM, text, "headwater resnapshot")


def _left(told: CitusOffset, slot: str) -> Iterator[Finding]:
    for address in told.slots.values():
        text = (
            f"Server {address} left the cluster, and its slot {slot!r} could not be dropped: it keeps its log for it."
        )
        fix = f"SELECT pg_drop_replication_slot('{slot}'); -- at {address}, if that server is still there"
        yield Finding("slot", Level.WARNING, text, fix)


def _on(node: Node, finding: Finding) -> Finding:
    return replace(finding, text=f"Node {node.address}: {finding.text}")
