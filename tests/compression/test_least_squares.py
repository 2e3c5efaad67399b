"""Least squares of output projections, against torch's solver and fits without each block."""

import pytest
import torch

import headwise as hw
import tiny
from headwise.compression import output_moments
from headwise.compression.least_squares import LeastSquaresScores, MagnitudeScores
from headwise.compression.output_moments import OutputMoments, reconstructed, removal_costs
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
    costs = removal_costs(OutputMoments.of(x, y), blocks, torch.tensor(removed, dtype=torch.int64), has_bias)
    rest = [column for column in range(12) if column not in removed]
    _, _, before = fit(x[:, rest], y, has_bias)
    total = float(((y - y.mean(0)) if has_bias else y).square().sum())
    for block, cost in zip(blocks, costs.tolist(), strict=True):
        _, _, after = fit(x[:, [column for column in rest if column not in block]], y, has_bias)
        assert cost == pytest.approx((after - before) / total, rel=1e-8)


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
    width = module.value_dim
    blocks = [torch.arange(head * width, (head + 1) * width) for head in range(6)]
    expected = removal_costs(OutputMoments.of(x, y), blocks, torch.tensor([], dtype=torch.int64), kind == "encoder")
    assert scores.of([((0, head),) for head in range(6)], frozenset()) == pytest.approx(expected.tolist(), rel=1e-6)
    without = removal_costs(OutputMoments.of(x, y), blocks[:3] + blocks[4:], blocks[3], kind == "encoder")
    units = [((0, head),) for head in (0, 1, 2, 4, 5)]
    assert scores.of(units, frozenset({(0, 3), (1, 2)})) == pytest.approx(without.tolist(), rel=1e-6)


def test_the_loss_weighs_the_errors_of_each_module():
    model, tokenizer = tiny.model("decoder", top="ForCausalLM"), tiny.tokenizer("decoder")
    batches = [dict(tokenizer(text, return_tensors="pt")) for text in tiny.texts(30, 20)]
    plain, weighted = (LeastSquaresScores(model, batches, loss) for loss in (None, hw.next_token_loss))
    ratios = []
    for layer in range(2):
        unit = [((layer, 0), (layer, 1), (layer, 2))]
        ratios.append(weighted.of(unit, frozenset())[0] / plain.of(unit, frozenset())[0])
        squares, energy, tokens = 0.0, 0.0, 0
        for batch in batches:
            outputs = []
            hook = model.model.layers[layer].self_attn.o_proj.register_forward_hook(
                lambda module, arguments, output, outputs=outputs: outputs.append(output) or output.retain_grad()
            )
            hw.next_token_loss(model, batch).sum().backward()
            hook.remove()
            squares += float(outputs[0].grad.double().square().sum()) / outputs[0].shape[-1] / len(batches)
            energy += float(outputs[0].detach().double().square().sum())
            tokens += outputs[0].shape[1]
        assert ratios[-1] == pytest.approx(squares * energy / tokens, rel=1e-4)
    assert ratios[0] != pytest.approx(ratios[1], rel=0.1)
    assert all(parameter.requires_grad for parameter in model.parameters())


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
