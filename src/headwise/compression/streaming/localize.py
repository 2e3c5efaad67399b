"""`localize`: finds key/value heads that need only the first tokens and a window, by the loss on a data set.

Heads are ranked by an estimate (`WindowEffects`). Then the number of streaming heads is chosen by bisection: each step
restricts the heads with the lowest scores, and measures the loss.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from headwise.analysis.losses import (
    Loss,
    finite_loss_per_example,
    loss_per_example,
    next_token_loss,
    require_loss,
    require_some_loss,
)
from headwise.attention.masks.factories import causal
from headwise.checks import finite_number, flag, require_module, whole_number
from headwise.compression.calibration.calibration_data import calibration_batches, scored_heads
from headwise.compression.calibration.reconstruction import layer_of_site
from headwise.compression.streaming.streaming_attention import (
    HeadKeys,
    LocalizedModule,
    PositionReader,
    attend_to,
    require_followed,
    restricted,
    streaming_mask,
)
from headwise.compression.streaming.streaming_cache import streaming_cache
from headwise.compression.streaming.streaming_heads import StreamingHeads, weight_samples
from headwise.data.batches import documents_of, evaluation_mode, frozen_parameters, relative_difference, select_examples
from headwise.errors import InputError, require
from headwise.intercept.adapters.transformers_attention import HFCall, ModuleAttention, computing, without_compiled_code
from headwise.intercept.module_calls import swap_forward
from headwise.progress import progress_bar, shown_progress
from headwise.runs.fingerprint import identity_of
from headwise.shapes import Float

Batch = dict[str, Any]


def localize(
    model: nn.Module, dataset: Any, budget: float = 0.01, *, window: int = 512, first: int = 4,
    loss: Loss = next_token_loss, progress: bool = False,
) -> StreamingHeads:  # fmt: skip
    """Find streaming heads of a decoder: key/value heads that need to attend only to the first tokens and a window of
    recent ones (Xiao et al. 2024, StreamingLLM, arXiv:2309.17453; Xiao et al. 2024, DuoAttention, arXiv:2410.10819). As
    many heads are chosen as possible while the loss rises by at most the share `budget` (0.01 is 1 %). The model is not
    changed.

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
    config = getattr(require_module(model), "config", None)
    if not hasattr(config, "get_text_config") or getattr(config, "is_encoder_decoder", False):
        raise InputError("model", expected="a decoder of transformers", got=type(model).__name__)
    finite_number("budget", budget, above=0.0)
    window, first = whole_number("window", window, least=1), whole_number("first", first, least=0)
    require_loss(loss)
    with evaluation_mode(model), without_compiled_code(), shown_progress(flag("progress", progress)):
        batches = calibration_batches(model, dataset)
        for batch in batches:
            ids, mask = batch.get("input_ids"), batch.get("attention_mask")
            if not isinstance(ids, Tensor) or ids.ndim != 2:
                raise InputError("dataset", expected="batches with input_ids (batch, tokens)", got=", ".join(batch))
            if mask is not None and mask.shape != ids.shape:
                expected = f"attention_mask of the shape of input_ids, {tuple(ids.shape)}"
                raise InputError("dataset", expected=expected, got=tuple(mask.shape))
        modules = _attention_modules(model, batches[0])
        selection, report = divided(batches, documents_of(dataset), window + first)
        candidates = [module for module in modules if module.own_window is None]
        effects = measure_effects(model, candidates, window, first, selection, loss)
        modules = tuple(
            replace(
                module,
                outside=tuple((effect.outside / effect.queries).tolist()),
                scores=tuple(effect.scores.tolist()),
            )
            if (effect := effects.get(module.module))
            else module
            for module in modules
        )
        with torch.no_grad():

            def measured(part: Sequence[Batch], restricted_modules: Sequence[LocalizedModule]) -> float:
                """Return the mean loss over the texts in `part` while the streaming heads of the modules are restricted
                to the first tokens and the window.
                """
                shown_bar = progress_bar("loss", len(part), "batches")
                with restricted(model, tuple(restricted_modules), window, first), shown_bar as bar:
                    of_batches = [finite_loss_per_example(loss, model, batch) for batch in bar.track(part, step=1)]
                values = torch.cat(of_batches).double()
                values = values[~values.isnan()]
                require_some_loss(len(values))
                return float(values.mean())

            modules, selection_losses = _within_budget(modules, budget, partial(measured, selection))
            losses = selection_losses
            if report is not selection:
                losses = measured(report, ()), measured(report, modules)
    chosen_by, measured_on = (sum(len(batch["input_ids"]) for batch in part) for part in (selection, report))
    return StreamingHeads(
        modules, window, first, float(budget), selection_losses, losses, chosen_by, measured_on,
        has_held_out=report is not selection, identity=identity_of(model),
        weights=weight_samples(model, [module.module for module in modules]),
    )  # fmt: skip


