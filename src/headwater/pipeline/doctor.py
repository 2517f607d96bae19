"""The doctor of a pipeline: what it needs on this machine and at its sinks, beside what its source needs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, urlsplit

from headwater.errors import HeadwaterError
from headwater.pipeline.config import PipelineConfig, matching
from headwater.pipeline.tables import captured_position, choose_tables, sink_tables, source_of
from headwater.sinks.lake import LakeSink
from headwater.sinks.sink import check_targets
from headwater.sources.diagnosis import Diagnosis, Finding, Level, finding, plain_finding, statement_of
from headwater.sources.open import diagnose
from headwater.sources.table import SourceTable
from headwater.spark.java import find_java
from headwater.spark.spark_version import check_spark

_TIGHT_BYTES: Final = 5 << 30
_FULL_BYTES: Final = 512 << 20


def examine_pipeline(config: PipelineConfig) -> Diagnosis:
    """Look at the machine, the store, the source and the sinks of *config*. Nothing is changed at the source."""
    findings: list[Finding] = []
    names: tuple[str, ...] = ()
    try:
        chosen = choose_tables(config)
        names = chosen.names
        findings += [
            Finding("tables", Level.NOTE, f"It is left out: {why}", statement_of(step), name)
            for name, (why, step) in chosen.left_out.items()
        ]
        for section in config.sink:
            sink_tables(config, section, names, chosen.left_out)
    except HeadwaterError as error:
        findings.append(_problem("tables", error))
    told = None
    try:
        told = captured_position(config.store)
    except HeadwaterError as error:
        findings.append(_problem("store", error))
    source = diagnose(
        config.dsn,
        names,
        slot=config.source.slot,
        publication=config.source.publication,
        told=told,
    )
    texts = {finding.text for finding in source.findings}
    findings = [finding for finding in findings if finding.text not in texts]
    return replace(
        source,
        findings=[
            *source.findings,
            *findings,
            *_machine(),
            *_store(config),
            *_sinks(config, names),
            *plain_connections(config),
        ],
    )


def _problem(check: str, error: HeadwaterError) -> Finding:
    return Finding(check, Level.PROBLEM, error.message, statement_of(error.next_step))


def _machine() -> Iterator[Finding]:
    try:
        java = find_java()
        yield Finding("java", Level.OK, f"Java {java.version} at {java.command}.")
    except HeadwaterError as error:
        yield _problem("java", error)
    try:
        yield Finding("spark", Level.OK, f"PySpark {check_spark()}.")
    except HeadwaterError as error:
        yield _problem("spark", error)


def _store(config: PipelineConfig) -> Iterator[Finding]:
    place = _existing(config.work)
    if not os.access(place, os.W_OK | os.X_OK):
        yield Finding("store", Level.PROBLEM, f"{place} cannot be written to.", f"-- chown it: {place}")
        return
    yield Finding("store", Level.OK, f"{config.work} can be written to.")
    free = shutil.disk_usage(place).free
    level = Level.OK if free >= _TIGHT_BYTES else Level.WARNING if free >= _FULL_BYTES else Level.PROBLEM
    fix = None if level is Level.OK else "-- The logs grow while a sink is down: make room."
    yield Finding("disk", level, f"{free / (1 << 30):.1f} GiB are free at {place}.", fix)


def _existing(path: Path) -> Path:
    """*path*, or the nearest folder above it that is there."""
    return next((each for each in (path, *path.parents) if each.exists()), Path("/"))


def _sinks(config: PipelineConfig, names: Sequence[str]) -> Iterator[Finding]:
    if not config.sink:
        yield Finding("sink", Level.PROBLEM, "The pipeline has no sink.", "-- Add [[sink]] with kind and path.")
    for section in config.sink:
        try:
            sink = section.open()
            sink.check()
            yield Finding("sink", Level.OK, f"{section.label}: {section.place} can be written to.")
        except HeadwaterError as error:
            yield _problem("sink", error)
            continue
        tables = list(_source_tables(config, matching(section.tables, names, config.home)))
        try:
            check_targets(sink, tables)
        except HeadwaterError as error:
            yield _problem("sink", error)
        if isinstance(sink, LakeSink):
            for table in tables:
                try:
                    sink.check_table(table, config.query(section))
                except HeadwaterError as error:
                    yield replace(_problem("sink", error), table=table.full_name)


def plain_connections(config: PipelineConfig) -> Iterator[Finding]:
    """Warnings about sinks and stores beyond this machine that are not asked for TLS. Pure."""
    for section in config.sink:
        options = section.options
        addresses = [options.get(name) for name in ("dsn", "catalog_uri", "url")]
        for group in ("storage_options", "catalog_options"):
            addresses += [value for name, value in options.get(group, {}).items() if "endpoint" in name.lower()]
        for address in addresses:
            found = plain_finding(section.label, address) if isinstance(address, str) else None
            if found is not None:
                yield found
        if (
            section.kind == "kafka"
            and "SSL" not in str(options.get("settings", {}).get("security.protocol", "")).upper()
        ):
            hosts = [broker.rpartition(":")[0] or broker for broker in str(options.get("brokers", "")).split(",")]
            found = finding(section.label, "kafka", [host.strip().strip("[]") for host in hosts])
            if found is not None:
                yield found
    endpoint = dict(parse_qsl(urlsplit(config.store).query)).get("endpoint")
    found = plain_finding("store", endpoint) if endpoint else None
    if found is not None:
        yield found


def _source_tables(config: PipelineConfig, names: Sequence[str]) -> Iterator[SourceTable]:
    """Those of *names* that can be captured now; why others cannot is found elsewhere."""
    with closing(source_of(config)) as source:
        for name in names:
            with suppress(HeadwaterError):
                yield from source.tables([name])
