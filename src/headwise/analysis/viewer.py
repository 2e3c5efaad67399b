"""Interceptor of `view`: statistics, links and attention weights of every head that attends over given texts.

Attention weights between tokens and between words are added up from blocks of query rows. Both are kept as a picture of
bounded size for each head, and as the largest weights of each query.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from headwise.analysis.roles import role_of
from headwise.analysis.token_sources import CallTokens, Place
from headwise.analysis.view_result import HeadView, Link, ViewedText
from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.backends.blockwise.row_block import RowBlock
from headwise.attention.masks.grid import Grid
from headwise.errors import InputError
from headwise.intercept.call_contexts import OF_COMMON_POSITIONS
from headwise.intercept.interceptor import Call, Observation, SiteKey
from headwise.intercept.sites import SiteRegistry
from headwise.page.contents import AllWeights, HeadAttention, LargestWeights, VisibleKeys
from headwise.page.write import LISTED_KEYS
from headwise.shapes import Bool, Float, Int
from headwise.statistics.tally import Tally

TOP = 8
"""Number of keys that are kept for each word."""

PICTURE = 64
"""Largest number of rows and columns of a head's picture; longer texts are pooled."""

Runs = tuple[Int[Tensor, " queries"], Int[Tensor, " runs"], Int[Tensor, " runs"]]
"""Runs of neighbouring visible keys of some queries: the number of runs of each query, the first key of each run, and
the key after the last one of each run."""


@dataclass(frozen=True, eq=False)
class VisibleWeights:
    """Attention weights of some heads and some consecutive queries (rows), on the CPU in float32, with a mask of the
    visible keys. The keys end with the last one that any of these queries may attend to, so that later tokens in a
    decoder are left out.

    Attributes:
        keys: index of the key of each column.
        is_visible: True where a row may attend to the key of a column; for one head if all heads have the same mask.
        all_keys: number of tokens of the text that has the keys.
    """

    weights: Float[Tensor, "heads rows columns"]
    heads: slice
    rows: range
    keys: Int[Tensor, " columns"]
    is_visible: Bool[Tensor, "#heads rows columns"]
    all_keys: int

    @staticmethod
    def of(row_block: RowBlock, index: int, starts: tuple[int, int], all_keys: int) -> "VisibleWeights":
        """Return the attention weights of one sequence of a row block (consecutive queries, for some heads). `index` is
        the number of the sequence among those of the block, `starts` are the indices of its first query and first key
        in their texts, and `all_keys` is the number of tokens of the text that has the keys.
        """

        def columns_in_use(values: Tensor) -> int:
            """Return 1 + the index of the last column in which any value is True or not 0; 0 if there is none."""
            columns = values.any(0).any(0).nonzero()
            return int(columns[-1]) + 1 if len(columns) else 0

        is_visible = row_block.tile.is_visible
        is_visible = is_visible[index if len(is_visible) > 1 else 0].cpu()
        if len(is_visible) > 1 and is_visible.eq(is_visible[:1]).all():
            is_visible = is_visible[:1]
        weights = row_block.weights[index].float().cpu()
        stop = max(columns_in_use(is_visible), 1)
        stop += columns_in_use(weights[..., stop:])  # weights that are not where the mask states that they are
        return VisibleWeights(
            weights[..., :stop],
            row_block.sequences_and_heads[1],
            range(row_block.rows.start + starts[0], row_block.rows.stop + starts[0]),
            row_block.visibility.key_indices[:stop].cpu() + starts[1],
            is_visible[..., :stop],
            all_keys,
        )


def largest(
    weights: Float[Tensor, "heads rows columns"], count: int
) -> tuple[Float[Tensor, "heads rows count"], Int[Tensor, "heads rows count"]]:
    """Return the `count` largest weights of each row, largest first, and the indices of their columns."""
    # The columns are split into groups. The largest weights are in the `count` groups with the largest maxima, so only
    # these are sorted, which takes a fraction of the time of `topk` of all columns.
    columns = weights.shape[-1]
    size = round((columns / count) ** 0.5)
    groups = columns // max(size, 1)
    if groups <= 2 * count:
        chosen = _columns_of_largest(weights, count)
        return weights.gather(-1, chosen), chosen
    maxima = weights[..., : size * groups].reshape(*weights.shape[:2], size, groups).amax(-2)
    of_groups = _columns_of_largest(maxima, count)
    candidates = (of_groups[..., None, :] + groups * torch.arange(size)[:, None]).flatten(-2)
    remaining = torch.arange(size * groups, columns).expand(*candidates.shape[:-1], -1)
    candidates = torch.cat([candidates, remaining], -1)
    chosen = candidates.gather(-1, _columns_of_largest(weights.gather(-1, candidates), count))
    return weights.gather(-1, chosen), chosen


