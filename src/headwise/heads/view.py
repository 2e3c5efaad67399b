"""`view`: what every head of a model does with one text, in statistics and in words.

Nothing of the size of tokens x tokens is kept: each layer's attention is read in blocks of rows, and what
stays of a head is its statistics, the strongest keys of each word, and a picture of bounded size.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attention.reference import each_kv_head
from headwise.attention.statistics import BLOCK_BYTES, Rows, Tally, blocks
from headwise.errors import InputError
from headwise.heads.roles import Role, role_of
from headwise.models.transformers import AttentionCall, observe
from headwise.shapes import Bool, Float, Int

TOP = 8
"""How many keys are kept for each word."""

PICTURE = 64
"""The most rows and columns of a head's picture; longer texts are pooled."""

DISAGREEMENT = 0.05
"""How far, relative to its largest value, a layer's output may be from the one its weights explain.

Rounding stays far below it even in bfloat16; attention that does something else to its scores does not.
"""


@dataclass(frozen=True)
class Word:
    """A word of the text as the tokenizer cut it: its text, and whether it is a special token."""

    text: str
    special: bool

    @property
    def lexical(self) -> bool:
        """Whether it has a letter or a digit, and so is more than punctuation."""
        return not self.special and any(character.isalnum() for character in self.text)


@dataclass(frozen=True)
class Link:
    """A word (by index) and the other word it attends to most.

    `back` is the weight returned where the two are each other's strongest, and above an even share both ways.
    """

    query: int
    key: int
    weight: float
    back: float | None


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
        pairs = {(self.words[link.query].text, self.words[link.key].text): link for link in reversed(head.links)}
        return sorted(pairs.values(), key=lambda link: -link.weight)[:count]

    def role_title(self, role: Role) -> str:
        """The role's name, with the first token itself where it is a sink."""
        return role.name.replace("the first token", self.words[0].text)

    def select(self, layers: Collection[int] = (), heads: Collection[int] = ()) -> "View":
        """Only the given layers and heads; an empty choice keeps all. `InputError` for one that is not there."""
        for option, chosen, there in (
            ("layer", layers, {head.layer for head in self.heads}),
            ("head", heads, {head.head for head in self.heads}),
        ):
            for number in chosen:
                if number not in there:
                    raise InputError(option, expected=f"{min(there)} to {max(there)}", got=number)
        kept = [h for h in self.heads if (not layers or h.layer in layers) and (not heads or h.head in heads)]
        return replace(self, heads=tuple(kept))


def view(model: nn.Module, tokenizer: Any, text: str, *, title: str = "model", truncate: bool = False) -> View:
    """Run `model` on `text` and say what each of its heads does.

    Args:
        model: a `transformers` model in evaluation mode that takes token ids.
        tokenizer: its tokenizer.
        text: one text; it is not split.
        title: the model's name, to show.
        truncate: cut a text that is longer than the model takes, instead of refusing it.

    Raises:
        InputError: a text that is empty or too long, or a model whose attention cannot be observed.
    """
    encoding, words, word_of = _encode(model, tokenizer, text, truncate)
    tokens = encoding["input_ids"]
    special = torch.tensor([[words[index].special for index in word_of.tolist()]])
    candidates = torch.tensor([word.lexical for word in words])
    heads: list[HeadView] = []

    def on_call(call: AttentionCall) -> None:
        if call.problem.grid.keys != tokens.shape[1] or call.problem.grid.queries != tokens.shape[1]:
            raise InputError(
                "model",
                expected=f"self-attention over the {tokens.shape[1]} tokens of the text",
                got=f"{call.problem.grid.queries} queries and {call.problem.grid.keys} keys in {call.path}",
            )
        tally, links = Tally(), _WordWeights(call.problem.grid.heads, word_of, candidates)
        ranges = _whole_words(word_of, call.problem.grid.heads)
        for rows in blocks(call.problem, tokens=tokens, special=special, ranges=ranges):
            _require_agreement(call, rows)
            tally.add(rows)
            links.add(rows)
        heads.extend(_head_views(call.layer, tally, links))

    device = next(model.parameters()).device
    with torch.no_grad(), observe(model, on_call):
        model(**{name: tensor.to(device) for name, tensor in encoding.items()})
    if not heads:
        raise InputError(
            "model",
            expected="attention that goes through the transformers attention interface",
            got=f"none in {type(model).__name__}",
        )
    heads.sort(key=lambda head: (head.layer, head.head))
    return View(title, text, words, tokens.shape[1], tuple(heads))


