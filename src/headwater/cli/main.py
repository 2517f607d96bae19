"""The ``headwater`` command: groups of sub-commands, one module each.

Errors of our own tree end the command with one line on stderr and exit code 1 (2 for bad input), never with a
traceback; ``--json`` commands print machine-readable output on stdout and nothing else.
"""

from __future__ import annotations

import errno
import sys
from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from headwater import __version__
from headwater.cli.terminal import fail
from headwater.errors import CapacityError, HeadwaterError, InputError

_COMMANDS: Final[dict[str, tuple[str, str, str]]] = {
    "demo": ("demo", "demo", "Start here"),
    "doctor": ("doctor", "doctor", "Start here"),
    "run": ("run", "run", "Run"),
    "status": ("status", "status", "Run"),
    "runs": ("runs", "runs", "Run"),
    "pause": ("control", "pause", "Run"),
    "resume": ("control", "resume", "Run"),
    "throttle": ("control", "throttle", "Run"),
    "resnapshot": ("control", "resnapshot", "Run"),
    "stop": ("control", "stop", "Run"),
    "requests": ("control", "requests", "Run"),
    "verify": ("verify", "verify", "Run"),
    "capture": ("capture", "capture", "Run"),
    "add-table": ("capture", "add_table", "Run"),
    "add-sink": ("sink", "add_sink", "Run"),
    "derive": ("derive", "derive", "Run"),
    "sink": ("sink", "app", "Run"),
    "pins": ("pins", "app", "Run"),
    "upstream": ("upstream", "app", "Run"),
    "state": ("state", "app", "Look inside"),
    "log": ("log", "app", "Look inside"),
    "journal": ("journal", "app", "Look inside"),
}
"""By name: the module of this package, what it has there (a function, or an app of sub-commands), and its panel."""


class _Commands(TyperGroup):
    """The commands above; the module of one is imported when it is asked for: what others need is not waited for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _COMMANDS:
            for known in _COMMANDS:
                self.get_command(ctx, known)  # one of them may have been meant
            return None
        if cmd_name not in self.commands:
            module, name, panel = _COMMANDS[cmd_name]
            found: Any = getattr(import_module(f"headwater.cli.{module}"), name)
            one = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode="rich")
            one.callback()(lambda: None)
            if isinstance(found, typer.Typer):
                one.add_typer(found, name=cmd_name, rich_help_panel=panel)
            else:
                one.command(cmd_name, rich_help_panel=panel)(found)
            made = typer.main.get_command(one)
            assert isinstance(made, TyperGroup)
            self.commands[cmd_name] = made.commands[cmd_name]
        return self.commands[cmd_name]


app = typer.Typer(
    name="headwater",
    cls=_Commands,
    help="Bring operational databases into Spark, exactly once.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        written = error.filename or "A file"
        fail(
            CapacityError(f"{written} cannot be written: {error.strerror}.", next_step="Free some space and try again.")
        )
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    run()
