"""Synthetic pages: heads with random attention whose weights the tests know."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headwise.page.contents import (
    AllWeights,
    Contents,
    Estimates,
    FocusScore,
    HeadAttention,
    LargestWeights,
    PageFocus,
    PageHead,
    PageModel,
    PageRole,
    PageStatistic,
    Passage,
    Patch,
    Picture,
    Side,
    VisibleKeys,
)

ROLES = (
    PageRole("previous token", "previous token", "at least half of the attention is on the token before", "previous"),
    PageRole("mixed", "mixed", "no one position gets half of the attention", "confidence"),
    PageRole("sink on special tokens", "sink on special tokens", "at least half is on special tokens", "special"),
)

STATISTICS = (
    PageStatistic("previous", "share", "mean weight of the token before", "this text"),
    PageStatistic("confidence", "share", "mean of each query's largest weight", "this text"),
    PageStatistic("special", "share", "mean weight of special tokens", "this text"),
    PageStatistic("entropy", "nats", "mean entropy of the weights of a query", "this text"),
    PageStatistic("effect", "nats", "loss without the head, minus the loss with it", "ablation"),
)

MINUS = "\N{MINUS SIGN}"
"""Sign of negative numbers on the page."""

SENTENCE = ("[CLS]", "Which", "do", "you", "like", "better", ",", "cof", "##fee", "or", "tea", "?", "[SEP]")


def text_side(tokens: Sequence[str] = SENTENCE, name: str = "text", first_generated: int | None = None) -> Side:
    """Return a side whose tokens that start with `##` continue a word."""
    words: list[str] = []
    word_of = []
    for token in tokens:
        if token.startswith("##") and len(token) > 2 and words:
            words[-1] += token[2:]
        else:
            words.append(token)
        word_of.append(len(words) - 1)
    joins = [token.startswith("##") or token in {",", "?", "."} for token in tokens]
    return Side(
        name=name,
        tokens=tuple(tokens),
        follows_blank=tuple(not join and place > 0 for place, join in enumerate(joins)),
        line_starts=(),
        special=tuple(token.startswith("[") and token.endswith("]") for token in tokens),
        words=tuple(words),
        word_of=tuple(word_of),
        first_generated=first_generated,
    )


def random_weights(queries: int, keys: int, *, causal: bool, seed: int, sharpness: float = 2.5) -> Tensor:
    """Return attention weights of one head: the softmax of random scores, (queries, keys)."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(queries, keys, generator=generator, dtype=torch.float64) * sharpness
    if causal:
        scores = scores.masked_fill(torch.ones(queries, keys, dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1)


def pooled(weights: Tensor, largest: int = 64) -> Tensor:
    """Return tiles of a weight matrix: means over queries of sums over keys."""
    queries, keys = weights.shape
    rows, columns = min(queries, largest), min(keys, largest)
    row_of, column_of = torch.arange(queries) * rows // queries, torch.arange(keys) * columns // keys
    sums = torch.zeros(rows, columns, dtype=weights.dtype)
    sums.index_put_((row_of[:, None], column_of[None]), weights, accumulate=True)
    return sums / torch.bincount(row_of, minlength=rows)[:, None]


def visible_keys(queries: int, keys: int, *, causal: bool) -> VisibleKeys:
    """Return the visible keys of a causal or a bidirectional head."""
    stops = torch.arange(1, queries + 1) if causal else torch.full((queries,), keys)
    return VisibleKeys(torch.ones(queries, dtype=torch.int64), torch.zeros(queries, dtype=torch.int64), stops)


def head_attention(
    weights: Tensor, *, causal: bool, listed: int | None = None, queries: int = 0, keys: int = 0
) -> HeadAttention:
    """Return a head's attention with all weights, or with the `listed` largest of each query."""
    stored: AllWeights | LargestWeights = AllWeights(weights)
    if listed is not None:
        top = weights.topk(min(listed, weights.shape[1]))
        stored = LargestWeights(top.indices, top.values, weights.sum(-1))
    visible = visible_keys(*weights.shape, causal=causal)
    return HeadAttention(queries, keys, weights.shape[1], pooled(weights), stored, visible)


def model_of(layers: int, heads: int, *, name: str = "synthetic", seed: int = 0, shift: int = 0) -> PageModel:
    """Return a model with random statistics and roles that repeat."""
    generator = torch.Generator().manual_seed(seed)
    count = layers * heads
    page_heads = tuple(
        PageHead(f"{layer}.{head}", layer, head, f"layers.{layer}.attention", "self",
                 ROLES[(layer * heads + head + (shift if head == 0 else 0)) % len(ROLES)].name)
        for layer in range(layers)
        for head in range(heads)
    )  # fmt: skip
    means = torch.rand(len(STATISTICS), count, generator=generator)
    means[-1] -= 0.5
    errors = torch.full_like(means, 0.02)
    errors[0] = math.nan
    counts = torch.full_like(means, 31.0)
    return PageModel(name, page_heads, Estimates(means, errors, counts))


def page_contents(
    *,
    layers: int = 3,
    heads: int = 5,
    sides: Sequence[Side] | None = None,
    causal: bool = False,
    listed: int | None = None,
    models: int = 1,
    foci: bool = False,
    sharpness: float = 2.5,
    title: str = "synthetic model",
) -> tuple[Contents, list[list[list[Tensor]]]]:
    """Return the contents of a page, and its weights: [passage][model][head] (queries, keys) in float64."""
    sides = sides or [text_side()]
    names = ["synthetic A", "synthetic B"][:models]
    page_models = tuple(model_of(layers, heads, name=name, seed=place, shift=place) for place, name in enumerate(names))
    truth, passages = [], []
    for number, side in enumerate(sides):
        count = len(side.tokens)
        weights = [
            [
                random_weights(
                    count, count, causal=causal, seed=1009 * number + 101 * model + head, sharpness=sharpness
                )
                for head in range(layers * heads)
            ]
            for model in range(models)
        ]
        truth.append(weights)
        stored = tuple(tuple(head_attention(w, causal=causal, listed=listed) for w in of_model) for of_model in weights)
        means = tuple(torch.rand(len(STATISTICS), layers * heads, generator=torch.Generator().manual_seed(number))
                      for _ in range(models))  # fmt: skip
        passages.append(Passage(" ".join(side.words)[:60], (side,), stored, means))
    page_foci = (focus_of(truth, sides, (5, 7), "objects"),) if foci else ()
    notes = ("The text was made up for a test.",)
    return Contents(title, notes, ROLES, STATISTICS, page_models, tuple(passages), page_foci), truth


def focus_of(truth: list[list[list[Tensor]]], sides: Sequence[Side], words: tuple[int, ...], name: str) -> PageFocus:
    """Return a focus with made-up shares, the best head last in the model."""
    count = len(truth[0][0])
    scores = tuple(
        FocusScore(0, head, 0.9 - 0.5 * place / count, 0.2, 0.03, 0.004, 0.9 - 0.5 * place / count >= 0.5)
        for place, head in enumerate(reversed(range(count)))
    )
    return PageFocus(name, "received", tuple(words for _ in sides), scores, "Head 2.4 has this focus.")


SIDE = text_side()
"""Side with the words of `SENTENCE`."""


def word_matrix(weights: Tensor, side: Side = SIDE) -> Tensor:
    """Return attention between words: means over the rows of a word of sums over the tokens of a word."""
    count = len(side.words)
    member = torch.nn.functional.one_hot(torch.tensor(side.word_of), count).to(weights.dtype)
    return (member / member.sum(0)).T @ weights @ member


def other_words(*marked: int) -> list[int]:
    """Return the indices of the words of `SIDE` that are neither special tokens nor marked."""
    return [index for index, text in enumerate(SIDE.words) if index not in marked and not text.startswith("[")]


def share_on(weights: Tensor, *marked: int) -> float:
    """Return the mean attention that other words of `SIDE` pay to the marked ones."""
    return float(word_matrix(weights)[other_words(*marked)][:, list(marked)].sum(1).mean())


def with_heads(contents: Contents, *heads: Sequence[HeadAttention | None], passage: int = 0) -> Contents:
    """Return contents with other heads of each model on one passage."""
    passages = list(contents.passages)
    passages[passage] = replace(passages[passage], heads=tuple(map(tuple, heads)))
    return replace(contents, passages=tuple(passages))


PIXEL = "data:image/gif;base64,R0lGODlhAQABAIAAAP///wAAACwAAAAAAQABAAACAkQBADs="
"""Address of a picture of one white pixel."""

GRIDS = ((2, 3), (3, 2))
"""Rows and columns of the patches of the pictures of `mixed_side`."""


def picture_side() -> Side:
    """Return a side whose tokens are [CLS] and the 2 x 3 patches of a small picture."""
    boxes = [(column / 3, row / 2, 1 / 3, 1 / 2) for row in range(2) for column in range(3)]
    tokens = ("[CLS]", *(f"row {row + 1}, column {column + 1}" for row in range(2) for column in range(3)))
    return Side("image", tokens, (False,) * 7, (), (True, *(False,) * 6), tokens, tuple(range(7)),
                pictures=(Picture("image", PIXEL, 300, 200),),
                patches=(None, *(Patch(0, *box) for box in boxes)))  # fmt: skip


def mixed_side() -> Side:
    """Return a side as the prompt of a vision-language model: words and the patches of two pictures, which overlap in
    the second one, and three words that the model generated.
    """
    tokens = ["[BOS]", "USER", ":"]
    patches: list[Patch | None] = [None] * 3
    for picture, (rows, columns) in enumerate(GRIDS):
        wide, high = ((1.0, 1.0), (1.2, 1.3))[picture]
        for row in range(rows):
            for column in range(columns):
                tokens.append(f"({row + 1}, {column + 1})")
                left, top = max((column + 0.5 - wide / 2) / columns, 0), max((row + 0.5 - high / 2) / rows, 0)
                right, bottom = min((column + 0.5 + wide / 2) / columns, 1), min((row + 0.5 + high / 2) / rows, 1)
                patches.append(Patch(picture, left, top, right - left, bottom - top))
        tokens.append("[IMG]")
        patches.append(None)
    tokens += ["What", "is", "left", "of", "the", "cir", "##cle", "?", "a", "blue", "square"]
    side = text_side(tokens, "prompt", first_generated=len(tokens) - 3)
    pictures = (Picture("picture 1", PIXEL, 300, 200), Picture("picture 2", PIXEL, 100, 200))
    return replace(side, pictures=pictures, patches=(*patches, *(None,) * 11))


def contents_on(title: str, *sides: Side, heads: int) -> tuple[Contents, list[Tensor]]:
    """Return the contents of a page whose heads attend from the last side to the first, and the heads' weights."""
    model, (keys, queries) = model_of(1, heads), (sides[0], sides[-1])
    weights = [random_weights(len(queries.tokens), len(keys.tokens), causal=False, seed=head) for head in range(heads)]
    stored = tuple(head_attention(each, causal=False, queries=len(sides) - 1, keys=0) for each in weights)
    means = torch.rand(len(STATISTICS), heads, generator=torch.Generator().manual_seed(5))
    return Contents(title, (), ROLES, STATISTICS, (model,), (Passage(title, sides, (stored,), (means,)),)), weights


def two_sided_contents(queries: Side, keys: Side, *, heads: int = 3) -> tuple[Contents, list[Tensor]]:
    """Return the contents of a page whose heads attend from one side to another, and the heads' weights."""
    return contents_on("two sides", keys, queries, heads=heads)


def picture_contents(*, heads: int = 3) -> tuple[Contents, list[Tensor]]:
    """Return the contents of a page of an image model, and the heads' weights."""
    return contents_on("a picture", picture_side(), heads=heads)


def long_contents(*, layers: int, heads: int, tokens: int, listed: int = 32) -> Contents:
    """Return the contents of a page with a long text, of which each query lists random weights on earlier keys."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = ("the", "model", "of", "atten", "##tion", "reads", "a", "long", "text", ",", "with", "many", "words")
    draws = torch.randint(len(vocabulary), (tokens - 1,), generator=generator).tolist()
    side = text_side(("[BOS]", *(vocabulary[draw] for draw in draws)))
    position = torch.arange(tokens)
    distances = torch.arange(listed).expand(tokens, listed) * torch.randint(1, 4, (tokens, 1), generator=generator)
    keys = (position[:, None] - distances).clamp(min=0)
    is_new = distances <= position[:, None]
    visible, means = visible_keys(tokens, tokens, causal=True), torch.rand(len(STATISTICS), layers * heads)
    tiles = (-0.3 * (torch.arange(64)[:, None] - torch.arange(64)).float().abs()).exp().tril()
    tiles = tiles / tiles.sum(-1, keepdim=True)
    stored = []
    for _ in range(layers * heads):
        weights = (torch.rand(tokens, listed, generator=generator) ** 8).masked_fill(~is_new, 0.0)
        weights = 0.9 * weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)
        ordered = weights.sort(dim=1, descending=True)
        largest = LargestWeights(keys.gather(1, ordered.indices), ordered.values, torch.ones(tokens))
        stored.append(HeadAttention(0, 0, tokens, tiles, largest, visible))
    passage = Passage("a long text", (side,), (tuple(stored),), (means,))
    return Contents("long text", (), ROLES, STATISTICS, (model_of(layers, heads),), (passage,))


def table_contents(layers: int = 2, heads: int = 4) -> Contents:
    """Return the contents of a page without texts."""
    return Contents("a table", (), ROLES, STATISTICS, (model_of(layers, heads),))
