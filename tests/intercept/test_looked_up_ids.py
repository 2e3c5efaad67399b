"""Token ids that a model changes or reorders before it looks them up: statistics of tokens are those of the ids that it
looks up, or left out by name.
"""

import pytest
import torch
import torch.nn.functional as F
from self_attention import DIM, HEADS, WIDTH, SelfAttention, merge, softmax, split
from torch import nn

import headwise as hw
from oracles import statistics_of

pytestmark = pytest.mark.usefixtures("no_grad")

IDS = torch.tensor([[4, 2, 7, 4, 4, 1, 2, 5], [6, 6, 1, 3, 6, 2, 1, 3], [5, 1, 5, 5, 2, 7, 3, 5]])
ORDER = torch.tensor([6, 2, 0, 7, 1, 5, 3, 4])
NOISE = torch.tensor([1, 7, 2, 2, 4, 6, 1, 3])
OTHERS = torch.arange(8) % 3 == 1
TABLE = torch.tensor([0, 3, 3, 5, 4, 1, 6, 2])
OF_TOKENS = ("special", "duplicate", "induction")
UNKNOWN = "^it is unknown which tokens the queries of these modules stand for.*: "


def causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Model(nn.Module):
    """Two layers of causal attention after the embedding of ids that `read` looks up."""

    def __init__(self, read):
        super().__init__()
        self.words, self.positions = nn.Embedding(40, WIDTH), nn.Embedding(40, WIDTH)
        self.first, self.second, self.read = SelfAttention(causal), SelfAttention(causal), read

    def forward(self, input_ids, **others):
        x = self.read(self, input_ids, **others)
        self.kept = [self.weights(self.first, x)]
        x = x + self.first(x)
        self.kept.append(self.weights(self.second, x))
        return self.second(x)

    def weights(self, layer, x):
        with torch._C.DisableTorchFunction():  # they are attention weights, too
            q, k, _ = (split(part.double()) for part in layer.qkv(x).chunk(3, -1))
            scores = torch.einsum("bhid,bhjd->bhij", q, k) * DIM**-0.5
            weights = (scores.exp() / scores.exp().sum(-1, keepdim=True)).tril()
            return weights / weights.sum(-1, keepdim=True)


def words(change):
    """Return a function that looks up what `change` makes of the ids, and adds positions."""

    def read(model, ids):
        ids = change(ids)
        return model.words(ids) + model.positions(torch.arange(ids.shape[1]))

    return read


def shifted(ids):
    result = ids.new_full(ids.shape, 9)
    result[:, 1:] = ids[:, :-1].clone()
    return result


def corrupted(ids):
    ids = ids.clone()
    ids[:, OTHERS] = 1
    return ids


CHANGES = {
    "right to left": lambda ids: ids.flip(1),
    "order of tokens": lambda ids: ids[:, ORDER],
    "gather": lambda ids: ids.gather(1, ORDER.expand_as(ids)),
    "rotated": lambda ids: torch.roll(ids, 3, 1),
    "sorted": lambda ids: ids.sort(1).values,
    "order of sequences": lambda ids: ids[torch.tensor([2, 0, 1])],
    "shifted by a pad": lambda ids: F.pad(ids, (1, -1), value=1),
    "shifted by a concatenation": lambda ids: torch.cat([torch.full((3, 1), 1), ids[:, :-1]], 1),
    "shifted by an assignment": shifted,
    "corrupted by where": lambda ids: torch.where(OTHERS, NOISE, ids),
    "corrupted by a fill": lambda ids: ids.masked_fill(OTHERS, 1),
    "corrupted by an assignment": corrupted,
    "without the last": lambda ids: ids[:, :-2],
    "without the first": lambda ids: ids[:, 2:],
}


