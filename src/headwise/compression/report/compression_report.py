"""`compression_report`: a dense model and a compressed one, compared in size, time, loss and generated text."""

import math
import warnings
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from copy import deepcopy
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.analysis.causality import require_causal
from headwise.analysis.losses import (
    Loss,
    finite_loss_per_example,
    name_of_loss,
    next_token_loss,
    prepare_loss,
    require_loss,
    require_some_loss,
)
from headwise.checks import collection_of, require_module, whole_number
from headwise.compression.parameter_counts import count_parameters, weight_bytes
from headwise.compression.report.report_data import (
    ModelPair,
    ReportData,
    cache_sizes,
    decode,
    has_examples_first,
    why_not_decoded,
)
from headwise.compression.report.report_result import CompressionReport, ReportRow
from headwise.compression.report.times import LEAST_ROUNDS, time_rows
from headwise.data.batches import (
    call_model,
    copied,
    count_sequences_and_tokens,
    device_of,
    evaluation_mode,
    name_of_mask,
)
from headwise.data.texts import Texts
from headwise.data.tokenization import max_input_tokens
from headwise.errors import InputError, require
from headwise.families.registry import head_module
from headwise.intercept.layer_index import is_inside
from headwise.intercept.survey import survey
from headwise.runs.data_pass import prepare_texts
from headwise.runs.fingerprint import run_settings
from headwise.shapes import Float, Int

MOST_PROMPTS = 32
"""Largest number of prompts of which the continuations are compared."""

LARGEST_BATCH = 8
"""Largest number of prompts that are continued at once."""


def compression_report(
    dense: nn.Module,
    compressed: nn.Module,
    dataset: Texts | Iterable[Any],
    *,
    loss: Loss | None = next_token_loss,
    prompt: int = 128,
    new_tokens: int = 32,
    batches: Sequence[int] = (1, 8),
    rounds: int = 12,
    tokenizer: Any = None,
) -> CompressionReport:
    """Compare a compressed model with its dense original on held-out data: sizes, times, losses, and the agreement of
    generated text.

    Each time is measured in rounds, in which the two models run in turns. The report has the median time of each model
    over the rounds, and the median over the rounds of the ratio of their times. Standard errors of losses and agreement
    are clustered by document. The notes of the report name what cannot be measured. If the interval of the ratio of a
    time is not below 1, a warning and the report name the row.

    Args:
        dense: the model before the compression.
        compressed: the model after the compression, on the same device.
        dataset: held-out data: `Texts`, or an iterable of batches, each a tensor or a mapping of the models' arguments.
            Only `Texts` state documents; otherwise each example counts as a document.
        loss: function `(model, batch) -> (batch,)`; None to compare the outputs by their cosine.
        prompt: number of tokens of the prompts that are timed, and of the prompts that generated text continues.
        new_tokens: number of tokens that are decoded after a prompt, at least 2. The bytes of the cache per token are
            measured on these tokens.
        batches: numbers of sequences in a batch for the times.
        rounds: number of paired runs for each time, at least 6.
        tokenizer: the models' tokenizer, which limits the number of tokens and states the token that ends a text; by
            default that of `Texts`.

    Raises:
        InputError: an argument cannot be used, or the loss has no meaning for the model.
        MissingExtra: pandas or scipy is not installed.

    Example:
        >>> print(headwise.compression_report(model, smaller, held_out))  # doctest: +SKIP
    """
    models = (require_module(dense), require_module(compressed))
    require("scipy.stats", purpose="a compression report", extra="tables")
    if device_of(dense) != device_of(compressed):
        raise InputError("compressed", expected=f"a model on {device_of(dense)}", got=str(device_of(compressed)))
    if loss is not None:
        require_loss(loss)
    prompt, new_tokens = whole_number("prompt", prompt, least=1), whole_number("new_tokens", new_tokens, least=2)
    numbers = collection_of("batches", batches, of="numbers")
    sizes = list(dict.fromkeys(whole_number("batches", size, least=1) for size in numbers))
    rounds = whole_number("rounds", rounds, least=LEAST_ROUNDS)
    dataset = prepare_texts(dataset, dense, None, shown=False)
    data = ReportData.of(dataset, device_of(dense))
    texts = dataset if isinstance(dataset, Texts) else None
    tokenizer = texts.tokenizer if tokenizer is None and texts is not None else tokenizer
    with evaluation_mode(dense), evaluation_mode(compressed), torch.no_grad():
        parts = _Parts(models, data, prompt, new_tokens, tokenizer)
        quality = [*parts.losses(loss), *parts.agreement()]  # first, because an unsuitable loss ends the report
        rows = (*parts.sizes(), *parts.caches(), *parts.times(sizes, rounds), *quality)
    name = None if loss is None else name_of_loss(loss)
    settings = {"loss": name, "prompt": prompt, "new_tokens": new_tokens, "batches": sizes, "rounds": rounds}
    of_dense, of_compressed = (run_settings(model, texts, None, **settings) for model in models)
    metadata = {
        "dense": of_dense["model"],
        "compressed": of_compressed["model"],
        "data": of_dense["data"],
        "examples": len(data.documents),
        "documents": len(set(data.documents)),
        "threads": torch.get_num_threads(),
        "versions": of_dense["versions"],
        "settings": of_dense["settings"],
    }
    report = CompressionReport(rows, tuple(parts.notes), metadata)
    if report.warnings:
        warnings.warn("; ".join(report.warnings), stacklevel=2)
    return report


