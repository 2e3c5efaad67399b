"""Maps of the relevance of each patch of a picture, or each token of a text, for one predicted token.

Attention weights state which tokens a query reads. They do not state whether the values that are read change the
prediction. This module compares several maps with the effect of occluding a patch, which is measured:

    gradient-weighted attention   Chefer, Gur and Wolf 2021, "Generic attention-model explainability", equations 5 to 7
    attention rollout             Abnar and Zuidema 2020
    attention                     weights of the last layer, or of chosen heads
    occlusion                     Zeiler and Fergus 2014, section 4.2

Gradient-weighted attention and rollout are products of one matrix per attention call. Only one row of the product is
needed, that of the query from which the token is predicted. So a row vector passes through the calls in reverse order,
and attention weights are computed for some query rows at a time.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from headwise.analysis.flow.layer_reader import IGNORED, LARGEST_LOSS
from headwise.analysis.flow.rollout import residual_share
from headwise.attention.autocast import without_autocast
from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.backends.blockwise.row_block import RowBlock
from headwise.attention.backends.reference import attention_weights, grouped_matmul, masked_scores, mix_heads
from headwise.attention.problem import Problem
from headwise.checks import collection_of, finite_number, head_pairs, require_module, require_one_of, whole_number
from headwise.data.batches import (
    call_model,
    device_of,
    evaluation_mode,
    frozen_parameters,
    to_device,
    with_cache_disabled,
)
from headwise.errors import InputError, require
from headwise.intercept.install import intercepted
from headwise.intercept.interceptor import Call, Change, HeadOutput, Observation, SiteKey
from headwise.intercept.sites import SiteRegistry
from headwise.page.contents import RelevanceMap
from headwise.settings import ROLLOUT_RESIDUAL
from headwise.shapes import Bool, Float, Int
from headwise.statistics.row_blocks import ROW_BLOCK_BYTES

GRADIENT, ROLLOUT, ATTENTION, OCCLUSION = "gradient-weighted attention", "attention rollout", "attention", "occlusion"

MEANINGS = {
    GRADIENT: "Attention weights times their gradients, positive part, averaged over heads and added up over layers.",
    ROLLOUT: "Share of the token in the attention of the query, multiplied over layers.",
    ATTENTION: "Attention weight of the query on the token, averaged over heads.",
    OCCLUSION: "Score of the complete input, less the score with the patch replaced by the baseline.",
}
"""Meaning of a value of a map, by the name of its method."""

LEVEL = 0.95
"""Probability of confidence intervals."""

ONE_STREAM = "tokens"
"""Name of the stream of tokens of a model for which the caller states no streams."""

Estimate = tuple[float, float, float]
"""An estimated number, and the lower and upper limit of its confidence interval."""


# -- what the caller states --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class InputPatches:
    """Arguments of a model, with the entries of one of them, a float tensor, that each token of a sequence stands for.
    A token with entries is called a patch, also where the tensor has embeddings of words.

        pixels = processor(images=image, return_tensors="pt")["pixel_values"]       # (1, 3, 224, 224)
        rows = torch.arange(224) // 16
        token_of = 1 + rows[:, None] * 14 + rows                                    # token 0 is the class token
        patches = InputPatches({"pixel_values": pixels}, "pixel_values", token_of.expand(1, 3, 224, 224))

    Attributes:
        inputs: arguments of the model by name, for one example.
        name: name of the float tensor, such as "pixel_values" or "inputs_embeds".
        token_of: for each entry of that tensor, the index of the token that stands for it, or -1 for none.
        centres: for each token the number of its picture, and the row and the column of its centre, in any unit; NaN
            for tokens without entries. By default, patches of a tensor `(pictures, channels, height, width)` have the
            centres of their entries, and other patches lie in a row, in the order of the tokens.
        baseline: number or tensor that replaces occluded entries; a tensor must broadcast to the input. By default the
            mean of the tensor over the entries of all patches, one for each channel.
        channel_axis: axis of the channels; by default 1 for a tensor of four axes. Other tensors have no channels.

    Raises:
        InputError: the tensor is missing, not of floats, or not finite; or another argument does not fit it.
    """

    inputs: Mapping[str, Any]
    name: str
    token_of: Int[Tensor, "..."]
    centres: Float[Tensor, "tokens 3"] | None = None
    baseline: float | Tensor | None = None
    channel_axis: int | None = None

    def __post_init__(self) -> None:
        values = self.inputs.get(self.name) if isinstance(self.inputs, Mapping) else None
        if not isinstance(values, Tensor) or not values.is_floating_point():
            got = f"{self.name!r} ({values.dtype if isinstance(values, Tensor) else type(values).__name__})"
            raise InputError("name", expected="the name of a float tensor among the inputs", got=got)
        if not bool(values.isfinite().all()):
            raise InputError("inputs", expected=f"finite numbers in {self.name}", got="NaN or infinity")
        token_of, centres = self.token_of, self.centres
        is_whole = isinstance(token_of, Tensor) and token_of.dtype in (torch.int32, torch.int64)
        if not is_whole or token_of.shape != values.shape:
            got = f"{token_of.dtype} of shape {tuple(token_of.shape)}" if isinstance(token_of, Tensor) else "no tensor"
            raise InputError("token_of", expected=f"whole numbers of shape {tuple(values.shape)}", got=got)
        count = int(token_of.max()) + 1 if token_of.numel() else 0
        if count < 1 or int(token_of.min()) < -1:
            least = int(token_of.min()) if token_of.numel() else "no numbers"
            raise InputError("token_of", expected="indices of tokens, and -1 for no token", got=f"from {least}")
        if self.channel_axis is not None:
            whole_number("channel_axis", self.channel_axis, least=-values.ndim, most=values.ndim - 1)
        if centres is not None and (
            not isinstance(centres, Tensor) or centres.shape[1:] != (3,) or len(centres) < count
        ):
            shape = tuple(centres.shape) if isinstance(centres, Tensor) else type(centres).__name__
            raise InputError("centres", expected=f"a tensor (tokens, 3) of at least {count} tokens", got=shape)
        if centres is not None and not bool(centres[self.tokens].isfinite().all()):
            raise InputError("centres", expected="finite numbers for tokens with entries", got="NaN or infinity")
        _ = self.replacement  # refuses a baseline that does not fit

    @cached_property
    def tokens(self) -> Int[Tensor, " patches"]:
        """Indices of the tokens that stand for entries, in ascending order, on the CPU."""
        counts = torch.bincount(self.token_of[self.token_of >= 0].cpu())
        return counts.nonzero()[:, 0]

    @cached_property
    def grid(self) -> Float[Tensor, "patches 3"]:
        """Picture, row and column of each patch on the grid of its picture: the centres, with the distance of
        neighbouring patches as the unit of each axis.
        """
        values, token_of = self.inputs[self.name], self.token_of.cpu()
        if self.centres is not None:
            centres = self.centres.detach().double().cpu()[self.tokens]
        elif values.ndim == 4:
            entry = (token_of >= 0).nonzero()
            patch = torch.searchsorted(self.tokens, token_of[token_of >= 0].long())
            sums = torch.zeros(len(self.tokens), 3, dtype=torch.float64).index_add_(
                0, patch, entry[:, [0, 2, 3]].double()
            )
            centres = sums / torch.bincount(patch, minlength=len(self.tokens))[:, None]
        else:
            centres = torch.zeros(len(self.tokens), 3, dtype=torch.float64)
            centres[:, 2] = self.tokens
        placed = centres.clone()
        for picture in torch.unique(centres[:, 0]):
            of_picture = centres[:, 0] == picture
            for axis in (1, 2):
                gaps = torch.unique(centres[of_picture, axis]).diff()
                placed[of_picture, axis] /= gaps.median() if len(gaps) else 1.0
        return placed

    @cached_property
    def replacement(self) -> Tensor:
        """Numbers that replace occluded entries: the baseline, in a shape that broadcasts to the tensor."""
        values = self.inputs[self.name].detach()
        if self.baseline is not None:
            is_tensor = isinstance(self.baseline, Tensor)
            baseline = torch.as_tensor(
                self.baseline if is_tensor else finite_number("baseline", self.baseline)
            ).detach()
            sizes = (*(1,) * (values.ndim - baseline.ndim), *baseline.shape)
            fits = len(sizes) == values.ndim and all(n in (1, m) for n, m in zip(sizes, values.shape, strict=True))
            if not fits or not bool(baseline.isfinite().all()):
                expected = f"finite numbers that broadcast to shape {tuple(values.shape)}"
                got = "NaN or infinity" if fits else f"shape {tuple(baseline.shape)}"
                raise InputError("baseline", expected=expected, got=got)
            return baseline.to(values)
        axis = 1 if self.channel_axis is None and values.ndim == 4 else self.channel_axis
        is_real, numbers = (self.token_of >= 0).cpu(), values.cpu().double()
        axes = [each for each in range(values.ndim) if axis is None or each != axis % values.ndim]
        sums, count = ((each * is_real).sum(axes, keepdim=True) for each in (numbers, torch.ones_like(numbers)))
        return (sums / count.clamp(min=1)).to(values)

    def occluded(self, hidden: Bool[Tensor, "masks patches"]) -> Tensor:
        """Return copies of the float tensor, stacked along a new first axis. In each copy, the entries of the patches
        at which a row of `hidden` is True are replaced by the baseline.
        """
        values = self.inputs[self.name].detach()
        is_patch = torch.zeros(len(hidden), int(self.token_of.max()) + 2, dtype=torch.bool)
        is_patch[:, self.tokens + 1] = hidden
        return torch.where(is_patch.to(values.device)[:, self.token_of.to(values.device) + 1], self.replacement, values)

    def neighbours(self, size: int) -> Bool[Tensor, "patches patches"]:
        """Return a mask that is True, in the row of each patch, at the patches of the same picture in a square of
        `size` x `size` patches around it.
        """
        apart = (self.grid[:, None] - self.grid).abs()
        return (apart[..., 0] == 0) & (apart[..., 1:] < size / 2).all(-1)


@dataclass(frozen=True, eq=False)
class PredictedToken:
    """The prediction that maps of relevance explain. Its score is the log-probability of a token or class.

        PredictedToken(token=42, position=-1)    # the token after a prompt; logits are (1, length, vocabulary)
        PredictedToken(token=281)                # a class; logits are (1, classes)

    Attributes:
        token: id of the predicted token, or index of the class.
        position: position of the logits from which the token is predicted; None for logits `(1, classes)`.
        query: token whose row of the maps is computed, in the stream of the queries: by default `position`, or the
            first token, the class token of most vision transformers. A tensor has a weight for each token, such as 1 /
            tokens for a model that averages its tokens.
        score: another score: function from the output of the model, for one example, to a tensor with one number.
            Curves then show the score in place of the probability.
    """

    token: int | None = None
    position: int | None = None
    query: int | Float[Tensor, " tokens"] | None = None
    score: Callable[[Any], Tensor] | None = None

    def __post_init__(self) -> None:
        if self.score is None and self.token is None:
            raise InputError("token", expected="the id of a token or class, or a score", got="neither")
        for name in ("token", "position", "query"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Tensor):
                whole_number(name, value, least=0 if name == "token" else -(2**31))

    def score_of(self, output: Any) -> Float[Tensor, ""]:
        """Return the score of the prediction in the output of the model for one example: by default the log-probability
        of the token, in float32 at least.
        """
        if self.score is not None:
            score = self.score(output)
            if not isinstance(score, Tensor) or score.numel() != 1:
                got = f"shape {tuple(score.shape)}" if isinstance(score, Tensor) else type(score).__name__
                raise InputError("score", expected="a function that returns a tensor with one number", got=got)
            return score.reshape(())
        logits = getattr(output, "logits", output)
        axes = 2 if self.position is None else 3
        if not isinstance(logits, Tensor) or logits.ndim != axes or len(logits) != 1:
            expected = f"logits (1, {'classes' if axes == 2 else 'length, vocabulary'}) of one example"
            got = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(output).__name__
            raise InputError("model", expected=expected, got=got)
        logits = logits[0]
        if self.position is not None:
            if not -len(logits) <= self.position < len(logits):
                raise InputError("position", expected=f"one of {len(logits)} positions", got=self.position)
            logits = logits[self.position]
        if self.token is None or self.token >= len(logits):
            raise InputError("token", expected=f"an id below {len(logits)}", got=self.token)
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)[self.token]

    def shown(self, scores: Float[Tensor, "*scores"]) -> Float[Tensor, "*scores"]:
        """Return the numbers that curves show for `scores`: probabilities, or the scores themselves if they are not
        log-probabilities.
        """
        return scores.exp() if self.score is None else scores


class CallStreams(NamedTuple):
    """Streams of one attention call: the sequence of tokens to which its queries belong, and that of its keys.

    Attributes:
        queries, keys: names of the streams.
        query_tokens: token of the stream for each query, -1 for padding. By default the queries of all sequences of the
            call are the tokens of the stream in order, as of the tiles of a picture.
        key_tokens: the same for the keys.
    """

    queries: str
    keys: str
    query_tokens: Int[Tensor, "batch queries"] | None = None
    key_tokens: Int[Tensor, "batch keys"] | None = None


@dataclass(frozen=True, eq=False)
class TokenStreams:
    """Sequences of tokens inside a model, called streams, and the flow of information between them. Examples are the
    patches of a vision tower, the prompt of a language model, and the source of an encoder-decoder.

        TokenStreams(
            lambda call: ("tower",) * 2 if "vision" in call.site.path else ("prompt",) * 2,
            queries="prompt",
            patches="tower",
            links={("prompt", "tower"): prompt_token_of_patch},
        )

    Attributes:
        of_call: function from an attention call to its `CallStreams`, or to the pair of their names; None for a call
            that is left out.
        queries: stream of the query from which the token is predicted.
        patches: stream whose tokens `InputPatches.token_of` numbers.
        links: for a pair of streams (later, earlier), the token of the later stream that each token of the earlier
            stream becomes, without attention; -1 for none. The relevance of a later token is divided equally among the
            earlier tokens that become it. It passes to the earlier stream before the last attention call there.
    """

    of_call: Callable[[Call], CallStreams | tuple[str, str] | None]
    queries: str
    patches: str
    links: Mapping[tuple[str, str], Int[Tensor, " tokens"]] = field(default_factory=dict)


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
class TokenMap:
    """Relevance of each token by one method.

    Attributes:
        method: name of the method, such as "gradient-weighted attention".
        values: relevance of each token; NaN at tokens without a value.
        agreement: Spearman correlation with occlusion over patches, and the limits of its 95 % confidence interval; see
            `spatial_spearman`. None for occlusion itself, or if it was not measured.
        curves: probability of the predicted token in the order of the map; None if it was not measured.
    """

    method: str
    values: Float[Tensor, " tokens"]
    agreement: Estimate | None
    curves: OrderCurves | None


@dataclass(frozen=True, eq=False)
class Relevance:
    """Maps of relevance for one predicted token.

    Attributes:
        target: the predicted token.
        score: its score with the complete input, such as a log-probability, in nats.
        baseline_score: its score with all patches replaced by the baseline.
        maps: one map per method.
        patches: indices of the tokens that are patches.
        left_out: paths of the attention modules through which no relevance passes, since their calls belong to no
            stream.
    """

    target: PredictedToken
    score: float
    baseline_score: float
    maps: tuple[TokenMap, ...]
    patches: tuple[int, ...]
    left_out: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Relevance({', '.join(each.method for each in self.maps)}; {len(self.patches)} patches)"

    def of(self, method: str) -> TokenMap:
        """Return the map of a method. Raise `InputError` if there is none."""
        require_one_of("method", method, [each.method for each in self.maps])
        return next(each for each in self.maps if each.method == method)

    def table(self) -> Any:
        """Return the maps as a pandas DataFrame with one row per token: its index `token`, True in `is_patch` for a
        patch, and one column per method.

        Raises:
            MissingExtra: pandas is not installed.
        """
        count = len(self.maps[0].values)
        patches = set(self.patches)
        columns: dict[str, Any] = {"token": range(count), "is_patch": [each in patches for each in range(count)]}
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

    def page_maps(self, *, side: int, target: int) -> tuple[RelevanceMap, ...]:
        """Return the maps for a page. `side` is the index of the side whose tokens have the values, and `target` the
        index of the predicted token in the last side of the passage.
        """
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
            maps.append(RelevanceMap(each.method, MEANINGS[each.method], side, target, values, each.agreement, curves))
        return tuple(maps)


# -- the analysis ------------------------------------------------------------------------------------------------------


def relevance(
    model: nn.Module,
    patches: InputPatches,
    targets: Sequence[PredictedToken],
    *,
    methods: Collection[str] = tuple(MEANINGS),
    streams: TokenStreams | None = None,
    heads: Collection[Any] | None = None,
    residual: float = ROLLOUT_RESIDUAL,
    neighbourhood: int = 1,
    steps: int = 16,
    orders: int = 8,
    seed: int = 0,
    batch_size: int = 8,
) -> tuple[Relevance, ...]:
    """Compute how relevant each patch of a picture, or each token of a text, was for predicted tokens. Several maps are
    compared with the measured effect of occluding patches. Return one result per predicted token; they share the runs
    with occluded patches.

        (result,) = relevance(model, patches, [PredictedToken(token=42, position=-1)])
        result.summary()                # one row per method: spearman, deletion, insertion, ...
        result.table()                  # one row per token, one column per method

    **Gradient-weighted attention** (Chefer, Gur and Wolf 2021). Let A_h be the weights of head h in an attention call,
    and S the score. With Hadamard products, and means over the H heads of the call,

        A = mean over h of (dS/dA_h * A_h)^+     (equation 5)
        R <- R + A R, with R = I before the first call     (equations 6 and 7)

    The rows and columns of R are the tokens of all streams, and A is zero outside of the queries and keys of the call.
    So for cross-attention the update is R^qk <- R^qk + A R^kk: equation 10 without its normalisation of R, and without
    its factor (R^qq)^T. The map is the row of R that belongs to the query from which the token is predicted. It is
    computed as a row vector r, the unit vector of the query, that passes through the calls in reverse order: r <- r + r
    A. The gradient with respect to a weight is dS/dA_ij = <dS/do_i, v_j>, with the output o_i of the head before the
    output projection and the value v_j. So one backward pass to the head outputs is enough.

    **Attention rollout** passes the same row vector through (1 - residual) times the mean weights of the heads, plus
    `residual` times the identity, for the queries of each call. Its sum is 1, less what learned sinks receive, for one
    stream. **Attention** is the mean over heads of the weights of
    the query in the last layer with keys in the stream of the patches, or of the chosen `heads`. Calls on which the
    score does not depend are left out of all maps.

    **Occlusion** (Zeiler and Fergus 2014) is the score of the complete input minus the score with the patch, or a
    square of patches around it, replaced by the baseline. It is NaN at tokens that are not patches.

    The result also contains, for each map, the rank correlation with occlusion (`spatial_spearman`), and the
    probability of the token while patches are removed or shown in the order of the map (`OrderCurves`).

    The model runs in evaluation mode: once with a backward pass for each predicted token, and once for each occluded
    input. The backward pass keeps the queries, keys and values of all calls. Weights are computed for up to 16 MiB of
    query rows at a time. Only for a model that computes the weights itself, without an attention function, the weights
    of these calls are kept.

    Args:
        model: any module that `watch` supports, whose output has gradients.
        patches: its arguments, and the entries that each token stands for.
        targets: the predicted tokens, such as all generated ones.
        methods: names of the methods, by default all. Without "occlusion", no agreement is measured.
        streams: sequences of tokens of the model, if it has cross-attention or several stages. By default, the model
            has one stream: all calls with as many queries and keys as the last call on which the score depends.
        heads: heads (layer, head) of the map "attention", by the numbers or module paths that `watch` shows.
        residual: share of the residual connection in the rollout, at least 0 and below 1.
        neighbourhood: odd number of patches along the side of the occluded square.
        steps: number of steps of the deletion and insertion curves, at most the number of patches; 0 for no curves.
        orders: number of random orders, at least 2.
        seed: seed of the random orders.
        batch_size: number of occluded inputs in one call of the model. If the model does not compute the same scores in
            a batch of two, it is called for one input at a time.

    Raises:
        InputError: an argument cannot be used; the attention of a module cannot be read; the score is not finite or
            does not depend on the output of any head; the model has cross-attention and no `streams`.
        MissingExtra: scipy, which computes ranks and intervals, is not installed.

    Example:
        >>> patches = InputPatches({"inputs_embeds": embeddings}, "inputs_embeds", token_of)  # doctest: +SKIP
        >>> relevance(model, patches, [PredictedToken(token, -1)])[0].summary()  # doctest: +SKIP
    """
    require_module(model)
    if not isinstance(patches, InputPatches):
        raise InputError("patches", expected="InputPatches", got=type(patches).__name__)
    if not isinstance(targets, list | tuple) or not all(isinstance(each, PredictedToken) for each in targets):
        raise InputError("targets", expected="a list of PredictedToken objects", got=repr(targets))
    chosen = list(dict.fromkeys(collection_of("methods", methods, of="names of methods")))
    for name in chosen:
        require_one_of("method", name, tuple(MEANINGS))
    residual, heads = residual_share(residual), None if heads is None else head_pairs("heads", heads)
    numbers = {"steps": (steps, 0), "orders": (orders, 2), "batch_size": (batch_size, 1), "seed": (seed, 0)}
    for name, (value, least) in (numbers | {"neighbourhood": (neighbourhood, 1)}).items():
        whole_number(name, value, least=least)
    if not chosen or not targets or neighbourhood % 2 == 0:
        argument = "methods" if not chosen else "neighbourhood" if targets else "targets"
        expected = "an odd number" if argument == "neighbourhood" else "at least one"
        raise InputError(argument, expected=expected, got=neighbourhood if expected == "an odd number" else "none")
    count, index = len(patches.tokens), patches.tokens
    generator = torch.Generator().manual_seed(seed)
    random_orders = [torch.randperm(count, generator=generator) for _ in range(orders)]
    with evaluation_mode(model), torch.no_grad():
        scorer = _Scorer(model, patches, targets, batch_size)
        ends = scorer(torch.tensor([[False] * count, [True] * count]))
        flow = None if chosen == [OCCLUSION] else _AttentionFlow(model, scorer, streams)
        tokens = int(index[-1]) + 1 if flow is None else flow.sizes[flow.streams.patches]
        effects = ends[0] - scorer(patches.neighbours(neighbourhood)) if OCCLUSION in chosen else None
        results = []
        for number, each in enumerate(targets):
            maps: list[TokenMap] = []
            for name in chosen:
                if flow is None or name == OCCLUSION:
                    assert effects is not None
                    values = torch.full((tokens,), torch.nan, dtype=torch.float64).index_copy(
                        0, index, effects[:, number]
                    )
                elif name == ATTENTION:
                    values = flow.attention(number, heads)
                else:
                    values = flow.passed(number, None if name == GRADIENT else residual)
                agreement = curves = None
                if effects is not None and name != OCCLUSION:
                    agreement = spatial_spearman(values[index], effects[:, number], patches.grid)
                if steps:
                    order = values[index].argsort(descending=True, stable=True)
                    curves = _order_curves(scorer, number, order, random_orders, min(steps, count))
                maps.append(TokenMap(name, values, agreement, curves))
            score, without = ends[:, number].tolist()
            left_out = () if flow is None else flow.left_out
            results.append(Relevance(each, score, without, tuple(maps), tuple(index.tolist()), left_out))
    return tuple(results)


def spatial_spearman(
    x: Float[Tensor, " patches"], y: Float[Tensor, " patches"], grid: Float[Tensor, "patches 3"]
) -> Estimate:
    """Return the Spearman correlation of two maps over patches, and the limits of its 95 % confidence interval.

    Values of neighbouring patches are correlated, so n patches are fewer than n independent observations. The interval
    uses the effective number of observations 1 + 1 / v (Clifford, Richardson and Hémon 1989),
    with v the variance of the correlation of two independent maps with these autocorrelations,

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

        results = [relevance(model, patches, [target])[0] for patches, target in examples]
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


