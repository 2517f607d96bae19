"""CitusSource: a cluster as the capture needs it: a Postgres source for each node, and their positions side by side."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from headwater.databases.timeouts import TIMEOUT_SECONDS
from headwater.sources.citus.changes import CitusChangeStream
from headwater.sources.citus.cluster import COORDINATOR, Cluster, TableKind
from headwater.sources.citus.members import Members, distributed, here, naming, present_tables
from headwater.sources.citus.offset import POSITION_TYPE, CitusOffset, NodePlace
from headwater.sources.errors import (
    ForeignOffset,
    RefusedValue,
    RereadNeeded,
    SourceBusy,
    SourceNotFound,
    UnsupportedTable,
)
from headwater.sources.events import Checked, Finding, Registered, SchemaChanged, Stopped
from headwater.sources.evolution import SchemaPolicy
from headwater.sources.offset import CdcOffset
from headwater.sources.postgres.changes import RawStream
from headwater.sources.postgres.names import TableName
from headwater.sources.postgres.offset import PostgresOffset
from headwater.sources.postgres.slot import ServerIdentity
from headwater.sources.postgres.source import PostgresSource
from headwater.sources.table import SourceTable, SpecialValues

_OWNED: Final = ("system_id", "database", "slot")


class CitusSource:
    """A cluster; on each node a publication and a slot of the same names. Nothing is connected before it is needed.

    :param dsn: ``citus://user@coordinator:5432/database``; the nodes are asked for with the same user and password.
    """

    def __init__(
        self,
        dsn: str,
        *,
        spill: Path,
        schema_policy: SchemaPolicy = SchemaPolicy.EVOLVE,
        special_values: Mapping[str, SpecialValues] | None = None,
        slot: str = "headwater",
        publication: str = "headwater",
        poll: bool = False,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self._cluster = Cluster(dsn, timeout_seconds)
        self._slot = slot
        self._policy = schema_policy

        def make(conninfo: str, group: int, through: Callable[[RawStream], RawStream]) -> PostgresSource:
            return PostgresSource(
                conninfo,
                spill=spill / f"node-{group}",
                schema_policy=schema_policy,
                special_values=special_values,
                slot=slot,
                publication=publication,
                poll=poll,
                through=through,
                streaming=False,  # in the blocks of open transactions the decoder of a cluster tells no row of a shard
                may_be_empty=group != COORDINATOR,  # where no table is distributed, the nodes have nothing to tell
                may_be_behind=True,
                timeout_seconds=timeout_seconds,
                shards=lambda table: self._cluster.shards_on(group, TableName(table.namespace, table.name)),
            )

        self._members = Members(self._cluster, make, slot)
        self._stream: CitusChangeStream | None = None
        self._seen: dict[SourceTable, Mapping[int, int]] = {}

    @property
    def name(self) -> str:
        return str(self._cluster)

    @property
    def position_type(self) -> pa.DataType:
        return POSITION_TYPE

    @property
    def _coordinator(self) -> PostgresSource:
        return self._members.source(COORDINATOR, self._cluster.own_address)

    # -- tables ----------------------------------------------------------------------------------------------------

    def tables(self, names: Sequence[str]) -> list[SourceTable]:
        """See :class:`~headwater.sources.source.Source`: as the coordinator has them."""
        if not names:
            return []
        self._cluster.require_coordinator()
        found = self._coordinator.tables(names)
        kinds = self._kinds(found)
        for table in found:
            self._require_placed(table, kinds[table.full_name])
        return found

    def _require_placed(self, table: SourceTable, kind: TableKind) -> None:
        """:raises UnsupportedTable: its rows would be told never, or more than once."""
        if kind is TableKind.LOCAL:
            return
        placed = self._cluster.shard_groups(table.source_id or 0)
        if kind is TableKind.REFERENCE and COORDINATOR not in (group for _, group in placed):
            raise UnsupportedTable(
                table.full_name,
                "the coordinator has no copy of this reference table, and only its copy is told.",
                next_step=f"Run: SELECT citus_set_coordinator_host({self._cluster.own_host});",
            )
        if kind is TableKind.DISTRIBUTED and len({shard for shard, _ in placed}) < len(placed):
            raise UnsupportedTable(
                table.full_name,
                "its shards have copies, each of which would tell every change.",
                next_step="Distribute it with citus.shard_replication_factor = 1.",
            )

    def _kinds(self, tables: Sequence[SourceTable]) -> dict[str, TableKind]:
        known = self._cluster.kinds()
        return {table.full_name: known.get(table.source_id or 0, TableKind.LOCAL) for table in tables}

    def _on(self, group: int, address: str, tables: Sequence[SourceTable]) -> list[SourceTable]:
        """The tables as a node has them. :raises SourceNotFound: it has not all of them."""
        names = [table.full_name for table in tables]
        try:
            with naming(address):
                return self._members.source(group, address).tables(names)
        except SourceNotFound as error:
            if group == COORDINATOR:
                raise
            raise SourceNotFound(error.message, next_step="Run: SELECT start_metadata_sync_to_all_nodes();") from None

    # -- preparing -------------------------------------------------------------------------------------------------

    def begin(self, tables: Sequence[SourceTable], *, resumed: bool) -> tuple[CdcOffset, Mapping[str, Any]]:
        """See :class:`~headwater.sources.source.Source`: on every node, the coordinator first."""
        if not resumed:
            self.claim([])
        return self._prepare(tables, lambda source, known: source.begin(known, resumed=True))

    def renew(self, tables: Sequence[SourceTable]) -> tuple[CdcOffset, Mapping[str, Any]]:
        """See :class:`~headwater.sources.source.Source`."""
        return self._prepare(tables, lambda source, known: source.renew(known))

    def _prepare(
        self,
        tables: Sequence[SourceTable],
        make: Callable[[PostgresSource, Sequence[SourceTable]], tuple[CdcOffset, Mapping[str, Any]]],
    ) -> tuple[CdcOffset, Mapping[str, Any]]:
        kinds = self._kinds(tables)
        placements = self._cluster.placements()  # shards that move from now on are merged by time
        names = {table.source_id or 0: table.full_name for table in distributed(kinds, tables)}
        shards = {names[oid]: numbers for oid, numbers in self._cluster.shard_numbers(list(names)).items()}
        nodes: dict[int, NodePlace] = {}
        prepared: dict[str, Any] = {}
        members = self._cluster.nodes()[0]
        for node in members:
            known = self._on(node.group, node.address, here(node.group, kinds, tables))
            with naming(node.address):
                self._cluster.require_decoder(node.group, node.address)
                at, identity = make(self._members.source(node.group, node.address), known)
            assert isinstance(at, PostgresOffset)
            nodes[node.group] = NodePlace(at, ServerIdentity.from_json(identity), node.address)
            prepared[str(node.group)] = dict(identity)
        number = max(self._cluster.clock_us(node) for node in members)
        return CitusOffset(nodes, (), number, placements, shards=shards), prepared["0"] | {"nodes": prepared}

    def claim(self, prepared: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """See :class:`~headwater.sources.source.Source`: where the coordinator's slot is ours, those of nodes are."""
        self._cluster.require_coordinator()
        own = self._coordinator.claim(prepared)
        known = [[source.get(part) for part in _OWNED] for source in prepared]
        ours = [own[part] for part in _OWNED] in known
        nodes = {}
        for node in self._cluster.nodes()[0]:
            source = self._members.source(node.group, node.address)
            with naming(node.address):
                identity = self._members.identity(node.group, node.address).to_json() | {"slot": self._slot}
                nodes[str(node.group)] = dict(source.claim([identity] if ours else []))
        return {**own, "nodes": nodes}

    def include(self, tables: Sequence[SourceTable]) -> CdcOffset:
        """See :class:`~headwater.sources.source.Source`."""
        kinds = self._kinds(tables)
        assert self._stream is not None
        self._stream.note_shards(distributed(kinds, tables))
        nodes = {}
        for group, place in self._stream.position.nodes.items():
            mine = here(group, kinds, tables)
            known = self._on(group, place.address, mine)
            for table, there in zip(mine, known, strict=True):
                if not _has_columns(there, table):
                    raise SourceBusy(
                        f"Node {place.address} has other columns of {table.full_name} than the coordinator.",
                        next_step="It is tried again until the cluster has altered the table on all nodes.",
                    )
            with naming(place.address):
                at = self._members.source(group, place.address).include(known)
            assert isinstance(at, PostgresOffset)
            nodes[group] = NodePlace(at, place.server, place.address)
        told = self._stream.position
        return CitusOffset(nodes, told.retired, told.number, told.placements)

    def has_reached(self, position: CdcOffset) -> bool:
        """See :class:`~headwater.sources.source.Source`."""
        assert isinstance(position, CitusOffset)
        return self._stream is not None and self._stream.has_reached(position)

    # -- the stream ------------------------------------------------------------------------------------------------

    def open(self, tables: Sequence[SourceTable], start: CdcOffset, identity: Mapping[str, Any]) -> CitusChangeStream:
        """See :class:`~headwater.sources.source.Source`."""
        if not isinstance(start, CitusOffset):
            raise ForeignOffset(
                f"The store holds a position of {start.kind}, and this is a Citus cluster.",
                next_step="Give the address of the source that was captured, or another --store.",
            )
        self._stream = CitusChangeStream(self._members, tables, self._kinds(tables), start)
        return self._stream

    # -- looking after it ------------------------------------------------------------------------------------------

    def register(self, tables: Sequence[SourceTable]) -> dict[str, str]:
        """See :class:`~headwater.sources.source.Source`: what kind of table it is, and what each node has of it."""
        kinds = self._kinds(tables)
        nodes: dict[str, dict[str, str]] = {table.full_name: {} for table in tables}
        for node in self._cluster.nodes()[0]:
            known = self._on(node.group, node.address, here(node.group, kinds, tables))
            for name, text in self._members.source(node.group, node.address).register(known).items():
                nodes[name][str(node.group)] = text
        return {name: _registration(kinds[name], entries) for name, entries in nodes.items()}

    def check(self, tables: Sequence[Registered]) -> Checked:
        """See :class:`~headwater.sources.source.Source`."""
        if self._stream is None:
            return Checked([], None)
        began: float | None = time.time()
        kinds = self._kinds([entry.table for entry in tables])
        before = {entry.table.full_name: json.loads(entry.registration) for entry in tables}
        now = {name: dict(known["nodes"]) for name, known in before.items()}
        findings: dict[str, Finding] = {}
        described: dict[str, dict[int, SourceTable]] = {name: {} for name in before}
        existing: set[int | None] = set()
        for group, place in sorted(self._stream.position.nodes.items()):
            mine = here(group, kinds, [entry.table for entry in tables])
            with naming(place.address):
                self._cluster.require_decoder(group, place.address)
                present, is_whole = self._check_node(group, place.address, mine, before, now, findings)
                for name, table in present.items():
                    described[name][group] = table
                began = began if is_whole else None
            if group == COORDINATOR:
                existing = {table.source_id for table in present.values()}
        seen, self._seen = self._seen, {}
        for entry in tables:
            table, name = entry.table, entry.table.full_name
            if name in findings or table.source_id not in existing:  # a table that was dropped has no kind
                continue
            known = _registration(kinds[name], now[name])
            try:
                if before[name]["kind"] != kinds[name].value:
                    what = f"the table was {before[name]['kind']} and is {kinds[name].value} now."
                    raise RereadNeeded(name, what)
                self._require_placed(table, kinds[name])
                change = self._changed_columns(table, described[name], seen)
            except (RereadNeeded, UnsupportedTable, RefusedValue) as error:
                stopped = Stopped.by(table, error)
                findings[name] = Finding(table, stopped.reason, stops=True, reread=stopped.reread)
            else:
                if change is not None or now[name] != before[name]["nodes"]:
                    findings[name] = Finding(table, "", stops=False, registration=known, change=change)
        return Checked(list(findings.values()), None if self._seen else began)

    def _changed_columns(
        self, table: SourceTable, described: Mapping[int, SourceTable], seen: Mapping[SourceTable, Mapping[int, int]]
    ) -> SchemaChanged | None:
        """How the coordinator has other columns of *table* than its log, where no row has shown that.

        :param described: the table as the nodes have it now.
        :param seen: where the logs of the nodes ended when the last check found it so.
        :raises RereadNeeded: rows may have been taken for those of another column: nodes tell columns by their names.
        """
        now = described.get(COORDINATOR, table)
        if _columns(now) == _columns(table) or not all(_has_columns(there, now) for there in described.values()):
            return None
        assert self._stream is not None
        nodes = self._stream.position.nodes
        ends = seen.get(now) or {group: self._cluster.log_end(group, place.address) for group, place in nodes.items()}
        if any(nodes[group].at.lsn < end for group, end in ends.items() if group in nodes):
            self._seen[now] = ends  # what was written by then may tell it
            return None
        numbers = {column.name: column.field_id for column in table.columns if not column.dropped}
        moved = [column.name for column in now.columns if numbers.get(column.name, column.field_id) != column.field_id]
        if moved:
            raise RereadNeeded(table.full_name, f"the name {moved[0]!r} means another column than before.")
        return self._stream.become(now) if self._policy is SchemaPolicy.EVOLVE else None

    def _check_node(
        self,
        group: int,
        address: str,
        tables: Sequence[SourceTable],
        before: Mapping[str, Any],
        now: dict[str, dict[str, str]],
        findings: dict[str, Finding],
    ) -> tuple[dict[str, SourceTable], bool]:
        """*tables* as one node has them now, by name, and whether its stream has passed all that was seen there.

        *now* gets what it has registered of them, *findings* why one stops.

        The first node to find that one stops is the one that is told: the coordinator sees what was done to a table.
        """
        source = self._members.source(group, address)
        merged = {table.full_name: table for table in tables}
        present = present_tables(source, list(merged))
        fresh = [table for name, table in present.items() if str(group) not in before[name]["nodes"]]
        for name, text in (source.register(fresh) if fresh else {}).items():
            now[name][str(group)] = text
        known = [
            Registered(table if group == COORDINATOR else present[name], before[name]["nodes"][str(group)])
            for name, table in merged.items()
            if str(group) in before[name]["nodes"] and (name in present or group == COORDINATOR)
        ]
        checked = source.check(known)
        for finding in checked.findings:
            name = finding.table.full_name
            # the coordinator has the partitions that people make; what a node has may be shards
            is_unlogged = group == COORDINATOR and finding.reason != ""
            if finding.stops or is_unlogged:
                where = "" if group == COORDINATOR else f"Node {address}: "
                reread = finding.reread or not finding.stops
                findings.setdefault(name, Finding(merged[name], f"{where}{finding.reason}", stops=True, reread=reread))
            elif finding.registration is not None:
                now[name][str(group)] = finding.registration
        return present, checked.time is not None

    def close(self) -> None:
        """End the connections."""
        self._members.close()


def _columns(table: SourceTable) -> dict[int, tuple[str, pa.DataType]]:
    return {column.field_id: (column.name, column.type) for column in table.columns if not column.dropped}


def _has_columns(there: SourceTable, table: SourceTable) -> bool:
    """Whether a node has the columns of *table*, whatever numbers it gives them."""
    return {column.name for column in there.columns} == {column.name for column in table.columns if not column.dropped}


def _registration(kind: TableKind, nodes: Mapping[str, str]) -> str:
    return json.dumps({"kind": kind.value, "nodes": dict(nodes)}, sort_keys=True)
