"""Attention rollout of some tokens of one text, from the top layer down (Abnar and Zuidema 2020)."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headwise.analysis.flow.layer_reader import LayerReader, eps_of, require_whole
from headwise.analysis.flow.rollout import RESIDUAL, residual_share
from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.backends.blockwise.row_block import RowBlock
from headwise.checks import collection_of, require_module, whole_number
from headwise.data.batches import call_model, device_of, evaluation_mode, to_device
from headwise.data.tokenization import encode_text, text_model
from headwise.errors import InputError, require
from headwise.intercept.install import intercepted
from headwise.intercept.interceptor import Call, Observation
from headwise.intercept.observed_call import ObservedCall
from headwise.plots.pattern import draw_pattern
from headwise.shapes import Float

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class TokenRollout:
    """Attention rollout of some tokens of one text.

    Attributes:
        tokens: the tokens of the text, for display.
        queries: index of each query token whose rollout was computed.
        weights: share of each token of the text in the rollout of each query; the shares of a query have the sum 1.
        by_layer: share of each position of the input of each layer; that of layer 0 is `weights`.
        residual: share of the residual connection in each layer.
    """

    tokens: tuple[str, ...]
    queries: tuple[int, ...]
    weights: Float[Tensor, "queries tokens"] = field(repr=False)
    by_layer: Float[Tensor, "layers queries tokens"] = field(repr=False)
    residual: float

    def table(self) -> Any:
        """Return a pandas DataFrame with one row for each query and token: `query` and `token` (indices), `query_text`,
        `token_text`, and `weight`, the share of the token in the rollout of the query.

        Raises:
            MissingExtra: pandas is not installed.
        """
        rows = [
            {
                "query": query,
                "token": token,
                "query_text": self.tokens[query],
                "token_text": self.tokens[token],
                "weight": weight,
            }
            for query, weights in zip(self.queries, self.weights.tolist(), strict=True)
            for token, weight in enumerate(weights)
        ]
        return require("pandas", purpose="a table", extra="tables").DataFrame(rows)

    def plot(self, ax: Any = None) -> "Axes":
        """Draw the shares as a matrix, with queries down and tokens across, and return the matplotlib axes.

        Args:
            ax: matplotlib axes to draw on; those of a new figure by default.

        Raises:
            MissingExtra: matplotlib is not installed.
        """
        queries = [self.tokens[query] for query in self.queries]
        return draw_pattern(self.weights, queries, self.tokens, title="attention rollout", ax=ax)


def token_rollout(
    model: nn.Module,
    text: str,
    tokenizer: Any,
    *,
    queries: Collection[int] = (-1,),
    layer: int | None = None,
    residual: float = RESIDUAL,
    truncate: bool = False,
) -> TokenRollout:
    """Compute the attention rollout of some tokens of one text: the share of each token of the text in what they read
    from the input, if attention is multiplied over layers (Abnar and Zuidema 2020).

        hw.token_rollout(model, "The keys to the cabinet are", tokenizer).table()

    The rollout of a query is a row of a product of matrices over the layers. It is computed as a row vector that passes
    from the top layer down, so that no matrix of tokens and tokens is kept. The layers run in the other direction, so
    the model runs once for each layer, and once before.

    Args:
        model: any model that `watch` can observe and that reads token ids. Of an encoder-decoder, the encoder is read.
        text: the text.
        tokenizer: the model's tokenizer.
        queries: indices of the query tokens; negative ones count from the end. By default the last token.
        layer: number of the layer, from 0 in the order of the run, whose rollout is computed; by default the last one.
        residual: share of the residual connection in each layer, at least 0 and below 1.
        truncate: cut a text that is longer than the model's limit.

    Raises:
        InputError: the text or an argument is unusable; or a layer of the model does not fit, as for `hw.rollout`.

    Example:
        >>> hw.token_rollout(model, "A cup of tea.", tokenizer, queries=range(7)).plot()  # doctest: +SKIP
    """
    require_module(model)
    residual = residual_share(residual)
    model = text_model(model)
    encoded = encode_text(model, tokenizer, text, truncate)
    tokens = tuple(token.text for token in encoded.tokens)
    chosen = _indices(queries, len(tokens))
    batch = to_device(encoded.inputs, device_of(model))
    with evaluation_mode(model), torch.no_grad():
        layers = _count_layers(model, batch, len(tokens))
        top = layers - 1 if layer is None else whole_number("layer", layer, least=0)
        if top >= layers:
            raise InputError("layer", expected=f"a number below {layers}", got=top)
        shares: Float[Tensor, "queries tokens"] | None = None
        by_layer = []
        for number in range(top, -1, -1):
            reader = _RowPass(model, number, chosen, shares, residual)
            with intercepted(model, reader):
                call_model(model, batch)
            reader.require_layers()
            shares = reader.after
            by_layer.append(shares)
    return TokenRollout(tokens, chosen, by_layer[-1], torch.stack(by_layer[::-1]), residual)


def _indices(queries: Any, count: int) -> tuple[int, ...]:
    """Return the indices of the query tokens, counted from the start."""
    chosen = collection_of("queries", queries, of="indices of tokens")
    wrong = [
        each for each in chosen if isinstance(each, bool) or not isinstance(each, int) or not -count <= each < count
    ]
    if wrong or not chosen:
        raise InputError("queries", expected=f"indices of {count} tokens", got=wrong[0] if wrong else "none")
    return tuple(each % count for each in chosen)


def _count_layers(model: nn.Module, batch: dict[str, Any], tokens: int) -> int:
    """Return the number of layers of a model, after checking that they fit."""
    reader = LayerReader(model)
    with intercepted(model, reader):
        call_model(model, batch)
    reader.require_layers()
    if reader.sizes != (1, tokens):
        raise InputError("model", expected=f"self-attention over the {tokens} tokens of the text", got=reader.sizes)
    return len(reader.records)


class _RowPass(LayerReader):
    """Interceptor that passes rows of the rollout through one layer, from its output to its input.

    Args:
        model: the intercepted model.
        number: number of the layer.
        queries: indices of the query tokens.
        shares: shares of the positions of the layer's output; None in the top layer.
        residual: share of the residual connection.
    """

    def __init__(
        self,
        model: nn.Module,
        number: int,
        queries: tuple[int, ...],
        shares: Float[Tensor, "queries tokens"] | None,
        residual: float,
    ) -> None:
        super().__init__(model)
        self._number, self._queries, self._shares, self._residual = number, queries, shares, residual
        self.after = torch.empty(0)

    def read_layer(self, number: int, call: Call, observed: ObservedCall) -> Observation | None:
        """Return an observation of the layer that is read; None for all others."""
        if number != self._number:
            return None
        grid, eps = call.grid, [0.0]
        read: list[Tensor] = []

        def observer(row_block: RowBlock) -> None:
            dtype = row_block.powers.dtype
            if self._shares is None:
                places = torch.tensor(self._queries, device=grid.device)
                self._shares = torch.nn.functional.one_hot(places, grid.queries).to(dtype)
            if not read:
                read.append(torch.zeros_like(self._shares))
                eps[0] = eps_of(row_block)
            of_rows = self._shares[:, row_block.rows.start : row_block.rows.stop]
            for keys, span in row_block.tile.spans(row_block.weights[0].sum(0)):
                read[0][:, keys.start : keys.stop] += of_rows @ span.to(self._shares.dtype) / grid.heads

        def on_end() -> None:
            assert self._shares is not None
            self.after = self._residual * self._shares + (1 - self._residual) * read[0]
            require_whole(self.after.sum(-1), call.site.label, eps[0])

        return Observation(observer, CallContext(), on_end)
