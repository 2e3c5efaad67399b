"""Weight of the first token where the mask separates documents, windows or pictures."""

import pytest
import torch

import headwise as hw
from sequences_alone import HEADS, WIDTH, Attention, weights_alone

DOCUMENTS = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2])
SHIFTED = torch.tensor([0, 0, 1, 0, 0, 1, 2, 2, 3])
SAME = DOCUMENTS[:, None] == DOCUMENTS


def first_weights(attention, x, context, mask):
    with torch.no_grad(), hw.watch(attention) as heads:
        attention(x, context, mask)
    return [row["first"] for row in heads.rows()]


def expected(attention, x, of_rows, of_keys, context=None, *, causal=False):
    """Return the mean weight on the first key of the row's own group, each group computed alone."""
    on_first = []
    for group in of_rows.unique():
        keys = None if context is None else context[of_keys == group]
        on_first.append(weights_alone(attention, x[of_rows == group], keys, causal=causal)[..., 0])
    return torch.cat(on_first, 1).mean(1).tolist()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("groups", [DOCUMENTS, SHIFTED], ids=["packed", "shifted windows"])
def test_first_is_the_first_token_of_the_own_group(groups, causal):
    torch.manual_seed(11)
    attention, x = Attention(), torch.randn(1, 9, WIDTH)
    mask = groups[:, None] == groups
    mask = mask & torch.ones(9, 9).tril().bool() if causal else mask
    assert first_weights(attention, x, None, mask) == pytest.approx(
        expected(attention, x[0], groups, groups, causal=causal), rel=1e-4
    )


def test_sequences_with_other_groups_in_one_batch():
    torch.manual_seed(11)
    attention, x = Attention(), torch.randn(3, 9, WIDTH)
    groups = torch.stack([DOCUMENTS, SHIFTED, torch.zeros(9).long()])
    mask = (groups[:, :, None] == groups[:, None])[:, None]
    of_each = [expected(attention, x[i], groups[i], groups[i]) for i in range(3)]
    means = [sum(each[head] for each in of_each) / 3 for head in range(HEADS)]
    assert first_weights(attention, x, None, mask) == pytest.approx(means, rel=1e-4)


def test_a_sliding_window_in_packed_documents():
    torch.manual_seed(11)
    attention, x = Attention(), torch.randn(1, 9, WIDTH)
    lag = torch.arange(9)[:, None] - torch.arange(9)
    mask = SAME & (lag >= 0) & (lag < 2)
    q, k, _ = attention.split(x, x)
    weights = (q @ k.mT * 7**-0.5).masked_fill(~mask, -torch.inf).softmax(-1)[0]
    starts = torch.tensor([0, 0, 0, 3, 3, 3, 3, 7, 7])
    on_first = weights[:, torch.arange(9), starts].mean(1).tolist()
    assert first_weights(attention, x, None, mask) == pytest.approx(on_first, rel=1e-4)


def test_tokens_that_attend_to_one_of_several_pictures():
    torch.manual_seed(11)
    attention, x, pictures = Attention(), torch.randn(1, 9, WIDTH), torch.randn(1, 7, WIDTH)
    of_keys = torch.tensor([0, 0, 1, 1, 1, 2, 2])
    mask = DOCUMENTS[:, None] == of_keys
    on_first = expected(attention, x[0], DOCUMENTS, of_keys, pictures[0])
    assert first_weights(attention, x, pictures, mask) == pytest.approx(on_first, rel=1e-4)


class Language(torch.nn.Module):
    """A model whose argument has the ids of the tokens."""

    def __init__(self):
        super().__init__()
        self.embedding, self.attention = torch.nn.Embedding(5, WIDTH), Attention()

    def forward(self, input_ids, mask):
        return self.attention(self.embedding(input_ids), None, mask)


@pytest.mark.parametrize("causal", [False, True])
def test_neighbours_and_copies_are_tokens_of_the_same_document(causal):
    torch.manual_seed(11)
    model, ids = Language(), torch.tensor([[1, 2, 1, 2, 3, 2, 2, 1, 4]])
    mask = SAME & torch.ones(9, 9).tril().bool() if causal else SAME
    with torch.no_grad(), hw.watch(model) as heads:
        model(ids, mask)
    x, on_previous, on_next, on_copies, after_copies = model.embedding(ids)[0], [], [], [], []
    for document in range(3):
        own = ids[0, document == DOCUMENTS].tolist()
        weights = weights_alone(model.attention, x[document == DOCUMENTS], causal=causal)
        on_previous.append(weights.diagonal(-1, 1, 2))
        on_next.append(weights.diagonal(1, 1, 2))
        for row, token in enumerate(own):
            copies = [index for index in range(row) if own[index] == token]
            if copies:
                on_copies.append(weights[:, row, copies].sum(-1, keepdim=True))
                after_copies.append(weights[:, row, [copy + 1 for copy in copies]].sum(-1, keepdim=True))
    of_statistic = {"previous": on_previous, "next": on_next, "duplicate": on_copies, "induction": after_copies}
    for name, parts in of_statistic.items():
        means = torch.cat(parts, 1).mean(1).tolist()
        assert [row[name] for row in heads.rows()] == pytest.approx(means, rel=1e-4), name
