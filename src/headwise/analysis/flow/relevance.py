"""Maps of the relevance of each patch of a picture, or each word of a text, for one predicted word.

Attention weights state which tokens a query reads. They do not state whether the values that are read change the
prediction. This module compares several maps with the effect of occluding a patch, which is measured:

    gradient-weighted attention   Chefer, Gur and Wolf 2021, "Generic attention-model explainability", equations 5 to 7
    attention rollout             Abnar and Zuidema 2020
    attention                     weights of the last layer, or of chosen heads
    occlusion                     Zeiler and Fergus 2014, section 4.2

Gradient-weighted attention and rollout are products of one matrix per attention call. Only the row of the product is
needed that belongs to the token from which the word is predicted. So a row vector passes through the calls in reverse
order, and attention weights are computed for some query rows at a time.
"""

import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from headwise.analysis.flow.layer_reader import IGNORED, LARGEST_LOSS
from headwise.analysis.flow.rollout import residual_share
from headwise.analysis.token_sources import (
    LARGEST_ROUNDING,
    MOST_SHARED,
    CallTokens,
    Place,
    hooked_embeddings,
    tokens_by_element,
)
from headwise.analysis.view_result import View, last_row, word_indices
from headwise.analysis.viewer import DISAGREEMENT
from headwise.attention.autocast import without_autocast
from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.backends.blockwise.row_block import RowBlock
from headwise.attention.backends.reference import attention_weights, grouped_matmul, masked_scores, mix_heads
from headwise.attention.problem import Problem
from headwise.checks import collection_of, head_pairs, require_module, require_one_of, whole_number
from headwise.data.batches import (
    call_by_names,
    evaluation_mode,
    frozen_parameters,
    is_encoder_decoder,
    with_cache_disabled,
)
from headwise.data.tokenization import text_model
from headwise.errors import InputError, errors_of, require
from headwise.intercept.install import intercepted
from headwise.intercept.interceptor import Call, Change, HeadOutput, Observation, SiteKey
from headwise.intercept.sites import SiteRegistry
from headwise.page.contents import RelevanceMap
from headwise.runs.fingerprint import identity_of
from headwise.settings import ROLLOUT_RESIDUAL
from headwise.shapes import Bool, Float, Int
from headwise.statistics.row_blocks import ROW_BLOCK_BYTES

GRADIENT, ROLLOUT, ATTENTION, OCCLUSION = "gradient-weighted attention", "attention rollout", "attention", "occlusion"

MEANINGS = {
    GRADIENT: "Attention weights times their gradients, positive part, averaged over heads and added up over layers.",
    ROLLOUT: "Share of the token in the attention of the query, multiplied over layers.",
    ATTENTION: "Attention weight of the query on the token, averaged over heads.",
    OCCLUSION: "Score of the complete input, less the score with the patch replaced by the mean of the input.",
}
"""Meaning of a value of a map, by the name of its method."""

LEVEL = 0.95
"""Probability of confidence intervals."""

Score = Callable[[Any], Tensor]
"""Function from the output of a model, for one example, to a tensor with one number."""

Estimate = tuple[float, float, float]
"""An estimated number, and the lower and upper limit of its confidence interval."""


# -- results -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class OrderCurves:
    """Probability of the predicted token while patches are removed or shown, in the order of a map and in random orders
    (Petsiuk, Das and Saenko 2018).

    Attributes:
        shares: share of the patches that are removed or shown at each step, from 0 to 1.
        deletion: probability while patches are replaced by the baseline, the most relevant first. Patches of equal
            relevance are in the order of the tokens.
        insertion: probability while patches are shown on the baseline, the most relevant first.
        random_deletion: `deletion` for each random order.
        random_insertion: `insertion` for each random order.
    """

    shares: Float[Tensor, " steps"]
    deletion: Float[Tensor, " steps"]
    insertion: Float[Tensor, " steps"]
    random_deletion: Float[Tensor, "orders steps"]
    random_insertion: Float[Tensor, "orders steps"]

    def area(self, kind: str) -> float:
        """Return the area under the curve `kind`, "deletion" or "insertion", by the trapezoidal rule. A good map has a
        small area of deletion, and a large area of insertion.
        """
        require_one_of("kind", kind, ("deletion", "insertion"))
        return float(torch.trapezoid(getattr(self, kind), self.shares))

    def difference(self, kind: str) -> Estimate:
        """Return the area under the curve `kind` of the map, less the mean area over random orders. The interval, by
        Student's t-distribution, covers the choice of the random orders.
        """
        area = self.area(kind)
        return _mean_interval(area - torch.trapezoid(getattr(self, f"random_{kind}"), self.shares))


@dataclass(frozen=True, eq=False)
class RelevantTokens:
    """Relevance of each token by one method.

    Attributes:
        method: name of the method, such as "gradient-weighted attention".
        values: relevance of each token; NaN at tokens without a value.
        agreement: Spearman correlation with occlusion over patches, and the limits of its 95 % confidence interval; see
            `spatial_spearman`. None for occlusion itself, or if it was not measured.
        curves: probability of the predicted word in the order of the map; None if it was not measured.
    """

    method: str
    values: Float[Tensor, " tokens"]
    agreement: Estimate | None
    curves: OrderCurves | None


@dataclass(frozen=True, eq=False)
class Relevance:
    """Maps of relevance for one predicted word.

    Attributes:
        view: the view of the model on the inputs.
        word: the predicted word or class, or "score" for a score of the caller.
        score: its score with the complete input: a log-probability in nats, or the caller's score.
        baseline_score: its score with all patches replaced by the baseline.
        maps: one map per method.
        side: index of the text in the view whose tokens have the values.
        patches: indices of the tokens that are patches or, in a text, words before the predicted one.
        query: text of the view, and token, to which the word is assigned on a page.
        left_out: paths of the attention modules through which no relevance passes, since it is unknown to which tokens
            they attend.
    """

    view: View
    word: str
    score: float
    baseline_score: float
    maps: tuple[RelevantTokens, ...]
    side: int
    patches: tuple[int, ...]
    query: tuple[int, int]
    left_out: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Relevance({self.word!r}: {', '.join(each.method for each in self.maps)}; {len(self.patches)} patches)"

    def of(self, method: str) -> RelevantTokens:
        """Return the map of a method. Raise `InputError` if there is none."""
        require_one_of("method", method, [each.method for each in self.maps])
        return next(each for each in self.maps if each.method == method)

    def table(self) -> Any:
        """Return the maps as a pandas DataFrame with one row per token: its index, the word to which it belongs, True
        in `is_patch` if it was occluded, and one column per method.

        Raises:
            MissingExtra: pandas is not installed.
        """
        text, patches = self.view.texts[self.side], set(self.patches)
        columns: dict[str, Any] = {
            "token": range(len(text.tokens)),
            "word": [text.words[index].text for index in text.word_of.tolist()],
            "is_patch": [index in patches for index in range(len(text.tokens))],
        }
        columns |= {each.method: each.values.tolist() for each in self.maps}
        return require("pandas", purpose="a table", extra="tables").DataFrame(columns)

    def summary(self) -> Any:
        """Return how well each map predicts measured effects, as a pandas DataFrame with one row per method. `spearman`
        is the correlation with occlusion. `deletion` and `insertion` are areas under curves, and
        `deletion_difference` and `insertion_difference` are their differences from random orders. Limits of 95 %
        confidence intervals have the suffixes `_low` and `_high`.

        Raises:
            MissingExtra: pandas is not installed.
        """
        unknown = (math.nan,) * 3
        rows = []
        for each in self.maps:
            estimates = {"spearman": each.agreement or unknown}
            row: dict[str, Any] = {"method": each.method}
            for kind in ("deletion", "insertion") if each.curves is not None else ():
                assert each.curves is not None
                row[kind] = each.curves.area(kind)
                estimates[f"{kind}_difference"] = each.curves.difference(kind)
            for name, (value, low, high) in estimates.items():
                row |= {name: value, f"{name}_low": low, f"{name}_high": high}
            rows.append(row)
        return require("pandas", purpose="a table", extra="tables").DataFrame(rows)

    def page_maps(self) -> tuple[RelevanceMap, ...]:
        """Return the maps in the form that a page shows."""
        maps = []
        for each in self.maps:
            curves: dict[str, list[float]] = {}
            if each.curves is not None:
                curves = {
                    "deletion": each.curves.deletion.tolist(),
                    "insertion": each.curves.insertion.tolist(),
                    "random deletion": each.curves.random_deletion.mean(0).tolist(),
                    "random insertion": each.curves.random_insertion.mean(0).tolist(),
                }
            values = each.values.float()
            maps.append(
                RelevanceMap(each.method, MEANINGS[each.method], self.side, *self.query, values, each.agreement, curves)
            )
        return tuple(maps)


