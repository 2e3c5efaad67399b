"""`view`: what every head of a model does with one text, in statistics and in words.

Nothing of the size of tokens x tokens is kept: each layer's attention is read in blocks of rows, and what
stays of a head is its statistics, the strongest keys of each word, and a picture of bounded size.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.roles import Role, role_of
from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.backends.blockwise.row_block import RowBlock
from headwise.attention.backends.reference import grouped_matmul
from headwise.data.tokenization import Word, encode_text, text_model
from headwise.errors import HeadwiseError, InputError
from headwise.intercept.hf_calls import AttentionCall, observe
from headwise.shapes import Bool, Float, Int
from headwise.statistics.registry import Tally, blocks, rows_per_block

TOP = 8
"""How many keys are kept for each word."""

PICTURE = 64
"""The most rows and columns of a head's picture; longer texts are pooled."""

DISAGREEMENT = 1e-3
"""How far, relative to its largest value, a head's output may be from the one its weights explain.

Half precision is allowed 8 of its epsilons. Rounding stays below that; attention that does something else to its
scores does not.
"""

SHOWN = 0.005
"""The weakest link that is shown: what would not print as 0.00."""


@dataclass(frozen=True)
class Link:
    """A word (by index) and the other word it attends to most.

    `back` is the weight returned where the two are each other's strongest, and above an even share both ways.
    """

    query: int
    key: int
    weight: float
    back: float | None


def _strength(link: Link) -> tuple[float, int]:
    """Strongest first; weights that differ only by rounding in the order of the text."""
    return -round(link.weight, 4), link.query


@dataclass(frozen=True)
class HeadView:
    """What one head does with the text."""

    layer: int
    head: int
    role: Role
    means: Mapping[str, float]
    links: tuple[Link, ...]
    top_keys: Int[Tensor, "words top"]
    top_weights: Float[Tensor, "words top"]
    picture: Float[Tensor, "side side"]

    @property
    def name(self) -> str:
        """`layer.head`, zero-based."""
        return f"{self.layer}.{self.head}"


@dataclass(frozen=True)
class View:
    """Every head of a model on one text."""

    title: str
    text: str
    truncated: bool
    words: tuple[Word, ...]
    tokens: int
    heads: tuple[HeadView, ...]

    def head(self, layer: int, head: int) -> HeadView:
        """One head, zero-based. `InputError` where there is none."""
        for candidate in self.heads:
            if (candidate.layer, candidate.head) == (layer, head):
                return candidate
        raise InputError("head", expected="a (layer, head) of this view", got=(layer, head))

    def strongest_links(self, head: HeadView, count: int) -> list[Link]:
        """The head's strongest links between different pairs of words; a pair that recurs is given once."""
        shown = [link for link in head.links if link.weight >= SHOWN]
        pairs = {(self.words[link.query].text, self.words[link.key].text): link for link in reversed(shown)}
        return sorted(pairs.values(), key=_strength)[:count]

    def role_title(self, role: Role) -> str:
        """The role's name, with the first token itself where it is a sink."""
        return role.name.replace("the first token", self.words[0].text)

    def select(self, layers: Collection[int] = (), heads: Collection[int] = ()) -> "View":
        """Only the given layers and heads; an empty choice keeps all. `InputError` for one that is not there."""
        for option, chosen, numbers in (
            ("layer", layers, sorted({head.layer for head in self.heads})),
            ("head", heads, sorted({head.head for head in self.heads})),
        ):
            gapless = len(numbers) == numbers[-1] - numbers[0] + 1
            expected = f"{numbers[0]} to {numbers[-1]}" if gapless else f"one of {', '.join(map(str, numbers))}"
            for number in chosen:
                if number not in numbers:
                    raise InputError(option, expected=expected, got=number)
        kept = [h for h in self.heads if (not layers or h.layer in layers) and (not heads or h.head in heads)]
        return replace(self, heads=tuple(kept))


def view(model: nn.Module, tokenizer: Any, text: str, *, title: str = "model", truncate: bool = False) -> View:
    """Run `model` on `text` and say what each of its heads does.

    Args:
        model: a `transformers` model in evaluation mode that takes token ids. Of an encoder-decoder, the encoder
            is viewed.
        tokenizer: its tokenizer.
        text: one text; it is not split.
        title: the model's name, to show.
        truncate: cut a text that is longer than the model takes, instead of refusing it.

    Raises:
        InputError: a text that is empty or too long, or a model whose attention cannot be observed.
    """
    model = text_model(model)
    if model.training:
        raise InputError("model", expected="a model in evaluation mode", got="training", remedy="call model.eval()")
    if not callable(tokenizer) or not hasattr(tokenizer, "convert_ids_to_tokens"):
        raise InputError("tokenizer", expected="a transformers tokenizer", got=type(tokenizer).__name__)
    encoded = encode_text(model, tokenizer, text, truncate)
    device = next(model.parameters()).device
    tokens, word_of = encoded.inputs["input_ids"], encoded.word_of
    special = torch.tensor([[encoded.words[index].special for index in word_of.tolist()]])
    candidates = torch.tensor([word.lexical for word in encoded.words])
    heads: list[HeadView] = []

    def on_call(call: AttentionCall) -> None:
        grid = call.problem.grid
        if not grid.queries == grid.keys == len(word_of):
            raise InputError(
                "model",
                expected=f"self-attention over the {len(word_of)} tokens of the text",
                got=f"{grid.queries} queries and {grid.keys} keys in {call.path}",
            )
        tally, links = Tally(), _WordWeights(grid.heads, word_of, candidates)
        ranges = _whole_words(word_of, rows_per_block(grid))
        for rows in blocks(call.problem, CallContext(tokens.to(device), special.to(device)), ranges):
            _require_agreement(call, rows)
            tally.add(rows)
            links.add(rows)
        heads.extend(_head_views(call.layer, tally, links))

    try:
        with torch.no_grad(), observe(model, on_call):
            model(**{name: tensor.to(device) for name, tensor in encoded.inputs.items()})
    except HeadwiseError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__} ({' '.join(str(error).split())[:200]})"
        raise InputError("model", expected="a model that takes these tokens", got=reason) from error
    if not heads:
        raise InputError(
            "model",
            expected="attention that goes through the transformers attention interface",
            got=f"none in {type(model).__name__}",
        )
    heads.sort(key=lambda head: (head.layer, head.head))
    return View(title, encoded.text, encoded.truncated, encoded.words, len(word_of), tuple(heads))