class _Parts:
    """Builder of the rows of a report that compares a dense and a compressed model, with notes about quantities that
    cannot be measured.
    """

    def __init__(self, models: ModelPair, data: ReportData, prompt: int, new_tokens: int, tokenizer: Any) -> None:
        self.notes: list[str] = []
        self._models, self._data, self._prompt, self._new = models, data, prompt, new_tokens
        self._tokenizer = tokenizer
        ids = data.sequences[0][:1] if data.sequences else None
        reasons = [reason for model in models if (reason := why_not_decoded(model, ids)) is not None]
        self._decodes = not reasons
        if reasons:
            self.notes.append(f"no cache bytes, no times of decoding and no agreement of generated text: {reasons[0]}")
        if data.sequences:
            tokens = prompt + (new_tokens if self._decodes else 0)
            for model in models:
                limit = max_input_tokens(
                    model, SimpleNamespace(model_max_length=None) if tokenizer is None else tokenizer
                )
                if limit is not None and tokens > limit:
                    got = f"{prompt}, with new tokens {tokens}" if self._decodes else prompt
                    raise InputError("prompt", expected=f"at most {limit} tokens, the model's limit", got=got)
        self._paths = self._attention_paths()
        if not data.knows_documents:
            self.notes.append("the data do not state documents: each example counts as one")

    def _attention_paths(self) -> list[list[str]]:
        """Return two lists of module paths, one for the dense and one for the compressed model. Each list has the
        modules that compute attention, and their output projections if these are elsewhere, as in BERT. No listed
        module contains another listed one. If the attention of some modules cannot be observed, in either model, add a
        note to the report and return two empty lists: the report then has no parameters and times of attention.
        """
        batch = self._data.call_inputs(1, self._prompt) if self._data.sequences else self._data.batches[0]
        paths_of_models = []
        for name, model in zip(("dense", "compressed"), self._models, strict=True):
            reason: str | None = None
            paths: set[str] = set()
            try:
                registry = survey(model, lambda model=model: call_model(model, copied(batch)))  # type: ignore[misc]
            except InputError as error:
                reason = str(error)
            else:
                paths = {record.site.path for record in registry.records}
                if registry.unread:
                    reason = f"that of {', '.join(sorted(registry.unread))} in the {name} model cannot be seen"
            if reason is not None:
                self.notes.append(f"no parameters and times of attention: {reason}")
                return [[], []]
            for path in tuple(paths):
                with suppress(InputError):  # a family of which no heads can be removed
                    paths.add(head_module(model, path).output)
            outermost = {path for path in paths if not any(is_inside(path, other) for other in paths)}
            paths_of_models.append([path for path, _ in model.named_modules() if path in outermost])
        return paths_of_models

    def sizes(self) -> list[ReportRow]:
        """Return the report rows of three sizes: the number of parameters of the model, the number of parameters of its
        attention modules, and the bytes of all weights.
        """
        rows = [ReportRow.of_sizes("parameters", "parameters", *map(count_parameters, self._models))]
        if all(self._paths):
            counts = [count_parameters(model, paths) for model, paths in zip(self._models, self._paths, strict=True)]
            rows.append(ReportRow.of_sizes("parameters in attention", "parameters", *counts))
        return [*rows, ReportRow.of_sizes("weights", "bytes", *map(weight_bytes, self._models))]

    def caches(self) -> list[ReportRow]:
        """Return the report rows of the bytes of key/value caches, measured after decoding. If the cache of each model
        grows by a constant number of bytes per token, there is also a row of the bytes per token.
        """
        if not self._decodes:
            return []
        middle = self._prompt + self._new // 2
        lengths = self._prompt, middle, self._prompt + self._new
        ids = self._data.tokens(1, lengths[-1])
        measured = [cache_sizes(model, ids, lengths) for model in self._models]
        rows, per_token = [], []
        for name, (first, second, last) in zip(("dense", "compressed"), measured, strict=True):
            growth = (last - first) / self._new
            is_even = (second - first) * self._new == (last - first) * (middle - lengths[0])
            per_token.append(growth if is_even and growth > 0 else None)
            if per_token[-1] is None:
                self.notes.append(
                    f"no cache bytes per token: the cache of the {name} model does not grow by the same number of "
                    f"bytes for each token from {lengths[0]} to {lengths[-1]}"
                )
        if None not in per_token:
            rows.append(ReportRow.of_sizes("cache per token", "bytes", *(each or 0.0 for each in per_token)))
        totals = [sizes[-1] for sizes in measured]
        return [*rows, ReportRow.of_sizes(f"cache after {lengths[-1]} tokens", "bytes", *totals)]

    def times(self, batches: Sequence[int], rounds: int) -> list[ReportRow]:
        """Return the report rows of times for each batch size. For models that decode with a cache, the rows are the
        time to read a prompt and the time to decode one token. For other models, the row is the time of a forward pass.
        """
        if self._decodes:
            return [row for batch in batches for row in self._decoding_times(batch, rounds)]
        data, first, inputs = self._data, self._data.batches[0], {}
        if data.sequences or has_examples_first(self._models[0], first):
            tokens = f" on {self._prompt} tokens" if data.sequences else ""
            inputs = {f"call{tokens}, batch {size}": data.call_inputs(size, self._prompt) for size in batches}
            if not data.sequences:
                self.notes.append("times are of examples of the first batch; prompt does not change their length")
        else:
            inputs = {f"call on the first batch, of {count_sequences_and_tokens(first)[0]}": first}
            sizes = ", ".join(map(str, batches))
            self.notes.append(f"no times of batches {sizes}: the first axis of the data is not examples")
        rows: list[ReportRow] = []
        for name, batch in inputs.items():
            rows += time_rows(name, self._models, self._paths, call_model, lambda _, batch=batch: copied(batch), rounds)  # type: ignore[misc]
        return rows

    def _decoding_times(self, batch: int, rounds: int) -> list[ReportRow]:
        """Return the report rows of the time to read a prompt, and of the time to decode one token after it with a
        cache. The time per token is a mean over several decoding steps, which start from a copy of the prompt's cache.
        """
        prompt, new = self._prompt, self._new
        ids = self._data.tokens(batch, prompt + new)

        def run_prompt(model: nn.Module, _: None) -> Any:
            return decode(model, ids[:, :prompt])

        def run_steps(model: nn.Module, cache: Any) -> None:
            for position in range(prompt, prompt + new):
                cache = decode(model, ids[:, position : position + 1], cache).past_key_values

        caches = {model: run_prompt(model, None).past_key_values for model in self._models}
        common = self._models, self._paths
        rows = time_rows(f"prompt of {prompt} tokens, batch {batch}", *common, run_prompt, lambda model: None, rounds)
        name = f"decoding a token after {prompt}, batch {batch}"
        return rows + time_rows(name, *common, run_steps, lambda model: deepcopy(caches[model]), rounds, new)

    def losses(self, loss: Loss | None) -> list[ReportRow]:
        """Return a list with one report row: the loss of both models or, if `loss` is None, the cosine between their
        outputs.
        """
        documents = self._data.documents
        if loss is None:
            cosines = output_cosines(self._models, self._data)
            row = ReportRow.of_agreement("cosine of outputs", "cosine", cosines, documents)
        else:
            remedy = "pass another loss, such as hw.MaskedTokenLoss(...), or loss=None for the cosine of outputs"
            for model in self._models:
                require_causal(loss, model, self._data.batches, remedy=remedy)
            before, after = losses_of(self._models, self._models[0], loss, self._data.batches)
            if any(math.isnan(one) != math.isnan(other) for one, other in zip(before, after, strict=True)):
                expected = "a number for the same examples under both models"
                raise InputError("loss", expected=expected, got="NaN under one alone")
            row = ReportRow.of_losses(f"loss, {name_of_loss(loss)}", before, after, documents)
        if row.documents == 1:
            self.notes.append("no standard errors and intervals of losses and agreement: the data is one document")
        return [row]

    def agreement(self) -> list[ReportRow]:
        """Return the report rows of the agreement between the tokens that both models generate. Generation ends at the
        end tokens that the dense model's generation configuration and the tokenizer state.
        """
        if not self._decodes:
            return []
        config = getattr(self._models[0], "generation_config", None)
        stated = (getattr(config, "eos_token_id", None), getattr(self._tokenizer, "eos_token_id", None))
        lists = [each if isinstance(each, list | tuple) else [each] for each in stated if each is not None]
        prompts, documents = zip(*self._data.prompts(self._prompt, MOST_PROMPTS), strict=True)
        end_tokens = {int(token) for tokens in lists for token in tokens}
        until_difference, same = zip(*greedy_agreements(self._models, prompts, self._new, end_tokens), strict=True)
        return [
            ReportRow.of_agreement(name, "share", shares, documents)
            for name, shares in (
                ("greedy tokens equal until the first difference", until_difference),
                ("most likely token equal after the same tokens", same),
            )
        ]