# -- the analysis ------------------------------------------------------------------------------------------------------


@overload
def relevance(
    model: nn.Module,
    seen: View,
    word: str | int | None = ...,
    *,
    score: Score | None = ...,
    methods: Collection[str] = ...,
    heads: Collection[Any] | None = ...,
    residual: float = ...,
    neighbourhood: int = ...,
    steps: int = ...,
    orders: int = ...,
    seed: int = ...,
    batch_size: int = ...,
) -> Relevance: ...


@overload
def relevance(
    model: nn.Module,
    seen: View,
    word: list[str | int] | tuple[str | int, ...],
    *,
    score: Score | None = ...,
    methods: Collection[str] = ...,
    heads: Collection[Any] | None = ...,
    residual: float = ...,
    neighbourhood: int = ...,
    steps: int = ...,
    orders: int = ...,
    seed: int = ...,
    batch_size: int = ...,
) -> tuple[Relevance, ...]: ...


def relevance(
    model: nn.Module,
    seen: View,
    word: str | int | list[str | int] | tuple[str | int, ...] | None = None,
    *,
    score: Score | None = None,
    methods: Collection[str] = tuple(MEANINGS),
    heads: Collection[Any] | None = None,
    residual: float = ROLLOUT_RESIDUAL,
    neighbourhood: int = 1,
    steps: int = 16,
    orders: int = 8,
    seed: int = 0,
    batch_size: int = 8,
) -> Relevance | tuple[Relevance, ...]:
    """Compute how relevant each patch of a picture, or each word of a text, was for a predicted word. Several maps are
    compared with the measured effect of occluding patches. For a list of words, return a tuple with one result per
    word; they share the runs with occluded patches.

        seen = headwise.view(model, processor, "What is left of the cup?", images="cups.png", generate=8)
        maps = headwise.relevance(model, seen, "plate")
        maps.summary()                              # one row per method: spearman, deletion, insertion, ...
        headwise.write_page("page.html", seen, maps)

    The score S is the log-probability of the word: the sum over its tokens, each predicted from the tokens before it.

    **Gradient-weighted attention** (Chefer, Gur and Wolf 2021). Let A_h be the weights of head h in an attention call.
    With Hadamard products, and means over the H heads of the call,

        A = mean over h of (dS/dA_h * A_h)^+     (equation 5)
        R <- R + A R, with R = I before the first call     (equations 6 and 7)

    The rows and columns of R are the tokens of all sequences of the model, and A is zero outside of the queries and
    keys of the call. So for cross-attention the update is R^qk <- R^qk + A R^kk: equation 10 without its normalisation
    of R, and without its factor (R^qq)^T. The map is the row of R of the token from which the word is predicted: the
    query of the last attention call on which the score depends; of several, such as in a model that averages its
    tokens, it is the mean of their rows. It is computed as a row vector r that passes through the calls in reverse
    order: r <- r + r A. The gradient with respect to a weight is dS/dA_ij = <dS/do_i, v_j>, with the output o_i of the
    head before the output projection and the value v_j. So one backward pass to the head outputs is enough.

    **Attention rollout** passes the same row vector through (1 - residual) times the mean weights of the heads, plus
    `residual` times the identity, for the queries of each call. **Attention** is the mean over heads of the weights of
    the query in the last layer, or of the chosen `heads`. Calls on which the score does not depend are left out of all
    maps. Where a token of one sequence becomes a token of another one without attention, as between a vision tower and
    a language model, the row vector passes on to the tokens that become it, as gradients show.

    **Occlusion** (Zeiler and Fergus 2014) is the score of the complete input minus the score with the patch, or a
    square of patches around it, replaced: pixels by those of a picture of the mean colour, a word by the mean embedding
    of the text. It is NaN at special tokens.

    The result also contains, for each map, the rank correlation with occlusion (`spatial_spearman`), and the
    probability of the word while patches are removed or shown in the order of the map (`OrderCurves`).

    The model runs in evaluation mode: once with a backward pass for each word, and once for each occluded input. The
    backward pass keeps the queries, keys and values of all calls. Weights are computed for up to 16 MiB of query rows
    at a time. Only for a model that computes the weights itself, without an attention function, the weights of these
    calls are kept.

    Args:
        model: the model that was viewed.
        seen: its view of a text, of pictures or of both. The values are those of the patches where the model first
            reads them or, without pictures, of the words of the first text.
        word: a word of the text that the model generates or reads, by its text or its index; of a word that occurs
            several times, the last one. For a classifier, the name or number of a class, by default the predicted one.
        score: another score than that of a word; a function from the output of the model, for one example, to a tensor
            with one number. Curves then show the score in place of the probability.
        methods: names of the methods, by default all. Without "occlusion", no agreement is measured.
        heads: heads (layer, head) of the map "attention", by the numbers of the view.
        residual: share of the residual connection in the rollout, at least 0 and below 1.
        neighbourhood: odd number of patches along the side of the occluded square.
        steps: number of steps of the deletion and insertion curves, at most the number of patches; 0 for no curves.
        orders: number of random orders, at least 2.
        seed: seed of the random orders.
        batch_size: number of occluded inputs in one call of the model. If the model does not compute the same scores in
            a batch of two, it is called for one input at a time.

    Raises:
        InputError: an argument cannot be used; the view is of another model; the attention of a module cannot be read;
            the score is not finite or does not depend on the output of any head; no path of known attention leads from
            the word to the patches.
        MissingExtra: scipy, which computes ranks and intervals, is not installed.

    Warns:
        UserWarning: of attention modules through which no relevance passes.

    Example:
        >>> seen = headwise.view(model, tokenizer, "The capital of France is Paris")  # doctest: +SKIP
        >>> headwise.relevance(model, seen, "Paris").summary()  # doctest: +SKIP
    """
    reader = _viewed_model(model, seen)
    chosen = list(dict.fromkeys(collection_of("methods", methods, of="names of methods")))
    for name in chosen:
        require_one_of("method", name, tuple(MEANINGS))
    residual = residual_share(residual)
    numbers = {"steps": (steps, 0), "orders": (orders, 2), "batch_size": (batch_size, 1), "seed": (seed, 0)}
    for name, (value, least) in (numbers | {"neighbourhood": (neighbourhood, 1)}).items():
        whole_number(name, value, least=least)
    if not chosen or neighbourhood % 2 == 0:
        argument, expected = ("neighbourhood", "an odd number") if chosen else ("methods", "at least one")
        raise InputError(argument, expected=expected, got=neighbourhood if chosen else "none")
    words: list[Any] = list(word) if isinstance(word, list | tuple) else [word]
    if not words or (score is not None and words != [None]):
        raise InputError("word", expected="a word, or a score in its place", got="none" if not words else "both")
    modules = None if heads is None else [(seen.head(*pair).module, pair[1]) for pair in head_pairs("heads", heads)]
    with torch.inference_mode(False), evaluation_mode(reader), torch.no_grad():
        scorer = _Scorer(reader, seen, batch_size)
        scorer.predictions = [_prediction(scorer, each, score) for each in words]
        count, index = len(scorer.patches), scorer.patches
        ends = scorer(torch.tensor([[False] * count, [True] * count]))
        flow = None if chosen == [OCCLUSION] else _AttentionFlow(reader, scorer)
        effects = ends[0] - scorer(scorer.neighbours(neighbourhood)) if OCCLUSION in chosen else None

        def result_of(number: int) -> Relevance:
            maps: list[RelevantTokens] = []
            word, query = scorer.predictions[number].word, scorer.predictions[number].query
            # A word and what follows it have no effect on the prediction of this word, and say nothing about a map.
            is_later = query is not None and query[0] == scorer.side
            counted = (index < query[1]).nonzero()[:, 0] if is_later and query is not None else torch.arange(count)
            generator = torch.Generator().manual_seed(seed)
            random_orders = [counted[torch.randperm(len(counted), generator=generator)] for _ in range(orders)]
            for name in chosen:
                if flow is None or name == OCCLUSION:
                    assert effects is not None
                    values = torch.full((scorer.size,), torch.nan, dtype=torch.float64)
                    values[index] = effects[:, number]
                elif name == ATTENTION:
                    values = flow.attention(number, modules)
                else:
                    values = flow.passed(number, None if name == GRADIENT else residual)
                agreement = curves = None
                if effects is not None and name != OCCLUSION:
                    of_map, of_effects = values[index[counted]], effects[counted, number]
                    agreement = spatial_spearman(of_map, of_effects, scorer.grid[counted])
                if steps and len(counted):
                    order = counted[values[index[counted]].argsort(descending=True, stable=True)]
                    curves = _order_curves(scorer, number, order, random_orders, min(steps, len(counted)))
                maps.append(RelevantTokens(name, values, agreement, curves))
            if query is None:
                query = (scorer.side, 0) if flow is None else flow.first_query(number)
            (complete, without), left_out = ends[:, number].tolist(), () if flow is None else flow.left_out
            patches = tuple(index[counted].tolist())
            return Relevance(seen, word, complete, without, tuple(maps), scorer.side, patches, query, left_out)

        results = tuple(result_of(number) for number in range(len(words)))
    return results if isinstance(word, list | tuple) else results[0]


