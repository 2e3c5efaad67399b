"""OV and QK matrices of all heads of a model, read from its weights and checked against what the model computes."""

from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.circuits.composition import composition_table
from headwise.analysis.circuits.composition_table import Composition
from headwise.analysis.circuits.matrices import SCORES, CircuitMatrices, distance_argument
from headwise.analysis.circuits.module_maps import placed_module
from headwise.analysis.circuits.scores import CircuitScores, score_table
from headwise.analysis.circuits.stream import (
    NotLinearError,
    StreamFactors,
    embedding_product,
    embedding_unembedding_product,
    stream_factors,
)
from headwise.analysis.circuits.trace import RunTrace, double_copy
from headwise.analysis.prompts import one_batch
from headwise.attention.autocast import without_autocast
from headwise.checks import flag, require_module
from headwise.data.batches import device_of, with_cache_disabled
from headwise.data.tokenization import input_embeddings
from headwise.errors import InputError
from headwise.progress import ProgressBar, progress_bar, shown_progress
from headwise.runs.fingerprint import run_settings
from headwise.settings import COMPOSITION_KINDS

TOKENS, FEWEST_TOKENS = 7, 4
"""Numbers of tokens of the text by which weights are checked: by default, and at least."""


def circuits(model: nn.Module, batch: Any = None, *, title: str | None = None, progress: bool = False) -> "Circuits":
    """Read the OV and QK matrix of each head from the weights of a model (Elhage et al. 2021), and return an object
    with these matrices, copying and matching scores, and composition scores of every two heads of different layers.

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
            found = _circuits_of(copy, batch, metadata, bar)
        bar.advance()
    found.shows_progress = progress
    return found


def _circuits_of(copy: nn.Module, batch: dict[str, Any], metadata: dict[str, Any], bar: ProgressBar) -> "Circuits":
    """Return the circuits of a model with these settings, whose copy in float64 runs on a batch."""
    trace = RunTrace(copy, batch)
    bar.advance()
    placed = [placed_module(trace, site) for site in trace.attention.sites.values()]
    bar.advance()
    if min(module.input.shape[1] for module in placed) < FEWEST_TOKENS:
        expected = f"at least {FEWEST_TOKENS} tokens, by which weights are checked"
        raise InputError("batch", expected=expected, got=min(module.input.shape[1] for module in placed))
    products: dict[str, Tensor | str] = {}
    stream: StreamFactors | str
    try:
        stream = stream_factors(trace, batch, placed)
        for name, product_of in (("copying", embedding_unembedding_product), ("matching", embedding_product)):
            try:
                products[name] = product_of(trace, stream)
            except NotLinearError as error:
                products[name] = str(error)
    except NotLinearError as error:
        stream = str(error)
    heads = tuple(labels for _, labels in trace.attention.head_labels())
    maps = [each.unfolded if isinstance(stream, str) else each.maps for each in placed]
    return Circuits(heads, metadata, maps, stream, products)


def _batch(model: nn.Module, batch: Any) -> dict[str, Any]:
    """Return the batch on which weights are checked as arguments of the model, in float64 where it consists of
    floating-point numbers; by default random tokens that are all different.

    Raises:
        InputError: there is no batch, and the model does not name its token embedding.
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


class Circuits(CircuitMatrices):
    """OV and QK matrices of all heads of a model, with scores of single heads and of pairs. `CircuitMatrices` defines
    the matrices.

    Attributes:
        shows_progress: True to show progress bars of the scores on standard error.
    """

    shows_progress = False

    def scores(self, *names: str, distance: int = 0) -> CircuitScores:
        """Return a table of scores of each head, one row per head. `CircuitScores` defines them.

        Args:
            names: names of scores, such as "copying"; by default all that the model has, with a warning that names
                those that it does not have, and the reason.
            distance: see `qk`; of the scores "matching", "qk_norm" and "qk_largest".

        Raises:
            InputError: a score is unknown, or the model does not have it.
        """
        for name in names:
            if name not in SCORES:
                raise InputError("names", expected=f"some of {', '.join(SCORES)}", got=repr(name))
        with shown_progress(self.shows_progress):
            return score_table(self, names, distance_argument(distance))

    def composition(self, *kinds: str, distance: int = 0) -> Composition:
        """Return the composition scores of every head with every head of earlier layers, one row per pair.
        `Composition` defines them.

        Args:
            kinds: some of "q", "k" and "v"; by default all that the model has, with a warning that names the others.
            distance: see `qk`; of the kinds "q" and "k", the distance at which the later head attends.

        Raises:
            InputError: a kind is unknown, or the model has no linear residual stream, or scores that are not bilinear.
        """
        for kind in kinds:
            if kind not in COMPOSITION_KINDS:
                raise InputError("kinds", expected=f"some of {', '.join(COMPOSITION_KINDS)}", got=repr(kind))
        with shown_progress(self.shows_progress):
            return composition_table(self, kinds, distance_argument(distance))
