"""The models and the text that the benchmarks of `watch` and `ablate` use."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.regime import Regime
from benchmarks.weight_statistics import Text
from headwise.data.models import load

SMOLLM2 = Regime(1, 2048, 576, 9, "causal", kv_heads=3, bias=False, rotary=True)
TINY = Regime(1, 40, 48, 6, "causal", kv_heads=2, bias=False, rotary=True)
SHORT = 256
"""Number of tokens for the comparison with the definition, and for the warm-up before a peak is measured."""

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("README.md", "docs/layer.md", "docs/watch.md", "docs/lab-notes.md", "CONTRIBUTING.md")


def sections() -> list[str]:
    """Return the text that models read: the documentation, split at its headings."""
    return [part for name in DOCUMENTS for part in (ROOT / name).read_text(encoding="utf-8").split("\n## ")]


def words(length: int, kinds: int) -> Tensor:
    """Return the first `length` words of the documentation as token ids below `kinds`, `(length,)`, repeated as often
    as needed.
    """
    numbers: dict[str, int] = {}
    text = [numbers.setdefault(word, len(numbers)) % kinds for section in sections() for word in section.split()]
    return repeated(text, length)


def repeated(tokens: Sequence[int], length: int) -> Tensor:
    """Return the tokens, repeated up to this length, as a tensor `(length,)`."""
    return torch.tensor(tokens).repeat(-(-length // len(tokens)))[:length]


@dataclass(frozen=True, eq=False)
class WatchedModel:
    """A model and the text that it reads.

    Attributes:
        model: the model.
        special: ids of its special tokens.
        tokens: the longest text, `(length,)`; shorter texts are its beginning.
        tokenizer: the tokenizer of a real model, None for a random one.
    """

    model: nn.Module
    special: Sequence[int]
    tokens: Tensor
    tokenizer: Any = None

    def text(self, length: int) -> Text:
        """Return the first `length` tokens, with a mask of special tokens, as input of `weight_statistics`."""
        tokens = self.tokens[:length]
        return Text(tokens, torch.isin(tokens, torch.tensor(self.special)))

    @cached_property
    def eager(self) -> nn.Module:
        """The model with eager attention, which returns its matrices. It shares the parameters of `model`."""
        model = copy.deepcopy(self.model, {id(parameter): parameter for parameter in self.model.parameters()})
        model.set_attn_implementation("eager")
        return model

    @property
    def written(self) -> list[Tensor]:
        """The output projection of each layer by heads, `(heads, head_dim, embed)`."""
        heads = self.model.config.num_attention_heads
        return [layer.self_attn.o_proj.weight.T.unflatten(0, (heads, -1)) for layer in self.model.layers]


def watched_model(regime: Regime) -> WatchedModel:
    """Return the model and text of a regime: SmolLM2 if it has SmolLM2's width, otherwise a small random model."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    length = max(regime.length, SHORT)
    if regime.embed == SMOLLM2.embed:
        loaded = load("smollm2")
        end = loaded.tokenizer.eos_token_id
        ids = [token for section in sections() for token in (*loaded.tokenizer(section)["input_ids"], end)]
        return WatchedModel(loaded.model, loaded.tokenizer.all_special_ids, repeated(ids, length), loaded.tokenizer)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=regime.embed,
        num_hidden_layers=2,
        num_attention_heads=regime.heads,
        num_key_value_heads=regime.kv_heads,
        intermediate_size=37,
        max_position_embeddings=length,
    )
    torch.manual_seed(0)
    return WatchedModel(transformers.AutoModel.from_config(config).eval(), [0, 3], words(length, config.vocab_size))
