"""Functions such as `unsqueeze_`, which change the axes of a tensor in place: what they change is still followed."""

import pytest
import torch
from self_attention import HEADS, WIDTH, merge, split
from torch import nn

import headwise as hw
from headwise.intercept.trace.refusals import HEADS_UNKNOWN
from sequences_alone import COMMON_POSITIONS, mean_statistics, require_statistics

pytestmark = pytest.mark.usefixtures("no_grad")

QUERIES, KEYS = 7, 11


def unsqueezed(tensor):
    tensor.unsqueeze_(1)
    return tensor.squeeze(1)


def squeezed(tensor):
    return tensor.unsqueeze(1).squeeze_(1)


def transposed(tensor):
    tensor.transpose_(-1, dim1=-2)
    return tensor.mT


def heads_last(tensor):
    tensor.swapaxes_(1, 2)
    return tensor.swapdims_(2, 1)


CHANGES = [unsqueezed, squeezed, transposed, heads_last]
STEPS = ["queries", "values", "scores", "weights"]


class Attention(nn.Module):
    """Attention that changes the axes of one of its tensors, and back."""

    def __init__(self, **changes):
        super().__init__()
        self.q, self.k, self.v, self.out_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.changes = changes

    def after(self, step, tensor):
        return self.changes.get(step, lambda each: each)(tensor)

    def scores(self, x, context):
        return self.after("queries", split(self.q(x)).clone()) @ split(self.k(context)).mT

    def forward(self, x, context):
        weights = self.after("scores", self.scores(x, context)).softmax(-1)
        out = self.after("weights", weights) @ self.after("values", split(self.v(context)).clone())
        return self.out_proj(merge(self.after("outputs", out)))


def inputs():
    torch.manual_seed(0)
    return torch.randn(2, QUERIES, WIDTH).double(), torch.randn(2, KEYS, WIDTH).double()


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", ["self", "cross"])
def test_axes_that_are_changed_in_place_are_followed(kind, step, change):
    x, context = inputs()
    context = x if kind == "self" else context
    attention = Attention(**{step: change}).double()
    with hw.watch(nn.ModuleList([attention])) as heads:
        attention(x, context)
    expected = mean_statistics(list(attention.scores(x, context).softmax(-1)))
    assert {row["kind"] for row in heads.rows()} == {kind}
    without = COMMON_POSITIONS | {"first"} if kind == "cross" else frozenset()
    require_statistics(heads.rows(), [drop(each, without) for each in expected], tolerance=1e-9)


def drop(values, names):
    return {name: value for name, value in values.items() if name not in names}


class KeysFirst(Attention):
    def scores(self, x, context):
        scores = split(self.k(context)) @ split(self.q(x)).mT
        scores.transpose_(2, 3)
        return scores


def test_scores_that_are_transposed_in_place_have_queries_and_keys_of_other_lengths():
    x, context = inputs()
    attention = KeysFirst().double()
    with hw.watch(nn.ModuleList([attention])) as heads:
        attention(x, context)
    expected = mean_statistics(list(attention.scores(x, context).softmax(-1)))
    assert len(heads.rows()) == HEADS
    require_statistics(heads.rows(), [drop(each, COMMON_POSITIONS | {"first"}) for each in expected], tolerance=1e-9)


@pytest.mark.parametrize("change", CHANGES)
def test_modules_that_change_the_axes_of_outputs_in_place_are_named(change):
    x, context = inputs()
    attention = Attention(outputs=change).double()
    plain = attention(x, context)
    with pytest.raises(hw.InputError, match=HEADS_UNKNOWN), hw.watch(nn.ModuleList([attention])):
        torch.testing.assert_close(attention(x, context), plain)


@pytest.mark.parametrize("dtype", [torch.float64, torch.long])
def test_a_model_runs_that_changes_the_axes_of_a_product_of_masks_in_place(dtype):
    class Mask(Attention):
        def forward(self, x, context):  # as block-sparse attention of BigBird combines masks of blocks
            of_queries, of_keys = ((each.mean(-1) > -9).to(dtype) for each in (x, context))
            pairs = torch.einsum("bq,bk->bqk", of_queries, of_keys)
            pairs.unsqueeze_(1)
            return super().forward(x, context) * pairs.amin()

    x, context = inputs()
    attention = Mask().double()
    plain = attention(x, context)
    with hw.watch(nn.ModuleList([attention])) as heads:
        torch.testing.assert_close(attention(x, context), plain)
    assert len(heads.rows()) == HEADS


class Decoder(nn.Module):
    """Embeddings of ids that get and lose an axis in place, before attention."""

    def __init__(self, changes_axes):
        super().__init__()
        self.embeddings, self.attention = nn.Embedding(5, WIDTH), Attention()
        self.changes_axes = changes_axes

    def forward(self, input_ids):
        ids = input_ids.clone()
        x = self.embeddings(unsqueezed(ids) if self.changes_axes else ids)
        return self.attention(x, x)


def test_ids_whose_axes_are_changed_in_place_are_known():
    torch.manual_seed(0)
    model, ids, rows = Decoder(changes_axes=False), torch.randint(5, (2, QUERIES)), []
    for model.changes_axes in (False, True):
        with hw.watch(model) as heads:
            model(input_ids=ids)
        rows.append(heads.rows())
    assert "duplicate" in rows[0][0]
    require_statistics(*[[drop(row, {"module", "kind"}) for row in each] for each in rows])
