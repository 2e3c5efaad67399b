"""Dependency accuracy against arg maxima of whole matrices between words."""

import itertools
import random

import pytest
import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers, processors

import headwise as hw
from full_attention import weights_of
from headwise.analysis.head_tests.dependencies import MostAttendedWords
from headwise.analysis.head_tests.treebank import AlignedTokens, aligned_tokens, read_treebank
from jackknife import jackknife
from prompt_models import HEADS, LAYERS, language_model

pytest.importorskip("conllu")
pytestmark = pytest.mark.usefixtures("as_user")

RELATIONS = ("nsubj", "obj", "det:x", "punct")


def tokenizer(kind):
    """Return a tokenizer of pairs of letters, so that words have one to three tokens."""
    letters = "abcdef"
    pieces = [*letters, *map("".join, itertools.product(letters, repeat=2)), ".", "'"]
    vocabulary = {piece: number for number, piece in enumerate(["[UNK]", "[CLS]", "[SEP]", "[START]", *pieces])}
    inner = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(tokenizers.Regex("[a-f]{1,2}|.'?"), "isolated")]
    )
    if kind == "bert":
        inner.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 1), ("[SEP]", 2)])
        return transformers.PreTrainedTokenizerFast(
            tokenizer_object=inner, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
        )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]")


def treebank(sentences=40, seed=0, documents=True):
    """Return a treebank of random words and trees, two sentences to a document."""
    draws, lines = random.Random(seed), []
    for number in range(sentences):
        count = draws.choice((1, 2, 5, 7, 8))
        words = ["".join(draws.choices("abcdef", k=draws.choice((1, 2, 3, 5)))) for _ in range(count)]
        if documents and number % 2 == 0:
            lines.append(f"# newdoc id = d{number}")
        lines += [f"# sent_id = s{number}", f"# text = {' '.join(words)}"]
        root = draws.randrange(count)
        for index, word in enumerate(words):
            head = 0 if index == root else draws.choice([i for i in range(count) if i != index]) + 1
            relation = "root" if head == 0 else draws.choice(RELATIONS)
            lines.append("\t".join([str(index + 1), word, *"____", str(head), relation, "_", "_"]))
        lines.append("")
    return "\n".join(lines) + "\n"


def between_words(weights, word_of, words):
    """Return sums over the tokens of attended words, and means over those of attending words: (heads, words, words)."""
    is_in_word = (torch.tensor(word_of)[:, None] == torch.arange(words)).double()  # (tokens, words)
    return (is_in_word / is_in_word.sum(0)).mT @ weights.double() @ is_in_word


def expected_pairs(kind, model, text, start_token):
    """Return relation, direction, offset, document and correct heads of each pair, from whole matrices."""
    own, document, pairs = tokenizer(kind), -1, []
    for block in text.strip().split("\n\n"):
        rows = [line.split("\t") for line in block.splitlines() if not line.startswith("#")]
        document += "newdoc" in block
        ids, word_of = [], []
        for index, row in enumerate(rows):
            pieces = own(row[1], add_special_tokens=False)["input_ids"]
            ids += pieces
            word_of += [index] * len(pieces)
        if kind == "bert":
            ids, word_of = [1, *ids, 2], [-1, *word_of, -1]
        if start_token is not None:
            ids, word_of = [start_token, *ids], [-1, *word_of]
        weights = weights_of(model, torch.tensor([ids]))[:, 0].flatten(0, 1)
        matrix = between_words(weights, word_of, len(rows))
        for dependent, row in enumerate(rows):
            governor = int(row[6]) - 1
            if governor < 0 or row[7] == "punct":
                continue
            for direction, source, target in (
                ("to governor", dependent, governor),
                ("to dependent", governor, dependent),
            ):
                if kind != "bert" and target > source:
                    continue
                others = matrix[:, source].clone()
                others[:, source] = -1
                relation = row[7].split(":")[0]
                pairs.append((relation, direction, target - source, document, others.argmax(-1) == target))
    return pairs


