"""Forward passes of tiny language models written out by hand, with access to every head, for tests of path patching."""

import functools
from typing import NamedTuple

import torch

from prompt_models import ANSWER, CLEAN, CORRUPTED, HEADS, WRONG


class Run(NamedTuple):
    """One run: difference of logits of each pair, and for each layer the outputs of heads `(batch, heads, length,
    width)`, their queries, keys and values in the same form, and the output of the MLP.
    """

    difference: torch.Tensor
    outputs: list
    inputs: list
    mlps: list


def attend(layer, qkv, is_causal, outputs, inputs):
    """Return the outputs of all heads and their inputs, some of which are replaced."""
    qkv = dict(zip("qkv", qkv, strict=True))
    own = {name: tensor.clone() for name, tensor in qkv.items()}
    for (at, name, head), tensor in inputs.items():
        if at == layer:
            qkv[name] = torch.cat([qkv[name][:, :head], tensor[:, None], qkv[name][:, head + 1 :]], 1)
    scores = torch.einsum("bhid,bhjd->bhij", qkv["q"], qkv["k"]) / qkv["q"].shape[-1] ** 0.5
    if is_causal:
        scores = scores + torch.full(scores.shape[-2:], -torch.inf, dtype=scores.dtype).triu(1)
    weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
    out = torch.einsum("bhij,bhjd->bhid", weights, qkv["v"])
    return outputs.get(layer, out), own


def heads_of(features, heads=HEADS):
    return features.unflatten(-1, (heads, -1)).transpose(1, 2)


def turned(x, cos, sin):
    """Apply rotary positions to `(batch, heads, length, width)`."""
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


def joined(out):
    return out.transpose(1, 2).flatten(2)


@torch.no_grad()
def run(model, ids, outputs=None, inputs=None, mlps=None):
    """Run a model.

    Args:
        model: Llama, GPT-2 or BERT of `prompt_models`.
        ids: token ids.
        outputs: outputs of all heads, by layer, in place of the computed ones.
        inputs: queries, keys or values of one head, `(batch, length, width)`, by (layer, name, head).
        mlps: outputs of MLPs, by layer, in place of the computed ones.
    """
    steps = {"llama": llama, "gpt2": gpt2, "bert": bert}[model.config.model_type]
    trace = [], [], []
    hidden = steps(model, ids, outputs or {}, inputs or {}, mlps or {}, trace)
    logits = hidden[:, -1]
    difference = logits.gather(1, ANSWER[:, None])[:, 0] - logits.gather(1, WRONG[:, None])[:, 0]
    return Run(difference, *trace)


def noted(trace, out, inputs, mlp):
    for values, value in zip(trace, (out, inputs, mlp), strict=True):
        values.append(value)


def llama(model, ids, outputs, inputs, mlps, trace):
    x = model.model.embed_tokens(ids)
    cos, sin = model.model.rotary_emb(x, torch.arange(ids.shape[1])[None])
    for number, layer in enumerate(model.model.layers):
        h, part = layer.input_layernorm(x), layer.self_attn
        q = turned(heads_of(part.q_proj(h)), cos, sin)
        k, v = turned(heads_of(part.k_proj(h), 2), cos, sin), heads_of(part.v_proj(h), 2)
        k, v = (each[:, [head // 3 for head in range(HEADS)]] for each in (k, v))
        out, own = attend(number, (q, k, v), True, outputs, inputs)
        x = x + part.o_proj(joined(out))
        mlp = mlps.get(number, layer.mlp(layer.post_attention_layernorm(x)))
        x = x + mlp
        noted(trace, out, own, mlp)
    return model.lm_head(model.model.norm(x))


def gpt2(model, ids, outputs, inputs, mlps, trace):
    x = model.transformer.wte(ids) + model.transformer.wpe(torch.arange(ids.shape[1]))
    for number, layer in enumerate(model.transformer.h):
        qkv = [heads_of(part) for part in layer.attn.c_attn(layer.ln_1(x)).chunk(3, -1)]
        out, own = attend(number, qkv, True, outputs, inputs)
        x = x + layer.attn.c_proj(joined(out))
        mlp = mlps.get(number, layer.mlp(layer.ln_2(x)))
        x = x + mlp
        noted(trace, out, own, mlp)
    return model.lm_head(model.transformer.ln_f(x))


def bert(model, ids, outputs, inputs, mlps, trace):
    x = model.bert.embeddings(ids)
    for number, layer in enumerate(model.bert.encoder.layer):
        part, after = layer.attention.self, layer.attention.output
        qkv = [heads_of(each(x)) for each in (part.query, part.key, part.value)]
        out, own = attend(number, qkv, False, outputs, inputs)
        x = after.LayerNorm(x + after.dense(joined(out)))
        mlp = mlps.get(number, layer.output.dense(layer.intermediate(x)))
        x = layer.output.LayerNorm(x + mlp)
        noted(trace, out, own, mlp)
    return model.cls(x)


@functools.lru_cache(maxsize=1)
def unpatched_runs(model, direction):
    """Return the runs of the prompts that patched values come from and of the patched prompts, once for all heads."""
    source, destination = (CLEAN, CORRUPTED) if direction == "denoise" else (CORRUPTED, CLEAN)
    return run(model, source), run(model, destination)


def path_difference(model, direction, senders, receivers=(), names="", frozen_mlps=False):
    """Return the difference of logits of each pair if the paths from all `senders` to the receivers are patched: to the
    logits if there are no receivers. These are the steps of Wang et al. (2022, appendix B), one by one.
    """
    destination = CORRUPTED if direction == "denoise" else CLEAN
    new, unpatched = unpatched_runs(model, direction)
    outputs = {layer: out.clone() for layer, out in enumerate(unpatched.outputs)}
    for layer, head in senders:
        outputs[layer][:, head] = new.outputs[layer][:, head]
    mlps = dict(enumerate(unpatched.mlps)) if frozen_mlps else {}
    frozen = run(model, destination, outputs=outputs, mlps=mlps)
    if not receivers:
        return frozen.difference
    inputs = {(layer, name, head): frozen.inputs[layer][name][:, head] for layer, head in receivers for name in names}
    return run(model, destination, inputs=inputs).difference