def _columns_of_largest(values: Float[Tensor, "heads rows columns"], count: int) -> Int[Tensor, "heads rows count"]:
    """Return the column indices of the `count` largest values of each row, the largest value first."""
    # numpy partitions integers, made of a value and its column, in a third of the time of `topk`.
    columns = values.shape[-1]
    bits = values.contiguous().view(torch.int32)
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # the bits of negative numbers are in descending order
    pairs = ((ascending.long() << 32) | torch.arange(columns - 1, -1, -1)).numpy()
    pairs.partition(columns - count, axis=-1)
    top = torch.from_numpy(np.sort(pairs[..., columns - count :])[..., ::-1].copy())
    return columns - 1 - (top & 0xFFFFFFFF)


class PooledWeights:
    """Attention weights of each head, reduced to a bounded size: a picture of at most 64 rows and columns (`PICTURE`),
    and the `listed` largest weights of each query with their keys. A cell of the picture stands for a range of queries
    and a range of keys. It is the sum of the weights over the keys in the range, averaged over the queries in the
    range.
    """

    def __init__(self, heads: int, queries: int, keys: int, listed: int) -> None:
        self._row_of, self._column_of = (torch.arange(n) * min(n, PICTURE) // n for n in (queries, keys))
        self.picture = torch.zeros(heads, min(queries, PICTURE), min(keys, PICTURE))
        self.top_weights = torch.zeros(heads, queries, min(listed, keys))
        self.top_keys = torch.zeros(heads, queries, min(listed, keys), dtype=torch.int32)

    def add_rows(
        self,
        weights: Float[Tensor, "heads queries keys"],
        heads: slice,
        queries: slice,
        keys: Int[Tensor, " keys"],
    ) -> tuple[Float[Tensor, "heads queries listed"], Int[Tensor, "heads queries listed"]]:
        """Add the attention weights of some queries and some heads to the picture and to the lists of largest weights.
        Return the largest weights of each query, and for each of these weights its column in the tensor `weights`.
        """
        first, last = int(self._row_of[queries.start]), int(self._row_of[queries.stop - 1])
        # Rows are contiguous in memory: summed first, they leave few numbers to be summed over columns.
        by_row = weights.new_zeros(len(weights), last + 1 - first, weights.shape[-1])
        by_row.index_add_(1, self._row_of[queries] - first, weights)
        by_row /= torch.bincount(self._row_of)[first : last + 1, None]
        sums = torch.zeros(*by_row.shape[:2], self.picture.shape[2]).index_add_(2, self._column_of[keys], by_row)
        self.picture[heads, first : last + 1] += sums
        listed = min(self.top_keys.shape[-1], len(keys))
        if not listed:
            return weights[..., :0], keys[:0].expand(*weights.shape[:2], 0)
        top_weights, columns = largest(weights, listed)
        self.top_weights[heads, queries, :listed] = top_weights
        self.top_keys[heads, queries, :listed] = keys.int()[columns]
        return top_weights, columns


class TokenWeights(PooledWeights):
    """Attention weights between the tokens of a text for each head, added up from blocks of queries. The object stores
    a picture of at most 64 rows and columns, the keys that each query may attend to, and weights. For a short text
    (`keeps_all`) it stores all weights, otherwise the largest ones of each query.

    Args:
        known_runs: by the rows of a block, the latest mask of these rows, its keys, and its runs of visible keys for
            each head, or once if all heads have the same. Calls over the same tokens share this dictionary. Most layers
            of a model have the same mask, whose runs are computed once.
    """

    def __init__(
        self,
        heads: int,
        queries: int,
        keys: int,
        keeps_all: bool,
        known_runs: dict[range, tuple[Tensor, Tensor, list[Runs]]],
    ) -> None:
        super().__init__(heads, queries, keys, 0 if keeps_all else LISTED_KEYS)
        self.queries, self.keys, self._known_runs = queries, keys, known_runs
        self._all = torch.zeros(heads, queries, keys) if keeps_all else None
        self._totals = torch.zeros(heads, queries)
        self._runs: dict[int, dict[int, Runs]] = defaultdict(dict)

    def add(self, block: VisibleWeights) -> None:
        """Add the attention weights of some queries and some heads to the picture and to the stored weights."""
        weights, heads, keys = block.weights, block.heads, block.keys
        selected = slice(block.rows.start, block.rows.stop)
        self._totals[heads, selected] = weights.sum(-1)
        self.add_rows(weights, heads, selected, keys)
        if self._all is not None:
            self._all[heads, selected, keys] = weights
        runs = self._runs_of(block)
        for place, head in enumerate(range(len(self.picture))[heads]):
            self._runs[head][selected.start] = runs[place if len(runs) > 1 else 0]

    def _runs_of(self, block: VisibleWeights) -> list[Runs]:
        """Return the runs (ranges of neighbouring keys) that some queries may attend to: one item for each head, or a
        single one if all heads have the same mask.
        """
        latest = self._known_runs.get(block.rows)
        if latest is not None and torch.equal(latest[0], block.is_visible) and torch.equal(latest[1], block.keys):
            return latest[2]
        runs = []
        for is_visible in block.is_visible:
            padded = torch.zeros(len(is_visible), block.all_keys + 2, dtype=torch.int8)
            padded[:, block.keys + 1] = is_visible.to(torch.int8)
            change = padded.diff()
            starts, stops = (change == 1).nonzero(), (change == -1).nonzero()
            runs.append((torch.bincount(starts[:, 0], minlength=len(is_visible)), starts[:, 1], stops[:, 1]))
        self._known_runs[block.rows] = block.is_visible, block.keys, runs
        return runs

    def of_head(self, head: int, queries: int, keys: int) -> HeadAttention:
        """Return the attention of one head, after all rows were added, for a passage on a page (one text, or a source
        and a target text). `queries` and `keys` are the numbers, 0 or 1, of the texts that have the queries and the
        keys. A query whose row was never added has no visible key.
        """
        weights: AllWeights | LargestWeights
        if self._all is not None:
            weights = AllWeights(self._all[head])
        else:
            weights = LargestWeights(self.top_keys[head], self.top_weights[head], self._totals[head])
        counts, empty = torch.zeros(self.queries, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
        starts, stops = [empty], [empty]
        for first_row, (of_rows, first_keys, stop_keys) in sorted(self._runs[head].items()):
            counts[first_row : first_row + len(of_rows)] = of_rows
            starts.append(first_keys)
            stops.append(stop_keys)
        visible = VisibleKeys(counts, torch.cat(starts), torch.cat(stops))
        return HeadAttention(queries, keys, self.keys, self.picture[head], weights, visible)


@dataclass(frozen=True, eq=False)
class TokensOfWords:
    """Words of the queries or of the keys of an attention matrix. Each token has the index of its word, and each word
    has a flag that is True if links between words may join it.
    """

    word_of: Int[Tensor, " tokens"]
    is_lexical: Bool[Tensor, " words"]

    @property
    def count(self) -> int:
        """Number of words."""
        return len(self.is_lexical)


class WordWeights(PooledWeights):
    """Attention weights between words for each head, added up from blocks of tokens. They are reduced to three results:
    the strongest link of each word to another word, the words to which each word attends most, and a picture of the
    weight matrix.

    Weights to the tokens of a word are summed, and those from its tokens averaged, so that each word's weights still
    add up to 1 (Clark et al. 2019, section 4.1). The row blocks of a head come in the order of the rows; a word may
    begin in one block and end in another. In self-attention, `queries` and `keys` are the same object.
    """

    def __init__(self, heads: int, queries: TokensOfWords, keys: TokensOfWords) -> None:
        super().__init__(heads, queries.count, keys.count, TOP)
        self.queries, self.keys = queries, keys
        self.is_self_attention = queries is keys
        self.token_counts = torch.bincount(queries.word_of, minlength=queries.count)
        self.best_key = torch.zeros(heads, queries.count, dtype=torch.int64)
        self.best_weight = torch.full((heads, queries.count), -1.0)
        # No link goes to a first token that sees no other token. It is the attention sink of most decoders (Xiao et al.
        # 2023), and would be the end of nearly all links.
        self.leaves_out_first = False
        self._unfinished = torch.zeros(heads, keys.count)  # weights of the word whose last rows are still to come
        self._has_unfinished = torch.zeros(heads, dtype=torch.bool)

    def add(self, block: VisibleWeights) -> None:
        """Add the attention weights of one block of consecutive tokens as queries. A word is processed once the rows of
        all its tokens have been added: its weights then enter the strongest links, the most attended words and the
        picture.
        """
        part, rows, word_of = block.heads, block.rows, self.queries.word_of
        if self.is_self_attention and rows.start == 0 and len(word_of) > 1:
            self.leaves_out_first = int(block.is_visible[:, 0].sum(-1).max()) == 1
        word_of_rows = word_of[rows.start : rows.stop]
        word_of_columns = self.keys.word_of[block.keys]
        first, last = int(word_of_rows[0]), int(word_of_rows[-1])
        # Words after the last visible key have no weight, except in rows of a word that began in the block before.
        words = self.keys.count if self._has_unfinished[part].any() else int(word_of_columns[-1]) + 1
        sums = _sums_of_words(block.weights, word_of_rows - first, word_of_columns, words)
        if self._has_unfinished[part].any():
            sums[:, 0] += self._unfinished[part]
        self._unfinished[part], self._has_unfinished[part] = 0.0, False
        if rows.stop < len(word_of) and int(word_of[rows.stop]) == last:
            self._unfinished[part, :words], self._has_unfinished[part] = sums[:, -1], True
            sums, last = sums[:, :-1], last - 1
        if last < first:
            return
        selected, queries = slice(first, last + 1), torch.arange(first, last + 1)
        weights = sums / self.token_counts[selected, None]
        top_weights, top_keys = self.add_rows(weights, part, selected, torch.arange(words))
        is_eligible = self._is_eligible(queries[:, None], top_keys)
        best = top_weights.masked_fill(~is_eligible, -1.0).max(-1)
        best_weight, best_key = best.values, top_keys.gather(-1, best.indices[..., None])[..., 0]
        # Rarely none of a word's most attended words may be linked.
        head, row = (best_weight < 0).logical_and_(self.queries.is_lexical[queries]).nonzero().unbind(-1)
        if words > TOP and len(row):
            is_eligible = self._is_eligible(queries[row, None], torch.arange(words))
            best_weight[head, row], best_key[head, row] = weights[head, row].masked_fill(~is_eligible, -1.0).max(-1)
        self.best_weight[part, selected], self.best_key[part, selected] = best_weight, best_key

    def _is_eligible(self, queries: Int[Tensor, "*#pairs"], keys: Int[Tensor, "*#pairs"]) -> Bool[Tensor, "*pairs"]:
        """Return True for each pair of a query word and a key word that a link may join. Both must have a letter or
        digit. In self-attention they must differ, and the key must not be the first word if the first token can attend
        only to itself.
        """
        is_eligible = self.queries.is_lexical[queries] & self.keys.is_lexical[keys]
        if self.is_self_attention:
            is_eligible &= keys != queries  # a link joins two words
            if self.leaves_out_first:
                is_eligible &= keys != 0
        return is_eligible

    def links(self, head: int) -> tuple[Link, ...]:
        """Return the links of one head, strongest first: each from a word to the other word to which it attends most.
        If two words attend most to each other, both with a weight above 1 / number of words, they share one link.
        """
        weights, keys = self.best_weight[head], self.best_key[head]
        queries = torch.arange(len(weights))
        is_listed, back = weights >= 0, torch.full_like(weights, torch.nan)  # no other word is eligible for the others
        if self.is_self_attention:
            is_mutual = (keys[keys] == queries) & (torch.minimum(weights, weights[keys]) > 1 / self.keys.count)
            back = weights[keys].where(is_mutual, torch.nan)
            # A mutual link is listed from the word with the larger weight.
            is_weaker = (back > weights) | ((back == weights) & (queries > keys))
            is_listed &= ~is_weaker
        strength = (weights.double() * 1e4).round()  # links of equal rounded weight are in the order of the text
        order = strength.masked_fill(~is_listed, -1.0).sort(descending=True, stable=True).indices
        order = order[: int(is_listed.sum())]
        columns = [each[order].tolist() for each in (queries, keys, weights, back)]
        columns[-1] = [None if math.isnan(weight) else weight for weight in columns[-1]]
        return tuple(map(Link, *columns))


def _sums_of_words(
    weights: Float[Tensor, "heads rows columns"],
    word_of_rows: Int[Tensor, " rows"],
    word_of_columns: Int[Tensor, " columns"],
    words: int,
) -> Float[Tensor, "heads row_words words"]:
    """Return the sums of attention weights over the tokens of each pair of words: rows are summed by query word, and
    columns by key word. Query words are counted from 0, and `words` is the number of key words. The tokens of a word
    are neighbours.
    """
    # Sums over columns cost many times as much as sums over rows, which are contiguous in memory, so the rows come
    # first, and the first column of each word is copied instead of added.
    row_words = int(word_of_rows[-1]) + 1
    if row_words < len(word_of_rows):
        weights = weights.new_zeros(len(weights), row_words, weights.shape[-1]).index_add_(1, word_of_rows, weights)
    is_first = word_of_columns.diff(prepend=word_of_columns.new_full((1,), -1)) != 0
    first, further = is_first.nonzero()[:, 0], (~is_first).nonzero()[:, 0]
    # `gather` takes a third of the time of `index_select`.
    sums = weights.gather(2, first.expand(*weights.shape[:2], -1))
    if len(first) < words:
        sums = weights.new_zeros(*weights.shape[:2], words).index_copy_(2, word_of_columns[first], sums)
    if len(further):
        added = weights.gather(2, further.expand(*weights.shape[:2], -1))
        sums.index_add_(2, word_of_columns[further], added)
    return sums


DISAGREEMENT = 1e-3
"""Largest accepted difference between a head's output and the product of its weights and values.

Relative to the output's largest value; for half precision 8 of its epsilons are accepted. Rounding stays below this.
Attention that computes something else than softmax of its scores does not.
"""


class ViewedRows(NamedTuple):
    """Queries or keys of an attention call, of which those of each sequence are neighbouring tokens of one text.

    Attributes:
        text: index of the text among those of the view.
        starts: for each sequence of the call, such as a window of a picture, the index of its first token in the text.
        length: number of tokens of each sequence.
    """

    text: int
    starts: tuple[int, ...]
    length: int

    @staticmethod
    def of(tokens: CallTokens) -> "ViewedRows | None":
        """Return the tokens of a call as rows of a text; None if the tokens of a sequence are not neighbours."""
        first, count = tokens.rows[:, :1], tokens.rows.shape[1]
        if not torch.equal(tokens.rows, first + torch.arange(count)):
            return None
        return ViewedRows(tokens.stream, tuple(first[:, 0].tolist()), count)

    @property
    def tokens(self) -> CallTokens:
        """These rows as tokens of a call."""
        return CallTokens(self.text, torch.tensor(self.starts)[:, None] + torch.arange(self.length))


@dataclass(frozen=True, eq=False)
class ObservedHeads:
    """Attention of the heads of one module on one or two texts. A module may attend in several calls, each over a part
    of the text, such as one picture of several.

    Attributes:
        layer: the model's own number of the layer; None if it does not number it.
        pair: indices of the texts that have the queries and the keys.
        tallies: sums of statistics of each call, with its queries and keys.
    """

    site: SiteKey
    layer: int | None
    pair: tuple[int, int]
    words: WordWeights
    tokens: TokenWeights
    tallies: list[tuple[Tally, ViewedRows, ViewedRows]] = field(default_factory=list)

    def continues(self, site: SiteKey, queries: ViewedRows, keys: ViewedRows) -> bool:
        """Return True if a call of this module has other queries than the calls so far, of the same text."""
        if (self.site, self.pair) != (site, (queries.text, keys.text)):
            return False
        return not any(set(before.starts) & set(queries.starts) for _, before, _ in self.tallies)

    def views(self, layer: int) -> Iterator[HeadView]:
        """Yield the `HeadView` of each head: statistics, role, links between words, and attention weights."""
        means, counts = _joined_statistics([tally for tally, *_ in self.tallies])
        # A word receives what its tokens receive.
        of_words = torch.zeros(len(self.words.picture), self.words.keys.count, dtype=torch.float64)
        for tally, _, keys in self.tallies:
            received, seen_by = (total.cpu().double() for total in tally.other_sums["received"])
            for sequence, start in enumerate(keys.starts):
                word_of = self.words.keys.word_of[start : start + received.shape[-1]]
                of_words.index_add_(1, word_of, received[sequence] / seen_by[sequence])
        for head in range(len(self.words.picture)):
            head_means = {name: values[head] for name, values in means.items()}
            head_rows = {name: values[head] for name, values in counts.items()}
            yield HeadView(
                layer=layer,
                head=head,
                module=self.site.label,
                kind="cross" if self.site.cross else "self",
                role=role_of(head_means, head_rows),
                means=head_means,
                rows=head_rows,
                links=self.words.links(head),
                top_keys=self.words.top_keys[head].long(),
                top_weights=self.words.top_weights[head],
                picture=self.words.picture[head],
                received=of_words[head].to(received.dtype),
                attention=self.tokens.of_head(head, *self.pair),
            )


def _joined_statistics(tallies: Sequence[Tally]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the value of each statistic for each head over all sequences of some calls, and the number of query rows
    behind it. Values of sequences are averaged by their numbers of rows.
    """
    means: dict[str, list[float]] = {}
    counts: dict[str, list[float]] = {}
    of_calls = [(tally.means(), tally.counts()) for tally in tallies]
    for name in of_calls[0][0]:
        values = torch.cat([of_call[name] for of_call, _ in of_calls]).cpu()
        rows = [of_call.get(name, of_call["entropy"]) for _, of_call in of_calls]
        weights = torch.cat(rows).cpu()
        has_rows = weights > 0
        total = weights.sum(0)
        mean = values[0] if len(values) == 1 else (values * weights).where(has_rows, 0.0).sum(0) / total
        means[name] = mean.tolist()
        if name in of_calls[0][1]:
            counts[name] = total.tolist()
    return means, counts


class Viewer(SiteRegistry):
    """Interceptor that stores the attention of every head on some texts while a model runs, as one `HeadView` per head.
    It reads attention from a text to itself, and from one text (target) to another one (source).

    Attributes:
        calls: tokens of the queries and keys of each attention call over the texts.
        other_grids: for each module that attended to something else than the tokens of the texts, by its path, the
            numbers of queries and keys of its first such call.

    Args:
        keep_all: all weights between tokens are kept in a call with at most `keep_all` squared weights in each head.
        on_call: function that is called after each attention call over the texts.
        calls: tokens of the queries and keys of each attention call, where they are known. The streams are the texts.
            Without them, calls are assigned to texts by their numbers of tokens.
    """

    def __init__(
        self,
        model: nn.Module,
        texts: Sequence[ViewedText],
        *,
        keep_all: int,
        on_call: Callable[[], None],
        calls: Mapping[Place, tuple[CallTokens, CallTokens]] | None = None,
    ) -> None:
        super().__init__(model)
        self._on_call, self._known_calls = on_call, calls
        self.calls: dict[Place, tuple[CallTokens, CallTokens]] = dict(calls or {})
        self._texts, self._keep_all = texts, keep_all
        self._words = [
            TokensOfWords(each.word_of, torch.tensor([word.lexical for word in each.words])) for each in texts
        ]
        self._contexts: dict[tuple[ViewedRows, ViewedRows, torch.device], CallContext] = {}
        self._known_runs: dict[tuple[int, int], dict[range, tuple[Tensor, Tensor, list[Runs]]]] = {}
        self.other_grids: dict[str, Grid] = {}
        self._observed: list[ObservedHeads] = []

    def observe(self, call: Call) -> Observation | None:
        """Return an observation of an attention call, from which `HeadView` objects of its heads are built. It also
        checks that weights times values equal the head outputs. Return None for attention over something other than the
        tokens of the texts.
        """
        self.register(call)
        grid, site, sides = call.grid, call.site, self._sides_of(call)
        if sides is None:
            self.other_grids.setdefault(site.path, grid)
            return None
        queries, keys = sides
        self.calls[Place(site, call.index)] = queries.tokens, keys.tokens
        pair, all_keys = (queries.text, keys.text), len(self._texts[keys.text].tokens)
        heads = next((each for each in self._observed if each.continues(site, queries, keys)), None)
        if heads is None:
            known_runs = self._known_runs.setdefault(pair, {})
            size = len(self._texts[queries.text].tokens)
            heads = ObservedHeads(
                site,
                call.layer,
                pair,
                WordWeights(grid.heads, self._words[queries.text], self._words[keys.text]),
                TokenWeights(grid.heads, size, all_keys, size * all_keys <= self._keep_all**2, known_runs),
            )
            self._observed.append(heads)
        tally, observed = Tally(), heads

        def observer(row_block: RowBlock) -> None:
            tally.add(replace(row_block, out=None))  # a view shows no norms
            for index, sequence in enumerate(range(grid.batch)[row_block.sequences_and_heads[0]]):
                starts = queries.starts[sequence], keys.starts[sequence]
                visible_weights = VisibleWeights.of(row_block, index, starts, all_keys)
                observed.words.add(visible_weights)
                observed.tokens.add(visible_weights)

        def on_end() -> None:
            observed.tallies.append((tally, queries, keys))
            self._on_call()

        if (queries, keys, grid.device) not in self._contexts:  # calls over the same tokens share their statistics
            text, is_self = self._texts[keys.text], queries == keys
            rows = keys.tokens.rows
            special = torch.tensor([token.special for token in text.tokens])[rows]
            real = []
            for side, count in ((queries, grid.queries), (keys, grid.keys)):
                padding = self._texts[side.text].padding
                indices = torch.tensor(side.starts)[:, None] + torch.arange(count)
                real.append(None if padding is None else ~padding[indices].to(grid.device))
            self._contexts[queries, keys, grid.device] = CallContext(
                text.ids[0].cpu()[rows].to(grid.device) if is_self and text.ids is not None else None,
                special.to(grid.device),
                real_queries=real[0],
                real_keys=real[1],
                left_out=frozenset() if is_self else OF_COMMON_POSITIONS,
            )
        context = self._contexts[queries, keys, grid.device]
        return Observation(observer, context, on_end, partial(require_agreement, site.path))

    def _sides_of(self, call: Call) -> "tuple[ViewedRows, ViewedRows] | None":
        """Return the tokens of the texts that are the queries and the keys of an attention call. Return None if the
        call is not over tokens of the texts, or if it could be over either of two texts.
        """
        grid, lengths = call.grid, [len(each.tokens) for each in self._texts]
        if self._known_calls is not None:
            sides = self._known_calls.get(Place(call.site, call.index))
            queries, keys = (None, None) if sides is None else map(ViewedRows.of, sides)
            return None if queries is None or keys is None else (queries, keys)
        if grid.batch != 1:
            return None
        if call.site.cross:
            source, target = 0, len(lengths) - 1
            if not target or (grid.queries, grid.keys) != (lengths[-1], lengths[0]):
                return None
            return ViewedRows(target, (0,), grid.queries), ViewedRows(source, (0,), grid.keys)
        fitting = [index for index, length in enumerate(lengths) if grid.queries == grid.keys == length]
        if len(fitting) > 1:
            texts = {index: self._texts[index].ids for index in fitting}
            fitting = [
                index
                for index, ids in texts.items()
                if ids is not None and call.tokens.ids is not None and torch.equal(ids.cpu(), call.tokens.ids.cpu())
            ]
        return (ViewedRows(fitting[0], (0,), grid.keys),) * 2 if len(fitting) == 1 else None

    def head_views(self) -> Iterator[HeadView]:
        """Yield the `HeadView` of each head, in the order of layers and heads. If every module attended once, heads
        have the layer numbers of result tables. Otherwise the heads of an attention call have the layer number that the
        model states. If that number is unknown or used already, the layer number is one more than the largest so far.
        """
        sites = [heads.site for heads in self._observed]
        layer_of = dict(zip((record.site for record in self.records), self.layers, strict=True))
        layers: list[int] = []
        for heads in self._observed:
            if len(set(sites)) == len(sites) and layer_of.keys() >= set(sites):
                layers.append(layer_of[heads.site])
            else:
                number = heads.layer
                layers.append(max(layers, default=-1) + 1 if number is None or number in layers else number)
        for number, heads in sorted(zip(layers, self._observed, strict=True), key=lambda pair: pair[0]):
            yield from heads.views(number)

    @property
    def left_out(self) -> str:
        """Description, for a message, of the attention calls that were left out because they were not over the tokens
        of the texts; empty if there were none.
        """
        return ", ".join(
            f"{'' if grid.batch == 1 else f'a batch of {grid.batch} with '}{grid.queries} queries and {grid.keys} keys "
            f"in {path}"
            for path, grid in self.other_grids.items()
        )


def require_agreement(path: str, row_block: RowBlock, out: Float[Tensor, "batch heads rows value_dim"]) -> None:
    """Raise `InputError` if the observed attention weights times the values differ from the actual head outputs `out`
    by more than rounding. The observed weights are then wrong. `row_block` has this product for some queries, and
    `path` is the path of the module.
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
