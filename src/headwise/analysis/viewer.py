"""Interceptor of `view`: statistics, links and attention weights of every head that attends over given texts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from headwise.analysis.roles import role_of
from headwise.analysis.view_result import HeadView, ViewedText
from headwise.analysis.view_weights import Runs, TokensOfWords, TokenWeights, VisibleWeights, WordWeights
from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.backends.blockwise.row_block import RowBlock
from headwise.attention.masks.grid import Grid
from headwise.errors import InputError
from headwise.intercept.call_contexts import OF_COMMON_POSITIONS
from headwise.intercept.interceptor import Call, Observation, SiteKey
from headwise.intercept.sites import SiteRegistry
from headwise.shapes import Float
from headwise.statistics.tally import Tally

DISAGREEMENT = 1e-3
"""Largest accepted difference between a head's output and the product of its weights and values.

Relative to the output's largest value; for half precision 8 of its epsilons are accepted. Rounding stays below this.
Attention that computes something else than softmax of its scores does not.
"""


class Viewer(SiteRegistry):
    """Interceptor that builds a `HeadView` of every head in every attention call over some texts: from a text to
    itself, or from the last text to the first.

    Attributes:
        other_grids: for each module that attended to something else than the tokens of the texts, by its path, the
            numbers of queries and keys of its first such call.

    Args:
        model: the intercepted model.
        texts: one text, or a source and a target.
        keeps_all: True to keep all weights between tokens.
        on_call: function that is called after each attention call over the texts.
    """

    def __init__(
        self, model: nn.Module, texts: Sequence[ViewedText], *, keeps_all: bool, on_call: Callable[[], None]
    ) -> None:
        super().__init__(model)
        self._on_call = on_call
        self._texts, self._keeps_all = texts, keeps_all
        self._words = [
            TokensOfWords(each.word_of, torch.tensor([word.lexical for word in each.words])) for each in texts
        ]
        self._contexts: dict[tuple[int, int, torch.device], CallContext] = {}
        self._known_runs: dict[tuple[int, int], dict[range, tuple[Tensor, Tensor, list[Runs]]]] = {}
        self.other_grids: dict[str, Grid] = {}
        self._calls: list[tuple[SiteKey, int | None, list[HeadView]]] = []  # with the model's own number of the layer

    def observe(self, call: Call) -> Observation | None:
        """Return an observation that builds the views of the heads of an attention call, and checks the observed
        weights against the head outputs. For attention over something other than the tokens of the texts, record its
        shape and return None.
        """
        self.register(call)
        grid, site, layer, sides = call.grid, call.site, call.layer, self._sides_of(call)
        if sides is None:
            self.other_grids.setdefault(site.path, grid)
            return None
        queries, keys = sides
        tally, words = Tally(), WordWeights(grid.heads, self._words[queries], self._words[keys])
        known_runs = self._known_runs.setdefault(sides, {})
        tokens = TokenWeights(grid.heads, grid.queries, grid.keys, self._keeps_all, known_runs)

        def observer(row_block: RowBlock) -> None:
            tally.add(replace(row_block, out=None))  # a view shows no norms
            visible_weights = VisibleWeights.of(row_block)
            words.add(visible_weights)
            tokens.add(visible_weights)

        def on_end() -> None:
            self._calls.append((site, layer, list(_head_views(site, sides, tally, words, tokens))))
            self._on_call()

        if (*sides, grid.device) not in self._contexts:  # calls over the same texts share the tokens for statistics
            text, is_self = self._texts[keys], queries == keys
            self._contexts[(*sides, grid.device)] = CallContext(
                text.ids.to(grid.device) if is_self and text.ids is not None else None,
                torch.tensor([[token.special for token in text.tokens]], device=grid.device),
                left_out=frozenset() if is_self else OF_COMMON_POSITIONS,
            )
        context = self._contexts[(*sides, grid.device)]
        return Observation(observer, context, on_end, partial(require_agreement, site.path))

    def _sides_of(self, call: Call) -> tuple[int, int] | None:
        """Return the indices of the texts with the queries and with the keys of an attention call; None if the call is
        over something else, or if it could be over either of two texts.
        """
        grid, lengths = call.grid, [len(each.tokens) for each in self._texts]
        if grid.batch != 1:
            return None
        if call.site.cross:
            source, target = 0, len(lengths) - 1
            return (target, source) if target and (grid.queries, grid.keys) == (lengths[-1], lengths[0]) else None
        fitting = [index for index, length in enumerate(lengths) if grid.queries == grid.keys == length]
        if len(fitting) > 1:
            texts = {index: self._texts[index].ids for index in fitting}
            fitting = [
                index
                for index, ids in texts.items()
                if ids is not None and call.tokens is not None and torch.equal(ids.cpu(), call.tokens.cpu())
            ]
        return (fitting[0], fitting[0]) if len(fitting) == 1 else None

    def head_views(self) -> Iterator[HeadView]:
        """Yield the view of each head, by layer and head. The layer number of an attention call is that of the module
        in tables of heads, if every module attended once; otherwise it is the model's own number, or one more than the
        largest used before.
        """
        sites = [site for site, *_ in self._calls]
        layer_of = dict(zip((record.site for record in self.records), self.layers, strict=True))
        layers: list[int] = []
        for site, layer, _ in self._calls:
            if len(set(sites)) == len(sites) and layer_of.keys() >= set(sites):
                layers.append(layer_of[site])
            elif layer is None or layer in layers:
                layers.append(max(layers, default=-1) + 1)
            else:
                layers.append(layer)
        for number, (*_, heads) in sorted(zip(layers, self._calls, strict=True), key=lambda pair: pair[0]):
            yield from (replace(head, layer=number) for head in heads)

    @property
    def left_out(self) -> str:
        """Description of the attention that was not over the tokens of the texts: numbers of queries and keys, and
        paths of the modules. It is empty if there was none.
        """
        return ", ".join(
            f"{'' if grid.batch == 1 else f'a batch of {grid.batch} with '}{grid.queries} queries and {grid.keys} keys "
            f"in {path}"
            for path, grid in self.other_grids.items()
        )


def _head_views(
    site: SiteKey, sides: tuple[int, int], tally: Tally, words: WordWeights, tokens: TokenWeights
) -> Iterator[HeadView]:
    """Yield the view (statistics, role, links and weights) of each head of one attention call, with layer 0."""
    means = {name: mean[0].tolist() for name, mean in tally.means().items()}
    counts = {name: count[0].tolist() for name, count in tally.counts().items()}
    received, seen_by = (total[0].cpu() for total in tally.other_sums["received"])
    of_words = torch.zeros(len(received), words.keys.count, dtype=received.dtype)
    of_words.index_add_(1, words.keys.word_of, received / seen_by)  # a word receives what its tokens receive
    for head in range(words.picture.shape[0]):
        head_means = {name: values[head] for name, values in means.items()}
        head_rows = {name: values[head] for name, values in counts.items()}
        yield HeadView(
            layer=0,
            head=head,
            module=site.label,
            kind="cross" if site.cross else "self",
            role=role_of(head_means, head_rows),
            means=head_means,
            rows=head_rows,
            links=words.links(head),
            top_keys=words.top_keys[head],
            top_weights=words.top_weights[head],
            picture=words.picture[head],
            received=of_words[head],
            attention=tokens.of_head(head, *sides),
        )


def require_agreement(path: str, row_block: RowBlock, out: Float[Tensor, "batch heads rows value_dim"]) -> None:
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
