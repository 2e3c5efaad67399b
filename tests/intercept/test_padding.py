"""Padding that is derived from masks, or stated by the user, against the statistics of each sequence alone."""

import re

import pytest
import torch
from torch import nn

import headwise as hw
from headwise.errors import InputError
from sequences_alone import (
    COMMON_POSITIONS,
    HEADS,
    WIDTH,
    Attention,
    mean_statistics,
    require_statistics,
    weights_alone,
)

LENGTHS = (11, 7)
RIGHT = torch.arange(11) < torch.tensor(LENGTHS)[:, None]
LEFT = RIGHT.flip(1)
NO_POSITIONS = "positions of queries among the keys could not be established"
UNKNOWN_PADDING = "a mask shows padding, but it could not be established"
LABELS = {"layer", "head", "kv_head", "module", "kind"}


def model_and_input(memory=0):
    torch.manual_seed(5)
    return nn.Sequential(Attention(memory)), torch.randn(2, 11, WIDTH)


def watched(model, *arguments, **options):
    with torch.no_grad(), hw.watch(model, **options) as heads:
        model[0](*arguments) if isinstance(model, nn.Sequential) else model(*arguments)
    return heads.rows()


def alone(model, x, real=RIGHT, *, causal=False):
    sequences = [each[is_real] for each, is_real in zip(x, real, strict=True)]
    return mean_statistics([weights_alone(model[0], each, causal=causal) for each in sequences])


def test_padding_after_learned_keys_is_found_by_the_causal_mask():
    model, x = model_and_input(memory=2)
    mask = torch.ones(11, 13).tril(2).bool() & torch.cat([torch.ones(2, 2).bool(), RIGHT], 1)[:, None, None]
    with pytest.warns(UserWarning, match=NO_POSITIONS):
        rows = watched(model, x, None, mask)
    require_statistics(rows, alone(model, x, causal=True), without=COMMON_POSITIONS | {"first"})


def test_padded_queries_that_are_unknown_are_named_and_can_be_stated():
    model, x = model_and_input(memory=2)
    mask = torch.cat([torch.ones(2, 2).bool(), RIGHT], 1)[:, None, None]
    with pytest.warns(UserWarning, match=NO_POSITIONS), pytest.warns(UserWarning, match=f"{UNKNOWN_PADDING}.*: 0$"):
        assert {*watched(model, x, None, mask)[0]} == LABELS
    with pytest.warns(UserWarning, match=NO_POSITIONS):
        rows = watched(model, x, None, mask, padding=RIGHT)
    require_statistics(rows, alone(model, x), without=COMMON_POSITIONS | {"first"})


@pytest.mark.parametrize("stated", [RIGHT, RIGHT.long(), {"": RIGHT}, {"0": RIGHT}], ids=["bool", "int", "all", "path"])
def test_padding_that_no_mask_shows_is_stated(stated):
    """Causal attention needs no mask of padding on the right."""
    model, x = model_and_input()
    expected = alone(model, x, causal=True)
    require_statistics(watched(model, x, None, None, True, padding=stated), expected)
    with pytest.raises(AssertionError):
        require_statistics(watched(model, x, None, None, True), expected)


def test_a_statement_about_a_part_of_the_model_is_used_there_only():
    torch.manual_seed(5)
    model, x = nn.ModuleDict({"one": Attention(), "other": Attention()}), torch.randn(2, 11, WIDTH)
    model.forward = lambda x: [part(x, is_causal=True) for part in model.values()]
    rows = watched(model, x, padding={"one": RIGHT})
    require_statistics(rows[:HEADS], alone([model["one"]], x, causal=True))
    require_statistics(rows[HEADS:], alone([model["other"]], x, torch.ones(2, 11).bool(), causal=True))


@pytest.mark.parametrize(
    ("padding", "message"),
    [
        (~RIGHT, "padding: expected padding that is hidden from the tokens, got padding that tokens attend to in 0"),
        (RIGHT[:, :9], "padding: expected the number of sequences and tokens of attention calls, got (2, 9)"),
        ({"0": RIGHT[:1]}, "padding: expected 2 sequences in 0, got (1, 11)"),
        ({"1": RIGHT}, "padding: expected paths of modules of the model, got '1'"),
        ([11, 7], "padding: expected a boolean tensor (batch, tokens), True at tokens that are not padding"),
        (RIGHT[0], "got (11,)"),
        (RIGHT + 1, "padding: expected a boolean tensor (batch, tokens)"),
    ],
    ids=["inverted", "length", "batch", "path", "lengths", "one axis", "numbers"],
)
def test_wrong_statements_are_refused(padding, message):
    model, x = model_and_input()
    with pytest.raises(InputError, match=re.escape(message)):
        watched(model, x, None, RIGHT[:, None, None], padding=padding)


