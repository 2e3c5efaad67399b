"""OV and QK matrices, scores and composition, against dense matrices written out from checkpoints."""

import warnings

import pytest
import torch
from blocks import close
from dense import CONFIGS, dense_circuits, dense_embeddings, model_of

import headwise as hw
from headwise.analysis.circuits.scores import CompositionSummary

pytestmark = pytest.mark.usefixtures("as_user")

DECODERS = [kind for kind in CONFIGS if kind != "bert"]
WITHOUT_QK = ("qwen3", "gemma3")


@pytest.fixture(scope="module")
def circuits_of():
    """Function that returns a model and its circuits by kind, computed once."""
    known = {}

    def find(kind):
        if kind not in known:
            model = model_of(kind)
            known[kind] = model, hw.circuits(model)
        return known[kind]

    return find


# -- matrices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CONFIGS)
def test_matrices_are_those_of_the_checkpoint(kind, circuits_of):
    model, circuits = circuits_of(kind)
    for (layer, head), (ov, qk) in dense_circuits(kind, model).items():
        assert close(circuits.ov(layer, head).matrix(), ov)
        if kind not in WITHOUT_QK:
            assert close(circuits.qk(layer, head).matrix(), qk)


@pytest.mark.parametrize("distance", [1, 5, 40])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "phi", "gpt_neox", "gpt2"])
def test_qk_rotates_queries_and_keys_by_their_distance(kind, distance, circuits_of):
    model, circuits = circuits_of(kind)
    tolerance = 1e-10 if kind == "gpt2" else 1e-5  # transformers computes angles in float32
    for (layer, head), (_, qk) in dense_circuits(kind, model, distance).items():
        assert close(circuits.qk(layer, head, distance).matrix(), qk, tolerance)
        assert kind == "gpt2" or not close(circuits.qk(layer, head).matrix(), qk, 1e-3)


def test_factors_have_the_singular_values_and_eigenvalues_of_the_product():
    matrix = hw.FactoredMatrix(torch.randn(11, 3, dtype=torch.float64), torch.randn(3, 11, dtype=torch.float64))
    dense = matrix.matrix()
    assert matrix.shape == (11, 11)
    assert repr(matrix) == "FactoredMatrix(11 x 11, rank 3 or less)"
    assert close(matrix.singular_values(), torch.linalg.svdvals(dense)[:3])
    assert close(matrix.norm(), dense.norm())
    assert torch.equal(matrix.transposed().matrix(), dense.mT)
    largest = torch.linalg.eigvals(dense)
    largest = largest[largest.abs().argsort(descending=True)][:3]
    assert float((matrix.eigenvalues()[:, None] - largest).abs().amin(1).max()) < 1e-10


def test_a_matrix_of_full_rank_has_as_many_singular_values_as_rows():
    matrix = hw.FactoredMatrix(torch.randn(5, 7, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64))
    assert close(matrix.singular_values(), torch.linalg.svdvals(matrix.matrix()))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_model_in_another_dtype_has_the_matrices_of_its_weights(kind):
    model = model_of(kind, torch.bfloat16)
    circuits = hw.circuits(model)
    ov, qk = dense_circuits(kind, model)[1, 4]
    assert circuits.ov(1, 4).left.dtype == torch.float64
    assert close(circuits.ov(1, 4).matrix(), ov)
    assert close(circuits.qk(1, 4).matrix(), qk)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_scores_scaled_by_the_layer_are_found():
    model = model_of("gpt2", scale_attn_by_inverse_layer_idx=True)
    circuits, dense = hw.circuits(model), dense_circuits("gpt2", model)
    for layer in range(3):
        assert close(circuits.qk(layer, 2).matrix(), dense[layer, 2][1] / (layer + 1), 1e-9)


