"""Attention of tiny models of transformers, and statistics of each query row, from whole matrices in float64.

Nothing here imports headwise. Each sequence runs alone and without padding, under eager attention.
"""

import contextlib
import math

import torch
import transformers

import tiny

VOCABULARY = 97
SPECIAL = (5, 11)


def models(name, top=""):
    """Return a tiny model of a family in float64 twice: as users call it, and under eager attention."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6}
    rotary = sizes | {"intermediate_size": 37, "max_position_embeddings": 128}
    found = []
    for implementation in ("sdpa", "eager"):
        config = {
            "llama": lambda: transformers.LlamaConfig(**rotary, num_key_value_heads=2, head_dim=10),
            "gpt2": lambda: transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=48, n_layer=2, n_head=6),
            "bert": lambda: transformers.BertConfig(**rotary),
        }[name]()
        config._attn_implementation = implementation
        torch.manual_seed(3)
        model = getattr(transformers, f"AutoModel{top}").from_config(config)
        found.append(tiny.with_distinct_heads(model).double())
    return found


@contextlib.contextmanager
def softmax_in_float64():
    """Let softmax compute in the dtype of its input: Llama asks for float32."""
    softmax = torch.nn.functional.softmax
    torch.nn.functional.softmax = lambda scores, dim, dtype=None: softmax(scores, dim)
    try:
        yield
    finally:
        torch.nn.functional.softmax = softmax


@torch.no_grad()
def attention(model, ids):
    """Return for each layer the weights `(heads, n, n)`, the head outputs `(n, heads, d)` and the output projection
    `(heads, d, width)` of one sequence.
    """
    projections = [
        module
        for path, module in model.named_modules()
        if path.endswith(("self_attn.o_proj", "attn.c_proj", "attention.output.dense"))
    ]
    inputs = []
    hooks = [each.register_forward_pre_hook(lambda _, args: inputs.append(args[0][0])) for each in projections]
    with softmax_in_float64():
        weights = model(input_ids=ids[None], output_attentions=True).attentions
    for hook in hooks:
        hook.remove()
    layers = []
    for of_layer, outputs, projection in zip(weights, inputs, projections, strict=True):
        heads = of_layer.shape[1]
        matrix = projection.weight if type(projection).__name__ == "Conv1D" else projection.weight.T
        layers.append((of_layer[0], outputs.unflatten(-1, (heads, -1)), matrix.unflatten(0, (heads, -1))))
    return [tuple(part.detach() for part in layer) for layer in layers]


def row_statistics(weights, outputs, projection, ids, *, causal):
    """Return the value of each statistic in each row of one head, NaN where it has none.

    Args:
        weights: weights `(n, n)`.
        outputs: head outputs `(n, d)`.
        projection: the head's slice of the output projection, `(d, width)`.
        ids: token ids `(n,)`.
        causal: True if a query sees no later keys.
    """
    n, nan, tokens = len(ids), math.nan, ids.tolist()
    rows = {name: [] for name in ("entropy", "evenness", "confidence", "distance", "self", "previous", "next")}
    rows |= {name: [] for name in ("first", "special", "confidence_content", "duplicate", "induction")}
    rows |= {name: [] for name in ("output_norm", "written_norm")}
    for i in range(n):
        row = weights[i].tolist()
        entropy = -sum(w * math.log(w) for w in row if w > 0)
        visible = i + 1 if causal else n
        copies = [j for j in range(i) if tokens[j] == tokens[i]]
        rows["entropy"].append(entropy)
        rows["evenness"].append(entropy / math.log(visible) if visible > 1 else nan)
        rows["confidence"].append(max(row))
        rows["distance"].append(sum(w * abs(i - j) for j, w in enumerate(row)))
        rows["self"].append(row[i])
        rows["previous"].append(row[i - 1] if i else nan)
        rows["next"].append(row[i + 1] if i + 1 < n else nan)
        rows["first"].append(row[0])
        content = [w for j, w in enumerate(row) if tokens[j] not in SPECIAL]
        rows["confidence_content"].append(max(content, default=0.0))
        rows["special"].append(sum(w for j, w in enumerate(row) if tokens[j] in SPECIAL))
        rows["duplicate"].append(sum(row[j] for j in copies) if copies else nan)
        rows["induction"].append(sum(row[j + 1] for j in copies) if copies else nan)
        rows["output_norm"].append(float(outputs[i].norm()))
        rows["written_norm"].append(float((outputs[i] @ projection).norm()))
    return rows