# -- from tokens to words -------------------------------------------------------------------------------------


def _whole_words(word_of: Int[Tensor, " tokens"], step: int) -> Iterator[range]:
    """Blocks of about `step` rows that end where a word ends."""
    length = len(word_of)
    start = 0
    while start < length:
        stop = min(start + step, length)
        while stop < length and word_of[stop] == word_of[stop - 1]:
            stop += 1
        yield range(start, stop)
        start = stop


class _WordWeights:
    """Attention between words, taken in by blocks of rows.

    Weights to the tokens of a word are summed, and those from its tokens averaged, so that each word's
    weights still add up to 1 (Clark et al. 2019, section 4.1).
    """

    def __init__(self, heads: int, word_of: Int[Tensor, " tokens"], candidates: Bool[Tensor, " words"]):
        words = len(candidates)
        self.word_of, self.candidates, self.words = word_of, candidates, words
        self.side = min(words, PICTURE)
        self.pool = torch.arange(words) * self.side // words
        self.picture = torch.zeros(heads, self.side, self.side)
        self.top: list[torch.return_types.topk] = []
        self.best: list[torch.return_types.max] = []

    def add(self, rows: RowBlock) -> None:
        """Take in a block of whole words."""
        weights = rows.weights[0].float().cpu()  # (heads, rows, keys)
        heads = weights.shape[0]
        word_rows = self.word_of[rows.rows.start : rows.rows.stop]
        first, count = int(word_rows[0]), int(word_rows[-1] - word_rows[0]) + 1
        to_words = torch.zeros(heads, len(word_rows), self.words).index_add_(2, self.word_of, weights)
        between = torch.zeros(heads, count, self.words).index_add_(1, word_rows - first, to_words)
        between /= torch.bincount(word_rows - first)[:, None]  # (heads, words here, words)

        here = torch.arange(first, first + count)
        pooled = torch.zeros(heads, count, self.side).index_add_(2, self.pool, between)
        self.picture.index_add_(1, self.pool[here], pooled / torch.bincount(self.pool)[self.pool[here], None])
        self.top.append(between.topk(min(TOP, self.words), dim=-1))

        eligible = self.candidates[here, None] & self.candidates
        eligible[torch.arange(count), here] = False  # a link joins two words
        self.best.append(between.masked_fill(~eligible, -1.0).max(-1))

    def links(self, head: int) -> tuple[Link, ...]:
        """The strongest link of each word, strongest first; a mutual pair is one link."""
        weight = torch.cat([best.values[head] for best in self.best]).tolist()
        key = torch.cat([best.indices[head] for best in self.best]).tolist()
        even = 1 / self.words
        links = []
        for query, (target, strength) in enumerate(zip(key, weight, strict=True)):
            if strength < 0:
                continue  # no other word to look at
            back = weight[target] if key[target] == query and min(strength, weight[target]) > even else None
            if back is not None and (back, query) > (strength, target):
                continue  # the pair is told from its stronger side
            links.append(Link(query, target, strength, back))
        return tuple(sorted(links, key=_strength))


def _head_views(layer: int, tally: Tally, weights: _WordWeights) -> Iterator[HeadView]:
    """The heads of one layer."""
    means = {name: mean[0].tolist() for name, mean in tally.means().items()}
    counts = {name: count[0].tolist() for name, count in tally.counts().items()}
    for head in range(weights.picture.shape[0]):
        of_head = {name: values[head] for name, values in means.items()}
        yield HeadView(
            layer=layer,
            head=head,
            role=role_of(of_head, {name: values[head] for name, values in counts.items()}),
            means=of_head,
            links=weights.links(head),
            top_keys=torch.cat([top.indices[head] for top in weights.top]),
            top_weights=torch.cat([top.values[head] for top in weights.top]),
            picture=weights.picture[head],
        )


def _require_agreement(call: AttentionCall, rows: RowBlock) -> None:
    """Refuse a head whose output is not its weights times its values: the weights would be wrong."""
    explained = grouped_matmul(rows.weights, call.problem.v.to(rows.weights.dtype))
    part = slice(rows.rows.start, rows.rows.stop)
    actual = call.out[:, part].transpose(1, 2).to(explained.dtype)  # (batch, heads, rows, value_dim)
    largest = actual.abs().amax((0, 2, 3)).clamp(min=torch.finfo(actual.dtype).tiny)
    off = float(((explained - actual).abs().amax((0, 2, 3)) / largest).max())
    if not off <= max(DISAGREEMENT, 8 * torch.finfo(call.out.dtype).eps):
        raise InputError(
            "model",
            expected="attention whose output is softmax(scale q k^T + mask) v",
            got=f"an output that differs by {off:.1%} in {call.path}",
        )