@torch.no_grad()
def losses_of(
    models: Sequence[nn.Module], reference: nn.Module, loss: Loss, batches: Iterable[dict[str, Any]]
) -> list[list[float]]:
    """Return a list of losses for each model, with one loss per example; NaN for an example without a loss. If the loss
    is a distance from the outputs of an unchanged model, `reference` is this model.
    """
    losses: list[list[float]] = [[] for _ in models]
    for batch in batches:
        prepare_loss(loss, reference, batch)
        for of_model, model in zip(losses, models, strict=True):
            of_model.extend(finite_loss_per_example(loss, model, batch).double().tolist())
    require_some_loss(sum(not math.isnan(value) for value in losses[0]))
    return losses


@torch.no_grad()
def output_cosines(models: ModelPair, data: ReportData) -> list[float]:
    """Return the cosine between the outputs of both models for each example. The output for an example is the vector
    that the model returns, or the mean of the last hidden state over tokens that are not padding (Reimers and Gurevych
    2019, section 3).
    """
    cosines: list[float] = []
    for batch in data.batches:
        dense, compressed = (_embeddings(model, batch).double() for model in models)
        cosines += F.cosine_similarity(dense, compressed, dim=-1).tolist()
    if any(map(math.isnan, cosines)):
        raise InputError("model", expected="outputs that are numbers", got="NaN for an example")
    return cosines


