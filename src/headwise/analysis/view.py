"""`view`: the attention of every head of a model on one text, in statistics and between words.

No matrix of tokens x tokens is kept. Each layer's attention is observed in blocks of rows; for each head its
statistics, the strongest keys of each word and a picture of bounded size are stored.
"""

import inspect
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.roles import role_of
from headwise.analysis.view_result import HeadView, View
from headwise.analysis.word_weights import WordWeights
from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.backends.blockwise.row_block import RowBlock
from headwise.data.batches import device_of
from headwise.data.tokenization import EncodedText, encode_text, text_model
from headwise.errors import HeadwiseError, InputError
from headwise.intercept.install import intercepted
from headwise.intercept.interceptor import Call, Observation
from headwise.intercept.sites import SiteRegistry
from headwise.shapes import Float
from headwise.statistics.tally import Tally

DISAGREEMENT = 1e-3
"""Largest accepted difference between a head's output and the product of its weights and values.

Relative to the output's largest value; for half precision 8 of its epsilons are accepted. Rounding stays below this.
Attention that computes something else than softmax of its scores does not.
"""


def view(model: nn.Module, tokenizer: Any, text: str, *, title: str = "model", truncate: bool = False) -> View:
    """Run a model on one text, and return the attention of each head: its statistics, its role (name for what it
    attends to), and the strongest links (largest attention weights) between words.

    Args:
        model: any model that `watch` can intercept and that reads token ids, in evaluation mode: of `transformers`, or
            a module that takes token ids `(1, tokens)`. Of an encoder-decoder, the encoder is viewed.
        tokenizer: its tokenizer, of `transformers`.
        text: one text; it is not split.
        title: name of the model, for display.
        truncate: cut off a text that is longer than the model's limit, instead of refusing it.

    Raises:
        InputError: the text is empty or too long; no self-attention over the tokens of the text was intercepted; the
            output of a head is not the product of its weights and values.

    Warns:
        UserWarning: of modules that ran and are called attention, but whose attention was not intercepted, and of
            attention over something else than the tokens of the text, which the view leaves out.
    """
    if hasattr(model, "config") or not isinstance(model, nn.Module):
        model = text_model(model)
    if model.training:
        raise InputError("model", expected="a model in evaluation mode", got="training", remedy="call model.eval()")
    if not callable(tokenizer) or not hasattr(tokenizer, "convert_ids_to_tokens"):
        raise InputError("tokenizer", expected="a transformers tokenizer", got=type(tokenizer).__name__)
    encoded = encode_text(model, tokenizer, text, truncate)
    device = device_of(model)
    viewer = _Viewer(model, encoded, device)
    try:
        with torch.no_grad(), intercepted(model, viewer):
            _call(model, {name: tensor.to(device) for name, tensor in encoded.inputs.items()})
    except HeadwiseError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__} ({' '.join(str(error).split())[:200]})"
        raise InputError("model", expected="a model that takes these tokens", got=reason) from error
    viewer.require_attention()
    viewer.require_heads()
    viewer.warn_of_unread(stacklevel=3)
    if viewer.left_out:
        warnings.warn(f"attention over something else than the text was left out: {viewer.left_out}", stacklevel=2)
    heads = sorted(viewer.heads, key=lambda head: (head.layer, head.head))
    return View(title, encoded.text, encoded.truncated, encoded.words, len(encoded.word_of), tuple(heads))


def _call(model: Any, inputs: dict[str, Tensor]) -> None:
    """Call a `transformers` model with all outputs of the tokenizer, and another module with those that its `forward`
    names as arguments. A module whose `forward` does not accept an argument `input_ids` gets the token ids alone, by
    position.

    A module whose `forward` has `**kwargs` but does not name `input_ids` gets all outputs.
    """
    parameters = inspect.signature(model.forward).parameters
    accepts_any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if hasattr(model, "config") or accepts_any_name or "input_ids" in parameters:
        is_own = not hasattr(model, "config") and "input_ids" in parameters
        model(**{name: tensor for name, tensor in inputs.items() if not is_own or name in parameters})
    else:
        model(inputs["input_ids"])