def require_tokens(heads, model, ids, special=(1, 5)):
    for layer, weights in enumerate(model.kept):
        for head in range(HEADS):
            row, values = heads.rows()[layer * HEADS + head], []
            for of_head, tokens in zip(weights[:, head], ids.tolist(), strict=True):
                values.append(statistics_of(of_head, tokens, [token in special for token in tokens]))
            for name in OF_TOKENS:
                expected = [value[name] for value in values if name in value]
                assert row[name] == pytest.approx(sum(expected) / len(expected), rel=1e-4, abs=1e-6), name


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", CHANGES)
def test_tokens_are_those_that_the_model_looks_up(name):
    torch.manual_seed(6)
    model = Model(words(CHANGES[name]))
    with hw.watch(model, special=[1, 5]) as heads:
        model(input_ids=IDS)
    require_tokens(heads, model, CHANGES[name](IDS))


def keys_before_queries(q, k, v):
    scores = (k @ q.mT * DIM**-0.5).masked_fill(torch.ones(8, 8).tril(-1).bool(), -torch.inf)
    return torch.einsum("bhkq,bhkd->bhqd", scores.softmax(2), v)


@pytest.mark.filterwarnings("error")
def test_weights_may_have_the_keys_before_the_queries():
    torch.manual_seed(6)
    model = Model(words(same))
    model.first.way = model.second.way = keys_before_queries
    with hw.watch(model, special=[1, 5]) as heads:
        model(input_ids=IDS)
    require_tokens(heads, model, IDS)


CAUSAL = torch.ones(8, 8).tril().bool()
VALUES = {
    "where": lambda scores: torch.where(CAUSAL, scores, -1e30),
    "where with a name": lambda scores: scores.where(CAUSAL, other=-1e30),
    "where with a tensor": lambda scores: torch.where(CAUSAL, scores, torch.tensor(-1e30)),
    "assignment": lambda scores: assigned(scores.clone()),
}


def assigned(scores):
    scores[:, :, ~CAUSAL] = -1e30
    return scores


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", VALUES)
def test_values_that_are_written_to_scores_are_no_tokens(name):
    def masked(q, k, v):
        scores = torch.baddbmm(q.new_zeros(1), q.flatten(0, 1), k.flatten(0, 1).mT, alpha=DIM**-0.5)
        return torch.linalg.matmul(VALUES[name](scores.unflatten(0, q.shape[:2])).softmax(-1), v)

    torch.manual_seed(6)
    model = Model(words(same))
    model.first.way = model.second.way = masked
    with hw.watch(model, special=[1, 5]) as heads:
        model(input_ids=IDS)
    require_tokens(heads, model, IDS)


def of_table(change):
    return lambda model, ids: model.words.weight[change(ids)]


def one_hot(change):
    return lambda model, ids: F.one_hot(change(ids), 40).float() @ model.words.weight


def with_types(model, ids, types):
    return model.words(ids.flip(1)) + model.positions(types) + model.positions(torch.zeros_like(ids))


def positions_of_real_tokens(model, ids):
    is_real = ids.ne(7).int()
    return model.words(ids) + model.positions(is_real.cumsum(1) * is_real + 1)


def same(ids):
    return ids


def projected(model, x):
    """Return a linear map of embeddings, with the sequences on the first axis."""
    x = F.linear(x, model.positions.weight[:WIDTH])
    return x if len(x) == 3 else x.transpose(0, 1)


def convolved(model, x):
    """Return a convolution of embeddings, which have the tokens on the last axis."""
    return F.conv1d(x.mT, model.positions.weight[:WIDTH, :, None]).mT


def with_neighbours(model, x):
    """Return a linear map of each embedding and the next one."""
    weights = model.positions.weight[:WIDTH]
    return F.linear(torch.cat([F.pad(x[:, 1:], (0, 0, 0, 1)), x], 2), torch.cat([weights, weights], 1))


def halves(x):
    """Return the two halves of each sequence in the other order."""
    return torch.cat([x[:, 4:], x[:, :4]], 1)


def written(x):
    result = torch.zeros_like(x)
    for place, token in enumerate(ORDER.tolist()):
        result[:, place] = x[:, token]
    return result


