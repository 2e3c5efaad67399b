"""A config's entries, smaller: by the names of its sizes, which stand in sizes.toml, also in the configs inside of it.

Lists with an entry a layer keep one layer of each kind.
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
"""What a config says of itself, and finds again."""


def shrunk(sizes: dict[str, Any]) -> dict[str, Any]:
    """A config's entries, smaller."""
    kept = _kept_layers(sizes)
    found = {name: _entry(name, value, sizes, kept) for name, value in sizes.items() if not _is_derived(name, sizes)}
    taken = sizes.get("out_indices")
    if isinstance(taken, list) and taken and _is_numbered(sizes):
        layers = found["num_hidden_layers"] = max(len(taken), found["num_hidden_layers"])
        found["out_indices"] = list(range(layers - len(taken) + 1, layers + 1))
    return found


Kept = tuple[int, list[int]] | None
"""How many layers there are, and which are kept, where lists have an entry a layer."""


def _is_numbered(sizes: dict[str, Any]) -> bool:
    """Whether stages are layers."""
    return isinstance(sizes.get("num_hidden_layers"), int)


def _is_derived(name: str, sizes: dict[str, Any]) -> bool:
    """Whether a config finds an entry by itself from the smaller ones."""
    latent = "qk_rope_head_dim" in sizes and name in ("head_dim", "qk_head_dim")
    return (
        latent or name in ("id2label", "label2id") or (name in ("out_features", "out_indices") and _is_numbered(sizes))
    )


def _entry(name: str, value: Any, sizes: dict[str, Any], kept: Kept) -> Any:
    if isinstance(value, dict):
        if name == "per_layer_config":
            return _per_layer(value, kept)
        return _rope(value) if "rope" in str(name) else shrunk(value)
    if isinstance(value, list) and kept and len(value) == kept[0]:
        return [value[layer] for layer in kept[1]]
    if isinstance(value, bool) or not isinstance(value, int) or not isinstance(name, str):
        return value
    if name in LAYER_COUNTS and kept and value == kept[0]:
        return len(kept[1])
    return _size(name, value, sizes)


def _size(name: str, value: int, sizes: dict[str, Any]) -> int:
    """A number, smaller where it is a size."""
    if name.endswith(("token_id", "token_index")):
        # Beyond what inputs hold, and the same for the same name.
        place = sum(ord(letter) * (number + 1) for number, letter in enumerate(name))
        return value if value < VOCABULARY else 60 + place % 30
    if name in KV_HEAD_COUNTS:
        heads = max([sizes[each] for each in HEAD_COUNTS if isinstance(sizes.get(each), int)], default=value)
        return min(value, HEADS if value >= heads or "kv_lora_rank" in sizes else KV_HEADS)
    return min(value, SIZES.get(name, value))


def _per_layer(entries: dict[Any, Any], kept: Kept) -> dict[int, Any]:
    """What single layers have of their own, for those that are kept."""
    by_number = {int(layer): entry for layer, entry in entries.items()}
    layers = kept[1] if kept else range(LAYERS)
    return {new: shrunk(by_number[old]) for new, old in enumerate(layers) if old in by_number}


def _kept_layers(sizes: dict[str, Any]) -> Kept:
    """How many layers there are, and one of each kind, where lists say of which kind they are."""
    for name in LAYER_COUNTS:
        count = sizes.get(name)
        if not isinstance(count, int) or count < 3:
            continue
        lists = [value for value in sizes.values() if isinstance(value, list) and len(value) == count]
        if not lists:
            continue
        kinds = [tuple(str(each[layer]) for each in lists) for layer in range(count)]
        first = sorted({kind: layer for layer, kind in reversed(list(enumerate(kinds)))}.values())
        if len(first) > 6:
            first = first[:6]
        return count, first if len(first) > 1 else [0, 1]
    return None


def _rope(rope: dict[str, Any]) -> dict[str, Any]:
    """Positions as they were, over fewer channels."""
    found: dict[str, Any] = {name: _rope(value) if isinstance(value, dict) else value for name, value in rope.items()}
    section = found.get("mrope_section")
    if isinstance(section, list):
        share = HEAD_DIM / 2 / sum(section)
        smaller = [max(1, math.floor(each * share)) for each in section]
        smaller[0] += HEAD_DIM // 2 - sum(smaller)
        found["mrope_section"] = smaller
    for name in ("long_factor", "short_factor"):
        factors = found.get(name)
        if isinstance(factors, list):
            found[name] = factors[: HEAD_DIM // 2]
    if "original_max_position_embeddings" in found:
        found["original_max_position_embeddings"] = 32
    return found
