"""Attention of tiny models of transformers and statistics of each query row, from whole matrices in float64.

The oracles do not use headwise. Each sequence runs alone and without padding. Attention weights and values are computed
from the inputs of the attention modules and their parameters.
"""

import math

import pytest
import torch
import transformers

import headwise as hw
import tiny
from token_sequences import padded

VOCABULARY, HEADS, LAYERS = 97, 6, 2
SPECIAL = (5, 11)

ENCODERS = ("bert", "modernbert")

LENGTHS = (13, 7, 1, 19, 2)


def model_of(name, implementation="sdpa", top="", **options):
    """Return a tiny model of a family in float64, in which all parameters are random, also biases and norms."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    rotary = sizes | {"intermediate_size": 37, "max_position_embeddings": 128} | options
    config = {
        "llama": lambda: transformers.LlamaConfig(**rotary, num_key_value_heads=2, head_dim=10, attention_bias=True),
        "gpt2": lambda: transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=48, n_layer=LAYERS, n_head=HEADS),
        "bert": lambda: transformers.BertConfig(**rotary),
        "modernbert": lambda: transformers.ModernBertConfig(  # a local layer, whose window is larger than the texts
            **rotary,
            attention_bias=True,
            layer_types=["full_attention", "sliding_attention"],
            local_attention=64,
            **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0),
        ),
    }[name]()
    config._attn_implementation = implementation
    torch.manual_seed(3)
    model = tiny.with_distinct_heads(getattr(transformers, f"AutoModel{top}").from_config(config))
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.4 * torch.randn(parameter.shape)
    return model.double()


def rotated(x, base=1e4):
    """Return queries or keys `(heads, n, d)`, rotated by their positions (Su et al. 2021)."""
    n, d = x.shape[1:]
    # The models compute angles in float32.
    angles = torch.arange(n).float()[:, None] * (1.0 / base ** (torch.arange(0, d, 2).float() / d))
    cos, sin = angles.cos().double(), angles.sin().double()
    first, second = x[..., : d // 2], x[..., d // 2 :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def projections(block, name):
    """Return queries, keys and values as functions of the input, and the output projection `(heads * d, width)`."""
    if name == "gpt2":
        parts = block.c_attn.weight.split(48, 1), block.c_attn.bias.split(48)
        maps = [lambda x, w=w, b=b: x @ w + b for w, b in zip(*parts, strict=True)]
        return *maps, block.c_proj.weight
    if name == "modernbert":
        parts = block.Wqkv.weight.split(48), block.Wqkv.bias.split(48)
        maps = [lambda x, w=w, b=b: x @ w.T + b for w, b in zip(*parts, strict=True)]
        return *maps, block.Wo.weight.T
    if name == "llama":
        layers, output = (block.q_proj, block.k_proj, block.v_proj), block.o_proj
    else:
        layers, output = (block.self.query, block.self.key, block.self.value), block.output.dense
    return *(lambda x, layer=layer: x @ layer.weight.T + layer.bias for layer in layers), output.weight.T


@torch.no_grad()
def layers_of(model, name, ids):
    """Return for each layer the weights `(heads, n, n)`, the values `(heads, n, d)` and the slices of the output
    projection `(heads, d, width)` of one sequence.
    """
    ends = {"llama": ".self_attn", "gpt2": ".attn", "bert": ".attention", "modernbert": ".attn"}[name]
    blocks = [module for path, module in model.named_modules() if path.endswith(ends)]
    inputs = {}

    def keep(block, args, kwargs):
        inputs[block] = (args[0] if args else kwargs["hidden_states"])[0]

    hooks = [block.register_forward_pre_hook(keep, with_kwargs=True) for block in blocks]
    model(input_ids=ids[None])
    for hook in hooks:
        hook.remove()
    found = []
    for block in blocks:
        x = inputs[block]
        to_q, to_k, to_v, output = projections(block, name)
        d = len(output) // HEADS
        q, k, v = (to(x).unflatten(-1, (-1, d)).transpose(0, 1) for to in (to_q, to_k, to_v))
        if name == "llama":
            q, k = rotated(q), rotated(k)
        if name == "modernbert":  # which rotates in float32
            base = 1.6e5 if block.sliding_window is None else 1e4
            q, k = (rotated(each.float().double(), base) for each in (q, k))
        k, v = (each.repeat_interleave(HEADS // len(each), 0) for each in (k, v))
        scores = q @ k.mT / math.sqrt(d)
        if name not in ENCODERS:
            scores = scores.masked_fill(torch.ones(len(x), len(x)).tril().bool().logical_not(), -math.inf)
        found.append((scores.softmax(-1), v, output.unflatten(0, (HEADS, d))))
    return found


def heads_of(model, name, rows):
    """Yield each head's layer and number, and for each sequence its ids and the head's part of `layers_of`."""
    layers = [layers_of(model, name, ids) for ids in rows]
    for layer in range(LAYERS):
        for head in range(HEADS):
            of_rows = zip(rows, layers, strict=True)
            yield layer, head, [(ids, *(part[head] for part in of_layers[layer])) for ids, of_layers in of_rows]


def row_statistics(weights, ids, *, causal):
    """Return the value of each statistic in each row of a matrix of weights `(n, n)`, NaN where it has none."""
    n, nan, tokens = len(ids), math.nan, ids.tolist()
    names = ("entropy", "evenness", "confidence", "confidence_content", "distance", "self", "previous", "next", "first")
    rows = {name: [] for name in (*names, "special", "duplicate", "induction")}
    for i in range(n):
        row = weights[i].tolist()
        entropy = -sum(w * math.log(w) for w in row if w > 0)
        visible = i + 1 if causal else n
        copies = [j for j in range(i) if tokens[j] == tokens[i]]
        rows["entropy"].append(entropy)
        rows["evenness"].append(entropy / math.log(visible) if visible > 1 else nan)
        rows["confidence"].append(max(row))
        rows["confidence_content"].append(max((w for j, w in enumerate(row) if tokens[j] not in SPECIAL), default=0.0))
        rows["distance"].append(sum(w * abs(i - j) for j, w in enumerate(row)))
        rows["self"].append(row[i])
        rows["previous"].append(row[i - 1] if i else nan)
        rows["next"].append(row[i + 1] if i + 1 < n else nan)
        rows["first"].append(row[0])
        rows["special"].append(sum(w for j, w in enumerate(row) if tokens[j] in SPECIAL))
        rows["duplicate"].append(sum(row[j] for j in copies) if copies else nan)
        rows["induction"].append(sum(row[j + 1] for j in copies) if copies else nan)
    return rows


def mean_of(values):
    """Return the mean of the values that are not NaN; NaN if there are none."""
    valid = [value for value in values if not math.isnan(value)]
    return sum(valid) / len(valid) if valid else math.nan


def numbers_of(table, *fields):
    """Return the estimates of a table by layer, head, name, and further fields of the rows."""
    return {
        (row.layer, row.head, name, *(getattr(row, field) for field in fields)): estimate
        for row in table.rows
        for name, estimate in row.statistics.items()
    }


def require_numbers(found, wanted):
    """Check that two dictionaries have the same estimates."""
    assert set(found) == set(wanted)
    for key, measured in found.items():
        assert measured == pytest.approx(wanted[key], abs=1e-10, nan_ok=True), key


def batches_of(rows, side):
    """Return sequences as two padded batches."""
    return [padded(rows[:3], side), padded(rows[3:], side)]


def cut_texts():
    """Return texts of three documents that are cut into sequences, these, and their documents."""
    texts = hw.Texts(tiny.texts(20, 9, 5), tiny.tokenizer("decoder"), context=8, documents="cut", batch=2)
    rows, documents = [ids.long() for batch in texts for ids in batch["input_ids"]], texts.document_numbers()
    assert len(set(documents)) < len(rows)
    return texts, rows, documents


@torch.no_grad()
def run_with_cache(model, ids):
    """Run a decoder on sequences in four calls, with a cache of keys."""
    cache, start = None, 0
    for count in (5, 1, 1, 5):
        output = model(ids[:, start : start + count], past_key_values=cache, use_cache=True)
        cache, start = output.past_key_values, start + count
