"""The ``headwater`` command: groups of sub-commands, one module each.

Errors of our own tree end the command with one line on stderr and exit code 1 (2 for bad input), never with a
traceback; ``--json`` commands print machine-readable output on stdout and nothing else.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from headwater import __version__
from headwater.cli import journal, log, state
from headwater.cli.capture import add_table, capture
from headwater.cli.control import pause, resnapshot, resume, throttle
from headwater.cli.demo import demo
from headwater.cli.doctor import doctor
from headwater.cli.run import run as run_pipeline
from headwater.cli.sink import add_sink
from headwater.cli.sink import app as sink_app
from headwater.cli.status import status
from headwater.cli.terminal import fail
from headwater.cli.verify import verify
from headwater.errors import HeadwaterError, InputError

app = typer.Typer(
    name="headwater",
    help="Bring operational databases into Spark, exactly once.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command(rich_help_panel="Start here")(demo)
app.command(rich_help_panel="Start here")(doctor)
app.command("run", rich_help_panel="Run")(run_pipeline)
app.command(rich_help_panel="Run")(status)
app.command(rich_help_panel="Run")(pause)
app.command(rich_help_panel="Run")(resume)
app.command(rich_help_panel="Run")(throttle)
app.command(rich_help_panel="Run")(resnapshot)
app.command(rich_help_panel="Run")(verify)
app.command(rich_help_panel="Run")(capture)
app.command("add-table", rich_help_panel="Run")(add_table)
app.command("add-sink", rich_help_panel="Run")(add_sink)
app.add_typer(sink_app, name="sink", rich_help_panel="Run")
app.add_typer(state.app, name="state", rich_help_panel="Look inside")
app.add_typer(log.app, name="log", rich_help_panel="Look inside")
app.add_typer(journal.app, name="journal", rich_help_panel="Look inside")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headwater {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Bring operational databases into Spark, exactly once."""


def run() -> None:
    """Entry point of the console script."""
    try:
        app()
    except HeadwaterError as error:
        fail(error)
        sys.exit(2 if isinstance(error, InputError) else 1)
    except BrokenPipeError:
        sys.exit(0)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    run()