class Decoder(nn.Module):
    """Self-attention and cross-attention to `memory`, with or without the first."""

    def __init__(self, has_self=True):
        super().__init__()
        self.own, self.cross = Attention() if has_self else None, Attention()

    def forward(self, x, memory, mask, memory_mask):
        x = x if self.own is None else x + self.own(x, None, mask)
        return self.cross(x, memory, memory_mask)


@pytest.mark.parametrize("real", [RIGHT, LEFT], ids=["right", "left"])
def test_padded_queries_of_cross_attention_are_those_of_self_attention(real):
    torch.manual_seed(6)
    model, x, memory = Decoder(), torch.randn(2, 11, WIDTH), torch.randn(2, 5, WIDTH)
    is_memory = torch.arange(5) >= torch.tensor([[0], [2]])
    causal = torch.ones(11, 11).tril().bool()
    rows = watched(model, x, memory, causal & real[:, None, None], is_memory[:, None, None])
    weights = []
    for index in range(2):
        tokens, keys = x[index, real[index]], memory[index, is_memory[index]]
        with torch.no_grad():
            after = tokens + model.own(tokens[None], is_causal=True)[0]
        weights.append(weights_alone(model.cross, after, keys))
    require_statistics(rows[HEADS:], mean_statistics(weights), without=COMMON_POSITIONS)


def test_cross_attention_without_self_attention_is_named():
    torch.manual_seed(6)
    model, x, memory = Decoder(has_self=False), torch.randn(2, 11, WIDTH), torch.randn(2, 5, WIDTH)
    is_memory = torch.arange(5) >= torch.tensor([[0], [2]])
    with pytest.warns(UserWarning, match=f"{UNKNOWN_PADDING}.*: cross$"):
        assert {*watched(model, x, memory, None, is_memory[:, None, None])[0]} == LABELS
    rows = watched(model, x, memory, None, is_memory[:, None, None], padding={"cross": RIGHT})
    weights = [weights_alone(model.cross, x[i, RIGHT[i]], memory[i, is_memory[i]]) for i in range(2)]
    require_statistics(rows, mean_statistics(weights), without=COMMON_POSITIONS)


class CrossFirst(nn.Module):
    """Cross-attention before the self-attention over the same tokens."""

    def __init__(self):
        super().__init__()
        self.cross, self.own = Attention(), Attention()

    def forward(self, x, memory, attention_mask):
        return self.own(x + self.cross(x, memory), None, attention_mask[:, None, None].bool())


def test_cross_attention_before_self_attention_is_named():
    torch.manual_seed(6)
    model, inputs = CrossFirst(), (torch.randn(2, 11, WIDTH), torch.randn(2, 5, WIDTH))
    with pytest.warns(UserWarning, match=f"{UNKNOWN_PADDING}.*: cross$"):
        rows = watched(model, *inputs, RIGHT.long())
    assert [{*row} == LABELS for row in rows] == [True] * HEADS + [False] * HEADS
    assert {*watched(model, *inputs, RIGHT.long(), padding=RIGHT)[0]} > LABELS


class Pooling(nn.Module):
    """Learned queries attend to the input."""

    def __init__(self):
        super().__init__()
        self.attention, self.queries = Attention(), nn.Parameter(torch.randn(1, 5, WIDTH))

    def forward(self, x, mask):
        return self.attention(self.queries.expand(len(x), -1, -1), x, mask)


def test_learned_queries_are_no_padding():
    torch.manual_seed(7)
    model, x = Pooling(), torch.randn(2, 11, WIDTH)
    rows = watched(model, x, RIGHT[:, None, None])
    weights = [weights_alone(model.attention, model.queries[0], x[i, RIGHT[i]]) for i in range(2)]
    require_statistics(rows, mean_statistics(weights), without=COMMON_POSITIONS)


class Alone(nn.Module):
    """Each token attends to itself alone, so that no mask shows which tokens are padding, and then to others."""

    def __init__(self):
        super().__init__()
        self.attention, self.cross = Attention(), Attention()

    def forward(self, x, attention_mask, memory):
        return self.cross(x + self.attention(x, None, torch.eye(11).bool()), memory)


def test_padding_that_no_query_could_see_is_named():
    torch.manual_seed(12)
    model, x = Alone(), torch.randn(2, 11, WIDTH)
    real = torch.arange(11) < torch.tensor([[9], [7]])
    with pytest.warns(UserWarning, match=f"{UNKNOWN_PADDING}.*: attention, cross$"):
        assert {*watched(model, x, real, torch.randn(2, 5, WIDTH))[-1]} == LABELS


class Preallocated(nn.Module):
    """Causal attention to memory for the keys of 17 tokens, of which the first 11 are filled."""

    def __init__(self):
        super().__init__()
        self.attention = Attention()

    def forward(self, x, attention_mask):
        mask = torch.ones(11, 17).tril().bool() & attention_mask[:, None, None].bool()
        q, k, v = self.attention.split(x, x)
        return self.attention.joined(q, nn.functional.pad(k, (0, 0, 0, 6)), nn.functional.pad(v, (0, 0, 0, 6)), mask)