class _Viewer(SiteRegistry):
    """Interceptor that builds a `HeadView` (statistics, links between words, and a picture of the weights) of every
    head in every attention call over the tokens of a text.

    Attributes:
        heads: the views so far, in the order of the calls.
    """

    def __init__(self, model: nn.Module, encoded: EncodedText, device: torch.device) -> None:
        super().__init__(model)
        self._word_of = encoded.word_of
        self._is_lexical = torch.tensor([word.lexical for word in encoded.words])
        is_special = torch.tensor([[encoded.words[index].special for index in encoded.word_of.tolist()]])
        self._call_context = CallContext(encoded.inputs["input_ids"].to(device), is_special.to(device))
        self._layers: set[int] = set()
        self._other_shapes: dict[str, str] = {}
        self.heads: list[HeadView] = []

    def observe(self, call: Call) -> Observation | None:
        """Return an observation that builds the views of the heads of an attention call, and checks the observed
        weights against the head outputs. For attention over something other than the tokens of the text, record its
        shape and return None.
        """
        self.register(call)
        grid, tokens = call.grid, len(self._word_of)
        if grid.batch != 1 or not grid.queries == grid.keys == tokens:
            shape = f"{grid.queries} queries and {grid.keys} keys"
            shape = shape if grid.batch == 1 else f"a batch of {grid.batch} with {shape}"
            self._other_shapes.setdefault(call.site.path, shape)
            return None
        layer, tally = self._next_layer(call.layer), Tally()
        word_weights = WordWeights(grid.heads, self._word_of, self._is_lexical)

        def observer(row_block: RowBlock) -> None:
            tally.add(replace(row_block, out=None))  # a view shows no norms
            word_weights.add(row_block)

        def on_end() -> None:
            self.heads.extend(_head_views(layer, tally, word_weights))

        return Observation(observer, self._call_context, on_end, partial(_require_agreement, call.site.path))

    def require_heads(self) -> None:
        """Raise `InputError` if no head was viewed, because no attention of the model was over the text's tokens."""
        if not self.heads:
            expected = f"self-attention over the {len(self._word_of)} tokens of the text"
            raise InputError("model", expected=expected, got=self.left_out)

    @property
    def left_out(self) -> str:
        """Description of the attention that was not over the tokens of the text: numbers of queries and keys, and paths
        of the modules. It is empty if there was none.
        """
        return ", ".join(f"{shape} in {path}" for path, shape in self._other_shapes.items())

    def _next_layer(self, model_number: int | None) -> int:
        """Return the layer number for an attention call, and record it as used: the model's own number or, if that is
        None or already used, one more than the largest used number.
        """
        is_used = model_number in self._layers
        layer = max(self._layers, default=-1) + 1 if model_number is None or is_used else model_number
        self._layers.add(layer)
        return layer


def _head_views(layer: int, tally: Tally, weights: WordWeights) -> Iterator[HeadView]:
    """Yield the view (statistics, role, links and picture) of each head of one attention call."""
    means = {name: mean[0].tolist() for name, mean in tally.means().items()}
    counts = {name: count[0].tolist() for name, count in tally.counts().items()}
    for head in range(weights.picture.shape[0]):
        head_means = {name: values[head] for name, values in means.items()}
        yield HeadView(
            layer=layer,
            head=head,
            role=role_of(head_means, {name: values[head] for name, values in counts.items()}),
            means=head_means,
            links=weights.links(head),
            top_keys=weights.top_keys[head],
            top_weights=weights.top_weights[head],
            picture=weights.picture[head],
        )


def _require_agreement(path: str, row_block: RowBlock, out: Float[Tensor, "batch heads rows value_dim"]) -> None:
    """Raise `InputError` if the head outputs of a module differ from the product of the observed attention weights and
    the values by more than rounding.

    The observed weights would be wrong then.

    Args:
        path: path of the module.
        row_block: rows with the product of weights and values.
        out: output of the model's own function in these rows.
    """
    assert row_block.out is not None
    product = row_block.tile.by_head(row_block.out)
    actual = out.to(product.dtype)
    largest = actual.abs().amax((0, 2, 3)).clamp(min=torch.finfo(actual.dtype).tiny)
    difference = float(((product - actual).abs().amax((0, 2, 3)) / largest).max())
    if not difference <= max(DISAGREEMENT, 8 * torch.finfo(out.dtype).eps):
        raise InputError(
            "model",
            expected="attention whose output is softmax(scale q k^T + mask) v",
            got=f"an output that differs by {difference:.1%} in {path}",
        )
