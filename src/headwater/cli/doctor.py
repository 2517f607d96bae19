"""``headwater doctor``: whether a database can be captured, or a pipeline run, and what mends what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from headwater.cli.terminal import out
from headwater.pipeline.config import DEFAULT_FILE, load
from headwater.sources.diagnosis import Diagnosis, Level
from headwater.sources.open import diagnose

_STYLES = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}


def doctor(
    subject: Annotated[
        str,
        typer.Argument(
            help="The database, postgresql://user@host/name or the same with citus, mysql, mongodb or sqlserver, or a"
            " pipeline.",
            metavar="DSN|PIPELINE",
        ),
    ] = DEFAULT_FILE,
    table: Annotated[list[str] | None, typer.Option(help="A table to look at; again for more. Default: all.")] = None,
    slot: Annotated[str, typer.Option(help="The replication slot of the capture.")] = "headwater",
    publication: Annotated[str, typer.Option(help="The publication of the capture.")] = "headwater",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Look whether a database can be captured, and print the SQL that mends what is missing. Changes nothing.

    Of a pipeline also Java, Spark, the disk and the sinks. Ends with 1 where there is a problem.
    """
    if subject.endswith(".toml") or Path(subject).is_file():
        from headwater.pipeline.doctor import examine_pipeline

        diagnosis = examine_pipeline(load(subject))
    else:
        diagnosis = diagnose(subject, table or [], slot=slot, publication=publication)
    if as_json:
        typer.echo(json.dumps(diagnosis.to_json()))
    else:
        _show(diagnosis)
    if not diagnosis.is_healthy:
        raise typer.Exit(1)


def _show(diagnosis: Diagnosis) -> None:
    table = Table(title=f"Doctor: {diagnosis.source}", title_justify="left", show_lines=False)
    table.add_column("level", no_wrap=True)
    table.add_column("check", no_wrap=True)
    table.add_column("finding", overflow="fold")
    for finding in diagnosis.findings:
        told = f"{finding.table}: {finding.text}" if finding.table else finding.text
        table.add_row(Text(finding.level.value, _STYLES[finding.level]), Text(finding.check), Text(told))
    out.print(table)
    mending = [finding for finding in diagnosis.findings if finding.fix and finding.level is not Level.OK]
    for finding in mending:
        out.print(
            Text(f"-- {finding.level.value}: {finding.check}{f' of {finding.table}' if finding.table else ''}", "dim")
        )
        out.print(Text(str(finding.fix)), soft_wrap=True)
    counts = {level: sum(finding.level is level for finding in diagnosis.findings) for level in Level}
    out.print(
        Text.assemble(
            *(
                (
                    f"{counts[level]} {level.value}{'s' if counts[level] != 1 and level is not Level.OK else ''}  ",
                    _STYLES[level],
                )
                for level in Level
            )
        )
    )