@pytest.mark.parametrize("real", [RIGHT, LEFT], ids=["right", "left"])
def test_a_padding_mask_may_have_places_of_later_tokens(real):
    torch.manual_seed(13)
    model, x = Preallocated(), torch.randn(2, 11, WIDTH)
    rows = watched(model, x, torch.cat([real, torch.zeros(2, 6)], 1).long())
    require_statistics(rows, alone([model.attention], x, real, causal=True))


class Text(nn.Module):
    """Each token of a text attends to its pair of tokens alone."""

    def __init__(self):
        super().__init__()
        self.embedding, self.attention = nn.Embedding(5, WIDTH), Attention()

    def forward(self, input_ids, attention_mask):
        return self.attention(self.embedding(input_ids), None, attention_mask)


class TextAndImage(nn.Module):
    """A text, whose padding mask has no effect on its pairs of tokens, and an image."""

    def __init__(self):
        super().__init__()
        self.text = Text()

    def forward(self, input_ids, attention_mask, pixel_values):
        pairs = torch.arange(11) // 2
        return self.text(input_ids, (pairs[:, None] == pairs).expand(2, 1, -1, -1)) + pixel_values.mean()


@pytest.mark.parametrize("real", [torch.arange(11) < 8, torch.arange(11) >= 4], ids=["right", "left"])
def test_padding_that_the_module_around_a_text_received_counts(real):
    torch.manual_seed(14)
    model, tokens, real = TextAndImage(), torch.randint(0, 5, (2, 11)), torch.stack([torch.ones(11).bool(), real])
    rows = watched(model, tokens, real.long(), torch.randn(2, 3, 7, 7))
    confidences = []
    for sequence, is_real in zip(model.text.embedding(tokens), real, strict=True):
        pairs = sequence[is_real].split(2)
        confidences.append(torch.cat([weights_alone(model.text.attention, pair)[0].amax(-1) for pair in pairs]).mean())
    assert rows[0]["confidence"] == pytest.approx(float(sum(confidences)) / 2, rel=1e-5)


class TwoStreams(nn.Module):
    """Two streams of equal length, each with padding of its own, and cross-attention from the second to the first."""

    def __init__(self):
        super().__init__()
        self.second, self.first, self.layers = Attention(), Attention(), nn.ModuleList([Attention()])

    def forward(self, x, y, of_x, of_y):
        y = y + self.second(y, None, of_y)
        x = x + self.first(x, None, of_x)
        return self.layers[0](y, x, of_x)


def test_streams_of_equal_length_are_distinguished_by_their_inputs():
    torch.manual_seed(8)
    model, x, y = TwoStreams(), torch.randn(2, 11, WIDTH), torch.randn(2, 11, WIDTH)
    rows = watched(model, x, y, RIGHT[:, None, None], LEFT[:, None, None])[2 * HEADS :]
    with torch.no_grad():
        x = x + model.first(x, None, RIGHT[:, None, None])
        y = y + model.second(y, None, LEFT[:, None, None])
    weights = [weights_alone(model.layers[0], y[i, LEFT[i]], x[i, RIGHT[i]]) for i in range(2)]
    require_statistics(rows, mean_statistics(weights), without=COMMON_POSITIONS)


class WithStart(nn.Module):
    """Causal attention to one more token than the padding mask has."""

    def __init__(self):
        super().__init__()
        self.attention, self.start = Attention(), nn.Parameter(torch.randn(1, 1, WIDTH))

    def forward(self, x, attention_mask):
        return self.attention(torch.cat([self.start.expand(len(x), -1, -1), x], 1), None, None, True)


def test_a_padding_mask_of_other_tokens_is_named():
    torch.manual_seed(12)
    model, x = WithStart(), torch.randn(2, 11, WIDTH)
    with pytest.warns(UserWarning, match=f"{UNKNOWN_PADDING}.*: attention$"):
        assert {*watched(model, x, RIGHT.long())[0]} == LABELS
    real = torch.cat([torch.ones(2, 1).bool(), RIGHT], 1)
    rows = watched(model, x, RIGHT.long(), padding=real)
    weights = [
        weights_alone(model.attention, torch.cat([model.start[0], x[i, RIGHT[i]]]), causal=True) for i in range(2)
    ]
    require_statistics(rows, mean_statistics(weights))


class FromDict(nn.Module):
    """Model of which all inputs are in one dict, as a sentence embedder's."""

    def __init__(self):
        super().__init__()
        self.embedding, self.attention = nn.Embedding(5, WIDTH), Attention()

    def forward(self, features):
        return self.attention(self.embedding(features["input_ids"]), None, features["mask"])