def _order_curves(
    scorer: "_Scorer", number: int, order: Int[Tensor, " patches"], random_orders: Sequence[Tensor], steps: int
) -> OrderCurves:
    """Return the probability of predicted token `number` while patches are removed and shown in `order`, and in random
    orders. After step i, i * patches // steps patches are removed or shown.
    """
    counts = torch.tensor([step * len(order) // steps for step in range(steps + 1)])

    def curves(order: Int[Tensor, " patches"]) -> Float[Tensor, "kinds steps"]:
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order))
        is_early = rank < counts[:, None]
        scores = scorer(torch.cat([is_early, ~is_early]))[:, number]
        return scorer.targets[number].shown(scores).view(2, -1)

    deletion, insertion = curves(order)
    of_random = torch.stack([curves(each) for each in random_orders])
    return OrderCurves(counts.double() / len(order), deletion, insertion, of_random[:, 0], of_random[:, 1])


class _Scorer:
    """Function from masks of occluded patches to the scores of all predicted tokens. Scores are cached by mask, since
    the curves of all maps begin and end with the same inputs. The masks are `(masks, patches)`, True at occluded
    patches; the scores are `(masks, targets)`, on the CPU in float64.
    """

    def __init__(
        self, model: nn.Module, patches: InputPatches, targets: Sequence[PredictedToken], batch_size: int
    ) -> None:
        self.model, self.patches, self.targets = model, patches, targets
        inputs = to_device(with_cache_disabled(model, dict(patches.inputs)), device_of(model))
        # A backward pass cannot save tensors that were made in inference mode.
        self.inputs = {
            name: value.clone() if isinstance(value, Tensor) and value.is_inference() else value
            for name, value in inputs.items()
        }
        self._batch_size, self._is_checked = batch_size, batch_size == 1
        self._known: dict[bytes, Tensor] = {}

    def __call__(self, masks: Bool[Tensor, "masks patches"]) -> Float[Tensor, "masks targets"]:
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
        dtype = self.inputs[self.patches.name].dtype
        try:
            difference = (self._run(masks) - expected).abs() / expected.abs().clamp(min=1.0)
        except Exception:  # any error of the model, which may read one example alone
            self._batch_size = 1
        else:
            if not bool((difference <= torch.finfo(dtype).eps ** 0.5).all()):
                self._batch_size = 1

    def _run(self, masks: Bool[Tensor, "masks patches"]) -> Float[Tensor, "masks targets"]:
        """Run the model on one batch with an input for each mask: along the first axis, each tensor is repeated."""
        count, name = len(masks), self.patches.name
        batch = {
            key: torch.cat([value] * count) if isinstance(value, Tensor) and value.ndim else value
            for key, value in self.inputs.items()
        }
        batch[name] = self.patches.occluded(masks).to(self.inputs[name]).flatten(0, 1)
        output = call_model(self.model, batch)

        def of_example(index: int) -> Any:
            def part(tensor: Tensor) -> Tensor:
                return tensor.chunk(count)[index] if tensor.ndim and len(tensor) % count == 0 else tensor

            return output if count == 1 else pytree.tree_map_only(Tensor, part, output)

        scores = [[target.score_of(each) for target in self.targets] for each in map(of_example, range(count))]
        return torch.stack([torch.stack([score.cpu().double() for score in row]) for row in scores])


