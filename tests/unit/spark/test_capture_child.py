"""What a capture gets from the process that starts it."""

from __future__ import annotations

import json

from headwater.capture import CaptureOptions
from headwater.capture.options import OnRewrite
from headwater.sources.evolution import SchemaPolicy
from headwater.sources.table import SpecialValues
from headwater.spark.capture_child import CaptureSettings


def test_settings_travel_as_json_and_never_show_the_password() -> None:
    settings = CaptureSettings(
        "postgresql://app:secret@db/shop",
        "store",
        "spill",
        ["public.t"],
        special_values={"public.t.v": SpecialValues.NULL},
        columns={"shop.items": "document"},
        options=CaptureOptions(epoch_rows=7, on_rewrite=OnRewrite.STOP, schema_policy=SchemaPolicy.IGNORE),
        parent=42,
    )
    assert CaptureSettings.from_json(json.loads(json.dumps(settings.to_json()))) == settings
    assert "secret" not in repr(settings)