def _attention_modules(model: Any, batch: Batch) -> tuple[LocalizedModule, ...]:
    """Return a description of each self-attention module of a decoder, from runs on a few tokens of a batch. Raise
    `InputError` if the attention or cache of the model cannot be restricted to streaming heads.
    """
    cache = require("transformers", purpose="a cache", extra="hf").DynamicCache(config=model.config)
    short = {"input_ids": batch["input_ids"][:1, :4], "use_cache": False}
    rows = scored_heads(model, short)
    if any(row.kind != "self" for row in rows):
        raise InputError("model", expected="a decoder without cross-attention", got=type(model).__name__)
    readers = [
        _ModuleReader(path, cache.layers, type(model).__name__) for path in dict.fromkeys(row.module for row in rows)
    ]
    with torch.no_grad(), computing(model, readers):
        model(**short)
    modules = tuple(reader.found for reader in readers)
    if len({module.layer for module in modules}) < len(modules):
        raise InputError("model", expected="one attention module in each layer", got=type(model).__name__)
    if all(module.own_window is not None for module in modules):
        raise InputError("model", expected="a layer without a sliding window", got=type(model).__name__)
    streaming = tuple(
        replace(module, streaming=() if module.own_window else tuple(range(module.num_kv_heads))) for module in modules
    )
    cache = streaming_cache(model, streaming, 1, 1)
    with torch.no_grad(), restricted(model, streaming, 1, 1):
        model(input_ids=batch["input_ids"][:1, :2], past_key_values=cache, use_cache=True)
    if any(cache.get_seq_length(module.layer) != 2 for module in modules):
        raise InputError("model", expected="one that uses past_key_values", got=type(model).__name__)
    return modules


class _ModuleReader(ModuleAttention):
    """Interceptor of one attention module that leaves attention unchanged, and stores the module's location and sizes
    in `found`.

    Attributes:
        found: the module.
    """

    found: LocalizedModule

    def __init__(self, path: str, layers: Sequence[Any], model: str) -> None:
        super().__init__(path)
        self._layers, self._model = layers, model

    def compute(self, call: HFCall) -> Tensor:
        """Store the sizes of the attention module in the attribute `found`, and return the unchanged attention output.
        Raise `InputError` if attention is not causal, or if keys and values are not cached.
        """
        call.require_readable()
        if _sees_later_keys(call):
            got = f"{self._model} with bidirectional attention in {self.path}"
            raise InputError("model", expected="a decoder with causal attention", got=got)
        layer: Any = getattr(call.module, "layer_idx", None)
        if not isinstance(layer, int) or layer >= len(self._layers):
            raise InputError("model", expected=f"the number of the layer as layer_idx of {self.path}", got=layer)
        library, cached = require("transformers.cache_utils", purpose="a cache", extra="hf"), self._layers[layer]
        if type(cached) not in (library.DynamicLayer, library.DynamicSlidingWindowLayer):
            expected = f"a cache of keys and values for {self.path}"
            raise InputError("model", expected=expected, got=type(cached).__name__)
        sizes = call.q.shape[1], call.k.shape[1], call.k.shape[3] + call.v.shape[3]
        dtype = str(call.k.dtype).removeprefix("torch.")
        window = None if type(cached) is library.DynamicLayer else int(cached.sliding_window)
        self.found = LocalizedModule(layer, self.path, *sizes, dtype, window)
        out: Tensor = call.run()[0]
        return out


def _sees_later_keys(call: HFCall) -> bool:
    """Return True if the first query attends to the last of several keys, so that attention is not causal."""
    if call.q.shape[2] == 1:
        return False
    if call.passed_mask is None:
        return not call.is_causal
    first_row = call.passed_mask[..., 0, -1]
    is_visible = first_row if first_row.dtype == torch.bool else first_row > torch.finfo(first_row.dtype).min / 2
    return bool(is_visible.any())