@pytest.mark.parametrize(("kind", "start_token"), [("llama", None), ("llama", 3), ("gpt2", None), ("bert", None)])
def test_accuracy_is_that_of_whole_matrices(kind, start_token):
    model, text = language_model(kind), treebank()
    table = hw.dependency_accuracy(model, tokenizer(kind), text, fewest=3, start_token=start_token)
    pairs = expected_pairs(kind, model, text, start_token)
    selection = set(random.Random(0).sample(range(20), 10))
    keys = sorted({pair[:2] for pair in pairs})
    assert table.metadata["measured"]["pairs"] == len(pairs)
    assert len(table.rows) == HEADS * LAYERS * len(keys) == HEADS * LAYERS * 6
    for number, row in enumerate(table.rows):
        head, key = number // len(keys), keys[number % len(keys)]
        assert (row.layer, row.head) == (head // HEADS, head % HEADS)
        assert (row.relation, row.direction) == key
        of_key = [pair for pair in pairs if pair[:2] == key]
        halves = [[pair for pair in of_key if (pair[3] in selection) == selects] for selects in (True, False)]
        offsets = [pair[2] for pair in halves[0]]
        assert offsets.count(row.offset) == max(map(offsets.count, offsets))
        for name, half in (("selection_gain", halves[0]), ("gain", halves[1])):
            gains = torch.tensor([float(pair[4][head]) - float(pair[2] == row.offset) for pair in half]).double()
            expected = jackknife(gains, [pair[3] for pair in half])
            assert row.statistics[name] == pytest.approx(expected, rel=1e-10, abs=1e-10)
        accuracy = sum(bool(pair[4][head]) for pair in halves[1]) / len(halves[1])
        assert row.statistics["accuracy"].value == pytest.approx(accuracy, rel=1e-10)


def test_the_best_relation_of_a_head_is_chosen_on_the_other_half():
    stats = pytest.importorskip("scipy.stats")
    table = hw.dependency_accuracy(language_model("bert"), tokenizer("bert"), treebank(documents=False), fewest=5)
    best = table.best()
    assert [(row.layer, row.head) for row in best.rows] == list(itertools.product(range(LAYERS), range(HEADS)))
    for row in best.rows:
        own = [each for each in table.rows if (each.layer, each.head) == (row.layer, row.head)]
        assert row.statistics["selection_gain"].value == max(each.statistics["selection_gain"].value for each in own)
    frame = best.table()
    assert frame["gain_q"].tolist() == pytest.approx(stats.false_discovery_control(frame["gain_p"]).tolist())
    assert table.plot().has_data()


def test_another_treebank_with_the_same_words_is_refused(tmp_path):
    model, words = language_model("bert"), tokenizer("bert")
    hw.dependency_accuracy(model, words, treebank(), fewest=5, out=tmp_path)
    with pytest.raises(hw.InputError, match=r"treebank\.digest differs"):
        hw.dependency_accuracy(model, words, treebank(documents=False), fewest=5, out=tmp_path)


def test_a_word_whose_rows_are_in_two_blocks_is_complete():
    model, length = language_model("gpt2"), 1021
    ids = torch.randint(4, 50, (1, length), generator=torch.Generator().manual_seed(2))
    word_of = torch.tensor([-1, *(word for word in range(204) for _ in range(5))])
    reader, stops = _Recorded(model), set()
    reader.stops = stops
    with torch.no_grad():
        reader.run_sentence(AlignedTokens(ids[0], word_of, [True] * 204))
    assert any(0 < (stop - 1) % 5 < 4 for stop in stops - {length})
    found = torch.cat([reader.found[record.site] for record in reader.records])
    weights = weights_of(model, ids)[:, 0].flatten(0, 1)[:, 1:, 1:]
    matrix = weights.unflatten(2, (204, 5)).sum(-1).unflatten(1, (204, 5)).mean(2)
    matrix[:, range(204), range(204)] = -1
    assert torch.equal(found[:, 1:], matrix.argmax(-1)[:, 1:])
    assert bool((found[:, 0] == -1).all())


class _Recorded(MostAttendedWords):
    """Reader that notes where blocks of rows end."""

    def read(self, site, block):
        self.stops.add(block.rows.stop)
        super().read(site, block)


CONTRACTIONS = """\
# sent_id = a
# text = cab ad'ef. ba ce
1\tcab\t_\t_\t_\t_\t2\tnsubj:pass\t_\t_
2-3\tad'ef\t_\t_\t_\t_\t_\t_\t_\tSpaceAfter=No
2\tad\t_\t_\t_\t_\t0\troot\t_\t_
3\t'ef\t_\t_\t_\t_\t2\tadvmod\t_\t_
4\t.\t_\t_\t_\t_\t2\tpunct\t_\t_
4.1\tempty\t_\t_\t_\t_\t_\t_\t_\t_
5-6\tba\t_\t_\t_\t_\t_\t_\t_\t_
5\tbo\t_\t_\t_\t_\t2\tcase\t_\t_
6\tla\t_\t_\t_\t_\t2\tdet\t_\t_
7\tce\t_\t_\t_\t_\t2\tobj\t_\t_
"""


def test_characters_of_words_and_contractions():
    (sentence,) = read_treebank(CONTRACTIONS)
    shown = [None if word.span is None else sentence.text[slice(*word.span)] for word in sentence.words]
    assert shown == ["cab", "ad", "'ef", ".", None, None, "ce"]
    assert [word.governor for word in sentence.words] == [1, None, 1, 1, 1, 1, 1]
    assert sentence.words[0].relation == "nsubj"
    assert read_treebank(CONTRACTIONS, subtypes=True)[0].words[0].relation == "nsubj:pass"
    (again,) = read_treebank("\n".join(CONTRACTIONS.splitlines()[2:]) + "\n")
    assert (again.text, again.words) == (sentence.text, sentence.words)


def test_words_that_share_a_token_are_not_aligned():
    # The tokens are ab, c' and d: the word "abc" shares one with the word "'d".
    tokens = aligned_tokens(tokenizer("bert"), "ab c'd ef", [(0, 2), (3, 4), (4, 6), (7, 9), None])
    assert tokens.is_aligned[0] is tokens.is_aligned[3] is True
    assert tokens.is_aligned[4] is False
    assert tokens.word_of.tolist()[0] == tokens.word_of.tolist()[-1] == -1
    joined = aligned_tokens(tokenizer("llama"), "abcd", [(0, 1), (1, 4)], start_token=3)
    assert joined.is_aligned == [False, False]
    assert joined.word_of.tolist() == [-1, -1, -1]
    assert joined.ids.tolist()[0] == 3


def line(number, word, head):
    """Return a line of a treebank."""
    return "\t".join([str(number), word, *"____", str(head), "obj", "_", "_"]) + "\n"


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (
            "^treebank: expected the words of sentence 1 in its text, got a text without 'b' after 'a'",
            "# sent_id = 1\n# text = ac\n" + line(1, "a", 0) + line(2, "b", 1),
        ),
        (
            "^treebank: expected a head and a relation of word 1 in sentence number 1, got 9, 'obj'",
            line(1, "a", 9),
        ),
        ("^treebank: expected sentences in CoNLL-U format", "no treebank\nat all\n"),
        ("^treebank: expected at least 4 documents", treebank(6)),
        ("^treebank: expected a relation with at least 20 pairs of words in each half", treebank(8)),
    ],
)
def test_treebanks_that_are_refused(message, text):
    with pytest.raises(hw.InputError, match=message):
        hw.dependency_accuracy(language_model("bert"), tokenizer("bert"), text)


def test_files_are_read(tmp_path):
    (tmp_path / "a.conllu").write_text(CONTRACTIONS)
    (tmp_path / "notes.txt").write_text("no treebank")
    assert len(read_treebank(tmp_path)) == len(read_treebank(tmp_path / "a.conllu")) == 1
    (tmp_path / "a.conllu").unlink()
    with pytest.raises(hw.InputError, match="^treebank: expected a folder with .conllu files"):
        read_treebank(tmp_path)
    with pytest.raises(hw.InputError, match="^treebank: expected a file .* that can be read, got No such file"):
        read_treebank(tmp_path / "b.conllu")
