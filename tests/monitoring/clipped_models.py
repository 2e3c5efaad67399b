"""Tiny models in float64 whose logits are clipped, and the rule of the paper, applied to queries and keys."""

from collections.abc import Callable
from copy import deepcopy

import torch
import transformers
from torch import Tensor, nn

import headwise as hw
import tiny
from removal import families

HEADS = 6
DEEPSEEK = {
    "vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 37,
    "num_key_value_heads": HEADS, "kv_lora_rank": 17, "qk_nope_head_dim": 5, "qk_rope_head_dim": 4, "v_head_dim": 7,
    "first_k_dense_replace": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


class OneLayer(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x)


class TorchLayer(OneLayer):
    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


def own(**options) -> OneLayer:
    return OneLayer(hw.MultiHeadAttention(48, HEADS, dtype=torch.float64, **({"mask": hw.causal()} | options)))


def latent(**options) -> OneLayer:
    sizes = {"kv_rank": 17, "head_dim": 5, "rotary_dim": 4, "value_dim": 7}
    return OneLayer(hw.LatentAttention(48, HEADS, **sizes, dtype=torch.float64, mask=hw.causal(), **options))


def of_transformers(config, **options) -> nn.Module:
    config = deepcopy(config)
    for name, value in options.items():
        setattr(config, name, value)
    return transformers.AutoModel.from_config(config)


ROTARY = families.ROTARY | {"pad_token_id": 0}
MAKERS: dict[str, Callable[[], nn.Module]] = {
    "llama, grouped": lambda: of_transformers(families.CONFIGS["llama"]),
    "llama": lambda: of_transformers(transformers.LlamaConfig(**ROTARY, attention_bias=True)),
    "llama, one key": lambda: of_transformers(transformers.LlamaConfig(**ROTARY, num_key_value_heads=1)),
    "gemma2, softcap": lambda: of_transformers(
        families.CONFIGS["gemma2"], attn_logit_softcapping=2.0, _attn_implementation="eager"
    ),
    "phi": lambda: of_transformers(families.CONFIGS["phi"]),
    "phi3": lambda: of_transformers(families.CONFIGS["phi3"]),
    "gpt2": lambda: of_transformers(families.CONFIGS["gpt2"]),
    "gpt_neox": lambda: of_transformers(families.CONFIGS["gpt_neox"]),
    "bert": lambda: of_transformers(families.CONFIGS["bert"]),
    "vit": lambda: of_transformers(families.CONFIGS["vit"]),
    "bart": lambda: of_transformers(families.CONFIGS["bart"]),
    "whisper": lambda: of_transformers(families.CONFIGS["whisper"]),
    "deepseek v2": lambda: of_transformers(transformers.DeepseekV2Config(**DEEPSEEK, q_lora_rank=None)),
    "deepseek v3": lambda: of_transformers(transformers.DeepseekV3Config(**DEEPSEEK, q_lora_rank=19)),
    "own": lambda: own(rotary=hw.Rotary()),
    "own, grouped": lambda: own(num_kv_heads=2, scores=hw.Scores(softcap=3.0, temperature=True)),
    "own, fused": lambda: own(fused_qkv=True, rotary=hw.Rotary(), head_dim=10, value_dim=7),
    "own, fused, grouped": lambda: own(fused_qkv=True, num_kv_heads=3, scores=hw.Scores(sinks=True)),
    "own, masks of heads": lambda: own(mask=hw.per_head([hw.causal()] * 3 + [hw.window(4)] * 3)),
    "latent": lambda: latent(bias=True),
    "latent, q_rank": lambda: latent(q_rank=19),
    "torch": lambda: TorchLayer(nn.MultiheadAttention(48, HEADS, batch_first=True, add_bias_kv=True)),
}


def model(name: str) -> nn.Module:
    """Return a tiny model in float64, whose biases are not 0."""
    torch.manual_seed(0)
    made = tiny.with_distinct_heads(MAKERS[name]()).double()
    for path, parameter in made.named_parameters():
        if "bias" in path and "norm" not in path.lower():
            nn.init.normal_(parameter, std=0.3)
    return made


def arguments(name: str) -> dict[str, Tensor]:
    if name.startswith(("own", "latent", "torch")):
        return {"x": torch.randn(2, 11, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(3))}
    return families.inputs(name)


# -- the rule, for the outputs of projections --------------------------------------------------------------------------

Rule = Callable[[Tensor, Tensor], Tensor]
"""Function of the output of a projection and each head's factor of the logits."""


def each_head(y: Tensor, factors: Tensor) -> Tensor:
    return (y.unflatten(-1, (HEADS, -1)) * factors[:, None]).flatten(-2)


def root(y: Tensor, factors: Tensor) -> Tensor:
    return each_head(y, factors.sqrt())


def unchanged(y: Tensor, factors: Tensor) -> Tensor:
    return y


def of_each_head(y: Tensor, factors: Tensor) -> Tensor:
    q, k, v = y.unflatten(-1, (HEADS, 3, -1)).unbind(-2)
    roots = factors.sqrt()[:, None]
    return torch.stack((q * roots, k * roots, v), -2).flatten(-3)


def of_features(*exponents: float) -> Rule:
    """Return the rule that multiplies each feature of a head by a power of the head's factor."""
    return lambda y, factors: (
        y.unflatten(-1, (HEADS, -1)) * factors[:, None] ** torch.tensor(exponents, dtype=y.dtype)
    ).flatten(-2)


def of_parts(*parts: tuple[int, Rule]) -> Rule:
    """Return the rule for consecutive features, with a number of them and a rule for each part."""
    widths = [width for width, _ in parts]
    return lambda y, factors: torch.cat(
        [rule(part, factors) for part, (_, rule) in zip(y.split(widths, -1), parts, strict=True)], -1
    )


LATENT_QUERY, LATENT_KEY = of_features(*[0.5] * 5, *[1.0] * 4), of_features(*[0.5] * 5, *[0.0] * 7)
RULES: dict[str, dict[str, Rule]] = {
    **{name: {"q_proj": root, "k_proj": root} for name in ("llama", "phi", "vit", "bart", "whisper", "own")},
    **{name: {"q_proj": each_head} for name in ("llama, grouped", "llama, one key", "gemma2, softcap", "own, grouped")},
    "bert": {"query": root, "key": root},
    "phi3": {"qkv_proj": of_parts((48, each_head), (32, unchanged))},
    "gpt2": {"c_attn": of_parts((48, root), (48, root), (48, unchanged))},
    "gpt_neox": {"query_key_value": of_each_head},
    "own, masks of heads": {"q_proj": root, "k_proj": root},
    "own, fused": {"qkv_proj": of_parts((60, root), (60, root), (42, unchanged))},
    "own, fused, grouped": {"qkv_proj": of_parts((48, each_head), (48, unchanged))},
    "latent": {"q_proj": LATENT_QUERY, "kv_up": LATENT_KEY},
    "latent, q_rank": {"q_up": LATENT_QUERY, "kv_up": LATENT_KEY},
    "deepseek v2": {"q_proj": LATENT_QUERY, "kv_b_proj": LATENT_KEY},
    "deepseek v3": {"q_b_proj": LATENT_QUERY, "kv_b_proj": LATENT_KEY},
}


def with_rule(name: str, reference: nn.Module, path: str, factors: Tensor) -> nn.Module:
    """Return a copy of a model in which queries and keys of the attention module at `path` follow the rule."""
    reference = deepcopy(reference)
    for projection, rule in RULES[name].items():
        module = reference.get_submodule(path).get_submodule(projection)
        module.register_forward_hook(lambda module, args, y, rule=rule: rule(y, factors))
    return reference
