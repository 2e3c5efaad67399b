"""Least squares of output projections, against torch's solver and fits without each block."""

import functools

import pytest
import torch

import headwise as hw
import tiny
from headwise.compression.calibration import output_moments
from headwise.compression.calibration.output_moments import (
    OutputMoments,
    block_removals,
    reconstructed,
    unfitted_removals,
)
from headwise.compression.scores.least_squares import LeastSquaresScores
from headwise.compression.scores.magnitude import MagnitudeScores
from headwise.errors import InputError
from headwise.removal.families import head_module


@pytest.fixture
def undamped(monkeypatch):
    """Solve without damping, as torch's solver does."""
    monkeypatch.setattr(output_moments, "DAMPING", 0.0)


def data(tokens=200, width=12, out=5):
    """Return inputs whose columns depend on each other, and targets."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(tokens, width, generator=generator) @ torch.randn(width, width, generator=generator) + 0.5
    y = mixed @ torch.randn(width, out, generator=generator) + torch.randn(tokens, out, generator=generator)
    return mixed.double(), y.double()


def fit(x, y, has_bias):
    """Return the weight, bias and squared error of the least squares fit of y by x."""
    inputs = torch.cat([x, torch.ones(len(x), 1)], 1) if has_bias else x
    solution = torch.linalg.lstsq(inputs, y).solution
    weight, bias = (solution[:-1].mT, solution[-1]) if has_bias else (solution.mT, None)
    return weight, bias, float((inputs @ solution - y).square().sum())


@pytest.mark.usefixtures("undamped")
@pytest.mark.parametrize("has_bias", [True, False])
def test_the_reconstructed_weights_are_those_of_the_solver(has_bias):
    x, y = data()
    kept = torch.tensor([0, 1, 4, 5, 9])
    moments = OutputMoments.of(x[:80], y[:80]) + OutputMoments.of(x[80:], y[80:])
    weight, bias = reconstructed(moments, torch.randn(5, 12), kept, has_bias)
    expected, expected_bias, _ = fit(x[:, kept], y, has_bias)
    torch.testing.assert_close(weight, expected, rtol=1e-9, atol=1e-9)
    assert (bias is None) == (expected_bias is None)
    if has_bias:
        torch.testing.assert_close(bias, expected_bias, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("undamped")
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("removed", [[], [6, 7, 8]])
def test_the_cost_of_a_block_is_the_error_that_its_removal_adds(removed, has_bias):
    x, y = data()
    blocks = [torch.tensor([0, 1, 2]), torch.tensor([3, 4, 5]), torch.tensor([9, 10, 11])]
    removals = block_removals(
        OutputMoments.of(x, y), torch.zeros(5, 12), blocks, torch.tensor(removed, dtype=torch.int64), has_bias
    )
    rest = [column for column in range(12) if column not in removed]
    before, _, error_before = fit(x[:, rest], y, has_bias)
    total = float(((y - y.mean(0)) if has_bias else y).square().sum())
    for block, removal in zip(blocks, removals, strict=True):
        left = [column for column in rest if column not in block]
        after, _, error_after = fit(x[:, left], y, has_bias)
        assert removal.error == pytest.approx((error_after - error_before) / total, rel=1e-8)
        change = torch.zeros(5, 12, dtype=torch.float64)
        change[:, left] += after
        change[:, rest] -= before
        torch.testing.assert_close(-removal.left @ removal.right, change, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("removed", [[], [6, 7, 8]])
def test_the_cost_of_a_block_without_a_fit_is_the_error_that_its_removal_adds(removed):
    x, _ = data()
    weight = torch.randn(5, 12, generator=torch.Generator().manual_seed(1))
    y, gone = x @ weight.double().mT, torch.tensor(removed, dtype=torch.int64)
    blocks = [torch.tensor([0, 1, 2]), torch.tensor([9, 10, 11])]

    def error_without(columns):
        kept = weight.double().index_fill(1, columns, 0.0)
        return float((y - x @ kept.mT).square().sum() / y.square().sum())

    for block, removal in zip(blocks, unfitted_removals(OutputMoments.of(x, y), weight, blocks, gone), strict=True):
        expected = error_without(torch.cat([gone, block])) - error_without(gone)
        assert removal.error == pytest.approx(expected, rel=1e-8)
        change = torch.zeros(5, 12, dtype=torch.float64)
        change[:, block] = weight.double()[:, block]
        torch.testing.assert_close(removal.left @ removal.right, change)


def test_columns_without_data_keep_their_weights():
    x, y = data()
    x[:, :6] = 0.0
    dense = torch.randn(5, 12, dtype=torch.float64)
    weight, _ = reconstructed(OutputMoments.of(x, y), dense, torch.arange(12), False)
    torch.testing.assert_close(weight[:, :6], dense[:, :6])


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_scores_of_a_model_are_those_of_its_output_projections(kind):
    model, tokenizer = tiny.model(kind), tiny.tokenizer(kind)
    batches = [dict(tokenizer(tiny.texts(30, 20), return_tensors="pt", padding=True)) for _ in range(2)]
    scores = LeastSquaresScores(model, batches)
    path = scores.rows[0].module
    module = head_module(model, path)
    recorded = []
    hook = model.get_submodule(module.output).register_forward_hook(
        lambda projection, arguments, output: recorded.append((arguments[0].detach(), output.detach()))
    )
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    hook.remove()
    masks = torch.stack([batch["attention_mask"].bool() for batch in batches])
    x, y = (torch.stack(parts)[masks] for parts in zip(*recorded, strict=True))
    moments, weight = OutputMoments.of(x, y), model.get_submodule(module.output).weight.detach()
    width = module.value_dim
    blocks = [torch.arange(head * width, (head + 1) * width) for head in range(6)]
    expected = block_removals(moments, weight, blocks, torch.tensor([], dtype=torch.int64), kind == "encoder")
    assert scores.of([((0, head),) for head in range(6)], frozenset()) == pytest.approx(errors(expected), rel=1e-6)
    without = block_removals(moments, weight, blocks[:3] + blocks[4:], blocks[3], kind == "encoder")
    units = [((0, head),) for head in (0, 1, 2, 4, 5)]
    assert scores.of(units, frozenset({(0, 3), (1, 2)})) == pytest.approx(errors(without), rel=1e-6)


def errors(removals):
    """Return the added errors."""
    return [removal.error for removal in removals]


def projected(model, batch):
    """Return a number per text that depends on the embeddings of all its tokens."""
    hidden = model(**batch).last_hidden_state * batch["attention_mask"][..., None]
    return hidden.sin().sum((1, 2))


def data_of(model, projection, batch, loss):
    """Return inputs and outputs of an output projection for one text, and the derivatives of the loss with respect to
    its parameters.
    """
    recorded = []

    def record(module, arguments, output):
        recorded.extend((arguments[0][0].detach(), output[0].detach()))

    hook = projection.register_forward_hook(record)
    model.zero_grad()
    loss(model, batch).sum().backward()
    hook.remove()
    return *recorded, [parameter.grad.clone() for parameter in projection.parameters()]


def refitted(moments, projection, heads, removed):
    """Return the fitted parameters of a projection without some of its heads, with weights of 0 for these."""
    owners = torch.arange(len(moments.x)) // (len(moments.x) // heads)
    kept = (~torch.isin(owners, torch.tensor(removed))).nonzero()[:, 0]
    weight, bias = reconstructed(moments, projection.weight.detach(), kept, projection.bias is not None)
    full = torch.zeros(projection.weight.shape, dtype=torch.float64)
    full[:, kept] = weight
    return [full] if bias is None else [full, bias]


def without_heads(projection, heads, removed):
    """Return the parameters of a projection with weights of 0 for some of its heads."""
    full = projection.weight.detach().clone().unflatten(1, (heads, -1))
    full[:, removed] = 0.0
    return [full.flatten(1)] if projection.bias is None else [full.flatten(1), projection.bias.detach()]


@pytest.mark.parametrize("fitted", [True, False])
@pytest.mark.parametrize(
    ("kind", "top", "loss"), [("decoder", "ForCausalLM", hw.next_token_loss), ("encoder", "", projected)]
)
def test_with_a_loss_scores_are_squared_first_order_changes_of_each_text(kind, top, loss, fitted):
    model, tokenizer = tiny.model(kind, top=top).double(), tiny.tokenizer(kind)
    texts = tiny.texts(30, 20, 25)
    scores = LeastSquaresScores(model, [dict(tokenizer(texts, return_tensors="pt", padding=True))], loss, fitted=fitted)
    for layer, path in enumerate(dict.fromkeys(row.module for row in scores.rows)):
        projection = model.get_submodule(head_module(model, path).output)
        batches = [dict(tokenizer([text], return_tensors="pt")) for text in texts]
        x, y, slopes = zip(*(data_of(model, projection, batch, loss) for batch in batches), strict=True)
        moments = OutputMoments.of(torch.cat(x), torch.cat(y))
        change_weights = functools.partial(refitted, moments) if fitted else without_heads
        before, after = (change_weights(projection, 6, removed) for removed in ([5], [0, 1, 5]))
        changes = [
            sum(float(((new - old) * slope).sum()) for new, old, slope in zip(after, before, each, strict=True))
            for each in slopes
        ]
        expected = sum(change**2 for change in changes) / len(changes)
        score = scores.of([((layer, 0), (layer, 1))], frozenset({(layer, 5)}))
        assert score == pytest.approx([expected], rel=1e-4)


def test_a_distance_from_the_unchanged_model_is_refused():
    model, tokenizer = tiny.model("encoder"), tiny.tokenizer("encoder")
    with pytest.raises(InputError, match="derivatives in the unchanged model are not 0"):
        LeastSquaresScores(model, [dict(tokenizer("w5 w6", return_tensors="pt"))], hw.EmbeddingDistance())


def test_the_magnitude_of_heads_adds_up_to_that_of_all_their_weights():
    model, tokenizer = tiny.model("decoder"), tiny.tokenizer("decoder")
    scores = MagnitudeScores(model, dict(tokenizer("w5 w6", return_tensors="pt")))
    of_heads = [scores.of([((0, head),)], frozenset())[0] for head in range(6)]
    attention = model.layers[0].self_attn
    total = sum(float(parameter.square().sum()) for parameter in attention.parameters())
    assert sum(each**2 for each in of_heads) == pytest.approx(total, rel=1e-5)
    own = attention.q_proj.weight[10:20].square().sum() + attention.o_proj.weight[:, 10:20].square().sum()
    shared = attention.k_proj.weight[:10].square().sum() + attention.v_proj.weight[:10].square().sum()
    assert of_heads[1] ** 2 == pytest.approx(float(own + shared / 3), rel=1e-5)