# -- text -----------------------------------------------------------------------------------------------------


def _encode(
    model: nn.Module, tokenizer: Any, text: str, truncate: bool
) -> tuple[dict[str, Int[Tensor, "1 tokens"]], tuple[Word, ...], Int[Tensor, " tokens"]]:
    """The model's inputs, the words of the text, and the word of each token."""
    if not text.strip():
        raise InputError("text", expected="at least one word", got="an empty text")
    limits = (getattr(model.config, "max_position_embeddings", None), tokenizer.model_max_length)
    limit = min((number for number in limits if number), default=None)
    encoding = tokenizer(
        text,
        return_tensors="pt",
        return_special_tokens_mask=True,
        truncation=truncate,
        max_length=limit if truncate else None,
        verbose=False,
    )
    special = encoding.pop("special_tokens_mask")[0].tolist()
    length = encoding["input_ids"].shape[1]
    if length == 0:
        raise InputError("text", expected="at least one token", got="a text that the tokenizer drops whole")
    if limit is not None and length > limit:
        raise InputError(
            "text",
            expected=f"at most {limit} tokens, the model's limit",
            got=f"{length}",
            remedy="--truncate cuts it there",
        )
    words, word_of = _words(tokenizer, encoding, text, special)
    return dict(encoding), words, word_of


def _words(
    tokenizer: Any, encoding: Any, text: str, special: list[int]
) -> tuple[tuple[Word, ...], Int[Tensor, " tokens"]]:
    """Tokens joined to the words the tokenizer cut them from. Special tokens stand alone."""
    ids = encoding["input_ids"][0].tolist()
    # Only tokenizers of the `tokenizers` library know which word a token came from; otherwise each is its own.
    origins = encoding.word_ids() if encoding.is_fast else list(range(len(ids)))
    words: list[Word] = []
    word_of: list[int] = []
    previous = None
    for index, origin in enumerate(origins):
        if special[index] or origin is None:
            words.append(Word(tokenizer.convert_ids_to_tokens(ids[index]), bool(special[index])))
        elif origin != previous:
            if encoding.is_fast:
                start, end = encoding.word_to_chars(origin)
                piece = text[start:end]
            else:
                piece = tokenizer.decode([ids[index]])
            words.append(Word(" ".join(piece.split()) or repr(piece)[1:-1].strip() or "␣", False))
        word_of.append(len(words) - 1)
        previous = None if special[index] else origin
    return tuple(words), torch.tensor(word_of)


def _whole_words(word_of: Int[Tensor, " tokens"], heads: int) -> Iterator[range]:
    """Blocks of rows that end where a word ends, near the size that statistics are made in."""
    length = len(word_of)
    step = max(1, BLOCK_BYTES // (4 * heads * length))
    start = 0
    while start < length:
        stop = min(start + step, length)
        while stop < length and word_of[stop] == word_of[stop - 1]:
            stop += 1
        yield range(start, stop)
        start = stop


# -- from tokens to words -------------------------------------------------------------------------------------


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

    def add(self, rows: Rows) -> None:
        """Take in a block of whole words."""
        weights = rows.weights[0].float().cpu()  # (heads, rows, keys)
        heads = weights.shape[0]
        word_rows = self.word_of[rows.index.start : rows.index.stop]
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
        return tuple(sorted(links, key=lambda link: -link.weight))


def _head_views(layer: int, tally: Tally, weights: _WordWeights) -> Iterator[HeadView]:
    """The heads of one layer."""
    means = {name: mean[0].tolist() for name, mean in tally.means().items()}
    counts = {name: count[0].expand(len(means[name])).tolist() for name, count in tally.count.items()}
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


def _require_agreement(call: AttentionCall, rows: Rows) -> None:
    """Refuse a layer whose output is not its weights times its values: the weights would be wrong."""
    explained = each_kv_head(rows.weights, call.problem.v.to(rows.weights.dtype))
    part = slice(rows.index.start, rows.index.stop)
    actual = call.out[:, part].transpose(1, 2).to(explained.dtype)
    off = float((explained - actual).abs().max() / actual.abs().max().clamp(min=1e-30))
    if not off <= DISAGREEMENT:
        raise InputError(
            "model",
            expected="attention whose output is softmax(scale q k^T + mask) v",
            got=f"an output that differs by {off:.0%} in {call.path}",
        )
