"""OV and QK matrices of all heads of a model, read from its weights and checked against what the model computes."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.circuits.module_maps import ModuleMaps, placed_modules
from headwise.analysis.circuits.scores import (
    CircuitScores,
    Composition,
    HeadPair,
    composition_scores,
    random_sd,
    reading_factor,
    writing_factor,
)
from headwise.analysis.circuits.stream import (
    NotLinearError,
    StreamFactors,
    embedding_product,
    stream_factors,
)
from headwise.analysis.circuits.trace import RunTrace, double_copy
from headwise.analysis.prompts import one_batch
from headwise.attention.autocast import without_autocast
from headwise.checks import LARGEST_SIZE, flag, require_module, whole_number
from headwise.data.batches import device_of, with_cache_disabled
from headwise.data.tokenization import input_embeddings
from headwise.errors import InputError
from headwise.progress import progress_bar, shown_progress
from headwise.runs.fingerprint import run_settings
from headwise.runs.rows import HeadRow, MeanEstimate
from headwise.settings import COMPOSITION_KINDS
from headwise.shapes import Float
from headwise.wording import counted

TOKENS, FEWEST_TOKENS = 7, 4
"""Numbers of tokens of the text by which weights are checked: by default, and at least."""

SCORES = ("copying", "matching", "ov_norm", "ov_largest", "qk_norm", "qk_largest")
"""Names of the scores of a head."""


def circuits(model: nn.Module, batch: Any = None, *, title: str | None = None, progress: bool = False) -> "Circuits":
    """Read the OV and QK matrices of each head from the weights of a model (Elhage et al. 2021). The OV matrix maps an
    attended token to what the head writes, and the QK matrix determines its attention scores. The returned object also
    computes scores of single heads, such as copying, and of how strongly one head reads the output of another
    (composition).

    With x the residual stream, a head adds `A OV x` to it, where the attention weights A follow from the scores
    `x_i^T QK x_j` of query i and key j. `Circuits` has the definitions.

        circuits = hw.circuits(model)
        circuits.ov(5, 1).singular_values()
        circuits.scores().table()                      # one row per head: copying, matching, norms
        circuits.composition().table()                 # one row per pair of heads: q, k, v

    A copy of the model in float64 runs twice on a short text. The matrices must give the attention weights, head
    outputs and sums that this copy computes; otherwise the model is refused. The copy needs 8 bytes per parameter.

    Args:
        model: a model of which the attention modules are of a known family: Llama, Mistral, Qwen2, Qwen3, Gemma 2 and
            3, Phi, GPT-2, GPT-NeoX, BERT and others, or headwise's own layer.
        batch: one sequence of at least 4 tokens, as a tensor or a mapping of the model's arguments; by default 7 random
            tokens, for a model that names its token embedding.
        title: the model's name for display; by default the last part of its hub id, its folder, or its class.
        progress: show progress bars on standard error, also for the scores that the result computes.

    Raises:
        InputError: the attention of a module is not one of a known family or computes something else than its weights
            say; a module has hooks, adapters, parametrizations or quantised weights; attention is cross-attention; the
            batch cannot be used, or the model does not run in float64.
    """
    require_module(model)
    with progress_bar("circuits", 4, "steps", shown=flag("progress", progress)) as bar:
        copy = double_copy(model)
        batch = _batch(copy, batch)
        metadata = run_settings(model, None, title)
        bar.advance()
        with without_autocast(device_of(copy)), torch.no_grad():
            trace = RunTrace(copy, batch)
            bar.advance()
            placed = placed_modules(trace)
            bar.advance()
            shortest = min(module.input.shape[1] for module in placed)
            if shortest < FEWEST_TOKENS:
                expected = f"at least {FEWEST_TOKENS} tokens, by which weights are checked"
                raise InputError("batch", expected=expected, got=shortest)
            stream: StreamFactors | str
            products: dict[str, Tensor | str] = {}
            try:
                stream = stream_factors(trace, batch, placed)
                maps = [each.maps for each in placed]
                for name in ("copying", "matching"):
                    try:
                        products[name] = embedding_product(trace, stream, with_logits=name == "copying")
                    except NotLinearError as error:
                        products[name] = str(error)
            except NotLinearError as error:
                stream, maps = str(error), [each.unfolded for each in placed]
        bar.advance()
    heads = tuple(labels for _, labels in trace.head_labels())
    return Circuits(heads, metadata, maps, stream, products, progress)


def _batch(model: nn.Module, batch: Any) -> dict[str, Any]:
    """Return the model's arguments, as a dictionary, for the run that checks the OV and QK matrices against the model's
    own attention. Floating-point tensors are converted to float64. If `batch` is None, use 7 different random tokens.
    """
    if batch is None:
        weight = getattr(input_embeddings(model), "weight", None)
        if not isinstance(weight, Tensor) or len(weight) < TOKENS:
            expected = "one sequence, for a model that does not name its token embedding (get_input_embeddings)"
            raise InputError("batch", expected=expected, got="none")
        batch = torch.randperm(len(weight), generator=torch.Generator().manual_seed(0))[None, :TOKENS]
    arguments = one_batch(model, batch)
    return with_cache_disabled(
        model,
        {
            name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
            for name, value in arguments.items()
        },
    )


@dataclass(frozen=True, eq=False, repr=False)
class FactoredMatrix:
    """A matrix of low rank, stored as two factors: `left @ right`. Norm, singular values and eigenvalues are computed
    from the factors. Only the method `matrix()` multiplies the factors.

    Attributes:
        left: first factor, `(rows, rank)`, or one for each of several matrices, `(..., rows, rank)`.
        right: second factor, `(rank, columns)`, or as many.

    Example:
        >>> FactoredMatrix(torch.ones(4, 1), torch.ones(1, 4)).norm()
        tensor(4.)
    """

    left: Float[Tensor, "*matrices rows rank"]
    right: Float[Tensor, "*matrices rank columns"]

    def __repr__(self) -> str:
        rows, columns = self.shape
        return f"FactoredMatrix({rows} x {columns}, rank {self.left.shape[-1]} or less)"

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and columns of the matrix `left @ right`."""
        return self.left.shape[-2], self.right.shape[-1]

    def transposed(self) -> "FactoredMatrix":
        """Return the transposed matrix, which has the factors `right.mT` and `left.mT`."""
        return FactoredMatrix(self.right.mT, self.left.mT)

    def matrix(self) -> Float[Tensor, "*matrices rows columns"]:
        """Return the matrix as a dense tensor: the product of its two stored factors."""
        return self.left @ self.right

    def singular_values(self) -> Float[Tensor, "*matrices values"]:
        """Return the singular values that may differ from 0, in descending order. There are at most `rank` of them,
        where `rank` is the number of columns of `left`.
        """
        # With left = Q R and right^T = P S, the product Q (R S^T) P^T has the singular values of R S^T.
        core = torch.linalg.qr(self.left, mode="r").R @ torch.linalg.qr(self.right.mT, mode="r").R.mT
        values: Tensor = torch.linalg.svdvals(core)
        return values

    def norm(self) -> Float[Tensor, "*matrices"]:
        """Return the Frobenius norm: the root of the sum of the squared singular values."""
        norm: Tensor = self.singular_values().norm(dim=-1)
        return norm

    def eigenvalues(self) -> Tensor:
        """Return `rank` complex eigenvalues of a square matrix, where `rank` is the number of columns of `left`. All
        other eigenvalues are 0.

        The matrices `left @ right` and `right @ left` have the same eigenvalues other than 0.
        """
        values: Tensor = torch.linalg.eigvals(self.right @ self.left)
        return values


