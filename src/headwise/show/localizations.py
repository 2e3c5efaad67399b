"""Streaming heads as rows."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from headwise.show.records import Records


def localization_records(result: Any, metadata: Mapping[str, Any]) -> Records:
    """Return one row per attention module, with its streaming heads, and the rest of the result among the metadata."""
    fields = asdict(result)
    return Records(fields.pop("modules"), {**metadata, **fields})
