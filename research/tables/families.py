"""Write docs/reports/families.md: what headwise can do with each architecture that it knows by name.

python -m research.tables.families
"""

from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import headwise as hw
from headwise.compression.merging.merge_kv import mergeable_modules
from headwise.errors import InputError
from headwise.families.registry import FAMILIES, Family, converted_families, head_module
from headwise.monitoring.head_slices import head_slices
from headwise.removal.remove_heads import loader_of
from research.markdown import markdown_table, wrap
from research.tiny_models.builder import build, randomise

REPORT = Path(__file__).parent.parent.parent / "docs" / "reports" / "families.md"

MODEL_TYPES = {
    "Llama": "llama",
    "Mistral": "mistral",
    "Qwen 2": "qwen2",
    "Qwen 3": "qwen3",
    "Gemma 2": "gemma2",
    "Gemma 3": "gemma3_text",
    "gpt-oss": "gpt_oss",
    "OLMo 2": "olmo2",
    "EuroBERT": "eurobert",
    "Phi": "phi",
    "Phi-3": "phi3",
    "GPT-2": "gpt2",
    "GPT-NeoX": "gpt_neox",
    "BERT, RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA": "bert",
    "ViT": "vit",
    "BART, Whisper": "bart",
    "T5": "t5",
    "DeepSeek V2 and V3": "deepseek_v3",
}
"""Model type of `transformers` of each architecture that has one."""

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "headwise's MultiHeadAttention": lambda: hw.MultiHeadAttention(48, 6, num_kv_heads=2, mask=hw.causal()),
    "torch's MultiheadAttention, or headwise's": lambda: nn.MultiheadAttention(48, 6, batch_first=True),
    "headwise's LatentAttention": lambda: hw.LatentAttention(48, 6, kv_rank=17, head_dim=8, rotary_dim=4),
}
"""Layers of the other architectures."""


class Residual(nn.Module):
    """Embedding, and one attention layer in a residual stream."""

    def __init__(self, layer: nn.Module, width: int = 48):
        super().__init__()
        self.embedding, self.attention = nn.Embedding(97, width), layer

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        inputs = (x, x, x) if isinstance(self.attention, nn.MultiheadAttention) else (x,)
        y = self.attention(*inputs)
        return x + (y[0] if isinstance(y, tuple) else y)


def tiny_model(family: Family) -> nn.Module:
    """Return a tiny model of an architecture with random weights; the encoder, if it also has a decoder."""
    if family.name in MODEL_TYPES:
        model: Any = build(MODEL_TYPES[family.name])
        return model.get_encoder() if model.config.is_encoder_decoder else model
    model = Residual(LAYERS[family.name]())
    randomise(model)
    return model.eval()


HEADERS = ("architecture", "convert", "remove heads", "merge key/value heads", "circuits", "clip logits")


def row(family: Family, model: nn.Module) -> list[str]:
    """Return what can be done with an architecture: its row of the table, from one model."""
    paths = [path for path, module in model.named_modules() if type(module).__name__ in family.classes]
    return [
        family.name,
        _conversion(family),
        _removal(model, paths),
        _tried(lambda: mergeable_modules(model, 1)),
        _circuits(model),
        _tried(lambda: [head_slices(model, path) for path in paths]),
    ]


def _conversion(family: Family) -> str:
    """Return "yes" if the attention modules can be converted, or the function that converts torch's layer."""
    if nn.MultiheadAttention in family.types:
        return "yes, `hw.from_torch`"
    return "yes" if family in converted_families().values() else "no"


def _tried(act: Callable[[], object]) -> str:
    """Return "yes" if a function returns, and "no" if it refuses its input."""
    try:
        act()
    except InputError:
        return "no"
    return "yes"


def _removal(model: nn.Module, paths: list[str]) -> str:
    """Return what loads the model without half of the heads of each layer; "no" if none can be removed."""
    try:
        modules = {path: head_module(model, path) for path in paths}
        groups = {path: module.num_heads // module.num_kv_heads for path, module in modules.items()}
        kept = {path: range(module.num_kv_heads // 2 * groups[path]) for path, module in modules.items()}
        loader = loader_of(model, kept)
    except InputError:
        return "no"
    return {"transformers": "yes, for `transformers`", "headwise": "yes, for `hw.load`", "none": "yes"}[loader]


def _circuits(model: Any) -> str:
    """Return which matrices of heads a model has."""
    generator = torch.Generator().manual_seed(3)
    if getattr(model, "main_input_name", None) == "pixel_values":
        batch = torch.randn(1, 3, model.config.image_size, model.config.image_size, generator=generator)
    else:
        batch = torch.randint(3, 60, (1, 7), generator=generator)
    try:
        circuits = hw.circuits(model, batch)
    except InputError:
        return "no"
    matrices = "OV" if _tried(lambda: circuits.qk(0, 0)) == "no" else "OV and QK"
    return matrices if circuits.has_linear_stream else f"{matrices} of each module"


def _dependent() -> str:
    """Return the architectures whose heads depend on each other, with the reason."""
    return ", ".join(f"{each.name} ({each.why_not_removed})" for each in FAMILIES if each.why_not_removed is not None)


def main() -> None:
    """Write docs/reports/families.md."""
    transformers.logging.set_verbosity_error()
    introduction = (
        "This page lists the architectures that headwise knows by name, and what it can do with each of them. "
        f"`research/tables/families.py` wrote it on {date.today().isoformat()} with torch {torch.__version__} and "
        f"transformers {transformers.__version__}: it tried each function on a tiny model of each architecture with "
        "random weights. Of models with an encoder and a decoder, it used the encoder.\n\n"
        "The table does not list functions such as `hw.watch`, `hw.gate`, `hw.ablate` and `hw.path_patching`. These "
        "derive what they need from a run of the model, so they also work with models that this page does not list. "
        "In models that the table does not list, `hw.qk_clip` derives the projections in the same way."
    )
    columns = (
        "- **convert**: `hw.from_transformers` and `hw.to_transformers` ([converting weights](../convert.md)).\n"
        "- **remove heads**: `hw.prune` removes half of the heads of each layer ([pruning](../prune.md)). It refuses "
        f"heads that depend on each other: {_dependent()}. A model is loaded by `transformers` if the fields of its "
        "configuration can state the remaining heads, and otherwise by `hw.load`, from a list of the remaining heads "
        "in its configuration.\n"
        "- **merge key/value heads**: `hw.merge_kv` ([merging](../prune.md)). It needs a configuration that can state "
        "a number of key/value heads, and heads that can be removed.\n"
        "- **circuits**: matrices that `hw.circuits` reads ([circuits](../circuits.md)): OV and QK in the residual "
        "stream, OV alone where scores are not a product of two linear maps, or OV and QK of each attention module "
        "alone where the residual stream is not linear.\n"
        "- **clip logits**: `hw.qk_clip` scales query and key projections ([monitoring](../monitor.md))."
    )
    rows = [row(family, tiny_model(family)) for family in FAMILIES]
    lines = ["# What headwise knows about architectures", "", wrap(introduction), "", *markdown_table(HEADERS, rows)]
    REPORT.write_text("\n".join([*lines, wrap(columns)]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