def _within_budget(
    modules: tuple[LocalizedModule, ...], budget: float, measure: Callable[[Sequence[LocalizedModule]], float]
) -> tuple[tuple[LocalizedModule, ...], tuple[float, float]]:
    """Find the largest number of streaming heads whose loss exceeds that of the unchanged model by at most the relative
    `budget`, by bisection. Heads with low scores are chosen first. Return the modules with these heads, and the losses
    without and with them.
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
    """Return copies of the modules whose streaming heads are exactly those in `heads`, each stated as score, layer and
    number of the key/value head.
    """
    chosen = {(layer, head) for _, layer, head in heads}
    return tuple(
        replace(module, streaming=tuple(head for head in range(module.num_kv_heads) if (module.layer, head) in chosen))
        for module in modules
    )


def divided(batches: Sequence[Batch], documents: Sequence[int] | None, tokens: int) -> tuple[list[Batch], list[Batch]]:
    """Divide texts into two parts: batches by which streaming heads are chosen, and batches on which their loss is
    reported. Raise `InputError` unless each part has a text with more than `tokens` tokens.

    The texts of every second document are for the choice. If the documents are None, each batch counts as a document
    or, of a single batch, each text. Equal texts count as texts of one document. If there is one document only, both
    parts are the same.
    """
    if documents is None:
        documents = [number for number, batch in enumerate(batches) for _ in batch["input_ids"]]
        documents = documents if len(batches) > 1 else list(range(len(documents)))
    first_with: dict[tuple[int, ...], int] = {}
    documents = [
        first_with.setdefault(text, document) for text, document in zip(_texts(batches), documents, strict=True)
    ]
    ranks = {document: rank for rank, document in enumerate(sorted(set(documents)))}
    halves = torch.tensor([ranks[document] % 2 for document in documents])
    of_batches = torch.split(halves, [len(batch["input_ids"]) for batch in batches])
    selection, report = (
        [
            select_examples(batch, own == half)
            for batch, own in zip(batches, of_batches, strict=True)
            if (own == half).any()
        ]
        for half in (0, 1)
    )
    report = report or selection
    for part in (selection, report):
        longest = max(
            int(batch["attention_mask"].sum(1).max()) if "attention_mask" in batch else batch["input_ids"].shape[1]
            for batch in part
        )
        if longest <= tokens:
            expected = f"texts of more than {tokens} tokens, the window and the first tokens"
            raise InputError("dataset", expected=expected, got=f"at most {longest}", remedy="choose a smaller window")
    return selection, report


def _texts(batches: Sequence[Batch]) -> Iterator[tuple[int, ...]]:
    """Yield the token ids of each text in the batches, without padding."""
    for batch in batches:
        ids = batch["input_ids"]
        is_real = batch.get("attention_mask", torch.ones_like(ids)).bool()
        for row, real in zip(ids, is_real, strict=True):
            yield tuple(row[real].tolist())


class WindowEffects(ModuleAttention):
    """Interceptor of one attention module that computes attention unchanged. It estimates, for each key/value head, how
    the loss would change if the head attended only to the first tokens and a window of recent ones.

    With g_t the derivative of the loss with respect to the outputs of the query heads at token t, and e_t the change of
    these outputs if the head sees only its window, the score is the sum of `(g_t . e_t)^2` over all tokens. This is the
    change of the loss to second order with the empirical Fisher matrix, without its terms between tokens.

    Attributes:
        is_recomputed: True while a backward pass computes layers again, of which nothing is measured.
        outside: sum of the shares of attention outside of the window, for each key/value head.
        queries: number of queries and query heads in each sum.
        scores: score of each key/value head.
    """

    def __init__(self, module: LocalizedModule, width: int, first: int, reader: PositionReader) -> None:
        super().__init__(module.module)
        self._module, self._width, self._first, self._reader = module, width, first, reader
        self.outside = torch.zeros(module.num_kv_heads, dtype=torch.float64)
        self.scores = torch.zeros(module.num_kv_heads, dtype=torch.float64)
        self.queries = 0
        self.is_recomputed = False

    def compute(self, call: HFCall) -> Tensor:
        """Return the unchanged attention output. Register a hook for the backward pass, which adds the effects of this
        call to the scores.
        """
        require_followed(call, self.path)
        out: Tensor = call.run()[0]
        if not out.requires_grad:
            out = out.detach().requires_grad_()
        if self.is_recomputed:
            return out
        change, share, counts = self._change(call, out)

        def add(gradient: Tensor) -> None:
            effects = (gradient.transpose(1, 2).double() * change.double()).sum(-1).where(counts[:, None], 0.0)
            self.scores += _by_kv_head(effects, self._module).square().sum((0, 2)).cpu()
            self.outside += share
            self.queries += int(counts.sum()) * self._module.num_heads // self._module.num_kv_heads

        out.register_hook(add)  # type: ignore[no-untyped-call]
        return out

    @torch.no_grad()
    def _change(self, call: HFCall, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compare full attention with attention to the first tokens and the window. Return the change of head outputs
        `(batch, heads, queries, value_dim)` and, for each key/value head, the sum of the attention weights on all other
        tokens. Also return a mask `(batch, queries)`, True for queries that have such other tokens.
        """
        batch, _, queries, _ = call.q.shape
        positions = self._reader.read(self.path, call).positions
        keys = HeadKeys(call.k.detach(), call.v.detach(), positions, False)
        (dense, dense_lse), (streaming, lse) = (
            attend_to(keys, call, slice(None), mask, return_lse=True)
            for mask in (causal(), streaming_mask(self._width, self._first))
        )
        own = torch.arange(queries, device=call.q.device).expand(batch, -1) if positions is None else positions
        computed = out.detach().transpose(1, 2)
        error = relative_difference(dense.where((own >= 0)[:, None, :, None], computed), computed)
        precision = torch.finfo(out.dtype).eps
        if call.implementation == "eager":  # which computes the softmax in float32 in many models, whatever their dtype
            precision = max(precision, torch.finfo(torch.float32).eps)
        if not error <= precision**0.5:
            expected = f"softmax attention with the options of its call in {self.path}"
            raise InputError("model", expected=expected, got=f"another output, by {error:.2g} of its largest number")
        counts = own >= self._width + self._first
        shares = 1.0 - (lse.double() - dense_lse.double()).exp()
        share = _by_kv_head(shares.where(counts[:, None], 0.0), self._module).sum((0, 2)).cpu()
        return streaming - dense, share, counts