# -- attention ---------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _ReadCall:
    """One attention call of the run: its tensors, and the gradient of each predicted token's score with respect to its
    head outputs.

    Attributes:
        added: zeros that were added to the head outputs, with respect to which scores are differentiated.
        out: head outputs.
        problem: queries, keys, values and options; None if these are unknown.
        weights, values: weights and values, if `problem` is None.
        gradients: gradient of each score; None for a score that does not depend on the call.
        queries, keys: streams of queries and keys.
        query_tokens, key_tokens: token of the stream for each query and each key, -1 for none.
    """

    call: Call
    added: Tensor
    out: Float[Tensor, "batch heads queries value_dim"]
    problem: Problem | None
    weights: Float[Tensor, "batch heads queries keys"] | None = None
    values: Float[Tensor, "batch kv_heads keys value_dim"] | None = None
    gradients: tuple[Tensor | None, ...] = ()
    queries: str = ""
    keys: str = ""
    query_tokens: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    key_tokens: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))

    def is_other_part(self, other: "_ReadCall") -> bool:
        """Return True if another call of the same module has other queries of the same stream."""
        tokens = other.query_tokens[other.query_tokens >= 0]
        is_same_layer = (self.call.site, self.queries) == (other.call.site, other.queries)
        return is_same_layer and not bool(torch.isin(tokens, self.query_tokens).any())

    def product(
        self, rows: Float[Tensor, "batch queries"], number: int | None = None, heads: Sequence[int] | None = None
    ) -> Float[Tensor, "batch keys"]:
        """Return the sum over queries of `rows` times a matrix (queries x keys). The matrix is the sum of the attention
        weights over `heads`, by default all. With the `number` of a predicted token, each weight is multiplied by its
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
                out = attended.out.detach()
                added = torch.zeros_like(out).requires_grad_(torch.is_grad_enabled())
                problem = attended.read_problem()
                if problem is not None:  # without the graph of the run, which would stay in memory
                    changes: dict[str, Any] = {
                        name: getattr(problem, name).detach()
                        for name in ("q", "k", "v", "bias", "sinks", "scale")
                        if isinstance(getattr(problem, name), Tensor)
                    }
                    problem = replace(problem, **changes)
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
    """Attention calls of one run of the model, through which row vectors pass from the query of a predicted token to
    the tokens of the first layer.

    Attributes:
        streams: the streams of the model.
        sizes: number of tokens of each stream.
        left_out: paths of modules with calls of no stream.
    """

    def __init__(self, model: nn.Module, scorer: _Scorer, streams: TokenStreams | None) -> None:
        self.targets, self._reader = scorer.targets, _CallReader(model)
        calls = self._differentiated(model, scorer)
        self.streams = streams = _one_stream(calls) if streams is None else streams
        self.sizes: dict[str, int] = {}
        self._whole: dict[str, int] = {}
        left_out: dict[str, None] = {}
        self._groups: list[list[_ReadCall]] = []
        for read in calls:
            stated = streams.of_call(read.call)
            if stated is None:
                left_out[read.call.site.path] = None
                continue
            self._place(read, stated)
            # Calls with parts of the queries of one layer, such as windows, are one step of the row vector.
            if self._groups and all(read.is_other_part(each) for each in self._groups[-1]):
                self._groups[-1].append(read)
            else:
                self._groups.append([read])
        self.left_out = tuple(left_out)
        for (later, earlier), link in streams.links.items():
            size = self.sizes.setdefault(earlier, len(link))
            if link.shape != (size,) or not bool(((link >= -1) & (link < self.sizes.get(later, 0))).all()):
                expected = f"a token of {later!r}, or -1, for each of {size} tokens of {earlier!r}"
                got = f"shape {tuple(link.shape)}, from {int(link.min())} to {int(link.max())}"
                raise InputError("links", expected=expected, got=got)
        for name in (streams.queries, streams.patches):
            if name not in self.sizes:
                raise InputError("streams", expected=f"attention calls of the stream {name!r}", got="none")
        last = int(scorer.patches.tokens[-1])
        if last >= self.sizes[streams.patches]:
            size = self.sizes[streams.patches]
            raise InputError("token_of", expected=f"indices of {size} tokens of the stream of patches", got=last)

    def _differentiated(self, model: nn.Module, scorer: _Scorer) -> list[_ReadCall]:
        """Run the model, and differentiate the score of each predicted token with respect to all head outputs. Return
        the attention calls.
        """
        reader = self._reader
        grad = frozen_parameters(model), torch.inference_mode(False), torch.enable_grad()
        with grad[0], grad[1], grad[2], intercepted(model, reader):
            output = call_model(model, scorer.inputs)
            scores = [target.score_of(output) for target in self.targets]
        reader.require_readable()
        calls, of_scores = list(reader.calls.values()), []
        for number, score in enumerate(scores):
            if not score.requires_grad:
                raise InputError(
                    "score", expected="a score that depends on the output of heads", got="one that does not"
                )
            added, keep = [each.added for each in calls], number < len(scores) - 1
            of_scores.append(torch.autograd.grad(score, added, retain_graph=keep, allow_unused=True))
        for read, *gradients in zip(calls, *of_scores, strict=True):
            read.gradients, read.added = tuple(gradients), read.out
            if any(each is not None and not bool(each.isfinite().all()) for each in gradients):
                raise InputError("score", expected="finite gradients", got=f"NaN or infinity in {read.call.site.label}")
        if any(read.problem is None for read in calls):
            with intercepted(model, _WeightReader(model, reader.calls)):
                call_model(model, scorer.inputs)
            for read in calls:
                if read.problem is None and (read.weights is None or read.values is None):
                    got = f"others in {read.call.site.label}"
                    raise InputError("model", expected="attention with known weights and values", got=got)
        return calls

    def _place(self, read: _ReadCall, stated: CallStreams | tuple[str, str]) -> None:
        """Store the streams of a call, and the token of its stream for each of its queries and keys."""
        if not isinstance(stated, tuple) or len(stated) not in (2, 4):
            raise InputError("streams", expected="CallStreams, a pair of names, or None", got=repr(stated))
        streams, call = CallStreams(*stated), read.call
        grid, device = call.grid, read.out.device
        read.queries, read.keys = streams.queries, streams.keys
        sides = (
            ("queries", streams.queries, streams.query_tokens, grid.queries, call.real_queries, 0),
            ("keys", streams.keys, streams.key_tokens, grid.keys, call.real_keys, call.appended_keys),
        )
        for side, name, tokens, length, is_real, appended in sides:
            if tokens is None:
                is_token = (
                    torch.ones(grid.batch, length, dtype=torch.bool) if is_real is None else is_real.cpu().clone()
                )
                is_token[:, length - appended :] = False
                placed = (is_token.flatten().cumsum(0) - 1).view_as(is_token).masked_fill(~is_token, -1)
                size = int(is_token.sum())
                if self._whole.setdefault(name, size) != size:
                    expected = f"all {self._whole[name]} tokens of the stream {name!r} in every call without tokens"
                    raise InputError("streams", expected=expected, got=f"{size} {side} in {call.site.label}")
            elif not isinstance(tokens, Tensor) or tokens.shape != (grid.batch, length):
                got = tuple(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
                expected = f"tokens of shape {(grid.batch, length)} for the {side} of {call.site.label}"
                raise InputError("streams", expected=expected, got=got)
            else:
                placed = tokens.cpu().long()
            self.sizes[name] = max(self.sizes.get(name, 0), int(placed.max()) + 1)
            if self.sizes[name] > self._whole.get(name, self.sizes[name]):
                expected = f"indices of {self._whole[name]} tokens of the stream {name!r}"
                raise InputError("streams", expected=expected, got=f"{self.sizes[name] - 1} in {call.site.label}")
            if side == "queries":
                read.query_tokens = placed.to(device)
            else:
                read.key_tokens = placed.to(device)

    def passed(self, number: int, residual: float | None) -> Float[Tensor, " tokens"]:
        """Pass the row vector of predicted token `number` through all attention calls on which its score depends, from
        the last one to the first. Return its entries at the tokens of the stream of patches. With `residual` r, the
        vector becomes r times itself plus 1 - r times its product with the mean weights. Without, its product with the
        gradient-weighted matrix is added to it.
        """
        rows, pending = self._start(number), dict(self.streams.links)
        for group in reversed(self._groups):
            active = [read for read in group if read.gradients[number] is not None]
            for read in active:
                self._hand_over(read.queries, rows, pending)
            products = []
            for read in active:
                product = read.product(
                    _taken(rows[read.queries], read.query_tokens), number if residual is None else None
                )
                products.append(product * ((1 if residual is None else 1 - residual) / read.call.grid.heads))
            for read in active:
                rows[read.queries][read.query_tokens[read.query_tokens >= 0]] *= 1.0 if residual is None else residual
            for read, product in zip(active, products, strict=True):
                _add(rows[read.keys], read.key_tokens, product)
        self._hand_over(self.streams.patches, rows, pending)
        return rows[self.streams.patches].cpu().double()

    def attention(self, number: int, heads: Collection[tuple[Any, int]] | None) -> Float[Tensor, " tokens"]:
        """Return the attention weights of the query of predicted token `number`, averaged over heads: over all heads of
        the last layer whose keys are in the stream of patches, or in one linked with it, or over chosen `heads`.
        """
        start, pending = self._start(number), dict(self.streams.links)
        rows = {name: torch.zeros_like(row) for name, row in start.items()}
        calls = [
            (place, read)
            for place, group in enumerate(self._groups)
            for read in group
            if read.queries == self.streams.queries and self._reaches(read.keys) and read.gradients[number] is not None
        ]
        chosen: list[tuple[_ReadCall, list[int]]] = []
        if heads is None:
            last = max((place for place, _ in calls), default=None)
            chosen = [(read, list(range(read.call.grid.heads))) for place, read in calls if place == last]
        else:
            by_site: dict[SiteKey, list[int]] = {}
            labels = [(record.site, each["layer"], each["head"]) for record, each in self._reader.head_labels()]
            for layer, head in heads:
                sites = [site for site, *own in labels if own[1] == head and layer in (own[0], site.label)]
                if not any(read.call.site in sites for _, read in calls):
                    expected = (
                        f"heads with queries in {self.streams.queries!r} whose keys reach {self.streams.patches!r}"
                    )
                    raise InputError("heads", expected=expected, got=(layer, head))
                for site in sites:
                    by_site.setdefault(site, []).append(head)
            chosen = [(read, by_site[read.call.site]) for _, read in calls if read.call.site in by_site]
        if not chosen:
            expected = f"attention from {self.streams.queries!r} to tokens that reach {self.streams.patches!r}"
            remedy = f"leave out the method {ATTENTION!r}"
            raise InputError("streams", expected=expected, got="none", remedy=remedy)
        # Several calls of a site, such as windows, have the same heads.
        total = sum(len(of_site) for of_site in {read.call.site: of_site for read, of_site in chosen}.values())
        for read, of_call in chosen:
            product = read.product(_taken(start[read.queries], read.query_tokens), heads=of_call)
            _add(rows[read.keys], read.key_tokens, product / total)
        self._hand_over(self.streams.patches, rows, pending)
        return rows[self.streams.patches].cpu().double()

    def _start(self, number: int) -> dict[str, Float[Tensor, " tokens"]]:
        """Return a row vector for each stream: zeros, with 1 at the query of predicted token `number`."""
        target, read = self.targets[number], self._groups[-1][0]
        dtype = torch.promote_types(read.out.dtype, torch.float32)
        rows = {name: torch.zeros(size, dtype=dtype, device=read.out.device) for name, size in self.sizes.items()}
        row, query = rows[self.streams.queries], target.query
        if isinstance(query, Tensor):
            if query.shape != row.shape or not bool(query.isfinite().all()):
                expected = f"a finite weight for each of {len(row)} tokens"
                raise InputError("query", expected=expected, got=f"shape {tuple(query.shape)}")
            row += query.to(row)
            return rows
        query = (target.position or 0) if query is None else query
        if not -len(row) <= query < len(row):
            raise InputError("query", expected=f"one of {len(row)} tokens", got=query)
        row[query] = 1.0
        return rows

    def _hand_over(self, name: str, rows: dict[str, Tensor], pending: dict[tuple[str, str], Tensor]) -> None:
        """Add to the row vector of the stream `name` that of later streams whose tokens its tokens become. Each link is
        used once.
        """
        for later, earlier in [pair for pair in pending if pair[1] == name]:
            link = pending.pop((later, earlier)).to(rows[name].device)
            self._hand_over(later, rows, pending)
            is_linked = link >= 0
            shares = torch.bincount(link[is_linked], minlength=len(rows[later])).clamp(min=1)
            rows[name][is_linked] += (rows[later] / shares)[link[is_linked]]

    def _reaches(self, name: str) -> bool:
        """Return True if the stream `name` is that of the patches, or links lead from it to that stream."""
        reached, links = {name}, list(self.streams.links)
        for _ in links:
            reached |= {earlier for later, earlier in links if later in reached}
        return self.streams.patches in reached


def _one_stream(calls: Sequence[_ReadCall]) -> TokenStreams:
    """Return the only stream of a model: all calls of self-attention over as many tokens as the last call on which a
    score depends. Raise `InputError` if there may be several streams.
    """
    active = [each.call for each in calls if any(gradient is not None for gradient in each.gradients)]
    remedy = "pass streams=, which states the streams of queries and keys"
    if not active:
        raise InputError("score", expected="a score that depends on the output of heads", got="one that does not")
    grid, last = active[-1].grid, active[-1]
    for call in active:
        if call.site.cross and call.grid.queries == grid.queries:
            got = f"cross-attention in {call.site.label}"
            raise InputError("model", expected="self-attention alone", got=got, remedy=remedy)
    if grid.batch != 1 or grid.queries != grid.keys - last.appended_keys:
        got = f"{grid.batch} x {grid.queries} queries and {grid.keys} keys in {last.site.label}"
        raise InputError("model", expected="self-attention over one sequence in the last layer", got=got, remedy=remedy)

    def of_call(call: Call) -> CallStreams | None:
        sizes = call.grid.batch, call.grid.queries, call.grid.keys - call.appended_keys
        return CallStreams(ONE_STREAM, ONE_STREAM) if sizes == (1, grid.queries, grid.queries) else None

    # Layers of another part of the model may have as many tokens by chance.
    names = {re.sub(r"\d+", "*", call.site.path) for call in active if of_call(call) is not None}
    if len(names) > 1:
        got = f"{grid.queries} tokens in {', '.join(sorted(names))}"
        raise InputError("model", expected="modules of one name in all layers", got=got, remedy=remedy)
    return TokenStreams(of_call, ONE_STREAM, ONE_STREAM)


def _taken(row: Float[Tensor, " tokens"], index: Int[Tensor, "batch queries"]) -> Float[Tensor, "batch queries"]:
    """Return the entries of a row vector at the tokens of queries; 0 at an index of -1."""
    return row[index.clamp(min=0)].masked_fill(index < 0, 0.0)


def _add(row: Float[Tensor, " tokens"], index: Int[Tensor, "batch keys"], values: Float[Tensor, "batch used"]) -> None:
    """Add values of keys to a row vector at the keys' tokens, in place. Keys with an index of -1 are left out, and
    `values` may lack keys at the end, which no query attends to.
    """
    index = index[:, : values.shape[1]]
    row.index_add_(0, index[index >= 0], values[index >= 0].to(row.dtype))