def _viewed_model(model: nn.Module, seen: View) -> nn.Module:
    """Return the model, or the part of it, whose run a view shows. Raise `InputError` if this is unknown."""
    require_module(model)
    if not isinstance(seen, View) or seen.run is None:
        raise InputError("seen", expected="a view, which hw.view returns", got=type(seen).__name__)
    if any(not named.keys() <= seen.run.inputs.keys() for named in seen.run.tokens_of):
        expected = "a view of a model that reads token ids, pixels, sound or a series"
        raise InputError("seen", expected=expected, got="a step of a diffusion pipeline")
    is_encoder = is_encoder_decoder(model) and list(seen.run.inputs)[:1] == ["input_ids"]
    reader = text_model(model) if is_encoder and "decoder_input_ids" not in seen.run.inputs else model
    if seen.identity is not None and seen.identity.is_other(identity_of(reader)):
        raise InputError("seen", expected="a view of this model", got=f"one of {seen.title} with other weights")
    return reader


class _Prediction(NamedTuple):
    """Prediction that maps explain: the word, its score, whether the score is a log-probability, and the text and token
    of the word in the view (None for a class or a score of the caller).
    """

    word: str
    score: Score
    is_log_probability: bool = True
    query: tuple[int, int] | None = None


def _prediction(scorer: "_Scorer", word: Any, score: Score | None) -> _Prediction:
    """Return the prediction of a word of a text in the view, or of a class; or the prediction of a score."""
    if score is not None:

        def checked(output: Any) -> Tensor:
            number = score(output)
            if not isinstance(number, Tensor) or number.numel() != 1:
                got = f"shape {tuple(number.shape)}" if isinstance(number, Tensor) else type(number).__name__
                raise InputError("score", expected="a function that returns a tensor with one number", got=got)
            return number.reshape(())

        return _Prediction("score", checked, is_log_probability=False)
    logits = getattr(scorer.output, "logits", None)
    if not isinstance(logits, Tensor) or logits.ndim not in (2, 3) or len(logits) != 1:
        got = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else "none"
        expected = "logits (1, classes) or (1, tokens, vocabulary) of one example"
        raise InputError("model", expected=expected, got=got, remedy="pass score=")

    return _of_class(scorer, logits, word) if logits.ndim == 2 else _of_word(scorer, logits, word)


