"""Config entries with tiny sizes. The sizes are recognised by their names, listed in sizes.toml, also in nested
configs.

Lists with one entry per layer keep one layer of each kind.
"""

import math
import tomllib
from pathlib import Path
from typing import Any

TABLES = tomllib.loads(Path(__file__).with_name("sizes.toml").read_text(encoding="utf-8"))
SIZES: dict[str, int] = TABLES["others"] | {
    name: table["tiny"] for group, table in TABLES.items() if group != "others" for name in table["names"]
}
HEADS, KV_HEADS, HEAD_DIM, LAYERS = (
    TABLES[group]["tiny"] for group in ("head_counts", "kv_head_counts", "head_dims", "layer_counts")
)
HEAD_COUNTS, KV_HEAD_COUNTS, LAYER_COUNTS = (
    TABLES[group]["names"] for group in ("head_counts", "kv_head_counts", "layer_counts")
)
VOCABULARY = SIZES["vocab_size"]

DERIVED = ("model_type", "transformers_version", "id2label", "label2id", "num_labels", "architectures", "stage_names")
"""Config entries that a config class sets itself, and that are not passed to it."""


def shrunk(sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a config with tiny sizes, without those that the config class derives from others."""
    selection = _select_layers(sizes)
    entries = {
        name: _entry(name, value, sizes, selection) for name, value in sizes.items() if not _is_derived(name, sizes)
    }
    out_indices = sizes.get("out_indices")
    if isinstance(out_indices, list) and out_indices and _is_numbered(sizes):
        layers = entries["num_hidden_layers"] = max(len(out_indices), entries["num_hidden_layers"])
        entries["out_indices"] = list(range(layers - len(out_indices) + 1, layers + 1))
    return entries


LayerSelection = tuple[int, list[int]] | None
"""Number of layers and indices of the selected ones, if there are lists with one entry per layer; otherwise None."""


def _is_numbered(sizes: dict[str, Any]) -> bool:
    """Return whether the stages of a backbone are its layers, so that `out_indices` counts layers."""
    return isinstance(sizes.get("num_hidden_layers"), int)


def _is_derived(name: str, sizes: dict[str, Any]) -> bool:
    """Return whether the config class derives an entry from the other, smaller ones."""
    latent = "qk_rope_head_dim" in sizes and name in ("head_dim", "qk_head_dim")
    return (
        latent or name in ("id2label", "label2id") or (name in ("out_features", "out_indices") and _is_numbered(sizes))
    )


def _entry(name: str, value: Any, sizes: dict[str, Any], selection: LayerSelection) -> Any:
    """Return an entry with tiny sizes: a nested config is shrunk, a list with one entry per layer is reduced to the
    selected layers.
    """
    if isinstance(value, dict):
        if name == "per_layer_config":
            return _per_layer(value, selection)
        return _rope(value) if "rope" in str(name) else shrunk(value)
    if isinstance(value, list) and selection and len(value) == selection[0]:
        return [value[layer] for layer in selection[1]]
    if isinstance(value, bool) or not isinstance(value, int) or not isinstance(name, str):
        return value
    if name in LAYER_COUNTS and selection and value == selection[0]:
        return len(selection[1])
    return _size(name, value, sizes)


def _size(name: str, value: int, sizes: dict[str, Any]) -> int:
    """Return the tiny value of an entry if its name is that of a size, otherwise its value. Token ids outside of the
    tiny vocabulary are moved into it.
    """
    if name.endswith(("token_id", "token_index")):
        # Above all ids in the inputs, and equal for equal names.
        name_hash = sum(ord(letter) * (index + 1) for index, letter in enumerate(name))
        return value if value < VOCABULARY else 60 + name_hash % 30
    if name in KV_HEAD_COUNTS:
        heads = max([sizes[count] for count in HEAD_COUNTS if isinstance(sizes.get(count), int)], default=value)
        return min(value, HEADS if value >= heads or "kv_lora_rank" in sizes else KV_HEADS)
    return min(value, SIZES.get(name, value))


def _per_layer(entries: dict[Any, Any], selection: LayerSelection) -> dict[int, Any]:
    """Return the entries of the selected layers from a dictionary by layer, shrunk and renumbered."""
    by_number = {int(layer): entry for layer, entry in entries.items()}
    layers = selection[1] if selection else range(LAYERS)
    return {new: shrunk(by_number[old]) for new, old in enumerate(layers) if old in by_number}


def _select_layers(sizes: dict[str, Any]) -> LayerSelection:
    """Return the number of layers, and the index of one layer of each kind, if lists state the kind of each layer. At
    most 6 layers are selected, and at least 2.
    """
    for name in LAYER_COUNTS:
        count = sizes.get(name)
        if not isinstance(count, int) or count < 3:
            continue
        lists = [value for value in sizes.values() if isinstance(value, list) and len(value) == count]
        if not lists:
            continue
        kinds = [tuple(str(entries[layer]) for entries in lists) for layer in range(count)]
        first = sorted({kind: layer for layer, kind in reversed(list(enumerate(kinds)))}.values())
        if len(first) > 6:
            first = first[:6]
        return count, first if len(first) > 1 else [0, 1]
    return None


def _rope(rope: dict[str, Any]) -> dict[str, Any]:
    """Return rotary position settings for the tiny head dim."""
    settings: dict[str, Any] = {
        name: _rope(value) if isinstance(value, dict) else value for name, value in rope.items()
    }
    section = settings.get("mrope_section")
    if isinstance(section, list):
        share = HEAD_DIM / 2 / sum(section)
        smaller = [max(1, math.floor(size * share)) for size in section]
        smaller[0] += HEAD_DIM // 2 - sum(smaller)
        settings["mrope_section"] = smaller
    for name in ("long_factor", "short_factor"):
        factors = settings.get(name)
        if isinstance(factors, list):
            settings[name] = factors[: HEAD_DIM // 2]
    if "original_max_position_embeddings" in settings:
        settings["original_max_position_embeddings"] = 32
    return settings
