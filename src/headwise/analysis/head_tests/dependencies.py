"""Dependency accuracy: how often a head's most attended word is the governor or the dependent of a word."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.head_tests.dependency_table import DIRECTIONS, DependencyAccuracy, DependencyRow
from headwise.analysis.head_tests.treebank import TreeSentence, read_treebank
from headwise.analysis.head_tests.word_alignment import AlignedTokens, aligned_tokens
from headwise.analysis.head_tests.word_attention import MostAttendedWords
from headwise.checks import collection_of, flag, require_module, whole_number
from headwise.data.batches import call_model, device_of, digest_of, evaluation_mode, with_cache_disabled
from headwise.data.tokenization import max_input_tokens, text_model
from headwise.errors import InputError
from headwise.intercept.install import intercepted
from headwise.progress import progress_bar
from headwise.runs.fingerprint import run_settings
from headwise.runs.rows import MeanEstimate, moment_estimates
from headwise.settings import FEWEST_PAIRS
from headwise.shapes import Bool
from headwise.statistics.moments import RunningMoments, clusters_of

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
    progress: bool = False,
    title: str | None = None,
) -> DependencyAccuracy:
    """Measure how often the word to which a head attends most, from a dependent, is its governor, and the reverse, and
    compare this with the best fixed offset (Clark et al. 2019, section 4.2; Voita et al. 2019, section 5.2).
    `DependencyAccuracy` defines the columns and the tests.

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
        progress: show a progress bar on standard error.
        title: the model's name for display.

    Raises:
        InputError: the treebank, the tokenizer or the model cannot be used, or no relation has enough pairs.
        MissingExtra: conllu is not installed; or rich, and `progress` is set.
    """
    model = text_model(require_module(model))
    whole_number("fewest", fewest, least=2)
    sentences = read_treebank(treebank, subtypes=flag("subtypes", subtypes))
    sentences = sentences if limit is None else sentences[: whole_number("limit", limit, least=2)]
    reader = MostAttendedWords(model)
    pairs = _Pairs(frozenset(collection_of("ignored", ignored, of="relations")))
    _read_treebank(model, tokenizer, reader, sentences, start_token, pairs, shown=progress)
    reader.warn_of_unread(stacklevel=3)
    selection = _selection_documents([sentence.document for sentence in sentences], whole_number("seed", seed, least=0))
    rows = tuple(_rows(reader, pairs, selection, fewest))
    if not rows:
        expected = f"a relation with at least {fewest} pairs of words in each half"
        raise InputError("treebank", expected=expected, got=f"{len(pairs.documents)} pairs in all")
    options = {"fewest": fewest, "ignored": sorted(pairs.ignored), "subtypes": subtypes, "start_token": start_token}
    settings = run_settings(model, None, title, **options, seed=seed, limit=limit)
    return DependencyAccuracy(rows, {**settings, "measured": _measured(sentences, pairs)})


def _measured(sentences: Sequence[TreeSentence], pairs: "_Pairs") -> dict[str, Any]:
    """Return the numbers of sentences, documents and pairs, and what was left out, for the metadata of a table."""
    return {
        "sequences": len(sentences),
        "documents": len({sentence.document for sentence in sentences}),
        "pairs": len(pairs.documents),
        "left_out": dict(pairs.left_out),
        "digest": digest_of([sentence.text for sentence in sentences]),
    }


@dataclass
class _Pairs:
    """Pairs of words with a relation, one entry for each pair and direction.

    Attributes:
        ignored: relations that are left out.
        relations: relation and direction.
        offsets: position of the other word minus that of the attending one, in words.
        documents: number of the document.
        correct: True for the heads whose most attended word is the other one, in the order of the labels of heads.
        left_out: numbers of words and pairs that are left out, by reason.
    """

    ignored: frozenset[str]
    relations: list[tuple[str, str]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    documents: list[int] = field(default_factory=list)
    correct: list[Bool[Tensor, " heads"]] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


def _read_treebank(
    model: nn.Module,
    tokenizer: Any,
    reader: MostAttendedWords,
    sentences: Sequence[TreeSentence],
    start_token: int | None,
    pairs: _Pairs,
    *,
    shown: bool,
) -> None:
    """Run the model on sentences, and add their pairs of words."""
    longest = max_input_tokens(model, tokenizer)
    with progress_bar("sentences", len(sentences), "sentences", shown=shown) as bar:
        for sentence in bar.track(sentences):
            tokens = aligned_tokens(tokenizer, sentence.text, [word.span for word in sentence.words], start_token)
            if longest is not None and len(tokens.ids) > longest:
                pairs.left_out["sentences longer than the model's limit"] += 1
            elif any(tokens.is_aligned):
                _read_sentence(model, reader, sentence, tokens, pairs)
    reader.require_attention()


def _read_sentence(
    model: nn.Module, reader: MostAttendedWords, sentence: TreeSentence, tokens: AlignedTokens, pairs: _Pairs
) -> None:
    """Run the model on a sentence, and add its pairs of words."""
    reader.begin_sentence(tokens.word_of, len(sentence.words))
    ids = tokens.ids[None].to(device_of(model))
    batch = with_cache_disabled(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    with evaluation_mode(model), torch.no_grad(), intercepted(model, reader):
        call_model(model, batch)
    reader.require_attention()
    found = reader.found()
    if missing := [record.site.label for record in reader.records if record.site not in found]:
        raise InputError("model", expected="attention in the same modules in each run", got=f"none in {missing[0]}")
    attended = torch.cat([found[record.site] for record in reader.records])
    pairs.left_out["words that share a token or have none"] += tokens.is_aligned.count(False)
    for dependent, word in enumerate(sentence.words):
        if word.governor is None or word.relation in pairs.ignored:
            continue
        if not (tokens.is_aligned[dependent] and tokens.is_aligned[word.governor]):
            pairs.left_out["pairs with such a word"] += 1
            continue
        both = (dependent, word.governor)
        for direction, (source, target) in zip(DIRECTIONS, (both, both[::-1]), strict=True):
            if not bool(reader.sees[source, target]):
                pairs.left_out["pairs and directions that no head can see"] += 1
                continue
            pairs.relations.append((word.relation, direction))
            pairs.offsets.append(target - source)
            pairs.documents.append(sentence.document)
            pairs.correct.append(attended[:, source] == target)


def _selection_documents(documents: Sequence[int], seed: int) -> set[int]:
    """Return the documents that select, half of all.

    Raises:
        InputError: there is only one.
    """
    distinct = sorted(set(documents))
    if len(distinct) < 4:
        expected = "at least 4 documents, or sentences of a treebank without documents"
        raise InputError("treebank", expected=expected, got=len(distinct))
    return set(Random(seed).sample(distinct, len(distinct) // 2))


def _rows(reader: MostAttendedWords, pairs: _Pairs, selection: set[int], fewest: int) -> Iterator[DependencyRow]:
    """Yield a row for each head, relation and direction with enough pairs in each half, by head."""
    members: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index, relation in enumerate(pairs.relations):
        members[relation].append(index)
    columns: dict[tuple[str, str], tuple[int, dict[str, list[MeanEstimate]]]] = {}
    for relation, indices in sorted(members.items()):
        halves = [
            [index for index in indices if (pairs.documents[index] in selection) == selects]
            for selects in (True, False)
        ]
        if min(map(len, halves)) >= fewest:
            columns[relation] = _columns(pairs, *halves)
    for index, (_, labels) in enumerate(reader.head_labels()):
        for (name_of_relation, direction), (offset, statistics) in columns.items():
            of_head = {name: estimates[index] for name, estimates in statistics.items()}
            yield DependencyRow(
                **labels, relation=name_of_relation, direction=direction, offset=offset, statistics=of_head
            )


def _columns(pairs: _Pairs, selection: Sequence[int], test: Sequence[int]) -> tuple[int, dict[str, list[MeanEstimate]]]:
    """Return the best offset on some pairs of a relation, and the columns of the table on these and on other pairs."""
    counts = Counter(pairs.offsets[index] for index in selection if abs(pairs.offsets[index]) <= FARTHEST)
    offset = min(counts, key=lambda each: (-counts[each], abs(each), each)) if counts else 1
    columns: dict[str, list[MeanEstimate]] = {}
    for prefix, indices in (("", test), ("selection_", selection)):
        correct = torch.stack([pairs.correct[index] for index in indices]).double()
        by_offset = torch.tensor([float(pairs.offsets[index] == offset) for index in indices], dtype=torch.float64)
        clusters = clusters_of([pairs.documents[index] for index in indices])
        values = {"accuracy": correct, "offset_accuracy": by_offset[:, None].expand_as(correct)}
        values["gain"] = values["accuracy"] - values["offset_accuracy"]
        names = values if not prefix else ("gain",)
        for name in names:
            columns[prefix + name] = moment_estimates(RunningMoments.from_values(values[name], None, clusters))
    return offset, columns
