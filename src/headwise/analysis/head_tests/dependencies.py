"""Dependency accuracy: how often a head's most attended word is the governor or the dependent of a word."""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.analysis.head_pass import SiteValues, measure_sequences, pass_data
from headwise.analysis.head_tests.treebank import AlignedTokens, TreeSentence, aligned_tokens, read_treebank
from headwise.analysis.head_tests.weight_reader import WeightReader, require_finite_weights
from headwise.attention.backends.blockwise.row_block import RowBlock
from headwise.checks import collection_of, flag, require_module, whole_number
from headwise.data.batches import NumberedBatches, digest_of
from headwise.data.tokenization import max_input_tokens, text_model
from headwise.errors import InputError
from headwise.intercept.interceptor import Call, SiteKey
from headwise.intercept.sites import SiteRecord, SiteRegistry
from headwise.runs.head_table import HeadTable
from headwise.runs.rows import HeadRow, MeanEstimate, moment_estimates
from headwise.runs.table import Table
from headwise.settings import FEWEST_PAIRS
from headwise.shapes import Bool, Float, Int
from headwise.statistics.columns import Column
from headwise.statistics.moments import RunningMoments, clusters_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DIRECTIONS = ("to governor", "to dependent")
"""Directions of attention between a dependent and its governor."""


@dataclass(frozen=True, kw_only=True, repr=False)
class DependencyRow(HeadRow):
    """Table row with the dependency accuracy of one head for one syntactic relation and direction. The accuracy is the
    share of words from which the head attends most to the word at the other end of the relation.

    Attributes:
        relation: relation of the dependent to its governor, such as `nsubj`.
        direction: "to governor" if the dependent attends, "to dependent" if the governor does.
        offset: the fixed offset in words, from the attending word, that is most often right in the selection half.
    """

    relation: str
    direction: str
    offset: int

    def _described(self) -> list[str]:
        return [self.name, self.relation, self.direction]


class _GainTable(Table[DependencyRow]):
    """Base class of tables of dependency accuracy (how often heads attend along a syntactic relation). The column
    `gain` is the accuracy of a head minus the accuracy of always choosing the word at a fixed offset. A significance
    test compares the gain with zero.
    """

    ROW_TYPE = DependencyRow
    SAMPLES = "document"
    COLUMNS = (
        Column("accuracy", "Share of pairs in which the head's most attended word is the other word.", "share"),
        Column("offset_accuracy", "Share of pairs in which the word at the best fixed offset is.", "share"),
        Column("gain", "Accuracy of the head minus that of the best fixed offset.", is_signed=True, is_tested=True),
        Column("selection_gain", "Gain in the half of the documents that selects.", is_signed=True),
    )


class DependencyHeads(_GainTable, HeadTable[DependencyRow]):
    """Table of dependency accuracy, one row per head: how often the head attends most from a word to the word at the
    other end of a syntactic relation. The gain is this accuracy minus the accuracy of always choosing the word at one
    fixed distance. Each row has the relation and direction with the largest gain in one half of the documents. The
    column `gain` is measured in the other half, so that the choice does not bias it.

    The columns are those of `DependencyAccuracy`. `gain_q` is adjusted for the number of heads.
    """

    NAME = "dependency_heads"
    PLOTTED = "gain"