def _float(logits: Tensor) -> Tensor:
    """Return logits in float32 at least."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _of_class(scorer: "_Scorer", logits: Float[Tensor, "1 classes"], word: Any) -> _Prediction:
    """Return the prediction of a class by its name or number; None is the predicted one."""
    config, count = getattr(scorer.model, "config", None), logits.shape[1]
    labels = getattr(config, "num_labels", count)
    if count < 2 or count != labels:
        got = f"{count} logits" if count == labels else f"{count} logits for {labels} classes"
        raise InputError("model", expected="logits of two or more classes", got=got, remedy="pass score=")
    names: dict[int, str] = dict(getattr(config, "id2label", None) or {})
    number = int(logits.argmax()) if word is None else word
    if isinstance(word, str):
        found = [index for index, name in names.items() if name.casefold() == word.strip().casefold()]
        if not found:
            shown = ", ".join(list(names.values())[:20])
            raise InputError("word", expected=f"a class ({shown}) or its number", got=repr(word))
        if len(found) > 1:
            got = f"{word!r}, the name of the classes {' and '.join(map(str, found))}"
            raise InputError("word", expected="the number of a class whose name is not unique", got=got)
        number = found[0]
    number = whole_number("word", number, least=0, most=count - 1)
    are_exclusive = getattr(config, "problem_type", None) != "multi_label_classification"

    def of_class(output: Any) -> Tensor:
        logits = _float(output.logits[0])
        return (logits.log_softmax(-1) if are_exclusive else nn.functional.logsigmoid(logits))[number]

    return _Prediction(names.get(number, f"class {number}"), of_class)


def _of_word(scorer: "_Scorer", logits: Float[Tensor, "1 tokens vocabulary"], word: Any) -> _Prediction:
    """Return the prediction of a word of the text of which the model predicts each next token."""
    seen, model, run = scorer.seen, scorer.model, scorer.seen.run
    assert run is not None
    name = "decoder_input_ids" if "decoder_input_ids" in run.inputs else "input_ids"
    sides = [
        side
        for side, tokens_of in enumerate(run.tokens_of)
        if name in tokens_of and logits.shape[1] == len(seen.texts[side].tokens)
    ]
    if len(sides) != 1:
        expected = f"a view with a text of {logits.shape[1]} tokens, for each of which the model has logits"
        raise InputError("seen", expected=expected, got=f"{len(sides)} of them", remedy="pass score=")
    text = seen.texts[sides[0]]
    if word is None:
        shown = ", ".join(dict.fromkeys(each.text for each in text.words if each.lexical))[:200]
        raise InputError("word", expected=f"a word of the text ({shown})", got="None")
    index = max(word_indices("word", text, [word]))
    tokens = (text.word_of == index).nonzero()[:, 0]
    ids = torch.full((len(tokens),), -1) if text.ids is None else text.ids[0].cpu()[tokens]
    if int(tokens[0]) == 0 or int(ids.min()) < 0:
        got = f"{text.words[index].text!r}"
        raise InputError("word", expected="a word that is predicted from tokens before it", got=got)
    is_word = torch.isin(run.tokens_of[sides[0]][name], tokens).any(0).to(logits.device)

    def changed(of: str, embedded: Tensor) -> Tensor:
        return torch.where(is_word[:, None], -embedded, embedded) if of == name else embedded

    with hooked_embeddings(model, scorer.inputs, changed) as replaced:
        others = call_by_names(model, scorer.inputs).logits
    _require_embeddings({name} - replaced)
    before = slice(0, int(tokens[0]))
    difference = float((others - logits)[0, before].abs().max() / logits[0, before].abs().max())
    can_generate: Any = getattr(model, "can_generate", None)
    generates = can_generate is None or can_generate()
    if not generates or not difference <= max(DISAGREEMENT, 8 * torch.finfo(logits.dtype).eps):
        got = f"{type(model).__name__}, which does not generate text"
        if generates:
            got = f"logits before {text.words[index].text!r} that change by {difference:.1%} with this word"
        expected = "a model that predicts each token from those before it alone"
        raise InputError("model", expected=expected, got=got, remedy="pass score=")

    def of_word(output: Any) -> Tensor:
        return _float(output.logits[0])[tokens - 1].log_softmax(-1)[range(len(tokens)), ids].sum()

    return _Prediction(text.words[index].text, of_word, query=(sides[0], int(tokens[0])))


def spatial_spearman(
    x: Float[Tensor, " patches"], y: Float[Tensor, " patches"], grid: Float[Tensor, "patches 3"]
) -> Estimate:
    """Return the Spearman correlation of two maps over patches, and the limits of its 95 % confidence interval.

    Values of neighbouring patches are correlated, so n patches are fewer than n independent observations. The interval
    uses the effective number of observations 1 + 1 / v (Clifford, Richardson and Hémon 1989), with v the variance of
    the correlation of two independent maps with these autocorrelations,

        v = sum over distances d of N_d c_x(d) c_y(d) / n^2

    N_d is the number of pairs of patches at distance d, rounded to a whole number of patches, in one picture, and
    c(d) is the autocorrelation of the ranks at this distance. Distances above half of the largest one, and negative
    products, are left out. The limits are those of Fisher's z with the standard error of Bonett and Wright (2000) and
    Student's t-distribution. docs/relevance.md states in how many simulated maps they contain the true correlation.

    All three numbers are NaN if a map is constant, or for fewer than four patches.

    Args:
        x: values of the patches in one map.
        y: their values in the other map.
        grid: picture, row and column of each patch; the unit is the distance of neighbouring patches.

    Raises:
        InputError: a value is not finite.
        MissingExtra: scipy is not installed.
    """
    stats = require("scipy.stats", purpose="a Spearman correlation", extra="tables")
    count, ranks = len(x), []
    for name, values in (("x", x), ("y", y)):
        if not bool(values.isfinite().all()):
            raise InputError(name, expected="finite values", got="NaN or infinity")
        rank = torch.from_numpy(stats.rankdata(values.double().cpu().numpy()))
        ranks.append((rank - rank.mean()) / rank.std(correction=0))
    if count < 4 or any(not bool(rank.isfinite().all()) for rank in ranks):
        return math.nan, math.nan, math.nan
    one, other = ranks
    correlation = float((one * other).mean().clamp(-1.0, 1.0))
    grid = grid.cpu().double()
    distance = torch.cdist(grid[:, 1:], grid[:, 1:], compute_mode="donot_use_mm_for_euclid_dist").round().long()
    distance[grid[:, :1] != grid[:, 0]] = int(distance.max()) + 1  # patches of different pictures count as independent
    pairs = torch.bincount(distance.flatten())
    covariances = (torch.bincount(distance.flatten(), weights=(rank[:, None] * rank).flatten()) for rank in ranks)
    products = math.prod(covariances, start=torch.ones(())) / pairs.clamp(min=1)  # N_d c_x(d) c_y(d)
    within = distance[grid[:, :1] == grid[:, 0]]
    variance = float(products[: int(within.max()) // 2 + 1].clamp(min=0.0).sum()) / count**2
    effective = max(1 + 1 / max(variance, 1 / (count - 1)), 4.0)  # at most `count`
    error = math.sqrt((1 + correlation**2 / 2) / (effective - 3))
    width = float(stats.t.ppf((1 + LEVEL) / 2, effective - 2)) * error
    z = math.atanh(max(min(correlation, 1 - 1e-12), -1 + 1e-12))
    return correlation, math.tanh(z - width), math.tanh(z + width)


def mean_agreement(results: Collection[Relevance], method: str) -> Estimate:
    """Return the mean over examples of the Spearman correlation of a map with occlusion, and the limits of its 95 %
    confidence interval by Student's t-distribution over examples. Examples without a correlation are left out. The
    limits are NaN for fewer than two.

        results = [relevance(model, seen, word) for seen, word in examples]
        mean_agreement(results, "attention")

    Args:
        results: results of different examples, such as of different pictures.
        method: name of the method.

    Raises:
        InputError: a result does not have the method, or has no occlusion.
    """
    agreements = [each.of(method).agreement for each in results]
    if any(each is None for each in agreements):
        raise InputError("method", expected="a method that was compared with occlusion", got=repr(method))
    values = torch.tensor([each[0] for each in agreements if each is not None], dtype=torch.float64)
    return _mean_interval(values[~values.isnan()])


def _mean_interval(values: Float[Tensor, " samples"]) -> Estimate:
    """Return the mean of independent values, and the limits of its 95 % confidence interval by Student's
    t-distribution. The limits are NaN for fewer than two values.
    """
    stats = require("scipy.stats", purpose="a confidence interval", extra="tables")
    mean, count = float(values.mean()), len(values)
    if count < 2:
        return mean, math.nan, math.nan
    width = float(stats.t.ppf((1 + LEVEL) / 2, count - 1)) * float(values.std()) / math.sqrt(count)
    return mean, mean - width, mean + width


def _require_embeddings(names: Collection[str]) -> None:
    """Raise `InputError` if there are inputs, by name, whose embeddings were to be replaced, but were not found."""
    if names:
        expected = f"an nn.Embedding that reads {', '.join(sorted(names))}"
        raise InputError("model", expected=expected, got="none", remedy="pass a model that looks its tokens up in one")


class _Scorer:
    """Function from masks of occluded patches to the scores of all predictions. Scores are cached by mask, since the
    curves of all maps begin and end with the same inputs. The masks are `(masks, patches)`, True at occluded patches;
    the scores are `(masks, predictions)`, on the CPU in float64.

    Attributes:
        model, seen: the model, and its view.
        predictions: the predictions; they are set after the first run.
        side: index of the text whose tokens are occluded: the first one with patches that the model reads or, without
            pictures, the first text.
        size: number of its tokens.
        patches: indices of the tokens that are occluded: patches or, without pictures, words.
        inputs: arguments of the model.
        output: output of the model for the complete input.
    """

    def __init__(self, model: nn.Module, seen: View, batch_size: int) -> None:
        assert seen.run is not None
        self.model, self.seen = model, seen
        self.predictions: list[_Prediction] = []
        # A backward pass cannot save tensors that were made in inference mode.
        self.inputs = {
            name: value.clone() if isinstance(value, Tensor) and value.is_inference() else value
            for name, value in with_cache_disabled(model, dict(seen.run.inputs)).items()
        }
        self._batch_size, self._is_checked = batch_size, batch_size == 1
        self._known: dict[bytes, Tensor] = {}
        read = [side.stream for sides in seen.run.calls.values() for side in sides[::-1]]
        with_patches = [side for side in read if any(seen.texts[side].patches)]
        self.side = with_patches[0] if with_patches else 0
        text = seen.texts[self.side]
        self._tokens_of, self._baselines = seen.run.tokens_of[self.side], seen.run.baselines
        self.size = len(text.tokens)
        is_occluded = torch.tensor(
            [patch is not None for patch in text.patches] or [not token.special for token in text.tokens]
        )
        has_source = torch.zeros(self.size + 1, dtype=torch.bool)
        for tokens in self._tokens_of.values():
            has_source[tokens] = True
        self.patches = (is_occluded & has_source[:-1]).nonzero()[:, 0]
        if not len(self.patches):
            raise InputError("seen", expected="a view with patches or words to occlude", got=f"none in {text.name!r}")
        with errors_of("model", expected="a model that reads the inputs of the view"):
            self.output = call_by_names(model, self.inputs)
        before, now = seen.run.last_row, last_row(self.output)
        if before is None or not bool(before.isfinite().all()):
            return
        if now is not None and before.shape == now.shape:
            difference = float((now - before).abs().max() / before.abs().max().clamp(min=1e-30))
            if not difference <= max(DISAGREEMENT, 8 * torch.finfo(now.dtype).eps):
                got = f"an output that differs from that of the view by {difference:.1%}"
                raise InputError("seen", expected="a view of this model", got=got)
        else:
            got = f"one of a module other than {type(model).__name__}, with an output of another size"
            raise InputError("seen", expected="a view of this model", got=got, remedy="pass the module that was viewed")

    @cached_property
    def grid(self) -> Float[Tensor, "patches 3"]:
        """Picture, row and column of each patch: those of its centre, with the distance of neighbouring patches as the
        unit of each axis. Words are in one row.
        """
        boxes = self.seen.texts[self.side].patches
        centres = torch.zeros(len(self.patches), 3, dtype=torch.float64)
        centres[:, 2] = torch.arange(len(self.patches))
        for place, index in enumerate(self.patches.tolist()):
            box = boxes[index] if boxes else None
            if box is not None:
                middle = box.picture, box.top + box.height / 2, box.left + box.width / 2
                centres[place] = torch.tensor(middle, dtype=torch.float64)
        for picture in torch.unique(centres[:, 0]):
            of_picture = centres[:, 0] == picture
            for axis in (1, 2):
                gaps = torch.unique(centres[of_picture, axis]).diff()
                gaps = gaps[gaps > gaps.amax() / 3] if len(gaps) else gaps  # others are rounding, or cut at the border
                centres[of_picture, axis] /= gaps.median() if len(gaps) else 1.0
        return centres

    def neighbours(self, size: int) -> Bool[Tensor, "patches patches"]:
        """Return a mask that is True, in the row of each patch, at the patches of the same picture in a square of
        `size` x `size` patches around it.
        """
        apart = (self.grid[:, None] - self.grid).abs()
        return (apart[..., 0] == 0) & (apart[..., 1:] < size / 2).all(-1)

    def __call__(self, masks: Bool[Tensor, "masks patches"]) -> Float[Tensor, "masks predictions"]:
        keys = [mask.numpy().tobytes() for mask in masks]
        missing = list({key: mask for key, mask in zip(keys, masks, strict=True) if key not in self._known}.items())
        while missing:
            size = self._batch_size if self._is_checked else 1
            part, missing = missing[:size], missing[size:]
            scores = self._run(torch.stack([mask for _, mask in part]))
            if not bool(scores.isfinite().all()):
                raise InputError("model", expected="a finite score for every occluded input", got="NaN or infinity")
            self._known |= zip((key for key, _ in part), scores, strict=True)
            if not self._is_checked and not missing:
                self._check_batches(masks)
        return torch.stack([self._known[key] for key in keys])

    def _check_batches(self, masks: Bool[Tensor, "masks patches"]) -> None:
        """Run the model on a batch of the masks that were run one by one: the complete input, and the input with all
        patches occluded. If it fails, or has other scores, all later masks are run one by one.
        """
        self._is_checked, expected = True, torch.stack(list(self._known.values()))
        dtype = next(each.dtype for each in self.model.parameters() if each.is_floating_point())
        try:
            difference = (self._run(masks) - expected).abs() / expected.abs().clamp(min=1.0)
        except Exception:  # any error of the model, which may read one example alone
            self._batch_size = 1
        else:
            if not bool((difference <= torch.finfo(dtype).eps ** 0.5).all()):
                self._batch_size = 1

    def _run(self, masks: Bool[Tensor, "masks patches"]) -> Float[Tensor, "masks predictions"]:
        """Run the model on one batch with an input for each mask: along the first axis, each tensor is repeated."""
        count = len(masks)
        hidden = torch.zeros(count, self.size + 1, dtype=torch.bool)
        hidden[:, self.patches] = masks
        batch = {
            name: torch.cat([value] * count) if isinstance(value, Tensor) and value.ndim else value
            for name, value in self.inputs.items()
        }
        of_ids: dict[str, Tensor] = {}
        for name, tokens in self._tokens_of.items():
            is_hidden = hidden[:, tokens].any(1)  # the token -1, which is none, is never hidden
            if name in self._baselines:
                value, baseline = self.inputs[name], self._baselines[name].to(self.inputs[name])
                is_hidden = is_hidden.view(count, *value.shape).to(value.device)
                batch[name] = torch.where(is_hidden, baseline, value).flatten(0, 1)
            elif not any(self.seen.texts[self.side].patches):
                of_ids[name] = is_hidden

        def occluded(name: str, embedded: Tensor) -> Tensor:
            is_hidden = of_ids.get(name)
            if is_hidden is None:
                return embedded
            is_word = torch.isin(self._tokens_of[name], self.patches).any(0)
            mean = embedded[:1, is_word.to(embedded.device)].mean(1, keepdim=True)
            return torch.where(is_hidden.to(embedded.device)[..., None], mean, embedded)

        with hooked_embeddings(self.model, batch, occluded) as replaced:
            output = call_by_names(self.model, batch)
        _require_embeddings(of_ids.keys() - replaced)

        def of_example(index: int) -> Any:
            def part(tensor: Tensor) -> Tensor:
                return tensor.chunk(count)[index] if tensor.ndim and len(tensor) % count == 0 else tensor

            return output if count == 1 else pytree.tree_map_only(Tensor, part, output)

        scores = [[each.score(example) for each in self.predictions] for example in map(of_example, range(count))]
        return torch.stack([torch.stack([score.cpu().double() for score in row]) for row in scores])


def _order_curves(
    scorer: _Scorer, number: int, order: Int[Tensor, " patches"], random_orders: Sequence[Tensor], steps: int
) -> OrderCurves:
    """Return the probability of prediction `number` while patches are removed and shown in `order`, and in random
    orders. After step i, i * patches // steps patches are removed or shown.
    """
    counts = torch.tensor([step * len(order) // steps for step in range(steps + 1)])

    def curves(order: Int[Tensor, " patches"]) -> Float[Tensor, "kinds steps"]:
        is_early, is_late = torch.zeros(2, len(counts), len(scorer.patches), dtype=torch.bool)
        is_early[:, order] = torch.arange(len(order)) < counts[:, None]
        is_late[:, order] = ~is_early[:, order]
        scores = scorer(torch.cat([is_early, is_late]))[:, number]
        return (scores.exp() if scorer.predictions[number].is_log_probability else scores).view(2, -1)

    deletion, insertion = curves(order)
    of_random = torch.stack([curves(each) for each in random_orders])
    return OrderCurves(counts.double() / len(order), deletion, insertion, of_random[:, 0], of_random[:, 1])


# -- attention ---------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _ReadCall:
    """One attention call of the run: its tensors, and the gradient of the score of each prediction with respect to its
    head outputs.

    Attributes:
        added: zeros that were added to the head outputs, with respect to which scores are differentiated.
        out: head outputs.
        problem: queries, keys, values and options; None if these are unknown.
        weights, values: weights and values, if `problem` is None.
        gradients: gradient of each score; None for a score that does not depend on the call.
        queries, keys: indices of the texts of the queries and keys; -1 if they are unknown.
        query_tokens, key_tokens: token of the text for each query and each key.
    """

    call: Call
    added: Tensor
    out: Float[Tensor, "batch heads queries value_dim"]
    problem: Problem | None
    weights: Float[Tensor, "batch heads queries keys"] | None = None
    values: Float[Tensor, "batch kv_heads keys value_dim"] | None = None
    gradients: tuple[Tensor | None, ...] = ()
    queries: int = -1
    keys: int = -1
    query_tokens: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    key_tokens: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))

    def place(self, queries: CallTokens, keys: CallTokens) -> None:
        """Store the tokens of the queries and keys."""
        self.queries, self.keys, device = queries.stream, keys.stream, self.out.device
        self.query_tokens, self.key_tokens = queries.rows.to(device), keys.rows.to(device)

    def release(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Store the gradients of the scores, and release the graph of the run, which would stay in memory."""
        self.gradients, self.out = gradients, self.out.detach()
        self.added = self.out
        if self.problem is not None:
            changes: dict[str, Any] = {
                name: getattr(self.problem, name).detach()
                for name in ("q", "k", "v", "bias", "sinks", "scale")
                if isinstance(getattr(self.problem, name), Tensor)
            }
            self.problem = replace(self.problem, **changes)

    def is_other_part(self, other: "_ReadCall") -> bool:
        """Return True if another call of the same module has other queries of the same text."""
        is_same_layer = (self.call.site, self.queries) == (other.call.site, other.queries)
        return is_same_layer and not bool(torch.isin(other.query_tokens, self.query_tokens).any())

    def add_to_keys(self, rows: Sequence[Float[Tensor, " _"]], values: Float[Tensor, "batch used"]) -> None:
        """Add values of keys to the row vector of their text, in place. `values` may lack keys at the end, which no
        query attends to.
        """
        row = rows[self.keys]
        row.index_add_(0, self.key_tokens[:, : values.shape[1]].flatten(), values.flatten().to(row.dtype))

    def product(
        self, rows: Float[Tensor, "batch queries"], number: int | None = None, heads: Sequence[int] | None = None
    ) -> Float[Tensor, "batch keys"]:
        """Return the sum over queries of `rows` times a matrix (queries x keys). The matrix is the sum of the attention
        weights over `heads`, by default all. With the `number` of a prediction, each weight is multiplied by its
        gradient, and negative products are set to 0.

        Raises:
            InputError: weights times values are not the output of the heads, or not finite.
        """
        grid, label = self.call.grid, self.call.site.label
        used = rows.ne(0).any(0).nonzero()[:, 0]
        step = max(1, ROW_BLOCK_BYTES // (4 * grid.batch * grid.heads * grid.keys))
        result: Tensor | None = None
        for start in range(int(used[0]), int(used[-1]) + 1, step) if len(used) else ():
            block = range(start, min(start + step, int(used[-1]) + 1))
            part = slice(block.start, block.stop)
            weights, values = self._weights_and_values(block)
            is_unused = rows[:, None, part, None] == 0  # such as padding
            out = self.out[:, :, part].to(weights.dtype).masked_fill(is_unused, 0.0)
            error = (grouped_matmul(weights, values).masked_fill(is_unused, 0.0) - out).abs().amax()
            tolerance = max(LARGEST_LOSS, 8 * torch.finfo(self.out.dtype).eps)
            if not bool(error <= tolerance * out.abs().amax()):
                got = f"a difference of {float(error):.2g} in {label}"
                raise InputError("model", expected="head outputs that are finite weights times values", got=got)
            if number is not None:
                gradient = self.gradients[number]
                assert gradient is not None
                of_weights = grouped_matmul(gradient[:, :, part].to(weights.dtype), values.mT)
                weights = (weights * of_weights).clamp(min=0.0)
            summed = (weights if heads is None else weights[:, list(heads)]).sum(1)
            added = (rows[:, None, part].to(summed.dtype) @ summed)[:, 0]
            result = added if result is None else result + added
        return self.out.new_zeros(grid.batch, grid.keys) if result is None else result

    def _weights_and_values(self, rows: range) -> tuple[Tensor, Tensor]:
        """Return the attention weights of some query rows, `(batch, heads, rows, keys)`, and the values, both in
        float32 at least.
        """
        if self.problem is None:
            assert self.weights is not None
            assert self.values is not None
            weights = self.weights[:, :, rows.start : rows.stop]
            return weights, self.values.to(weights.dtype)
        problem = self.problem
        with without_autocast(problem.q.device):
            weights = attention_weights(masked_scores(problem, rows), problem.sinks)
            if problem.talking is not None:
                weights = mix_heads(weights, problem.talking.after)
        return weights, problem.v.to(weights.dtype)


class _CallReader(SiteRegistry):
    """Interceptor that adds zeros, which require gradients, to the head outputs of each attention call, and stores the
    call's tensors.

    Attributes:
        calls: the calls of the run, in order, by module and number.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.calls: dict[tuple[SiteKey, int], _ReadCall] = {}

    def require_readable(self) -> None:
        """Raise `InputError` if the model has no attention, or a module whose attention cannot be read."""
        self.require_attention()
        for reason, paths in self._paths_by_reason().items():
            if reason not in IGNORED:
                got = f"{self._names(paths)} ({reason})"
                raise InputError("model", expected="attention that can be read in every module", got=got)

    def change(self, call: Call) -> Change | None:
        """Return the function that adds zeros to the head outputs of a call, and stores the call."""
        if not call.is_recomputation:
            self.register(call)
        key = call.site, call.index

        def change(attended: HeadOutput) -> Tensor:
            if key not in self.calls:
                out = attended.out  # with the graph of the run, until links are known
                added = torch.zeros_like(out).requires_grad_(torch.is_grad_enabled())
                problem = attended.read_problem()
                self.calls[key] = _ReadCall(call, added, out, problem)
            return attended.out + self.calls[key].added

        return change


class _WeightReader(SiteRegistry):
    """Interceptor that stores the attention weights and values of calls whose queries and keys are unknown, since the
    model computes the weights itself.
    """

    def __init__(self, model: nn.Module, calls: Mapping[tuple[SiteKey, int], _ReadCall]) -> None:
        super().__init__(model)
        self._calls = calls

    def observe(self, call: Call) -> Observation | None:
        """Return an `Observation`, which receives the weights, for a call whose queries and keys are unknown."""
        read = self._calls.get((call.site, call.index))
        if read is None or read.problem is not None:
            return None

        def observer(row_block: RowBlock) -> None:
            weights, grid, rows = row_block.weights, row_block.grid, row_block.rows
            if read.weights is None:
                read.weights = weights.new_zeros(grid.batch, grid.heads, grid.queries, grid.keys)
            part = read.weights[(*row_block.sequences_and_heads, slice(rows.start, rows.stop))]
            part[..., row_block.visibility.key_indices] = weights
            read.values = row_block.values

        return Observation(observer, CallContext(), lambda: None, keeps_output=True)


class _AttentionFlow:
    """Attention calls of one run of the model, through which row vectors pass from the token from which a word is
    predicted to the tokens of the text that is occluded. The sequences of tokens are the texts of the view.

    Attributes:
        left_out: paths of modules on which a score depends, and of which it is unknown to which tokens they attend.
    """

    def __init__(self, model: nn.Module, scorer: _Scorer) -> None:
        assert scorer.seen.run is not None
        self._scorer, self._side = scorer, scorer.side
        self._sizes = [len(text.tokens) for text in scorer.seen.texts]
        left_out: dict[str, None] = {}
        self._groups: list[list[_ReadCall]] = []
        for read in self._differentiated(model, scorer):
            sides = scorer.seen.run.calls.get(Place(read.call.site, read.call.index))
            if sides is None:
                if any(gradient is not None for gradient in read.gradients):
                    left_out[read.call.site.label] = None
                continue
            # Calls with parts of the queries of one layer, such as windows, are one step of the row vector.
            if self._groups and all(read.is_other_part(each) for each in self._groups[-1]):
                self._groups[-1].append(read)
            else:
                self._groups.append([read])
        self.left_out = tuple(left_out)
        if self.left_out:
            names = ", ".join(self.left_out)
            warnings.warn(f"no relevance passes through attention between unknown tokens: {names}", stacklevel=3)
        reaching = self._reaching()
        for number, prediction in enumerate(scorer.predictions):
            active = [read for group in self._groups for read in group if read.gradients[number] is not None]
            if not active:
                raise InputError("score", expected="a score that depends on the output of heads", got="none does")
            is_lost = any(self._side in self._depends[read.queries] and read.queries not in reaching for read in active)
            if is_lost or not any(read.queries in reaching for read in active):
                expected = f"attention that leads from {prediction.word!r} to the patches"
                remedy = f"pass methods=[{OCCLUSION!r}]"
                raise InputError("model", expected=expected, got="a path that is not known", remedy=remedy)

    def _differentiated(self, model: nn.Module, scorer: _Scorer) -> list[_ReadCall]:
        """Run the model, and differentiate the score of each prediction with respect to all head outputs. Return the
        attention calls. Also store the links between texts.
        """
        assert scorer.seen.run is not None
        reader = _CallReader(model)
        grad = frozen_parameters(model), torch.inference_mode(False), torch.enable_grad()
        with grad[0], grad[1], grad[2], intercepted(model, reader):
            output = call_by_names(model, scorer.inputs)
            scores = [each.score(output) for each in scorer.predictions]
        reader.require_readable()
        calls, of_scores = list(reader.calls.values()), []
        added = [each.added for each in calls]
        for score in scores:
            if not score.requires_grad:
                raise InputError("score", expected="a score that depends on the output of heads", got="none does")
            of_scores.append(torch.autograd.grad(score, added, retain_graph=True, allow_unused=True))
        for read in calls:
            sides = scorer.seen.run.calls.get(Place(read.call.site, read.call.index))
            if sides is not None:
                read.place(*sides)
        with torch.enable_grad():
            self._links, self._depends = _links(scorer.seen, calls)
        for read, *gradients in zip(calls, *of_scores, strict=True):
            read.release(tuple(gradients))
            if any(each is not None and not bool(each.isfinite().all()) for each in gradients):
                raise InputError("score", expected="finite gradients", got=f"NaN or infinity in {read.call.site.label}")
        if any(read.problem is None for read in calls):
            with intercepted(model, _WeightReader(model, reader.calls)):
                call_by_names(model, scorer.inputs)
            for read in calls:
                if read.problem is None and (read.weights is None or read.values is None):
                    got = f"others in {read.call.site.label}"
                    raise InputError("model", expected="attention with known weights and values", got=got)
        return calls

    def _reaching(self) -> set[int]:
        """Return the texts from which attention and links lead to the text that is occluded."""
        edges = {(read.queries, read.keys) for group in self._groups for read in group} | set(self._links)
        reaching = {self._side}
        for _ in self._sizes:
            reaching |= {later for later, earlier in edges if earlier in reaching}
        return reaching

    def _last_group(self, number: int) -> list[_ReadCall]:
        """Return the last attention calls on which the score of a prediction depends, of a text from which attention
        leads to the text that is occluded.
        """
        reaching = self._reaching()
        for group in reversed(self._groups):
            active = [read for read in group if read.gradients[number] is not None]
            if any(read.queries in reaching for read in active):
                return active
        return []

    def passed(self, number: int, residual: float | None) -> Float[Tensor, " tokens"]:
        """Pass the row vector of a prediction through all attention calls on which its score depends, from the last one
        to the first. Return its entries at the tokens of the text that is occluded. With `residual` r, the vector
        becomes r times itself plus 1 - r times its product with the mean weights. Without, its product with the
        gradient-weighted matrix is added to it.
        """
        rows, pending = self._start(number), dict(self._links)
        for group in reversed(self._groups):
            active = [read for read in group if read.gradients[number] is not None]
            for read in active:
                self._hand_over(read.queries, rows, pending)
            products = []
            for read in active:
                product = read.product(rows[read.queries][read.query_tokens], number if residual is None else None)
                products.append(product * ((1 if residual is None else 1 - residual) / read.call.grid.heads))
            if residual is not None:
                for read in active:
                    rows[read.queries][read.query_tokens.flatten()] *= residual
            for read, product in zip(active, products, strict=True):
                read.add_to_keys(rows, product)
        self._hand_over(self._side, rows, pending)
        return rows[self._side].cpu().double()

    def attention(self, number: int, heads: Sequence[tuple[str, int]] | None) -> Float[Tensor, " tokens"]:
        """Return the attention weights of the token from which a word is predicted, averaged over heads: over all heads
        of the last layer from whose keys attention leads to the text that is occluded, or over chosen heads (module,
        head).
        """
        start, pending, reaching = self._start(number), dict(self._links), self._reaching()
        rows = [torch.zeros_like(row) for row in start]
        calls = [
            (place, read)
            for place, group in enumerate(self._groups)
            for read in group
            if bool(start[read.queries].any()) and read.keys in reaching and read.gradients[number] is not None
        ]
        if heads is None:
            last = max((place for place, _ in calls), default=None)
            chosen = [(read, list(range(read.call.grid.heads))) for place, read in calls if place == last]
        else:
            if not heads:
                raise InputError("heads", expected="at least one head", got="none")
            for module, head in heads:
                if not any(read.call.site.label == module for _, read in calls):
                    expected = "heads with queries in the text of the word, whose keys lead to the patches"
                    raise InputError("heads", expected=expected, got=f"head {head} of {module}")
            chosen = [(read, [head for module, head in heads if read.call.site.label == module]) for _, read in calls]
        # Several calls of a site, such as windows, have the same heads.
        total = sum(len(of_site) for of_site in {read.call.site: of_site for read, of_site in chosen}.values())
        for read, of_call in chosen:
            if of_call:
                product = read.product(start[read.queries][read.query_tokens], heads=of_call)
                read.add_to_keys(rows, product / total)
        self._hand_over(self._side, rows, pending)
        return rows[self._side].cpu().double()

    def _start(self, number: int) -> list[Float[Tensor, " _"]]:
        """Return a row vector for each text: zeros, with equal weights at the queries of the last attention call on
        which the score of the prediction depends.
        """
        group = self._last_group(number)
        dtype = torch.promote_types(group[0].out.dtype, torch.float32)
        rows = [torch.zeros(size, dtype=dtype, device=group[0].out.device) for size in self._sizes]
        for read in group:
            gradient = read.gradients[number]
            assert gradient is not None
            rows[read.queries][read.query_tokens[gradient.abs().amax((1, 3)) > 0]] = 1.0
        total = sum(float(row.sum()) for row in rows)
        if not total:
            remedy = f"pass methods=[{OCCLUSION!r}]"
            raise InputError("score", expected="a gradient that is not 0", got="0 at all heads", remedy=remedy)
        return [row / total for row in rows]

    def first_query(self, number: int) -> tuple[int, int]:
        """Return the text and the first token from which a prediction is made."""
        rows = self._start(number)
        side = next(index for index, row in enumerate(rows) if bool(row.any()))
        return side, int(rows[side].nonzero()[0, 0])

    def _hand_over(self, side: int, rows: list[Tensor], pending: dict[tuple[int, int], Tensor]) -> None:
        """Add to the row vector of a text those of later texts whose tokens its tokens become. Each link is used once;
        the relevance of a token is divided equally among the tokens that become it.
        """
        for later, earlier in [pair for pair in pending if pair[1] == side]:
            link = pending.pop((later, earlier)).to(rows[side].device)
            self._hand_over(later, rows, pending)
            is_linked = link >= 0
            shares = torch.bincount(link[is_linked], minlength=len(rows[later])).clamp(min=1)
            rows[side][is_linked] += (rows[later] / shares)[link[is_linked]]


def _links(
    seen: View, calls: Sequence[_ReadCall]
) -> tuple[dict[tuple[int, int], Int[Tensor, " tokens"]], dict[int, set[int]]]:
    """Return links, and for each text the earlier ones on whose head outputs its own depend by the graph of
    differentiation. A link is, for a pair of texts (later, earlier), the token of the later text that each token of the
    earlier one becomes without attention, such as in the projector between a vision tower and a language model; -1 for
    none. There is a link where the later text depends on the earlier one, but not by way of a third text or of
    cross-attention.
    """
    assert seen.run is not None
    added: dict[int, list[Tensor]] = {}
    computed: dict[int, Tensor] = {}  # the last tensor that is computed from the tokens of a text
    for read in calls:
        if read.queries >= 0:
            added.setdefault(read.queries, []).append(read.added)
            computed[read.queries] = read.out
            if read.problem is not None:
                computed.setdefault(read.keys, read.problem.k)
    depends: dict[int, set[int]] = {}
    for later, tensor in computed.items():
        depends[later] = set()
        for earlier in added.keys() - {later} if tensor.requires_grad else ():
            gradients = torch.autograd.grad(tensor.sum(), added[earlier], retain_graph=True, allow_unused=True)
            if any(gradient is not None for gradient in gradients):
                depends[later].add(earlier)
    links = {}
    for later, sources in depends.items():
        attended = {read.keys for read in calls if read.queries == later} - {later}
        between = attended.union(*(depends.get(each, set()) for each in sources | attended))
        for earlier in sources - between:
            link = _link(calls, later, earlier, len(seen.texts[earlier].tokens))
            if bool((link >= 0).any()):
                links[later, earlier] = link
    return links, depends


def _link(calls: Sequence[_ReadCall], later: int, earlier: int, size: int) -> Int[Tensor, " tokens"]:
    """Return the token of a later text that each of the `size` tokens of an earlier one becomes; -1 for none. It is the
    token whose query in the first attention call of the later text (or key, if it has no queries) depends on the head
    outputs of the token in the last call of the earlier text on which they depend. If one of the tokens becomes several
    tokens, as in a convolution with overlapping windows, there is no link at all.
    """
    reading = [read for read in calls if read.queries == later] or [read for read in calls if read.keys == later]
    link = torch.full((size,), -1)
    for read in (each for each in reading if each.call.site == reading[0].call.site and each.problem is not None):
        assert read.problem is not None
        is_query = read.queries == later
        values, placed = (read.problem.q, read.query_tokens) if is_query else (read.problem.k, read.key_tokens)
        values = values.transpose(1, 2).flatten(2).flatten(0, 1)
        for before in reversed([each for each in calls if each.queries == earlier]):
            leaves = {"added": before.added}
            found = tokens_by_element(values, leaves, torch.Generator().manual_seed(0), strides=(1,))["added"]
            if not len(found):
                continue
            # One token for each query, which is the same in all elements of its head outputs; -1 is no token.
            by_query = found[0].view(before.added.shape).amax((1, 3)).cpu()
            is_linked = by_query >= 0
            factors = torch.rand(values.shape[1], generator=torch.Generator().manual_seed(1)).to(values) + 0.5
            (gradient,) = torch.autograd.grad((values @ factors).sum(), before.added, retain_graph=True)
            largest = gradient.abs().amax((1, 3)).cpu()
            is_shared = (largest > LARGEST_ROUNDING * largest.max()) & ~is_linked
            if int(is_shared.sum()) > MOST_SHARED * is_linked.numel():
                return torch.full((size,), -1)
            link[before.query_tokens.cpu()[is_linked]] = placed.cpu().flatten()[by_query[is_linked]]
            if before.call.index == 0:
                break  # the calls before are of an earlier layer
    return link
