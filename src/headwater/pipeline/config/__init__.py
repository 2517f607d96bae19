"""The settings of a pipeline, from ``pipeline.toml`` or from Python: the same models behind both.

========================  =======================================================================================
table                     what it says
========================  =======================================================================================
``[pipeline]``            its name; where logs and state are kept
``[source]``              the database, its tables, how its log is followed
``[table."schema.name"]`` what is special about one table
``[[sink]]``              one place of delivery; as many as there are
``[[derive]]``            a table that a function makes of kept ones (docs/derive.md)
``[backfill]``            how the history is read
``[spark]``               master and settings of the Spark session
``[limits]``              how much one batch may hold
========================  =======================================================================================

``${NAME}`` in any text is the environment variable of that name, so that no password has to be in the file; ``$${`` is
``${`` itself. Paths are relative to the file. A key that nobody knows is refused with the nearest one that is known.
"""

from __future__ import annotations

from headwater.pipeline.config.loading import DEFAULT_FILE, configure, load, plain
from headwater.pipeline.config.parts import KEPT_KIND, DeriveSection, SinkSection
from headwater.pipeline.config.patterns import is_pattern, matching
from headwater.pipeline.config.pipeline_config import PipelineConfig
from headwater.pipeline.config.sections import (
    BackfillSection,
    LimitsSection,
    PipelineSection,
    SourceSection,
    SparkSection,
    TableSection,
)

__all__ = [
    "DEFAULT_FILE",
    "KEPT_KIND",
    "BackfillSection",
    "DeriveSection",
    "LimitsSection",
    "PipelineConfig",
    "PipelineSection",
    "SinkSection",
    "SourceSection",
    "SparkSection",
    "TableSection",
    "configure",
    "is_pattern",
    "load",
    "matching",
    "plain",
]