class DependencyAccuracy(_GainTable):
    """Table of dependency accuracy, one row per head, relation and direction (Clark et al. 2019, section 4.2). It
    states how often a head attends most from a word to the word at the other end of a syntactic relation. The direction
    is from a word (the dependent) to the word on which it depends (its governor), or the reverse.

        accuracy         share of pairs in which the head's most attended word is the other word of the pair
        offset_accuracy  share in which the word at the best fixed offset is
        gain             accuracy - offset_accuracy, paired
        selection_gain   the same in the selection half

    The attention between two words is the sum over the tokens of the attended word, and the mean over those of the
    attending one. Special tokens and the word itself do not compete.

    The first three columns are of the test half; the offset was chosen in the selection half, from -10 to 10 words.
    Standard errors are clustered by document, or by sentence in a treebank without documents, which `n` counts.
    `gain_p` is the p-value of a two-sided t-test of the gain against zero, and `gain_q` is adjusted for the number of
    all rows (Benjamini and Hochberg 1995).
    """

    NAME = "dependencies"
    UNIT = "head, relation and direction"

    def best(self) -> DependencyHeads:
        """Return a table with one row per head, for the syntactic relation and direction with the largest
        `selection_gain`. This gain is the head's accuracy minus the accuracy of always choosing the word at a fixed
        offset. It is measured in the half of the documents that is used for selection.
        """
        best: dict[tuple[int, int, str], tuple[float, DependencyRow]] = {}
        for row in self.rows:
            key, gain = (row.layer, row.head, row.module), row.statistics["selection_gain"].value
            gain = -math.inf if math.isnan(gain) else gain
            if key not in best or gain > best[key][0]:
                best[key] = gain, row
        return DependencyHeads(tuple(row for _, row in best.values()), self.metadata)

    def plot(self, statistic: str = "gain", *, kind: str = "heatmap", **options: Any) -> "Axes":
        """Draw a statistic of each head, for the relation and direction that `best()` selects for the head, and return
        the matplotlib axes. The options are those of `HeadTable.plot`.

        Raises:
            InputError: there is no such statistic or kind.
            MissingExtra: matplotlib is not installed.
        """
        return self.best().plot(statistic, kind=kind, **options)


FARTHEST = 10
"""Largest distance, in words, of the fixed offsets."""

IGNORED = ("punct",)
"""Default relations that are left out, as in Clark et al."""


