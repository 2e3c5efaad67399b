"""A gate of 0 in every kind of model, compared with the same model without that head's weights.

The oracle knows nothing of headwise: which module projects the heads is in a table, and the head's columns of its
weight are set to zero by hand.
"""

import copy
from contextlib import contextmanager
from itertools import chain

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from research.tiny_models.builder import build
from research.tiny_models.inputs import attempts, takes_padding

BUDGET = 1e-12

LLAMA = ("layers.1.self_attn", "layers.1.self_attn.o_proj")
BERT = ("encoder.layer.1.attention.self", "encoder.layer.1.attention.output.dense")
GPT = ("h.1.attn", "h.1.attn.c_proj")
GPTJ = ("h.1.attn", "h.1.attn.out_proj")
BART = ("decoder.layers.1.encoder_attn", "decoder.layers.1.encoder_attn.out_proj")
T5 = ("decoder.block.1.layer.1.EncDecAttention", "decoder.block.1.layer.1.EncDecAttention.o")
ALBERT = "encoder.albert_layer_groups.0.albert_layers.0.attention"
SWIN = "encoder.layers.1.blocks.0.attention"

FAMILIES = {
    "decoders, by the interface of transformers": {
        **dict.fromkeys(("llama", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt_oss", "phi3"), LLAMA),
        "deepseek_v3": LLAMA,
        "gpt2": GPT,
        "gpt_bigcode": GPT,
        "gpt_neo": ("h.1.attn.attention", "h.1.attn.attention.out_proj"),
        "gpt_neox": ("layers.1.attention", "layers.1.attention.dense"),
        "opt": ("decoder.layers.1.self_attn", "decoder.layers.1.self_attn.out_proj"),
    },
    "decoders that attend in their own way": {
        "falcon": ("h.1.self_attention", "h.1.self_attention.dense"),
        "bloom": ("h.1.self_attention", "h.1.self_attention.dense"),
        "gptj": GPTJ,
        "codegen": GPTJ,
        "mpt": ("blocks.1.attn", "blocks.1.attn.out_proj"),
        "openai-gpt": GPT,
        "xlnet": ("layer.1.rel_attn", "layer.1.rel_attn"),
    },
    "encoders": {
        **dict.fromkeys(("bert", "electra", "deberta", "deberta-v2", "roformer", "tapas", "big_bird"), BERT),
        "distilbert": ("transformer.layer.1.attention", "transformer.layer.1.attention.out_lin"),
        "albert": (ALBERT, f"{ALBERT}.dense"),
        "mpnet": ("encoder.layer.1.attention.attn", "encoder.layer.1.attention.attn.o"),
        "modernbert": ("layers.1.attn", "layers.1.attn.Wo"),
        "flaubert": ("attentions.1", "attentions.1.out_lin"),
        "perceiver": ("encoder.self_attends.1.attention.self", "encoder.self_attends.1.attention.output.dense"),
    },
    "encoders and decoders": {
        **dict.fromkeys(("bart", "whisper", "fsmt"), BART),
        "t5": T5,
        "detr": ("decoder.layers.1.encoder_attn", "decoder.layers.1.encoder_attn.o_proj"),
    },
    "images, sound and both": {
        "vit": ("layers.1.attention", "layers.1.attention.o_proj"),
        "dinov2": ("encoder.layer.1.attention", "encoder.layer.1.attention.o_proj"),
        "siglip_vision_model": ("head.attention", "head.attention.out_proj"),
        "swin": (SWIN, f"{SWIN}.o_proj"),
        "clip": ("text_model.encoder.layers.1.self_attn", "text_model.encoder.layers.1.self_attn.out_proj"),
        "blip": (f"text_model.{BERT[0]}", f"text_model.{BERT[1]}"),
        "wav2vec2": ("encoder.layers.1.attention", "encoder.layers.1.attention.out_proj"),
        "wavlm": ("encoder.layers.1.attention", "encoder.layers.1.attention.out_proj"),
    },
}
HEADS = {"electra": 4, "codegen": 4}
"""Number of heads of some tiny models; the others have 6."""
TYPES = [(name, None) for kind in FAMILIES.values() for name in kind]
TYPES += [(name, "eager") for name in ("llama", "gpt2", "bert", "t5", "vit")]


def tensors(output):
    """Return all numbers in a model's output."""
    if isinstance(output, Tensor):
        yield from [output] * output.is_floating_point()
    elif hasattr(output, "values") or isinstance(output, list | tuple):
        for each in output.values() if hasattr(output, "values") else output:
            yield from tensors(each)


def outputs_of(model, inputs):
    torch.manual_seed(3)
    return [each.detach().clone() for each in tensors(model(**copy.deepcopy(inputs)))]


def double(inputs):
    return {
        name: each.double() if isinstance(each, Tensor) and each.is_floating_point() else each
        for name, each in inputs.items()
    }


def difference(outputs, others):
    """Return the largest difference, relative to the largest number if that is above 1."""
    found = [0.0]
    for each, other in zip(outputs, others, strict=True):
        found.append(float((each - other).abs().max() / each.abs().max().clamp(min=1.0)) if each.numel() else 0.0)
    return max(found)


@contextmanager
@torch.no_grad()
def without(projection, head, heads):
    """Set one head's columns of the projection to zero while the context is active."""
    weight = projection.o if hasattr(projection, "o") and isinstance(projection.o, nn.Parameter) else projection.weight
    before = weight.clone()
    if weight.ndim == 3:  # XLNet: (embed, heads, head_dim)
        weight[:, head] = 0.0
    else:
        features = weight if type(projection).__name__ == "Conv1D" else weight.mT  # transformers' has inputs first
        width = len(features) // heads
        features[head * width : (head + 1) * width] = 0.0
    yield
    weight.copy_(before)


def require_gated_as_without(model, inputs, path, projection, heads, head=1):
    """Gates of 0 and of 1, and what the projection is given."""
    plain = outputs_of(model, inputs)
    with without(projection, head, heads):
        expected = outputs_of(model, inputs)
    given = []
    hook = projection.register_forward_pre_hook(lambda _, args: given.append(args[0].detach().clone()))
    with hw.gate(model, {(path, head): 0.0}):
        found = outputs_of(model, inputs)
    hook.remove()
    if type(projection).__name__ in ("Linear", "Conv1D") and given:  # torch's own layer does not call its projection
        by_head = given[0].unflatten(-1, (heads, -1)).abs().flatten(0, -3).amax((0, 2))
        assert (by_head == 0).tolist() == [each == head for each in range(heads)]
    assert difference(plain, expected) > 1e-6
    assert difference(found, expected) <= BUDGET
    with hw.gate(model, {(path, head): 1.0}):
        same = outputs_of(model, inputs)
    assert all(torch.equal(each, other) for each, other in zip(same, plain, strict=True))


def ready(model_type, implementation=None):
    """Return a tiny model in float64 and its inputs, with one padded sequence if the model accepts a padding mask."""
    model = build(model_type, implementation)
    sides = ("right", None) if takes_padding(model) else (None,)
    model = model.double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others are not for float64
    for inputs in chain(*(attempts(model_type, model, side) for side in sides)):
        try:
            found = outputs_of(model, double(inputs))
        except (AttributeError, TypeError, ValueError, RuntimeError):
            continue
        if all(each.isfinite().all() for each in found):  # a mask of Gemma 2 overflows in float64
            return model, double(inputs)
    raise LookupError(f"no inputs for {model_type}")


@pytest.mark.parametrize(("name", "implementation"), TYPES)
@torch.no_grad()
def test_a_gate_of_0_is_the_model_without_that_heads_weights(name, implementation):
    model, inputs = ready(name, implementation)
    path, projection = next(kind[name] for kind in FAMILIES.values() if name in kind)
    require_gated_as_without(model, inputs, path, model.get_submodule(projection), HEADS.get(name, 6))


def test_forty_families_are_held_against_their_weights():
    assert len({name for name, _ in TYPES}) >= 40


# -- plain PyTorch ----------------------------------------------------------------------------------------------------

X, MEMORY = torch.randn(2, 5, 21, dtype=torch.float64), torch.randn(2, 11, 21, dtype=torch.float64)
PADDING = torch.arange(5) >= torch.tensor([[5], [3]])


class Written(nn.Module):
    """Three heads of 7 over 21 features, in a way of writing them."""

    def __init__(self, way):
        super().__init__()
        self.qkv, self.out, self.way, self.num_heads = nn.Linear(21, 63), nn.Linear(21, 21), way, 3

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 7)).permute(2, 0, 3, 1, 4)
        if self.way.startswith("torch"):
            options = {"is_causal": True} if "causal" in self.way else {}
            sdpa = torch._C._nn.scaled_dot_product_attention if "inner" in self.way else F.scaled_dot_product_attention
            out = sdpa(q, k, v, **options)
        else:
            scores = (q @ k.mT) / 7**0.5
            hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
            weights = F.dropout(F.softmax(scores.masked_fill(hidden, -1e9), dim=-1), 0.0, training=False)
            out = {
                "matmul": lambda: weights @ v,
                "matmul by keyword": lambda: torch.matmul(weights, other=v),
                "bmm": lambda: torch.bmm(weights.flatten(0, 1), v.flatten(0, 1)).unflatten(0, (2, 3)),
                "einsum": lambda: torch.einsum("bhij,bhjd->bhid", weights, v),
                "einsum, other axes": lambda: torch.einsum("bhjd,bhij->ihdb", v, weights).permute(3, 1, 0, 2),
            }[self.way]()
        return x + self.out(out.transpose(1, 2).flatten(2))