# -- scores -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DECODERS)
def test_scores_are_those_of_dense_matrices_over_the_vocabulary(kind, circuits_of):
    model, circuits = circuits_of(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if kind in WITHOUT_QK else "error")
        scores = circuits.scores()
    e, u = dense_embeddings(kind, model)
    for row, ((layer, head), (ov, qk)) in zip(scores.rows, dense_circuits(kind, model).items(), strict=True):
        assert (row.layer, row.head) == (layer, head)
        expected = {"copying": u @ ov @ e.T, "matching": e @ qk @ e.T}
        for name in expected.keys() & row.statistics.keys():
            values = torch.linalg.eigvals(expected[name])
            share = float(values.sum().real / values.abs().sum())
            assert row.statistics[name].value == pytest.approx(share, abs=1e-10)
        for name, dense in {"ov": ov, "qk": qk}.items():
            if f"{name}_norm" in row.statistics:
                assert row.statistics[f"{name}_norm"].value == pytest.approx(float(dense.norm()), rel=1e-10)
                largest = float(torch.linalg.svdvals(dense)[0])
                assert row.statistics[f"{name}_largest"].value == pytest.approx(largest, rel=1e-10)
    assert ("matching" in scores.statistics) == (kind not in WITHOUT_QK)
    assert "copying" in scores.statistics


def test_the_vocabulary_is_summed_in_blocks(monkeypatch, circuits_of):
    model, circuits = circuits_of("llama")
    monkeypatch.setattr("headwise.analysis.circuits.stream.TOKENS_AT_ONCE", 7)
    blocks = hw.circuits(model).scores("copying", "matching")
    for row, other in zip(blocks.rows, circuits.scores("copying", "matching").rows, strict=True):
        for name, estimate in row.statistics.items():
            assert estimate.value == pytest.approx(other.statistics[name].value, abs=1e-12)


def test_a_head_that_copies_has_a_score_of_1():
    model = model_of("llama", torch.float64)
    attention, head_dim = model.model.layers[1].self_attn, 10
    with torch.no_grad():  # the small matrix of head 2, W_V (E^T U) W_O, becomes W_V W_V^T
        e, u = dense_embeddings("llama", model)
        gain = model.model.layers[1].input_layernorm.weight
        value = attention.v_proj.weight[:head_dim] * gain
        attention.o_proj.weight[:, 20:30] = torch.linalg.inv(e.T @ u) @ value.T
        expected = hw.circuits(model).scores("copying").head(1, 2).statistics["copying"].value
        assert expected == pytest.approx(1.0, abs=1e-6)
        attention.o_proj.weight[:, 20:30].neg_()
    assert hw.circuits(model).scores("copying").head(1, 2).statistics["copying"].value == pytest.approx(-1, abs=1e-6)


# -- composition ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("distance", [0, 3])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
def test_composition_scores_are_those_of_dense_matrices(kind, distance, circuits_of):
    model, circuits = circuits_of(kind)
    composition = circuits.composition(distance=distance)
    dense = dense_circuits(kind, model, distance)
    assert len(composition.rows) == 3 * 36
    for row in composition.rows:
        assert row.earlier_layer < row.layer
        ov1, (ov2, qk2) = dense[row.earlier_layer, row.earlier_head][0], dense[row.layer, row.head]
        for name, reads in {"q": qk2.T, "k": qk2, "v": ov2}.items():
            expected = float((reads @ ov1).norm() / (reads.norm() * ov1.norm()))
            tolerance = 1e-10 if distance == 0 or kind == "gpt2" else 1e-5
            assert row.statistics[name].value == pytest.approx(expected, rel=tolerance)


def test_random_matrices_have_the_expected_score(circuits_of):
    composition = circuits_of("llama")[1].composition()
    squares = []
    for _ in range(300):
        factors = [torch.randn(48, 10, dtype=torch.float64) for _ in range(4)]
        later, earlier = factors[0] @ factors[1].T, factors[2] @ factors[3].T
        squares.append(float((later @ earlier).norm() / (later.norm() * earlier.norm())) ** 2)
    mean = sum(squares) / len(squares)
    assert composition.expected == 48**-0.5
    assert mean**0.5 == pytest.approx(composition.expected, rel=0.02)
    sd = float(torch.tensor(squares, dtype=torch.float64).sqrt().std())
    assert sd == pytest.approx(composition.random_sd, rel=0.3)