EMBEDDINGS_IN_ANOTHER_ORDER = {
    "concatenation": halves,
    "stack": lambda x: torch.stack(x.unbind(1)[::-1], 1),
    "list": lambda x: x[:, ORDER.tolist()],
    "mirror": torch.fliplr,
    "rotation": lambda x: torch.rot90(x, 2, (0, 1)),
    "merged axes": lambda x: x.transpose(0, 1).reshape(x.shape),
    "slices": lambda x: torch.cat([x[:, ::2], x[:, 1::2]], 1),
    "sequences": lambda x: torch.cat([x[1:], x[:1]]),
    "assignment": written,
    "index_copy": lambda x: torch.zeros_like(x).index_copy(1, ORDER, x),
    "scatter": lambda x: torch.zeros_like(x).scatter(1, ORDER[None, :, None].expand(x.shape), x),
    "repetition": lambda x: x.repeat_interleave(torch.tensor([2, 0, 1, 1, 1, 1, 2, 0]), 1),
    "flat index": lambda x: x.flatten(0, 1)[torch.arange(24).flip(0)].view_as(x),
}


LOOKUPS = {
    "index of a table": (of_table(lambda ids: ids.flip(1)), lambda ids: ids.flip(1)),
    "one-hot vectors": (one_hot(lambda ids: ids[:, ORDER]), lambda ids: ids[:, ORDER]),
    "token types": (lambda model, ids: with_types(model, ids, (IDS > 3).long()), lambda ids: ids.flip(1)),
    "positions from ids": (positions_of_real_tokens, same),
    "one axis": (lambda model, ids: model.words(ids.flatten()).view(*ids.shape, -1), same),
    "transposed": (lambda model, ids: model.words(ids.T).transpose(0, 1), same),
    "parts": (lambda model, ids: torch.cat([model.words(part) for part in ids.split([5, 3], 1)], 1), same),
    "offset": (lambda model, ids: model.words(ids + 20), same),
    "hashes": (lambda model, ids: model.words(ids * 11 % 13) + model.positions(ids * 7 % 17), same),
    "sequences on the second axis": (lambda model, ids: projected(model, model.words(ids).transpose(0, 1)), same),
    "tokens on the last axis": (lambda model, ids: convolved(model, model.words(ids)), same),
    "neighbours": (lambda model, ids: with_neighbours(model, model.words(ids)), same),
    "mean with the token before": (
        lambda model, ids: 0.5 * F.pad(model.words(ids)[:, :-1], (0, 0, 1, 0)) + 0.5 * model.words(ids),
        same,
    ),
    "order that is undone": (lambda model, ids: halves(projected(model, halves(model.words(ids)))), same),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", LOOKUPS)
def test_lookups_of_ids_are_told_from_other_lookups(name):
    torch.manual_seed(7)
    read, change = LOOKUPS[name]
    model = Model(read)
    with hw.watch(model, special=[1, 5]) as heads:
        model(input_ids=IDS)
    require_tokens(heads, model, change(IDS))


def strided(x):
    return torch.cat([x[::2], x[1::2]])


class InputLast(Model):
    """Two layers of attention by hand after a linear map of the embeddings. The input is added to the first output."""

    def __init__(self):
        super().__init__(lambda model, ids: projected(model, model.words(ids)))
        self.first.way = self.second.way = lambda q, k, v: softmax(q, k, v, torch.ones(8, 8).tril().bool())

    def forward(self, input_ids):
        x = self.read(self, input_ids)
        self.kept = [self.weights(self.first, x)]
        x = self.first(x) + x
        self.kept.append(self.weights(self.second, x))
        return self.second(x)


@pytest.mark.filterwarnings("error")
def test_the_output_of_attention_has_the_ids_of_its_queries():
    torch.manual_seed(8)
    model = InputLast()
    with hw.watch(model, special=[1, 5]) as heads:
        model(IDS)
    require_tokens(heads, model, IDS)


NOT_KNOWN = {
    "embeddings in another order": lambda model, ids: model.words(ids)[:, ORDER],
    "sequences in another order": lambda model, ids: model.words(ids).flip(0),
    "sequences joined in another order": lambda model, ids: torch.cat(model.words(ids).split([1, 2])[::-1]),
    "every second sequence first": lambda model, ids: strided(model.words(ids)),
    "first tokens": lambda model, ids: model.words(ids)[:, :5],
    "first sequences": lambda model, ids: model.words(ids)[:2],
    "each sequence twice": lambda model, ids: model.words(ids).repeat_interleave(2, 0),
    "the batch twice": lambda model, ids: torch.cat([model.words(ids)] * 2),
    "parts of sequences as sequences": lambda model, ids: model.words(ids).view(6, 4, WIDTH),
    "unique ids": lambda model, ids: model.words((found := ids.unique(return_inverse=True))[0])[found[1]],
    "two orders": lambda model, ids: model.words(ids) + model.positions(ids.flip(1)),
    "offsets of positions": lambda model, ids: model.words(ids + 4 * torch.arange(8)),
    "corrupted by a product": lambda model, ids: model.words(ids * ~OTHERS),
    "table of ids": lambda model, ids: model.words(TABLE[ids]),
    "moved offsets": lambda model, ids: model.words((ids + 3).flip(1)),
    "other embeddings": lambda model, ids: torch.randn(3, 8, WIDTH),
    "projection in another order": lambda model, ids: projected(model, halves(model.words(ids))),
    "convolution in another order": lambda model, ids: convolved(model, halves(model.words(ids))),
    **{
        f"embeddings in another order by {name}": lambda model, ids, change=change: change(model.words(ids))
        for name, change in EMBEDDINGS_IN_ANOTHER_ORDER.items()
    },
}


@pytest.mark.parametrize("name", NOT_KNOWN)
def test_statistics_of_unknown_tokens_are_left_out_by_name(name):
    model = Model(NOT_KNOWN[name])
    with pytest.warns(UserWarning, match=UNKNOWN), hw.watch(model, special=[1]) as heads:
        model(input_ids=IDS)
    for row in heads.rows():
        assert not {*OF_TOKENS, "confidence_content"} & row.keys()
        assert {"entropy", "previous"} <= row.keys()


def test_heads_of_single_sequences_that_linear_maps_compare_are_named():
    def by_maps(q, k, v):
        heads = [F.linear(a, b).softmax(-1) @ c for a, b, c in zip(*(x.flatten(0, 1) for x in (q, k, v)), strict=True)]
        return torch.stack(heads).view(q.shape)

    model = Model(words(same))
    model.first.way = by_maps
    with pytest.warns(UserWarning, match=": first"), hw.watch(model) as heads:
        model(input_ids=IDS)
    assert {row["module"] for row in heads.rows()} == {"second"}


def test_ids_of_one_sequence_without_an_axis_of_the_batch_are_named():
    model = Model(lambda model, ids: model.words(ids)[None])
    with pytest.warns(UserWarning, match=UNKNOWN), hw.watch(model, special=[1]) as heads:
        model(input_ids=IDS[0])
    assert not any({*OF_TOKENS, "confidence_content"} & row.keys() for row in heads.rows())


def test_queries_in_another_order_of_sequences_have_no_ids():
    torch.manual_seed(6)
    model = Model(words(same))
    model.first.way = lambda q, k, v: causal(q.flip(0), k.flip(0), v.flip(0)).flip(0)
    with pytest.warns(UserWarning, match=f"{UNKNOWN}first"), hw.watch(model, special=[1, 5]) as heads:
        model(input_ids=IDS)
    assert not any(set(OF_TOKENS) & row.keys() for row in heads.rows())


def test_padding_of_moved_tokens_is_not_that_of_the_argument():
    """Without a mask in the attention, only the argument shows padding, in the order of the argument."""
    model, mask = Model(lambda model, ids, attention_mask: model.words(ids.flip(1))), torch.ones_like(IDS)
    mask[0, 5:] = 0
    with pytest.warns(UserWarning, match="^a mask shows padding, but"), hw.watch(model) as heads:
        model(input_ids=IDS, attention_mask=mask)
    assert not any("entropy" in row for row in heads.rows())


def test_entries_of_a_dict_without_names_are_no_arguments():
    """A cache has an entry for each module, as that of Whisper."""
    model = Model(lambda model, ids, cache: model.words(ids) + cache[model.words])
    with hw.watch(model, special=[1, 5]) as heads:
        model(input_ids=IDS, cache={model.words: torch.zeros(WIDTH)})
    require_tokens(heads, model, IDS)


class Translation(nn.Module):
    """An encoder of ids from right to left, and a decoder of the same ids, shifted, with cross-attention."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(40, WIDTH)
        self.encoder, self.decoder = SelfAttention(causal), SelfAttention(causal)
        self.cross = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, input_ids):
        source, target = self.words(input_ids.flip(1)), self.words(shifted(input_ids))
        self.kept = [Model.weights(self, self.encoder, source), Model.weights(self, self.decoder, target)]
        source, target = source + self.encoder(source), target + self.decoder(target)
        q, k, v = (split(each(x)) for each, x in zip(self.cross, (target, source, source), strict=False))
        return self.cross[3](merge((q @ k.mT).softmax(-1) @ v))


def test_each_stream_of_an_encoder_and_decoder_has_its_own_ids():
    torch.manual_seed(8)
    model = Translation()
    with hw.watch(model, special=[1, 5]) as heads:
        model(input_ids=IDS)
    rows = heads.rows()
    for layer, (path, ids) in enumerate((("encoder", IDS.flip(1)), ("decoder", shifted(IDS)))):
        found = [row["special"] for row in rows if row["module"] == path]
        is_special = (ids == 1) | (ids == 5)
        expected = (model.kept[layer] * is_special[:, None, None]).sum(-1).mean((0, 2))
        assert found == pytest.approx(expected.tolist(), rel=1e-4)
    assert [row["kind"] for row in rows if not row["module"]] == ["cross"] * HEADS


class TwoStreams(nn.Module):
    """Attention of words and of boxes, whose scores are the sum of both products.

    Args:
        change: function of the scores of the words, before they are added to those of the boxes.
        ids: function of the ids that are looked up.
    """

    def __init__(self, change=lambda scores: scores, ids=same):
        super().__init__()
        self.words, self.box, self.change, self.ids = nn.Embedding(40, WIDTH), nn.Linear(4, WIDTH), change, ids
        self.of_words, self.of_boxes = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, input_ids, boxes):
        q, k = (split(part) for part in self.of_words(self.words(self.ids(input_ids))).chunk(2, -1))
        of_words = self.change(q @ k.mT)
        q, k, v = (split(part) for part in self.of_boxes(self.box(boxes)).chunk(3, -1))
        scores = q @ k.mT + of_words
        with torch._C.DisableTorchFunction():  # they are attention weights, too
            self.kept = [scores.double().softmax(-1)]
        return self.out(merge(scores.softmax(-1) @ v))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("change", [same, CHANGES["right to left"]])
def test_queries_without_ids_have_those_of_the_scores_that_are_added(change):
    torch.manual_seed(9)
    model = TwoStreams(ids=change)
    with hw.watch(model, special=[1, 5]) as heads:
        model(IDS, boxes=torch.randn(*IDS.shape, 4))
    require_tokens(heads, model, change(IDS))


OTHER_SUMS = {
    "rows from right to left": lambda scores: scores.flip(2),
    "rows in another order": lambda scores: scores[:, :, ORDER],
    "both axes from right to left": lambda scores: scores.flip(2, 3),
    "another order of sequences": lambda scores: scores.flip(0),
    "mean of all rows": lambda scores: scores.mean(2, keepdim=True),
    "no other scores": lambda scores: 0.0,
}


@pytest.mark.parametrize("name", OTHER_SUMS)
def test_scores_in_another_order_have_no_ids_for_other_queries(name):
    model = TwoStreams(OTHER_SUMS[name])
    with pytest.warns(UserWarning, match=UNKNOWN), hw.watch(model, special=[1, 5]) as heads:
        model(IDS, boxes=torch.randn(*IDS.shape, 4))
    assert not any({*OF_TOKENS, "confidence_content"} & row.keys() for row in heads.rows())