class WrittenAttention(Written):
    """A class with "attention" in its name; softmax is intercepted only in such modules."""


WAYS = ("torch", "torch, causal", "matmul", "matmul by keyword", "bmm", "einsum", "einsum, other axes")


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_every_way_of_writing_it(way):
    model = nn.Sequential(nn.Linear(21, 21), WrittenAttention(way), nn.Tanh(), WrittenAttention(way)).double()
    for head in range(3):
        require_gated_as_without(model, {"input": X}, "1", model[1].out, 3, head)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("training", [True, False])
@torch.no_grad()
def test_torchs_attention(batch_first, need_weights, training):
    layer = nn.MultiheadAttention(21, 3, batch_first=batch_first, dropout=0.3).double().train(training)
    query, memory, padding = (X, MEMORY, torch.arange(11) >= torch.tensor([[11], [7]]))
    query, memory = (query, memory) if batch_first else (query.transpose(0, 1), memory.transpose(0, 1))
    inputs = {"query": query, "key": memory, "value": memory, "key_padding_mask": padding}
    inputs["need_weights"] = need_weights
    nn.init.normal_(layer.out_proj.bias)
    with slow_path():
        require_gated_as_without(layer, inputs, "", layer.out_proj, 3, head=2)


@contextmanager
def slow_path():
    """Torch's fused layer, which a gate disables, rounds differently."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@pytest.mark.parametrize("training", [True, False])
@torch.no_grad()
def test_torchs_encoder_and_decoder(training):
    layer = nn.TransformerEncoderLayer(21, 3, 37, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double().train(training)
    layer = nn.TransformerDecoderLayer(21, 3, 37, batch_first=True)
    decoder = nn.TransformerDecoder(layer, 2).double().train(training)
    with slow_path():
        inputs, projection = {"src": X, "src_key_padding_mask": PADDING}, encoder.layers[1].self_attn.out_proj
        require_gated_as_without(encoder, inputs, "layers.1.self_attn", projection, 3)
        inputs, projection = {"tgt": X, "memory": MEMORY}, decoder.layers[0].multihead_attn.out_proj
        require_gated_as_without(decoder, inputs, "layers.0.multihead_attn", projection, 3)


@torch.no_grad()
def test_a_gate_is_met_where_torch_would_take_its_fast_path():
    layer = nn.TransformerEncoderLayer(21, 3, 37, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double().eval()
    with hw.gate(encoder, {("layers.0.self_attn", 1): 0.0}):
        found = encoder(X, src_key_padding_mask=PADDING)
    with without(encoder.layers[0].self_attn.out_proj, 1, 3):
        expected = encoder(X, src_key_padding_mask=PADDING)
    assert difference([found[~PADDING]], [expected[~PADDING]]) <= BUDGET


OURS = {
    "one head each": lambda: hw.MultiHeadAttention(21, 3),
    "grouped": lambda: hw.MultiHeadAttention(21, 6, num_kv_heads=2, head_dim=7, rotary=None, mask=hw.causal()),
    "blockwise": lambda: hw.MultiHeadAttention(21, 3, mask=hw.window(3), backend="blockwise"),
    "gated by the input": lambda: hw.MultiHeadAttention(21, 3, output_gate="element"),
    "latent": lambda: hw.LatentAttention(21, 3, kv_rank=5, head_dim=7, rotary_dim=4),
    "differential": lambda: hw.DifferentialAttention(21, 3, head_dim=4, value_dim=7),
}


@pytest.mark.parametrize("name", OURS)
@torch.no_grad()
def test_our_own_layers(name):
    layer = OURS[name]().double()
    require_gated_as_without(layer, {"x": X}, "", layer.out_proj, layer.num_heads)


@torch.no_grad()
def test_our_layer_between_others_to_a_context_and_with_weights():
    layer = hw.MultiHeadAttention(21, 6, num_kv_heads=3, head_dim=7).double()
    require_gated_as_without(layer, {"x": X, "context": MEMORY}, "", layer.out_proj, 6, head=5)
    model = nn.Sequential(nn.Linear(21, 21), layer).double()
    require_gated_as_without(model, {"input": X}, "1", layer.out_proj, 6)
    weights = layer(X, return_weights=True)[1]
    with hw.gate(layer, {("", 1): 0.0}):
        assert torch.equal(layer(X, return_weights=True)[1], weights)


@pytest.mark.parametrize("need_weights", [True, False])
@torch.no_grad()
def test_the_replacement_for_torchs_layer(need_weights):
    from headwise.compat import MultiheadAttention

    layer = MultiheadAttention(21, 3, batch_first=True).double().eval()
    inputs = {"query": X, "key": MEMORY, "value": MEMORY, "need_weights": need_weights}
    require_gated_as_without(layer, inputs, "", layer.out_proj, 3)
