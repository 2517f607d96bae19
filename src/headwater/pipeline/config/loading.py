"""From the file, or from Python, to settings that are whole: read, variables put in, checked, completed."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from headwater.pipeline.config.completion import completed
from headwater.pipeline.config.pipeline_config import PipelineConfig
from headwater.pipeline.config.telling import KeyPath, Teller
from headwater.pipeline.errors import ConfigError, ConfigNotFound

DEFAULT_FILE: Final = "pipeline.toml"
_VARIABLE: Final = re.compile(r"\$(\$\{|\{([A-Za-z_][A-Za-z0-9_]*)\})")


def load(path: str | Path = DEFAULT_FILE) -> PipelineConfig:
    """The settings in the file *path*.

    :raises ConfigNotFound: there is no such file. :raises ConfigError: it cannot be used; the line, the key and what
        is valid there.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigNotFound(
            f"There is no {path}.", next_step="Go to the directory that has it, or name it; docs/pipeline.md shows one."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"{path} cannot be read: {reason}.", next_step="Check the file.") from None
    try:
        read = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no TOML: {error}.", next_step="Mend that line.") from None
    return configure(read, folder=path.absolute().parent, origin=str(path), text=text)


def configure(
    settings: Mapping[str, Any], *, folder: Path | None = None, origin: str = "", text: str = ""
) -> PipelineConfig:
    """*settings*, checked and completed.

    :param folder: what relative paths begin at; the current directory by default.
    :param origin: the file that they come from, with its *text*: for messages.
    :raises ConfigError: they cannot be used.
    """
    told = Teller(origin, text)
    try:
        config = PipelineConfig.model_validate(_expanded(settings, told, ()))
    except ValidationError as error:
        raise told.first(error) from None
    return completed(config, folder or Path.cwd(), told)


def plain(value: Any) -> Any:
    """*value* with each text so that :func:`configure` takes it as it is: settings that were completed before."""
    if isinstance(value, str):
        return value.replace("${", "$${")
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def _expanded(value: Any, told: Teller, path: KeyPath) -> Any:
    if isinstance(value, str):

        def variable(found: re.Match[str]) -> str:
            if found[2] is None:
                return "${"
            if found[2] not in os.environ:
                raise told.unset(path, found[2])
            return os.environ[found[2]]

        return _VARIABLE.sub(variable, value)
    if isinstance(value, Mapping):
        return {name: _expanded(item, told, (*path, name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_expanded(item, told, (*path, place)) for place, item in enumerate(value)]
    return value