@dataclass(frozen=True, eq=False, repr=False)
class Circuits:
    """OV and QK matrices of all heads of a model. The OV matrix maps the residual stream at an attended token to what
    the head writes into the stream. The QK matrix determines the attention scores. Each matrix is `(width, width)`, for
    the width of the residual stream, and is stored as two factors of rank head_dim.

        OV = f P W_O W_V N          QK = s (R(i) W_Q N)^T (R(j) W_K N)

    W_Q, W_K, W_V and W_O are the head's slices of the projections; with grouped heads, W_K and W_V are those of its
    key/value head. N is the linear part of the norm before attention: its weight and, in a layer norm, the subtraction
    of the mean. P is that of a norm after attention (Gemma 2), otherwise 1. s is the scale of the scores, and f the
    factor with which heads write into the stream (1 in most models). R is the rotation by the positions i of the query
    and j of the key, which matters through the distance i - j only.

    In a model without a linear residual stream (`has_linear_stream`), such as BERT, whose norms follow each sum, no
    norm is folded in: x is the input of the attention module, and OV x is a part of its output.

    Left out are the divisions by norms, which multiply what a head reads at each token by a positive number; all
    biases; and caps of scores and logits.

    Attributes:
        heads: labels of each head: layer, head, kv_head, module, kind.
        metadata: model, versions and settings.
        shows_progress: True to show progress bars of the scores on standard error.
    """

    heads: tuple[Mapping[str, Any], ...]
    metadata: Mapping[str, Any]
    _modules: list[ModuleMaps]
    _stream: StreamFactors | str
    _products: Mapping[str, Tensor | str]
    shows_progress: bool = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({counted(len(self.heads), 'head')} of {self.metadata['model']['name']})"

    @property
    def has_linear_stream(self) -> bool:
        """True if the model has a linear residual stream: each head adds its output to a sum of vectors, and every
        later head reads this sum directly or through one norm.
        """
        return isinstance(self._stream, StreamFactors)

    def ov(self, layer: int, head: int) -> FactoredMatrix:
        """Return the OV matrix of a head, by zero-based layer and head. It maps the residual stream at a token to the
        vector that the head writes if it attends to this token with weight 1.

        Raises:
            InputError: there is no such head.
        """
        maps, index = self._find(layer, head)
        output, value = self._ov_factors(maps)
        return FactoredMatrix(output[index], value[index])

    def qk(self, layer: int, head: int, distance: int = 0) -> FactoredMatrix:
        """Return the QK matrix of a head, by zero-based layer and head. The attention score of query i and key j is
        `x_i^T QK x_j`, where x_i is the residual stream at token i. With rotary positions, QK is the matrix for a key
        that is `distance` tokens before the query.

        Args:
            layer: zero-based layer.
            head: zero-based head in the layer.
            distance: number of tokens from the key to the query, for models with rotary positions: their QK matrix
                depends on it. At 0 queries and keys are not rotated against each other, so that the score is that of a
                token with itself. Without rotary positions, QK is the same at all distances.

        Raises:
            InputError: there is no such head; the scores of the module are not of this form, as with norms of queries
                and keys (Qwen3, Gemma 3), or biases by position (T5); or the distance is not a whole number of 0 or
                more.
        """
        maps, index = self._find(layer, head)
        distance = whole_number("distance", distance, least=0, most=LARGEST_SIZE)
        query, key = self._qk_factors(maps, distance)
        return FactoredMatrix(query[index], key[index])

    def why_not(self, score: str) -> str | None:
        """Return the reason why a score cannot be computed for this model, or None if it can be computed. `score` is a
        score of single heads, such as "copying", or a kind of composition: "q", "k" or "v", for queries, keys or values
        that read what an earlier head writes.

        Raises:
            InputError: the name is none of a score, such as "copying", or of a kind of composition, such as "q".
        """
        if score not in (*SCORES, *COMPOSITION_KINDS):
            raise InputError("score", expected=f"one of {', '.join((*SCORES, *COMPOSITION_KINDS))}", got=repr(score))
        if score in ("q", "k", "v", "copying", "matching") and isinstance(self._stream, str):
            return self._stream
        reason = self._products.get(score)
        if isinstance(reason, str):
            return reason
        if score in ("q", "k", "matching", "qk_norm", "qk_largest"):
            return next((maps.why_no_qk for maps in self._modules if maps.why_no_qk is not None), None)
        return None

    def scores(self, *names: str, distance: int = 0) -> CircuitScores:
        """Return a table with one row per head and one column per score, such as "copying" or "ov_norm". The class
        `CircuitScores` defines the scores.

        Args:
            names: names of scores, such as "copying"; by default all that the model has, with a warning that names
                those that it does not have, and the reason.
            distance: see `qk`; of the scores "matching", "qk_norm" and "qk_largest".

        Raises:
            InputError: a score is unknown, or the model does not have it.
        """
        distance = whole_number("distance", distance, least=0, most=LARGEST_SIZE)
        names = self._available("names", names, SCORES, "scores")
        values = {}
        with shown_progress(self.shows_progress), progress_bar("scores", len(self._modules), "layers") as bar:
            for maps in bar.track(self._modules):
                values[maps.path] = self._module_scores(maps, names, distance)
        rows = []
        for labels in self.heads:
            of_module, head = values[labels["module"]], labels["head"]
            statistics = {name: MeanEstimate.exact(float(of_module[name][head])) for name in names}
            rows.append(HeadRow(**labels, statistics=statistics))
        settings = {**self.metadata["settings"], "distance": distance}
        return CircuitScores(tuple(rows), {**self.metadata, "settings": settings, "measured": {"sequences": 1}})

    def _module_scores(self, maps: ModuleMaps, names: Sequence[str], distance: int) -> dict[str, Tensor]:
        """Return the scores of the heads of one attention module: a tensor with one number per head for each score in
        `names`.
        """
        values: dict[str, Tensor] = {}
        for circuit, vocabulary_score in (("ov", "copying"), ("qk", "matching")):
            needed = [name for name in names if name == vocabulary_score or name.startswith(circuit)]
            if not needed:
                continue
            left, right = self._ov_factors(maps) if circuit == "ov" else self._qk_factors(maps, distance)
            if vocabulary_score in needed:
                # The eigenvalues of U (left right) E^T are those of right (E^T U) left, and 0.
                middle = self._products[vocabulary_score]
                assert isinstance(middle, Tensor)
                eigenvalues = torch.linalg.eigvals(right @ middle @ left)
                values[vocabulary_score] = eigenvalues.sum(-1).real / eigenvalues.abs().sum(-1)
            singular = FactoredMatrix(left, right).singular_values()
            values[f"{circuit}_norm"] = singular.norm(dim=-1)
            values[f"{circuit}_largest"] = singular.amax(-1)
        return values

    def composition(self, *kinds: str, distance: int = 0) -> Composition:
        """Return a table with one row for each pair of a head and a head of an earlier layer. The columns are
        composition scores: how strongly the queries, keys or values of the later head read what the earlier head writes
        into the residual stream.

        Args:
            kinds: some of "q", "k" and "v"; by default all that the model has, with a warning that names the others.
            distance: see `qk`; of the kinds "q" and "k", the distance at which the later head attends.

        Raises:
            InputError: a kind is unknown, or the model has no linear residual stream, or scores that are not bilinear.
        """
        distance = whole_number("distance", distance, least=0, most=LARGEST_SIZE)
        kinds = self._available("kinds", kinds, COMPOSITION_KINDS, "composition scores")
        if len(self._modules) < 2:
            raise InputError("model", expected="at least two attention layers", got=len(self._modules))
        readers, written = [], []
        for maps in self._modules:
            output, value = self._ov_factors(maps)
            of_module = {"v": reading_factor(output, value)}
            if {"q", "k"} & set(kinds):
                query, key = self._qk_factors(maps, distance)
                of_module |= {"q": reading_factor(key.mT, query.mT), "k": reading_factor(query, key)}
            readers.append(of_module)
            written.append(writing_factor(output, value))
        labels = [[each for each in self.heads if each["module"] == maps.path] for maps in self._modules]
        rows = []
        with shown_progress(self.shows_progress), progress_bar("composition", len(written) - 1, "layers") as bar:
            for layer in bar.track(range(1, len(written))):
                scores = {}
                for kind in kinds:
                    of_modules = [composition_scores(readers[layer][kind], each) for each in written[:layer]]
                    scores[kind] = torch.cat(of_modules, 1).tolist()
                earlier_heads = [each for of_earlier in labels[:layer] for each in of_earlier]
                for (row, later), (column, earlier) in product(enumerate(labels[layer]), enumerate(earlier_heads)):
                    pair = HeadPair(
                        layer=later["layer"],
                        head=later["head"],
                        earlier_layer=earlier["layer"],
                        earlier_head=earlier["head"],
                        statistics={kind: MeanEstimate.exact(scores[kind][row][column]) for kind in kinds},
                    )
                    rows.append(pair)
        width = written[0].shape[1]
        measured = {
            "sequences": 1,
            "expected": width**-0.5,
            "random_sd": random_sd(readers[1][kinds[0]].shape[1], written[0].shape[2], width),
            "heads": [dict(each) for each in self.heads],
        }
        settings = {**self.metadata["settings"], "distance": distance}
        return Composition(tuple(rows), {**self.metadata, "settings": settings, "measured": measured})

    def _available(self, argument: str, names: Sequence[str], known: Sequence[str], plural: str) -> tuple[str, ...]:
        """Check that the scores in `names` can be computed for the model, and return these names. If `names` is empty,
        return every score in `known` that can be computed, and warn of all other scores in `known`. Raise `InputError`
        for a name that is unknown or a score that cannot be computed.
        """
        for name in names:
            if name not in known:
                raise InputError(argument, expected=f"some of {', '.join(known)}", got=repr(name))
        reasons = {name: self.why_not(name) for name in names or known}
        missing = {name: reason for name, reason in reasons.items() if reason is not None}
        present = tuple(name for name in reasons if name not in missing)
        if missing and (names or not present):
            name, reason = next(iter(missing.items()))
            others = [other for other in known if self.why_not(other) is None]
            remedy = f"the model has {', '.join(others)}" if others else "use the matrices of each head, ov and qk"
            raise InputError("model", expected=f"one that has {plural} of the name {name!r}", got=reason, remedy=remedy)
        for reason in dict.fromkeys(missing.values()):
            left_out = ", ".join(name for name, of_name in missing.items() if of_name == reason)
            warnings.warn(f"the {plural} {left_out} are left out: the model has {reason}", stacklevel=3)
        return present

    def _find(self, layer: int, head: int) -> tuple[ModuleMaps, int]:
        """Return the weights of the attention module that a head belongs to (`ModuleMaps`), and the index of the head
        in this module.
        """
        for labels in self.heads:
            if (labels["layer"], labels["head"]) == (layer, head):
                return next(maps for maps in self._modules if maps.path == labels["module"]), labels["head"]
        raise InputError("head", expected="a (layer, head) of the model", got=(layer, head))

    def _ov_factors(self, maps: ModuleMaps) -> tuple[Tensor, Tensor]:
        """Return two tensors whose product is the OV matrix of each head of a module: `(heads, width, value_dim)` and
        `(heads, value_dim, width)`.
        """
        factor = 1.0
        if isinstance(self._stream, StreamFactors):
            factor = self._stream.of_modules[self._modules.index(maps)]
        group = len(maps.query) // len(maps.value)
        return maps.output * factor, maps.value.repeat_interleave(group, 0)

    def _qk_factors(self, maps: ModuleMaps, distance: int) -> tuple[Tensor, Tensor]:
        """Return two tensors whose product is the QK matrix of each head of a module: `(heads, width, head_dim)` and
        `(heads, head_dim, width)`. With rotary positions, the product is the QK matrix for a query `distance` tokens
        after the key.
        """
        if maps.why_no_qk is not None:
            expected = "scores that are a bilinear form of the residual stream"
            raise InputError("model", expected=expected, got=maps.why_no_qk, remedy="use OV matrices, copying or v")
        positions = torch.zeros(maps.query.shape[-1], dtype=torch.int64, device=maps.query.device)
        query = maps.rotation.rotate(maps.query.mT, positions + distance) * maps.scale[:, None, None]
        key = maps.rotation.rotate(maps.key.mT, positions).mT
        return query, key.repeat_interleave(len(maps.query) // len(maps.key), 0)
