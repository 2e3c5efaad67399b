"""Least squares of output projections, against torch's solver and fits without each block."""

import pytest
import torch

import headwise as hw
import tiny
from headwise.compression.calibration import least_squares_fits
from headwise.compression.calibration.calibration_data import folds_of
from headwise.compression.calibration.derivatives import token_weights
from headwise.compression.calibration.least_squares_fits import FoldedMoments, OutputMoments
from headwise.compression.scores.least_squares import LeastSquaresScores
from headwise.compression.scores.measured import MagnitudeScores
from headwise.data.batches import documents_of
from headwise.errors import InputError
from headwise.families.registry import head_module

DAMPINGS = (0.01, 0.1, 1.0)
"""Fewer dampings, so that tests are fast."""

PARTS = (slice(0, 80), slice(80, 110), slice(110, 200))
"""Tokens of each fold."""


@pytest.fixture(autouse=True)
def few_dampings(monkeypatch):
    """Try few dampings."""
    monkeypatch.setattr(least_squares_fits, "DAMPINGS", DAMPINGS)


def data(tokens=200, width=12, out=5):
    """Return inputs whose columns depend on each other, targets, and a weight near the best one."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(tokens, width, generator=generator) @ torch.randn(width, width, generator=generator) + 0.5
    weight = torch.randn(out, width, generator=generator)
    y = mixed @ weight.mT + 5 * torch.randn(tokens, out, generator=generator)
    return mixed.double(), y.double(), weight


def folded(x, y, dense, has_bias):
    """Return moments in folds, each added in two parts."""
    moments = FoldedMoments("o_proj", dense, has_bias)
    for fold, part in enumerate(PARTS):
        for own in (slice(0, 20), slice(20, None)):
            moments.add(fold, OutputMoments.of(x[part][own], y[part][own]))
    return moments.checked()


def ridge(x, y, dense, kept, has_bias, damping):
    """Return the full weight and the bias of the fit of y by some columns of x that is drawn to the dense weight, by
    torch's solver: each damped weight is one more observation.
    """
    mean, target = (x.mean(0), y.mean(0)) if has_bias else (x.mean(0) * 0, y.mean(0) * 0)
    scale = (damping * (x - mean).square().mean() * len(x)).sqrt()
    rows = scale * torch.eye(len(kept), dtype=torch.float64)
    inputs = torch.cat([(x - mean)[:, kept], rows])
    full = torch.zeros_like(dense, dtype=torch.float64)
    full[:, kept] = torch.linalg.lstsq(inputs, torch.cat([y - target, scale * dense[:, kept].double().mT])).solution.mT
    return full, target - full @ mean


def fits_without_folds(x, y, dense, kept, has_bias, damping):
    """Return for each fold the fit to the other folds, and its squared error on the fold."""
    fits, errors = [], []
    for part in PARTS:
        others = torch.ones(len(x), dtype=torch.bool)
        others[part] = False
        fits.append(ridge(x[others], y[others], dense, kept, has_bias, damping))
        weight, bias = fits[-1]
        errors.append(float((y[part] - x[part] @ weight.mT - bias).square().sum()))
    return fits, sum(errors)


@pytest.mark.parametrize("has_bias", [True, False])
def test_the_reconstructed_weights_are_those_of_the_solver_with_the_best_damping(has_bias):
    x, y, dense = data()
    kept = torch.tensor([0, 1, 4, 5, 9])
    weight, bias = folded(x, y, dense, has_bias).fit(kept)
    errors = {damping: fits_without_folds(x, y, dense, kept, has_bias, damping)[1] for damping in DAMPINGS}
    expected, expected_bias = ridge(x, y, dense, kept, has_bias, min(errors, key=errors.get))
    torch.testing.assert_close(weight, expected[:, kept], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(bias, expected_bias, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("removed", [[], [6, 7, 8]])
def test_the_cost_of_a_block_is_the_error_that_its_removal_adds_on_other_folds(removed, has_bias):
    x, y, dense = data()
    blocks = [torch.tensor([0, 1, 2]), torch.tensor([3, 4, 5]), torch.tensor([9, 10, 11])]
    removals = folded(x, y, dense, has_bias).fitted_removals(blocks, torch.tensor(removed, dtype=torch.int64))
    rest = [column for column in range(12) if column not in removed]
    total = float(((y - y.mean(0)) if has_bias else y).square().sum())
    added = {}
    for damping in DAMPINGS:
        before, error = fits_without_folds(x, y, dense, rest, has_bias, damping)
        for index, block in enumerate(blocks):
            left = [column for column in rest if column not in block]
            after, error_after = fits_without_folds(x, y, dense, left, has_bias, damping)
            added[damping, index] = (error_after - error) / total, after, before, error_after
    best = min(DAMPINGS, key=lambda damping: sum(added[damping, index][-1] for index in range(len(blocks))))
    for index, (measured, changes) in enumerate(removals):
        error, after, before, _ = added[best, index]
        assert measured == pytest.approx(error, rel=1e-8)
        for fold, change in changes.items():
            torch.testing.assert_close(-change.left @ change.right, after[fold][0] - before[fold][0])
            torch.testing.assert_close(change.left @ change.right @ change.centre, after[fold][1] - before[fold][1])


def test_the_damping_is_that_of_the_least_error_not_of_the_least_rise(monkeypatch):
    """A damping that overfits has a large error already before the removal, so that little is added."""
    monkeypatch.setattr(least_squares_fits, "DAMPINGS", (1e-6, 1.0))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 12, generator=generator, dtype=torch.float64)
    dense = torch.randn(5, 12, generator=generator)
    y = x @ dense.double().mT
    moments = FoldedMoments("o_proj", dense, False)
    for fold in range(3):
        moments.add(fold, OutputMoments.of(x[8 * fold : 8 * fold + 8], y[8 * fold : 8 * fold + 8]))
    blocks, removed = [torch.tensor([0, 1])], torch.arange(6, 12)
    ((error, _),) = moments.fitted_removals(blocks, removed)
    kept = torch.arange(6)
    before, after, added = {}, {}, {}
    for damping in (1e-6, 1.0):
        for errors, columns in ((before, kept), (after, kept[2:])):
            fits = [next(moments.without(fold).fits(dense, columns, False, [damping])) for fold in range(3)]
            errors[damping] = sum(moments.folds[fold].error(*fits[fold][:2], columns) for fold in range(3))
        added[damping] = (after[damping] - before[damping]) / float(y.square().sum())
    assert added[1e-6] < added[1.0]
    assert after[1e-6] > after[1.0]
    assert error == pytest.approx(added[1.0])


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("removed", [[], [6, 7, 8]])
def test_the_cost_of_a_block_without_a_fit_is_the_error_that_its_removal_adds(removed, has_bias):
    x, _, weight = data()
    y, gone = x @ weight.double().mT, torch.tensor(removed, dtype=torch.int64)
    blocks = [torch.tensor([0, 1, 2]), torch.tensor([9, 10, 11])]

    def error_without(columns):
        kept = weight.double().index_fill(1, columns, 0.0)
        return float((y - x @ kept.mT).square().sum() / (y - y.mean(0) * has_bias).square().sum())

    removals = folded(x, y, weight, has_bias).unfitted_removals(blocks, gone)
    for block, (error, changes) in zip(blocks, removals, strict=True):
        expected = error_without(torch.cat([gone, block])) - error_without(gone)
        assert error == pytest.approx(expected, rel=1e-8)
        expected_change = torch.zeros(5, 12, dtype=torch.float64)
        expected_change[:, block] = weight.double()[:, block]
        assert changes.keys() == {0, 1, 2}
        for change in changes.values():
            torch.testing.assert_close(change.left @ change.right, expected_change)


def test_columns_without_data_keep_their_weights():
    x, y, dense = data()
    x[:, :6] = 0.0
    weight, _ = folded(x, y, dense, False).fit(torch.arange(12))
    torch.testing.assert_close(weight[:, :6], dense[:, :6].double())


def test_what_is_peculiar_to_each_text_is_not_learned(monkeypatch):
    """Half of the columns are constant in each text, and say nothing about the targets of other texts."""
    monkeypatch.setattr(least_squares_fits, "DAMPINGS", (1e-6, 1e3))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 30, 12, generator=generator, dtype=torch.float64)
    x[:, :, 6:] = torch.randn(8, 1, 6, generator=generator, dtype=torch.float64)
    y = torch.randn(8, 1, 5, generator=generator, dtype=torch.float64).expand(8, 30, 5)
    texts, tokens = (FoldedMoments("o_proj", torch.zeros(5, 12), False) for _ in range(2))
    for number in range(8):
        texts.add(number, OutputMoments.of(x[number], y[number]))
        tokens.add(0, OutputMoments.of(x[number, ::2], y[number, ::2]))
        tokens.add(1, OutputMoments.of(x[number, 1::2], y[number, 1::2]))
    columns = torch.arange(12)
    assert float(texts.fit(columns)[0].abs().max()) < 1e-2
    assert float(tokens.fit(columns)[0].abs().max()) > 0.1


def test_sequences_of_a_document_are_in_one_fold():
    texts = hw.Texts(tiny.texts(30, 20, 9, 25), tiny.tokenizer("decoder"), documents="cut", context=8, batch=3)
    folds = folds_of(list(texts), documents_of(texts))
    fold_of = dict(zip(texts.document_numbers(), (fold for of_batch in folds for fold in of_batch), strict=True))
    assert [fold for of_batch in folds for fold in of_batch] == [fold_of[each] for each in texts.document_numbers()]
    assert sorted(fold_of.values()) == [0, 1, 2, 3]
    scores = LeastSquaresScores(tiny.model("decoder"), texts)
    tokens = {fold: moments.tokens for fold, moments in scores._moments[scores.rows[0].module].folds.items()}
    lengths = [len(ids) for ids in texts.tokenizer(list(texts.source))["input_ids"]]
    assert tokens == {fold_of[number]: length for number, length in enumerate(lengths)}


def test_folds_are_consecutive_sequences_or_documents():
    batches = [{"input_ids": torch.zeros(sequences, 3)} for sequences in (4, 1, 5)]
    assert folds_of(batches) == [[0, 0, 1, 1], [1], [2, 2, 3, 3, 3]]
    assert folds_of(batches[1:2] * 2) == [[0], [1]]
    assert folds_of(batches, [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]) == [[0, 1, 2, 3], [0], [0, 1, 2, 3, 0]]
    assert folds_of(batches, [2] * 10) == folds_of(batches)
    assert folds_of(batches, [2] * 6 + [3] * 4) == folds_of(batches)  # document 2 has more than half of the tokens
    with pytest.raises(InputError, match=r"calibration: expected at least 2 sequences, got 1"):
        folds_of(batches[1:2])


def test_folds_have_similar_numbers_of_tokens():
    lengths = [40, 3, 5, 30, 20, 25, 2, 60]
    masks = torch.arange(60) < torch.tensor(lengths)[:, None]
    batches = [{"input_ids": torch.zeros(2, 60), "attention_mask": mask} for mask in masks.split(2)]
    for documents in (None, list(range(8))):
        tokens = [0] * 4
        for length, fold in zip(
            lengths, [fold for of_batch in folds_of(batches, documents) for fold in of_batch], strict=True
        ):
            tokens[fold] += length
        assert max(tokens) <= 65
        assert min(tokens) >= 25
    long_and_short = {"input_ids": torch.zeros(2, 60), "attention_mask": torch.arange(60) < torch.tensor([[60], [1]])}
    assert folds_of([long_and_short]) == [[0, 1]]


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
    projection = model.get_submodule(module.output)
    moments = FoldedMoments("o_proj", projection.weight.detach(), kind == "encoder")
    weights = token_weights(model, [module.output], batches)[module.output]
    for number, (batch, (x, y)) in enumerate(zip(batches, recorded, strict=True)):
        for sequence, mask in enumerate(batch["attention_mask"].bool()):
            own = OutputMoments.of(x[sequence][mask], y[sequence][mask], weights[number][sequence])
            moments.add(2 * number + sequence, own)
    width = module.value_dim
    blocks = [torch.arange(head * width, (head + 1) * width) for head in range(6)]
    expected = moments.fitted_removals(blocks, torch.tensor([], dtype=torch.int64))
    assert scores.of([((0, head),) for head in range(6)], frozenset()) == pytest.approx(errors(expected), rel=1e-5)
    without = moments.fitted_removals(blocks[:3] + blocks[4:], blocks[3])
    units = [((0, head),) for head in (0, 1, 2, 4, 5)]
    assert scores.of(units, frozenset({(0, 3), (1, 2)})) == pytest.approx(errors(without), rel=1e-5)


def errors(removals):
    """Return the added errors."""
    return [error for error, _ in removals]


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


def columns_of(module, heads):
    """Return the input columns of heads."""
    return torch.cat([torch.arange(head * module.value_dim, (head + 1) * module.value_dim) for head in heads])


@pytest.mark.parametrize("fitted", [True, False])
@pytest.mark.parametrize(
    ("kind", "top", "loss"), [("decoder", "ForCausalLM", hw.next_token_loss), ("encoder", "", projected)]
)
def test_with_a_loss_scores_are_squared_first_order_changes_of_each_text(kind, top, loss, fitted):
    model, tokenizer = tiny.model(kind, top=top).double(), tiny.tokenizer(kind)
    texts = tiny.texts(30, 20, 25)
    scores = LeastSquaresScores(model, [dict(tokenizer(texts, return_tensors="pt", padding=True))], loss, fitted=fitted)
    weights = token_weights(model, [head_module(model, row.module).output for row in scores.rows], scores.batches)
    for layer, path in enumerate(dict.fromkeys(row.module for row in scores.rows)):
        module = head_module(model, path)
        projection = model.get_submodule(module.output)
        batches = [dict(tokenizer([text], return_tensors="pt")) for text in texts]
        measured = [data_of(model, projection, batch, loss) for batch in batches]
        moments = FoldedMoments("o_proj", projection.weight.detach(), projection.bias is not None)
        for text, (x, y, _) in enumerate(measured):
            moments.add(text, OutputMoments.of(x, y, weights[module.output][0][text]))
        removed, added = (columns_of(module, heads) for heads in ([5], [0, 1]))
        ((_, of_folds),) = (moments.fitted_removals if fitted else moments.unfitted_removals)([added], removed)
        changes = []
        for text, (_, _, slopes) in enumerate(measured):
            left, right, centre = of_folds[text]
            shifts = [-left @ right, left @ right @ centre][: len(slopes)]
            changes.append(sum(float((shift * slope).sum()) for shift, slope in zip(shifts, slopes, strict=True)))
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