def test_token_ids_in_a_dict_are_read():
    torch.manual_seed(9)
    model, tokens = FromDict(), torch.randint(0, 5, (2, 11))
    rows = watched(model, {"input_ids": tokens, "mask": RIGHT[:, None, None]})
    found = [
        mean_statistics(
            [weights_alone(model.attention, model.embedding.weight[tokens[i, : LENGTHS[i]]])],
            tokens=tokens[i, : LENGTHS[i]].tolist(),
        )
        for i in range(2)
    ]
    for head, row in enumerate(rows):
        for name in ("duplicate", "induction"):
            assert row[name] == pytest.approx(sum(each[head][name] for each in found) / 2, rel=1e-4)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_appended_keys_of_torch_have_no_position(option, need_weights):
    torch.manual_seed(10)
    model = nn.Sequential(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **{option: True}))
    x = torch.randn(2, 11, WIDTH)
    nn.init.normal_(model[0].in_proj_weight, std=0.4)
    with torch.no_grad(), hw.watch(model) as heads:
        model[0](x, x, x, key_padding_mask=~RIGHT, need_weights=need_weights)
    with torch.no_grad():
        sequences = [x[i : i + 1, : LENGTHS[i]] for i in range(2)]
        weights = [model[0](*[each] * 3, average_attn_weights=False)[1][0] for each in sequences]
    expected = mean_statistics(weights)
    for head, values in enumerate(expected):
        tokens = [each[head, :, :-1] for each in weights]  # without the last key
        lag = torch.arange(11)[:, None] - torch.arange(11)
        distances = [(each * lag.abs()[: len(each), : len(each)]).sum(-1).mean() for each in tokens]
        values["distance"] = float(sum(distances)) / 2
        for name, shift in (("self", 0), ("previous", -1), ("next", 1)):
            values[name] = float(sum(each.diagonal(shift).mean() for each in tokens)) / 2
    require_statistics(heads.rows(), expected)


class Layer(Attention):
    """Attention whose output does not depend on its arguments that are the ids and the padding of the tokens."""

    def __init__(self, is_causal):
        super().__init__()
        self.is_causal = is_causal

    def forward(self, x, input_ids, attention_mask):
        return super().forward(x + 0.0 * input_ids[..., None], None, None, self.is_causal)


class Overwriting(nn.Module):
    """Two layers, between which the ids and the padding of the tokens are changed in place."""

    def __init__(self, is_causal):
        super().__init__()
        self.first, self.second = Layer(is_causal), Layer(is_causal)

    def forward(self, x, input_ids, attention_mask):
        x = self.first(x, input_ids, attention_mask)
        input_ids[:, ::3] = 1
        attention_mask[0, -4:] = 0
        self.kept = x.clone(), input_ids.clone(), attention_mask.clone()
        return self.second(x, input_ids, attention_mask)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_ids_and_padding_that_change_in_place_are_read_again(mode, is_causal):
    torch.manual_seed(11)
    model, x, ids = Overwriting(is_causal), torch.randn(2, 11, WIDTH), torch.randint(2, 7, (2, 11))
    for _ in range(3):
        with mode():
            with hw.watch(model, special=[1]) as heads:
                model(x, input_ids=ids.clone(), attention_mask=RIGHT.long())
            hidden, *arguments = model.kept
            with hw.watch(model.second, special=[1]) as expected:
                model.second(hidden, *arguments)
        rows = [row for row in heads.rows() if row["module"] == "second"]
        for row, other in zip(rows, expected.rows(), strict=True):
            names = row.keys() - LABELS
            assert row["special"] > 0
            assert names == other.keys() - LABELS
            for name in names:
                assert row[name] == pytest.approx(other[name], rel=1e-5), name


class Pooled(nn.Module):
    """Self-attention over neighbouring tokens that are averaged to one, after attention with these queries to all."""

    def __init__(self):
        super().__init__()
        self.down, self.up = Attention(), Attention()

    def forward(self, x):
        pairs = (x[:, :-1:2] + x[:, 1::2]) / 2
        return self.up(self.down(pairs, x), is_causal=True)


@pytest.mark.parametrize("path", ["", "down", "up"])
def test_padding_of_more_tokens_than_queries_is_refused(path):
    torch.manual_seed(3)
    model, x = Pooled(), torch.randn(2, 11, WIDTH)
    with pytest.raises(InputError, match=re.escape("padding: expected the 5 tokens of the queries in ")):
        watched(model, x, padding={path: RIGHT})
    rows = watched(model, x, padding={path: RIGHT[:, ::2][:, :5]})
    plain = watched(model, x)
    changed = {row["module"] for row, other in zip(rows, plain, strict=True) if row["entropy"] != other["entropy"]}
    assert changed == ({path} if path else {"down", "up"})
