"""`localize`: finds key/value heads that need only the first tokens and a window, by the loss on a data set.

Heads are ranked by an estimate (`WindowEffects`). Then the number of streaming heads is chosen by bisection: each step
restricts the heads with the lowest scores, and measures the loss.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.losses import (
    Loss,
    finite_loss_per_example,
    next_token_loss,
    require_loss,
    require_some_loss,
)
from headwise.checks import finite_number, flag, require_module, whole_number
from headwise.compression.calibration.scored_heads import calibration_batches, scored_heads
from headwise.compression.streaming.attention_calls import AttentionCall, answered, without_compiled_code
from headwise.compression.streaming.localized_module import LocalizedModule
from headwise.compression.streaming.streaming_attention import restricted
from headwise.compression.streaming.streaming_cache import streaming_cache
from headwise.compression.streaming.streaming_heads import StreamingHeads
from headwise.compression.streaming.text_division import Batch, divided
from headwise.compression.streaming.weight_samples import weight_samples
from headwise.compression.streaming.window_effects import measure_effects
from headwise.data.batches import documents_of, evaluation_mode
from headwise.errors import InputError, require
from headwise.progress import progress_bar, shown_progress
from headwise.runs.fingerprint import identity_of


def localize(
    model: nn.Module, dataset: Any, budget: float = 0.01, *, window: int = 512, first: int = 4,
    loss: Loss = next_token_loss, progress: bool = False,
) -> StreamingHeads:  # fmt: skip
    """Find the key/value heads of a decoder that need only the first tokens and a window of recent ones: streaming
    heads (Xiao et al. 2024, StreamingLLM, arXiv:2309.17453; Xiao et al. 2024, DuoAttention, arXiv:2410.10819). As many
    become streaming heads as the budget allows. The model is not changed.

    The heads are ranked by gradients of the loss, in one run forwards and backwards. Their number is chosen by the
    measured loss, in at most `log2(key/value heads) + 2` runs. Every second document of `Texts` (otherwise every second
    batch or, of a single batch, every second text) is used for both; the loss of the result is measured on the others.
    Equal texts count as one. If there is one document or text only, it is used for everything.

    Layers with a sliding window of the model's own, as in Gemma 3, keep their heads unchanged.

    Args:
        model: a decoder of `transformers` with the attention implementation "sdpa" or "eager".
        dataset: `Texts`, or batches with `input_ids` and, with padding, `attention_mask`. The texts should be as long
            as those that the model will read.
        budget: largest relative rise of the loss on the texts by which the heads are chosen: 0.01 is 1 %.
        window: number of tokens of the window, up to the query's own, which is among them.
        first: number of first tokens that streaming heads also attend to (attention sinks).
        loss: function of model and batch that returns one positive number for each text.
        progress: show progress bars on standard error.

    Returns:
        The streaming heads, with measured losses. Run them by `running` and `cache`.

    Raises:
        InputError: an argument cannot be used; the texts are not longer than the window; the model is no decoder, all
            its layers have sliding windows, or its attention or its cache cannot be restricted.

    Example:
        >>> streaming = headwise.localize(model, texts, budget=0.01, window=512)  # doctest: +SKIP
        >>> with streaming.running(model):  # doctest: +SKIP
        ...     model.generate(**inputs, past_key_values=streaming.cache(model))
    """
    _require_decoder(model)
    finite_number("budget", budget, above=0.0)
    window, first = whole_number("window", window, least=1), whole_number("first", first, least=0)
    require_loss(loss)
    with evaluation_mode(model), without_compiled_code(), shown_progress(flag("progress", progress)):
        batches = calibration_batches(model, dataset)
        _require_token_ids(batches)
        modules = _attention_modules(model, batches[0])
        selection, report = divided(batches, documents_of(dataset), window + first)
        modules = _scored(model, modules, window, first, selection, loss)
        with torch.no_grad():
            measured = partial(_mean_loss, model, window=window, first=first, loss=loss)
            modules, selection_losses = _within_budget(modules, budget, partial(measured, selection))
            losses = selection_losses
            if report is not selection:
                losses = measured(report, ()), measured(report, modules)
    return StreamingHeads(
        modules, window, first, float(budget), selection_losses, losses, _count(selection), _count(report),
        has_held_out=report is not selection, identity=identity_of(model),
        weights=weight_samples(model, [module.module for module in modules]),
    )  # fmt: skip


def _count(batches: Sequence[Batch]) -> int:
    """Return the number of texts."""
    return sum(len(batch["input_ids"]) for batch in batches)


def _scored(
    model: nn.Module, modules: Sequence[LocalizedModule], window: int, first: int, batches: Sequence[Batch], loss: Loss
) -> tuple[LocalizedModule, ...]:
    """Return attention modules with the shares and scores of their heads, except for layers with a window."""
    candidates = [module for module in modules if module.own_window is None]
    effects = measure_effects(model, candidates, window, first, batches, loss)
    scored = list(modules)
    for index, module in enumerate(modules):
        if module.module in effects:
            measured = effects[module.module]
            outside, scores = measured.outside / measured.queries, measured.scores
            scored[index] = replace(module, outside=tuple(outside.tolist()), scores=tuple(scores.tolist()))
    return tuple(scored)


def _require_decoder(model: Any) -> None:
    """Raise `InputError` unless a model is one of `transformers` without a separate encoder."""
    config = getattr(require_module(model), "config", None)
    if not hasattr(config, "get_text_config") or getattr(config, "is_encoder_decoder", False):
        raise InputError("model", expected="a decoder of transformers", got=type(model).__name__)


def _require_token_ids(batches: Sequence[Batch]) -> None:
    """Raise `InputError` unless all batches have token ids, and masks of tokens only."""
    for batch in batches:
        ids = batch.get("input_ids")
        if not isinstance(ids, Tensor) or ids.ndim != 2:
            raise InputError("dataset", expected="batches with input_ids (batch, tokens)", got=", ".join(batch))
        mask = batch.get("attention_mask")
        if mask is not None and mask.shape != ids.shape:
            expected = f"attention_mask of the shape of input_ids, {tuple(ids.shape)}"
            raise InputError("dataset", expected=expected, got=tuple(mask.shape))


def _attention_modules(model: Any, batch: Batch) -> tuple[LocalizedModule, ...]:
    """Return the attention modules of a decoder, all of whose heads attend to all tokens, or to the model's own window.

    Raises:
        InputError: the model has no causal attention, has no layer without a window, or cannot run with a cache of
            streaming heads.
    """
    cache = require("transformers", purpose="a cache", extra="hf").DynamicCache(config=model.config)
    short = {"input_ids": batch["input_ids"][:1, :4], "use_cache": False}
    rows = scored_heads(model, short)
    if any(row.kind != "self" for row in rows):
        raise InputError("model", expected="a decoder without cross-attention", got=type(model).__name__)
    sizes: dict[str, LocalizedModule] = {}

    def read(call: AttentionCall) -> Tensor:
        call.require_known_implementation()
        if call.sees_later_keys:
            got = f"{type(model).__name__} with bidirectional attention in {call.path}"
            raise InputError("model", expected="a decoder with causal attention", got=got)
        heads, kv_heads = call.q.shape[1], call.k.shape[1]
        features, dtype = call.k.shape[3] + call.v.shape[3], str(call.k.dtype).removeprefix("torch.")
        own_window = _own_window(call.path, call.module, cache.layers)
        layer: Any = call.module.layer_idx
        sizes[call.path] = LocalizedModule(layer, call.path, heads, kv_heads, features, dtype, own_window)
        return call.dense()

    paths = list(dict.fromkeys(row.module for row in rows))
    handlers: Mapping[str, Callable[[AttentionCall], Tensor]] = dict.fromkeys(paths, read)
    with torch.no_grad(), answered(model, handlers, reads_windows=True):
        model(**short)
    modules = tuple(sizes[path] for path in paths)
    if len({module.layer for module in modules}) < len(modules):
        raise InputError("model", expected="one attention module in each layer", got=type(model).__name__)
    if all(module.own_window is not None for module in modules):
        raise InputError("model", expected="a layer without a sliding window", got=type(model).__name__)
    _require_cache(model, modules, batch)
    return modules


def _own_window(path: str, module: Any, layers: Sequence[Any]) -> int | None:
    """Return the sliding window of a layer of the model's own; None if the layer caches all tokens.

    Raises:
        InputError: the module does not state its layer, or the layer has another kind of cache.
    """
    library = require("transformers.cache_utils", purpose="a cache", extra="hf")
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int) or index >= len(layers):
        raise InputError("model", expected=f"the number of the layer as layer_idx of {path}", got=index)
    layer = layers[index]
    if type(layer) is library.DynamicLayer:
        return None
    if type(layer) is library.DynamicSlidingWindowLayer:
        return int(layer.sliding_window)
    raise InputError("model", expected=f"a cache of keys and values for {path}", got=type(layer).__name__)


def _require_cache(model: Any, modules: Sequence[LocalizedModule], batch: Batch) -> None:
    """Raise `InputError` if a model cannot run with a cache of streaming heads."""
    streaming = tuple(
        replace(module, streaming=() if module.own_window else tuple(range(module.num_kv_heads))) for module in modules
    )
    cache = streaming_cache(model, streaming, 1, 1)
    with torch.no_grad(), restricted(model, streaming, 1, 1):
        model(input_ids=batch["input_ids"][:1, :2], past_key_values=cache, use_cache=True)
    if any(cache.get_seq_length(module.layer) != 2 for module in modules):
        raise InputError("model", expected="one that uses past_key_values", got=type(model).__name__)


def _mean_loss(
    model: nn.Module, batches: Sequence[Batch], modules: Sequence[LocalizedModule], *, window: int, first: int,
    loss: Loss,
) -> float:  # fmt: skip
    """Return the mean loss of a model over texts, with the streaming heads of some modules."""
    with restricted(model, tuple(modules), window, first), progress_bar("loss", len(batches), "batches") as bar:
        losses = [finite_loss_per_example(loss, model, batch) for batch in bar.track(batches, step=1)]
    values = torch.cat(losses).double()
    values = values[~values.isnan()]
    require_some_loss(len(values))
    return float(values.mean())


def _within_budget(
    modules: tuple[LocalizedModule, ...], budget: float, measure: Callable[[Sequence[LocalizedModule]], float]
) -> tuple[tuple[LocalizedModule, ...], tuple[float, float]]:
    """Return modules with the largest number of streaming heads, by bisection, whose loss is within the budget, and the
    losses before and after.
    """
    order = sorted((score, module.layer, head) for module in modules for head, score in enumerate(module.scores))
    before = measure(())
    if not before > 0:
        raise InputError("loss", expected="a positive number, whose relative rise is limited", got=before)
    best, after, above = 0, before, len(order) + 1
    while above - best > 1:
        count = (best + above) // 2 if above <= len(order) or best else len(order)
        loss = measure(_with_streaming(modules, order[:count]))
        if loss <= before * (1 + budget):
            best, after = count, loss
        else:
            above = count
    return _with_streaming(modules, order[:best]), (before, after)


def _with_streaming(
    modules: Sequence[LocalizedModule], heads: Sequence[tuple[float, int, int]]
) -> tuple[LocalizedModule, ...]:
    """Return modules with these streaming heads, listed as score, layer and number."""
    chosen = {(layer, head) for _, layer, head in heads}
    return tuple(
        replace(module, streaming=tuple(head for head in range(module.num_kv_heads) if (module.layer, head) in chosen))
        for module in modules
    )
