"""Merged key/value heads in a terminal, and as a row."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from headwise.show.records import Records


def print_merge(kv_heads: int, sizes: Mapping[str, int], console: Console) -> None:
    """Print the number of key/value heads that remain, and the number of parameters before and after."""
    before, after = sizes["parameters_before"], sizes["parameters_after"]
    console.print(f"key/value heads in each layer: {kv_heads}")
    console.print(f"parameters: {before:,} before, {after:,} after ({after / before:.1%})")


def merge_records(kv_heads: int, sizes: Mapping[str, int], metadata: Mapping[str, Any]) -> Records:
    """Return one row with the number of key/value heads that remain, and the numbers of parameters."""
    return Records([{"kv_heads": kv_heads, **sizes}], metadata)
