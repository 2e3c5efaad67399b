"""Attention rollout of some tokens of one text, from the top layer down (Abnar and Zuidema 2020)."""

import operator
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headwise.analysis.flow.layer_reader import LayerReader, eps_of, require_whole
from headwise.analysis.flow.rollout import residual_share
from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.backends.blockwise.row_block import RowBlock
from headwise.checks import collection_of, require_module, whole_number
from headwise.data.batches import device_of, evaluation_mode, to_device
from headwise.data.tokenization import encode_text, text_model
from headwise.errors import InputError, require
from headwise.intercept.interceptor import Call, Observation
from headwise.intercept.observed_call import ObservedCall
from headwise.plots.words import draw_pattern
from headwise.settings import ROLLOUT_RESIDUAL
from headwise.shapes import Float

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KEPT_BYTES = 2**26
"""Largest size of the mean weights of layers that one run keeps."""


@dataclass(frozen=True)
class TokenRollout:
    """Attention rollout (attention multiplied over layers) of some query tokens of one text. It states, for each query
    token, which share of the information that it reads comes from each token of the text.

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
        """Return the attention rollout (attention multiplied over layers) as a pandas DataFrame with one row for each
        query and token. The columns are the indices `query` and `token`, the texts `query_text` and `token_text`, and
        `weight`, the share of the token in the rollout of the query.

        Raises:
            MissingExtra: pandas is not installed.
        """
        rows = [
            (query, token, self.tokens[query], self.tokens[token], weight)
            for query, weights in zip(self.queries, self.weights.tolist(), strict=True)
            for token, weight in enumerate(weights)
        ]
        columns = ["query", "token", "query_text", "token_text", "weight"]
        return require("pandas", purpose="a table", extra="tables").DataFrame(rows, columns=columns)

    def plot(self, ax: Any = None) -> "Axes":
        """Draw the shares of the tokens in the attention rollout (attention multiplied over layers) as a matrix. It has
        one row per query and one column per token. Return the matplotlib axes.

        Args:
            ax: matplotlib axes to draw on; those of a new figure by default.

        Raises:
            MissingExtra: matplotlib is not installed.
        """
        queries = [self.tokens[query] for query in self.queries]
        return draw_pattern(self.weights, queries, self.tokens, title="attention rollout", ax=ax)


def token_rollout(
    model: nn.Module,
    tokenizer: Any,
    text: str,
    *,
    queries: Collection[int] = (-1,),
    layer: int | None = None,
    residual: float = ROLLOUT_RESIDUAL,
    truncate: bool = False,
) -> TokenRollout:
    """Compute the attention rollout of some query tokens of one text: attention matrices are multiplied over layers
    (Abnar and Zuidema 2020). The result states, for each query token, which share of the information that it reads
    comes from each token of the text.

        hw.token_rollout(model, tokenizer, "The keys to the cabinet are").table()

    The rollout of a query is a row of a product of matrices over the layers. It is computed as a row vector that passes
    from the top layer down, so the product of matrices is never computed. The layers run in the other direction. So the
    model runs several times, and each run passes the vector through some layers, whose mean weights it keeps in up to
    64 MiB. For long texts (more than 4,096 tokens in float32) each run passes it through one layer, block by block, and
    keeps no matrix.

    Args:
        model: any model that `watch` can observe and that reads token ids. Of an encoder-decoder, the encoder is read.
        tokenizer: the model's tokenizer.
        text: the text.
        queries: indices of the query tokens; negative ones count from the end. By default the last token.
        layer: number of the layer, from 0 in the order of the run, whose rollout is computed; by default the last one.
        residual: share of the residual connection in each layer, at least 0 and below 1.
        truncate: cut a text that is longer than the model's limit.

    Raises:
        InputError: the text or an argument is unusable; or a layer of the model does not fit, as for `hw.rollout`.

    Example:
        >>> hw.token_rollout(model, tokenizer, "A cup of tea.", queries=range(7)).plot()  # doctest: +SKIP
    """
    require_module(model)
    residual = residual_share(residual)
    model = text_model(model)
    encoded = encode_text(model, tokenizer, text, truncate)
    tokens = tuple(token.text for token in encoded.tokens)
    chosen = _indices(queries, len(tokens))
    batch = to_device(encoded.inputs, device_of(model))
    with evaluation_mode(model), torch.no_grad():
        reader = LayerReader(model)
        reader.run(batch)
        if reader.sizes != (1, len(tokens)):
            expected = f"self-attention over the {len(tokens)} tokens of the text"
            raise InputError("model", expected=expected, got=reader.sizes)
        layers = len(reader.records)
        top = layers - 1 if layer is None else whole_number("layer", layer, least=0)
        if top >= layers:
            raise InputError("layer", expected=f"a number below {layers}", got=top)
        dtypes = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
        dtype = torch.promote_types(next(dtypes, torch.float32), torch.float32)
        shares: Tensor = nn.functional.one_hot(torch.tensor(chosen), len(tokens)).to(device_of(model), dtype)
        by_layer: list[Tensor] = []
        together = max(1, KEPT_BYTES // (shares.element_size() * len(tokens) ** 2))
        for last in range(top, -1, -together):
            numbers = range(max(last - together + 1, 0), last + 1)
            row_pass = _RowPass(model, numbers, shares, residual)
            row_pass.run(batch)
            by_layer += row_pass.passed()
            shares = by_layer[-1]
    return TokenRollout(tokens, chosen, by_layer[-1], torch.stack(by_layer[::-1]), residual)


def _indices(queries: Any, count: int) -> tuple[int, ...]:
    """Return the indices of the query tokens as non-negative numbers. Raise `InputError` if an index is not in the text
    of `count` tokens, or if `queries` is empty.
    """
    indices: list[int] = []
    for query in collection_of("queries", queries, of="indices of tokens"):
        try:
            index = operator.index(query)
        except TypeError:
            index = count
        if isinstance(query, bool) or not -count <= index < count:
            raise InputError("queries", expected=f"indices of {count} tokens", got=repr(query))
        indices.append(index % count)
    if not indices:
        raise InputError("queries", expected=f"indices of {count} tokens", got="none")
    return tuple(indices)


class _RowPass(LayerReader):
    """Interceptor that multiplies rows of an attention rollout (`shares`, one row per query token) by attention
    matrices. These are the matrices of the layers in `numbers`, averaged over heads, from the last layer to the first.
    For a single layer, the product is computed block by block. For several layers, the matrices are stored and
    multiplied after the run.
    """

    def __init__(
        self, model: nn.Module, numbers: range, shares: Float[Tensor, "queries tokens"], residual: float
    ) -> None:
        super().__init__(model)
        self._numbers, self._shares, self._residual = numbers, shares, residual
        self._read: dict[int, Tensor] = {}
        self._paths: dict[int, str] = {}
        self._eps = 0.0

    def read_layer(self, number: int, call: Call, observed: ObservedCall) -> Observation | None:
        """Return an `Observation`, which receives the attention weights of layer `number`. Return None if the attention
        rollout (attention multiplied over layers) is not multiplied by the weights of this layer.
        """
        if number not in self._numbers:
            return None
        # The product of these rows with the mean weights: of all rows, these are the weights themselves.
        rows = self._shares if len(self._numbers) == 1 else None
        self._paths[number] = call.site.label
        tokens = call.grid.queries
        read = self._read[number] = self._shares.new_zeros(tokens if rows is None else len(rows), tokens)

        def observer(row_block: RowBlock) -> None:
            self._eps = max(self._eps, eps_of(row_block))
            part = slice(row_block.rows.start, row_block.rows.stop)
            mean = row_block.weights[0].sum(0).to(read.dtype) / call.grid.heads
            for keys, span in row_block.tile.spans(mean):
                columns = slice(keys.start, keys.stop)
                if rows is None:
                    read[part, columns] += span
                else:
                    read[:, columns] += rows[:, part] @ span

        return Observation(observer, CallContext(), lambda: None)

    def passed(self) -> list[Float[Tensor, "queries tokens"]]:
        """Return the shares of the tokens at the input of each layer, from the last layer to the first. To compute
        them, the shares at the layer's output are multiplied by its mean attention matrix. The product is mixed with
        the unmultiplied shares, to account for the residual connection.
        """
        shares, found = self._shares, []
        for number in reversed(self._numbers):
            read = self._read[number]
            product = read if len(self._numbers) == 1 else shares @ read
            shares = self._residual * shares + (1 - self._residual) * product
            require_whole(shares.sum(-1), self._paths[number], self._eps)
            found.append(shares)
        return found