def dependency_accuracy(
    model: nn.Module,
    tokenizer: Any,
    treebank: Any,
    *,
    limit: int | None = None,
    fewest: int = FEWEST_PAIRS,
    ignored: Collection[str] = IGNORED,
    subtypes: bool = False,
    start_token: int | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    force: bool = False,
    progress: bool = False,
    title: str | None = None,
) -> DependencyAccuracy:
    """Measure how often each head attends most from a word to its syntactic governor, and from a governor to its
    dependent (Clark et al. 2019, section 4.2). Compare this accuracy with the accuracy of always choosing the word at
    the best fixed offset (Voita et al. 2019, section 5.2). The class `DependencyAccuracy` defines the columns and the
    tests.

        accuracy = hw.dependency_accuracy(model, tokenizer, "en_ewt-ud-test.conllu")
        accuracy.best()                     # one row per head: the relation at which it is best
        accuracy.table()                    # one row per head, relation and direction

    Half of the documents select the offset, and the relation of each head in `best`; the other half tests them. A
    treebank that states no documents (`# newdoc`) is divided by sentences. Words that share a token with other
    characters, and pairs in which no head may attend from one word to the other, as to later words in a decoder, are
    left out and counted in `metadata["measured"]`. The model reads one sentence at a time, without gradients.

    Args:
        model: any model of `transformers` that reads text; of an encoder-decoder, the encoder.
        tokenizer: its tokenizer, a fast one.
        treebank: a file or folder in CoNLL-U format, or the text of such a file.
        limit: number of sentences to use, from the start; all by default.
        fewest: least number of pairs in each half; relations with fewer are left out.
        ignored: relations that are left out.
        subtypes: keep subtypes of relations, such as `nsubj:pass`.
        start_token: id of a token to put before each sentence, on which most decoders have their attention sink.
        seed: seed of the division into halves.
        out: folder for the table; an interrupted run resumes there with the same arguments.
        force: replace another run in that folder.
        progress: show a progress bar on standard error.
        title: the model's name for display.

    Raises:
        InputError: the treebank, the tokenizer or the model cannot be used, or no relation has enough pairs.
        MissingExtra: conllu is not installed; or a package that `out` or `progress` needs.
    """
    model = text_model(require_module(model))
    whole_number("fewest", fewest, least=2)
    sentences = read_treebank(treebank, subtypes=flag("subtypes", subtypes))
    sentences = sentences if limit is None else sentences[: whole_number("limit", limit, least=2)]
    distinct = sorted({sentence.document for sentence in sentences})
    if len(distinct) < 4:
        expected = "at least 4 documents, or sentences of a treebank without documents"
        raise InputError("treebank", expected=expected, got=len(distinct))
    selection = set(Random(whole_number("seed", seed, least=0)).sample(distinct, len(distinct) // 2))
    relations = frozenset(collection_of("ignored", ignored, of="relations"))
    read, left_out = _aligned(sentences, tokenizer, start_token, max_input_tokens(model, tokenizer), relations)
    pairs = [pair for _, _, pairs_of_sentence in read for pair in pairs_of_sentence]
    reader = MostAttendedWords(model)
    batches = [{"input_ids": tokens.ids[None], "sentence": torch.tensor([i])} for i, (_, tokens, _) in enumerate(read)]
    data = pass_data(model, NumberedBatches(batches, [document for document, *_ in read]), (), out=out, shown=progress)

    def measure_batch(batch: dict[str, Any]) -> tuple[list[SiteRecord], SiteValues]:
        _, tokens, of_sentence = read[int(batch["sentence"])]
        reader.run_sentence(tokens)
        sources = torch.tensor([pair.source for pair in of_sentence], dtype=torch.int64)
        targets = torch.tensor([pair.target for pair in of_sentence], dtype=torch.int64)
        is_seen = reader.sees[sources, targets][:, None].float()
        return reader.records, {
            site: {IS_CORRECT: (found[:, sources] == targets).mT.float(), IS_SEEN: is_seen}
            for site, found in reader.found.items()
        }

    def make_table(registry: SiteRegistry, values: SiteValues, metadata: dict[str, Any]) -> DependencyAccuracy:
        of_sites = [values[record.site] for record in registry.records]
        seen = of_sites[0][IS_SEEN][:, 0].bool()
        correct = torch.cat([of_site[IS_CORRECT] for of_site in of_sites], 1)[seen]
        visible = [pair for pair, is_seen in zip(pairs, seen.tolist(), strict=True) if is_seen]
        if len(visible) < len(pairs):
            left_out["pairs and directions that no head can see"] = len(pairs) - len(visible)
        labels = [labels for _, labels in registry.head_labels()]
        rows = tuple(_rows(labels, visible, correct, selection, fewest))
        if not rows:
            expected = f"a relation with at least {fewest} pairs of words in each half"
            raise InputError("treebank", expected=expected, got=f"{len(visible)} pairs in all")
        measured = {"documents": len(distinct), "pairs": len(visible), "left_out": dict(left_out)}
        measured = metadata["measured"] | {"sequences": len(sentences)} | measured
        return DependencyAccuracy(rows, {**metadata, "measured": measured})

    options: dict[str, Any] = {"fewest": fewest, "ignored": sorted(relations), "subtypes": subtypes, "limit": limit}
    # Another treebank may have the same words.
    options |= {"start_token": start_token, "seed": seed, "treebank": {"digest": digest_of(sentences)}}
    options |= {"out": out, "force": force, "progress": progress, "title": title}
    table = measure_sequences(data, measure_batch, DependencyAccuracy, make_table, **options)
    reader.warn_of_unread(stacklevel=3)
    return table


IS_CORRECT, IS_SEEN = "is_correct", "is_seen"
"""Names of the values of each pair: 1 for the heads whose most attended word is the other one, and 1 if some head can
attend from one word to the other.
"""


class _Pair(NamedTuple):
    """Two words of a sentence that a syntactic relation joins, in one direction of attention. The source is the word
    that attends. The target is the other word, and attending to it counts as correct.

    Attributes:
        relation: the dependency, and which of the two words is its head.
        source: position of the attending word in the sentence.
        target: position of the other word.
        document: number of the document.
    """

    relation: tuple[str, str]
    source: int
    target: int
    document: int


def _aligned(
    sentences: Sequence[TreeSentence],
    tokenizer: Any,
    start_token: int | None,
    longest: int | None,
    ignored: Collection[str],
) -> tuple[list[tuple[int, AlignedTokens, list[_Pair]]], Counter[str]]:
    """Return three things for each sentence that the model can read: the number of its document, its tokens with the
    word of each token, and its pairs of words in a syntactic relation. Also return counts of the sentences, words and
    pairs that are left out, by reason.
    """
    read, left_out = [], Counter[str]()
    for sentence in sentences:
        tokens = aligned_tokens(tokenizer, sentence.text, [word.span for word in sentence.words], start_token)
        if longest is not None and len(tokens.ids) > longest:
            left_out["sentences longer than the model's limit"] += 1
            continue
        if not any(tokens.is_aligned):
            continue
        left_out["words that share a token or have none"] += tokens.is_aligned.count(False)
        pairs: list[_Pair] = []
        for dependent, word in enumerate(sentence.words):
            if word.governor is None or word.relation in ignored:
                continue
            if not (tokens.is_aligned[dependent] and tokens.is_aligned[word.governor]):
                left_out["pairs with such a word"] += 1
                continue
            both = (dependent, word.governor)
            for direction, (source, target) in zip(DIRECTIONS, (both, both[::-1]), strict=True):
                pairs.append(_Pair((word.relation, direction), source, target, sentence.document))
        read.append((sentence.document, tokens, pairs))
    if not read:
        expected = "a sentence within the model's limit, with a word that has tokens of its own"
        raise InputError("treebank", expected=expected, got=f"none of {len(sentences)}")
    return read, left_out


def _rows(
    labels: Sequence[dict[str, Any]],
    pairs: Sequence[_Pair],
    correct: Float[Tensor, "pairs heads"],
    selection: set[int],
    fewest: int,
) -> Iterator[DependencyRow]:
    """Yield the rows of a table of dependency accuracy: for each head, one row per syntactic relation and direction.
    One half of the documents is for selection, the other for the test. A relation and direction is left out if one of
    the halves has fewer than `fewest` word pairs in it.
    """
    members: dict[tuple[str, str], tuple[list[int], list[int]]] = {}  # for the test, and for selection
    for index, pair in enumerate(pairs):
        members.setdefault(pair.relation, ([], []))[pair.document in selection].append(index)
    columns = {
        relation: _columns(pairs, correct, *halves)
        for relation, halves in sorted(members.items())
        if min(map(len, halves)) >= fewest
    }
    for index, label in enumerate(labels):
        for (relation_name, direction), (offset, statistics) in columns.items():
            of_head = {name: estimates[index] for name, estimates in statistics.items()}
            yield DependencyRow(**label, relation=relation_name, direction=direction, offset=offset, statistics=of_head)


def _columns(
    pairs: Sequence[_Pair], correct: Float[Tensor, "pairs heads"], test: Sequence[int], selection: Sequence[int]
) -> tuple[int, dict[str, list[MeanEstimate]]]:
    """Return, for one relation and direction, the fixed offset in words that is most often right for the word pairs in
    the selection half of the documents. Also return the columns, such as accuracy and gain. `test` and `selection` are
    the indices of the word pairs in each half.
    """
    offsets = [pair.target - pair.source for pair in pairs]
    counts = Counter(offsets[index] for index in selection if abs(offsets[index]) <= FARTHEST)
    offset = min(counts, key=lambda each: (-counts[each], abs(each), each)) if counts else 1
    columns: dict[str, list[MeanEstimate]] = {}
    for prefix, indices in (("", test), ("selection_", selection)):
        accuracy = correct[list(indices)].double()
        by_offset = torch.tensor([float(offsets[index] == offset) for index in indices], dtype=torch.float64)
        clusters = clusters_of([pairs[index].document for index in indices])
        values = {"accuracy": accuracy, "offset_accuracy": by_offset[:, None].expand_as(accuracy)}
        values["gain"] = values["accuracy"] - values["offset_accuracy"]
        for name in ("gain",) if prefix else values:
            columns[prefix + name] = moment_estimates(RunningMoments.from_values(values[name], None, clusters))
    return offset, columns


NO_WORD = -1
"""In place of the index of a word, where a token is of no word or no other word is attended to."""


class MostAttendedWords(WeightReader):
    """Interceptor that finds, for each head and each word of a sentence, the other word to which this word attends
    most.

    The attention between two words is the sum over the tokens of the attended word and the mean over the tokens of the
    attending one (Clark et al. 2019, section 4.1). Tokens of no word, such as [CLS], do not compete. The row blocks of
    a head come in the order of the rows. Only the sums of the word whose rows are not complete are kept.

    Attributes:
        found: for each site, the index of the most attended other word, `(heads, words)`; -1 for words without tokens
            of their own, and for those that attend to no other word.
        sees: True where some head attends from one word to another.
    """

    def run_sentence(self, tokens: AlignedTokens) -> None:
        """Run the model on one sentence, and store in `found` the most attended word of each word for each head."""
        words = len(tokens.is_aligned)
        self._word_of = tokens.word_of
        self._last_row = {word: row for row, word in enumerate(tokens.word_of.tolist()) if word != NO_WORD}
        self._eligible = torch.zeros(words, dtype=torch.bool)
        self._eligible[list(self._last_row)] = True
        self._unfinished: dict[SiteKey, tuple[Int[Tensor, " heads"], Float[Tensor, "heads words"]]] = {}
        self.sees: Bool[Tensor, "words words"] = torch.zeros(words, words, dtype=torch.bool)
        self.run(tokens.ids[None])

    def start(self, call: Call) -> Int[Tensor, "heads words"]:
        """Return the tensor for the most attended words of one attention module: -1 for every head and word before the
        weights are read.
        """
        return torch.full((call.grid.heads, len(self._eligible)), NO_WORD)

    def read(self, site: SiteKey, block: RowBlock) -> None:
        """Sum the attention weights of some query rows over the tokens of each word. Once all query rows of a word are
        read, store the other word that receives most attention from it.
        """
        heads, rows, words = block.tile.heads, block.rows, len(self._eligible)
        if site not in self._unfinished:
            sums_of_heads = block.weights.new_zeros(block.grid.heads, words, device="cpu")
            self._unfinished[site] = torch.full((block.grid.heads,), NO_WORD), sums_of_heads
        of_rows, of_columns = self._word_of[rows.start : rows.stop], self._word_of[block.visibility.key_indices.cpu()]
        is_row, is_column = of_rows != NO_WORD, of_columns != NO_WORD
        weights = block.weights[0].cpu()[:, is_row][..., is_column]
        require_finite_weights(site, weights)
        to_words = weights.new_zeros(len(weights), weights.shape[1], words)
        to_words.index_add_(2, of_columns[is_column], weights)
        local, place = torch.unique(of_rows[is_row], return_inverse=True)
        sums = weights.new_zeros(len(weights), len(local), words).index_add_(1, place, to_words)
        unfinished_word, unfinished_sums = self._unfinished[site]  # of each head, since blocks may divide heads anew
        sums += (local == unfinished_word[heads, None])[..., None] * unfinished_sums[heads, None]
        is_complete = torch.tensor([self._last_row[word] < rows.stop for word in local.tolist()], dtype=torch.bool)
        if len(local):
            unfinished_word[heads], unfinished_sums[heads] = NO_WORD if is_complete[-1] else local[-1], sums[:, -1]
        complete, sums = local[is_complete], sums[:, is_complete]
        self.sees[complete] |= (sums > 0).any(0)
        is_other = self._eligible & (torch.arange(words) != complete[:, None])
        best = sums.masked_fill(~is_other, -1.0).max(-1)
        self.found[site][heads, complete] = best.indices.masked_fill(best.values <= 0, NO_WORD)
