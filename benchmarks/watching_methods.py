"""Methods to get the statistics of every head: `hw.watch`, and implementations that return whole matrices."""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import headwise as hw
from benchmarks import weight_statistics
from benchmarks.contestants import LeftOutError
from benchmarks.oracle import WrongError
from benchmarks.watched_model import WatchedModel
from benchmarks.weight_statistics import Statistics

PLAIN, OURS = "plain forward", "ours"
EAGER, BERTVIZ, LENS = "`output_attentions=True`", "BertViz", "TransformerLens"

Method = Callable[[int], Statistics]
"""Function from a number of tokens to every statistic, `(layers, heads)`; for the plain forward pass an empty
dictionary.
"""


def without_statistics(watched: WatchedModel) -> Method:
    """Return a function that runs a plain forward pass and computes no statistics."""

    def run(length: int) -> Statistics:
        watched.model(input_ids=watched.tokens[None, :length], use_cache=False)
        return {}

    return run


def by_watch(watched: WatchedModel) -> Method:
    """Return a function that computes the statistics with `hw.watch`."""

    def run(length: int) -> Statistics:
        with hw.watch(watched.model, special=watched.special) as heads:
            watched.model(input_ids=watched.tokens[None, :length], use_cache=False)
        return weight_statistics.of_layers(
            [{name: statistic.value for name, statistic in record.statistics.items()} for record in heads.records]
        )

    return run


def _matrices(watched: WatchedModel, length: int) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Return, for each layer of the eager model, the weights `(1, heads, length, length)` and the heads' concatenated
    output `(1, length, embed)`.
    """
    head_outputs: list[Tensor] = []
    handles = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, inputs: head_outputs.append(inputs[0]))
        for layer in watched.eager.layers
    ]
    try:
        returned = watched.eager(input_ids=watched.tokens[None, :length], use_cache=False, output_attentions=True)
    finally:
        for handle in handles:
            handle.remove()
    return returned.attentions, head_outputs


def _statistics_of_matrices(
    watched: WatchedModel, length: int, weights: Sequence[Tensor], out: Sequence[Tensor]
) -> Statistics:
    """Return the statistics of a model from the weights `(heads, length, length)` and the heads' output `(1, length,
    ...)` of each layer.
    """
    text = watched.text(length)
    by_layer = []
    for layer, returned, written in zip(weights, out, watched.written, strict=True):
        by_head = returned.reshape(length, layer.shape[0], -1).transpose(0, 1)
        by_layer.append(weight_statistics.statistics(layer, by_head, text, written))
    return weight_statistics.of_layers(by_layer)


def by_output_attentions(watched: WatchedModel) -> Method:
    """Return a function that computes the statistics from the matrices of `output_attentions=True`."""

    def run(length: int) -> Statistics:
        weights, out = _matrices(watched, length)
        return _statistics_of_matrices(watched, length, [layer[0] for layer in weights], out)

    return run


def by_bertviz(watched: WatchedModel) -> Method:
    """Return a function that computes the statistics from the same matrices as `by_output_attentions`, stacked by
    BertViz into one tensor.
    """
    from bertviz.util import format_attention

    def run(length: int) -> Statistics:
        weights, out = _matrices(watched, length)
        return _statistics_of_matrices(watched, length, format_attention(weights), out)

    return run


def by_transformer_lens(watched: WatchedModel) -> Method:
    """Return a function that computes the statistics from the patterns TransformerLens caches. Its bridge wraps the
    same model with an output layer, and shares its parameters.
    """
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import LlamaForCausalLM

    if watched.tokenizer is None:
        raise LeftOutError("requires a model with a tokenizer")
    base_model = copy.deepcopy(watched.eager, {id(parameter): parameter for parameter in watched.eager.parameters()})
    with torch.device("meta"):
        with_output_layer = LlamaForCausalLM(base_model.config)
    with_output_layer.model, with_output_layer.lm_head.weight = base_model, base_model.embed_tokens.weight
    bridge = TransformerBridge.boot_transformers(
        "SmolLM2-135M-Instruct", hf_model=with_output_layer, tokenizer=watched.tokenizer
    )

    def run(length: int) -> Statistics:
        _, cache = bridge.run_with_cache(
            watched.tokens[None, :length],
            names_filter=lambda name: name.endswith(("attn.hook_pattern", "attn.hook_z")),
            use_cache=False,
            logits_to_keep=1,
        )
        weights, out = (
            [cache[f"blocks.{number}.attn.hook_{name}"] for number in range(len(base_model.layers))]
            for name in ("pattern", "z")
        )
        return _statistics_of_matrices(watched, length, [layer[0] for layer in weights], out)

    return run


METHODS: dict[str, Callable[[WatchedModel], Method]] = {
    PLAIN: without_statistics,
    OURS: by_watch,
    EAGER: by_output_attentions,
    BERTVIZ: by_bertviz,
    LENS: by_transformer_lens,
}


def exact(watched: WatchedModel, length: int) -> Statistics:
    """Return the statistics in float64, from the weights of eager attention."""
    weights, out = _matrices(watched, length)
    text = watched.text(length)
    by_layer = []
    for layer, returned, written in zip(weights, out, watched.written, strict=True):
        by_head = returned[0].double().unflatten(-1, (layer.shape[1], -1)).transpose(0, 1)
        by_layer.append(weight_statistics.statistics(layer[0].double(), by_head, text, written.double()))
    return weight_statistics.of_layers(by_layer)


def checked_methods(
    watched: WatchedModel, names: Sequence[str], length: int
) -> tuple[dict[str, Method], dict[str, str]]:
    """Return the named methods whose statistics are correct, and the reasons why others are left out. Exit with a
    message if those of headwise are wrong.
    """
    methods, left_out, expected = {}, {}, exact(watched, length)
    for name in names:
        try:
            method = METHODS[name](watched)
            if name != PLAIN:
                weight_statistics.check(method(length), expected)
        except WrongError as reason:
            if name == OURS:
                raise SystemExit(f"watched, {length} tokens: {reason}") from reason
            left_out[name] = str(reason)
        except LeftOutError as reason:
            left_out[name] = str(reason)
        else:
            methods[name] = method
    for name, reason in left_out.items():
        print(f"LEFT OUT  {name}: {reason}", flush=True)
    return methods, left_out