def test_the_summary_has_the_largest_scores_of_each_head(circuits_of):
    composition = circuits_of("llama")[1].composition("k")
    summary = composition.summary()
    assert isinstance(summary, CompositionSummary)
    assert summary.statistics == ("k_in", "k_out")
    for row in summary.rows:
        head, pairs = (row.layer, row.head), composition.rows
        own = [pair.statistics["k"].value for pair in pairs if (pair.layer, pair.head) == head]
        written = [pair.statistics["k"].value for pair in pairs if (pair.earlier_layer, pair.earlier_head) == head]
        for name, values in (("k_in", own), ("k_out", written)):
            assert row.statistics[name].value == max(values) if values else row.statistics[name].n == 0


# -- tables -----------------------------------------------------------------------------------------------------------


def test_tables_join_on_layer_and_head(circuits_of):
    _, circuits = circuits_of("gpt2")
    scores, composition = circuits.scores(), circuits.composition()
    joined = scores.table().merge(composition.summary().table(), on=["layer", "head"])
    assert len(joined) == 18
    merged = composition.table().merge(scores.table(), on=["layer", "head"])
    assert len(merged) == 108


def test_tables_are_saved_and_loaded(tmp_path, circuits_of):
    _, circuits = circuits_of("llama")
    scores, composition = circuits.scores(), circuits.composition(distance=2)
    for table in (scores, composition, composition.summary()):
        table.save(tmp_path)
        loaded = type(table).load(tmp_path)
        assert loaded.table().equals(table.table())
        assert loaded.metadata == table.metadata
    assert hw.Composition.load(tmp_path).expected == composition.expected
    assert hw.Composition.load(tmp_path).metadata["settings"]["distance"] == 2
    assert repr(scores) == "CircuitScores(18 heads of LlamaForCausalLM, 6 statistics over 1 model)"
    assert repr(composition) == "Composition(108 pairs of LlamaForCausalLM, 3 statistics over 1 model)"
    assert repr(circuits) == "Circuits(18 heads of LlamaForCausalLM)"
    assert repr(composition.rows[0]).startswith("HeadPair(0.0>1.0, q 0.")


def test_pairs_are_found_by_their_heads_and_scores(circuits_of):
    composition = circuits_of("llama")[1].composition()
    pair = composition.pair((0, 4), (2, 1))
    assert pair.name == "0.4>2.1"
    assert (pair.earlier_layer, pair.earlier_head, pair.layer, pair.head) == (0, 4, 2, 1)
    values = [row.statistics["v"].value for row in composition.rows]
    assert [row.statistics["v"].value for row in composition.largest("v", 3)] == sorted(values)[:-4:-1]
    with pytest.raises(hw.InputError, match=r"^pair: expected a head of an earlier layer and a later one"):
        composition.pair((2, 1), (0, 4))
    with pytest.raises(hw.InputError, match=r"^kind: expected one of q, k, v, got 'x'"):
        composition.largest("x")


def test_plots_show_the_numbers(circuits_of):
    pytest.importorskip("matplotlib")
    composition = circuits_of("llama")[1].composition()
    (image,) = composition.plot().images
    assert image.get_array().shape == (18, 18)
    assert float(image.get_array()[13, 4]) == pytest.approx(composition.pair((0, 4), (2, 1)).statistics["k"].value)
    assert composition.plot("v").get_title().startswith("V-composition")
    axes = composition.plot("q", kind="ranking", top=3)
    drawn = axes.lines[1].get_ydata() if len(axes.lines) > 1 else None
    assert drawn is not None
    assert composition.expected in [float(line.get_ydata()[0]) for line in axes.lines]
    assert circuits_of("llama")[1].scores().plot("copying", kind="ranking").has_data()
    assert circuits_of("llama")[1].scores().plot().has_data()
    with pytest.raises(hw.InputError, match=r"^statistic: expected one of q, k, v, got 'cka'"):
        composition.plot("cka")