def _by_kv_head(values: Tensor, module: LocalizedModule) -> Float[Tensor, "batch kv_heads queries"]:
    """Return values `(batch, heads, queries)`, summed over the query heads that share each key/value head."""
    batch, _, queries = values.shape
    return values.reshape(batch, module.num_kv_heads, -1, queries).sum(2)


def measure_effects(
    model: nn.Module, modules: Sequence[LocalizedModule], width: int, first: int, batches: Sequence[dict[str, Any]],
    loss: Loss,
) -> dict[str, WindowEffects]:  # fmt: skip
    """Run a model forwards and backwards on batches. Return, by module path, the measured effects of restricting each
    key/value head to the first tokens and a window of `width` tokens.
    """
    reader = PositionReader()
    effects = {module.module: WindowEffects(module, width, first, reader) for module in modules}
    bar = progress_bar("window effects", len(batches), "batches")
    with frozen_parameters(model), torch.enable_grad(), computing(model, effects.values()), bar as progress:
        for batch in progress.track(batches, step=1):
            with _checkpointed(model, list(effects)):
                losses = loss_per_example(loss, model, batch)
                if not losses.requires_grad:
                    expected = "a differentiable function of the model's output"
                    raise InputError("loss", expected=expected, got="a loss without a gradient")
                for each in effects.values():
                    each.is_recomputed = True
                losses.nansum().backward()  # type: ignore[no-untyped-call]
                for each in effects.values():
                    each.is_recomputed = False
    return effects


@contextmanager
def _checkpointed(model: nn.Module, sites: Sequence[str]) -> Iterator[None]:
    """While the context is open, the layers that contain the modules at `sites` use activation checkpointing: they
    store only their inputs, and are computed again in the backward pass (Chen et al. 2016, arXiv:1604.06174).
    """
    modules: Mapping[str, nn.Module] = dict(model.named_modules())
    with ExitStack() as stack:
        for path in dict.fromkeys(layer_of_site(modules, site, sites) for site in sites):
            layer = modules[path]

            def forward(*args: Any, _forward: Any = layer.forward, **kwargs: Any) -> Any:
                return checkpoint.checkpoint(_forward, *args, use_reentrant=False, **kwargs)

            stack.enter_context(swap_forward(layer, forward))
        yield