def _embeddings(model: nn.Module, batch: dict[str, Any]) -> Float[Tensor, "batch width"]:
    """Return one output vector per example: the output itself if it has one vector per example, otherwise the mean of
    the last hidden state over tokens that are not padding.
    """
    output = call_model(model, copied(batch))
    hidden = getattr(output, "last_hidden_state", output)
    if not isinstance(hidden, Tensor) or hidden.ndim not in (2, 3) or not hidden.is_floating_point():
        remedy = "pass a loss"
        expected = "one that returns a last_hidden_state, or a tensor (batch, width) or (batch, tokens, width)"
        raise InputError("model", expected=expected, got=type(output).__name__, remedy=remedy)
    if hidden.ndim == 2:
        return hidden
    mask = batch.get(name_of_mask(model))
    is_of_tokens = isinstance(mask, Tensor) and mask.shape == hidden.shape[:2]
    weights = mask if is_of_tokens and mask is not None else torch.ones(hidden.shape[:2], device=hidden.device)
    weights = weights[..., None].to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1.0)


@torch.no_grad()
def greedy_agreements(
    models: ModelPair, prompts: Sequence[Tensor], new_tokens: int, end_tokens: Collection[int]
) -> list[tuple[float, float]]:
    """Continue each prompt by greedy decoding with the first model, and return two shares of the generated tokens per
    prompt. The first is the share of tokens before the first disagreement: a token that the second model does not rank
    first. The second is the share of all tokens that the second model ranks first. Both models read the same preceding
    tokens.

    The first model continues a prompt by its most likely token, up to a number of tokens or an end token, which counts.
    The second model reads the same tokens one by one; as long as it ranks the same tokens first, it generates them.
    """
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    agreements: dict[int, tuple[float, float]] = {}
    for _, same_length in groupby(order, key=lambda index: len(prompts[index])):
        indices = list(same_length)
        for start in range(0, len(indices), LARGEST_BATCH):
            part = indices[start : start + LARGEST_BATCH]
            ids = torch.stack([prompts[index] for index in part]).long()
            generated = _most_likely(models[0], ids, None, new_tokens)
            is_equal = generated == _most_likely(models[1], ids, generated, new_tokens)
            for index, tokens, equal in zip(part, generated.tolist(), is_equal.tolist(), strict=True):
                end = next((place for place, token in enumerate(tokens, 1) if token in end_tokens), len(tokens))
                until = next((place for place, same in enumerate(equal[:end]) if not same), end)
                agreements[index] = until / end, sum(equal[:end]) / end
    return [agreements[index] for index in range(len(prompts))]


def _most_likely(
    model: nn.Module, ids: Int[Tensor, "batch tokens"], forced: Int[Tensor, "batch new"] | None, count: int
) -> Int[Tensor, "batch new"]:
    """Return the most likely token of a model at each of `count` positions after each prompt in `ids`. After the
    prompt, the model reads the tokens in `forced`; if `forced` is None, it reads its own most likely tokens (greedy
    decoding).
    """
    output: Any = decode(model, ids)
    tokens = [output.logits[:, -1].argmax(-1)]
    for number in range(count - 1):
        previous = tokens[-1] if forced is None else forced[:, number]
        output = decode(model, previous[:, None], output.past_key_values)
        tokens.append(output.logits[:, -1].argmax(-1))
    return torch.stack(tokens, 1)
