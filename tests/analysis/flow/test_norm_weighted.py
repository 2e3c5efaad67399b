"""Norm-weighted attention, compared with whole matrices of each sequence alone."""

import math

import pytest
import torch
import transformers

import headwise as hw
import tiny
from jackknife import jackknife
from token_sequences import sequences
from whole_matrices import (
    ENCODERS,
    LENGTHS,
    SPECIAL,
    batches_of,
    heads_of,
    mean_of,
    model_of,
    numbers_of,
    require_numbers,
    row_statistics,
    run_with_cache,
)

pytestmark = pytest.mark.usefixtures("as_user")


def of_sequence(weights, vectors, ids, *, causal):
    """Return the columns of one head for one sequence, by definition: norms |A_ij f(x_j)| of all pairs."""
    n = len(ids)
    norms = (weights[:, :, None] * vectors[None]).norm(dim=-1)
    normed = norms / norms.sum(-1, keepdim=True)
    of_weights, of_norms = (row_statistics(each, ids, causal=causal) for each in (weights, normed))
    columns = {}
    for name in of_norms:
        columns[f"norm_{name}"] = mean_of(of_norms[name])
        columns[f"{name}_change"] = mean_of([b - a for a, b in zip(of_weights[name], of_norms[name], strict=True)])
    moved, preference = [], []
    for i in range(n):
        visible = range(i + 1) if causal else range(n)
        if len(visible) > 1:
            lengths = vectors.norm(dim=-1).tolist()
            moved.append(sum(abs(float(normed[i, j] - weights[i, j])) for j in visible) / 2)
            attended = sum(float(weights[i, j]) * lengths[j] for j in visible)
            preference.append(math.log(attended * len(visible) / sum(lengths[j] for j in visible)))
    return columns | {"moved": mean_of(moved), "norm_preference": mean_of(preference)}


def expected(model, name, rows):
    """Return the estimates of each column by (layer, head, column)."""
    found = {}
    for layer, head, of_rows in heads_of(model, name, rows):
        columns = [
            of_sequence(weights, values @ projection, ids, causal=name not in ENCODERS)
            for ids, weights, values, projection in of_rows
        ]
        for column in columns[0]:
            found[layer, head, column] = jackknife([each[column] for each in columns])
    return found


@pytest.mark.parametrize(
    ("name", "side", "implementation"),
    [
        *(("llama", "left", "sdpa"), ("llama", "right", "sdpa")),  # its eager softmax is in float32
        *(("gpt2", "left", "eager"), ("gpt2", "right", "sdpa")),
        *(("bert", "left", "sdpa"), ("bert", "right", "eager")),
        ("modernbert", "left", "sdpa"),
    ],
)
def test_norms_equal_those_of_whole_matrices(name, side, implementation):
    model, rows = model_of(name, implementation), sequences(*LENGTHS)
    table = hw.norm_weighted(model, batches_of(rows, side), special=SPECIAL)
    require_numbers(numbers_of(table), expected(model, name, rows))


@pytest.mark.parametrize("name", ["mistral, window 4", "gemma2, softcap", "gpt-oss, sinks"])
def test_windows_softcaps_and_sinks(name):
    model = tiny.family(name, "eager")
    ids = sequences(17)[0][None]
    values = {}
    layers = [module for path, module in model.named_modules() if path.endswith("self_attn")]
    hooks = [
        layer.v_proj.register_forward_hook(lambda _, __, out, layer=layer: values.update({layer: out[0]}))
        for layer in layers
    ]
    with torch.no_grad():
        weights = model(input_ids=ids, output_attentions=True).attentions
    for hook in hooks:
        hook.remove()
    table = hw.norm_weighted(model, [{"input_ids": ids}])
    for row in table.rows:
        layer, d = layers[row.layer], layers[row.layer].head_dim
        value = values[layer].unflatten(-1, (-1, d))[:, row.kv_head]
        vectors = (value @ layer.o_proj.weight[:, row.head * d : (row.head + 1) * d].T).detach().double()
        of_head = weights[row.layer][0, row.head].double()
        visible = (of_head > 0).sum(-1).tolist()
        normed = of_head * vectors.norm(dim=-1)
        normed = normed / normed.sum(-1, keepdim=True)
        rows = row_statistics(normed, ids[0], causal=True)
        for column in ("entropy", "confidence", "distance", "self", "previous", "first"):
            measured = row.statistics[f"norm_{column}"].value
            assert measured == pytest.approx(mean_of(rows[column]), rel=1e-4, abs=1e-4), column
        share = of_head / of_head.sum(-1, keepdim=True)
        moved = [float((share[i] - normed[i]).abs().sum()) / 2 for i in range(17) if visible[i] > 1]
        assert row.statistics["moved"].value == pytest.approx(mean_of(moved), abs=1e-4)


def test_cached_keys_keep_their_norms():
    from headwise.intercept.watch import watch_further
    from headwise.statistics.by_norm import NormStatistics

    model = model_of("llama")
    rows = sequences(12, 12)
    with watch_further(model, NormStatistics(), SPECIAL) as heads:
        run_with_cache(model, torch.stack(rows))
    wanted = expected(model, "llama", rows)
    for layer, record in enumerate(heads.records):
        for name in ("entropy", "first", "previous"):
            of_norms, change = (record.statistics[f"{name} {kind}"].value.tolist() for kind in ("by norm", "change"))
            for head in range(6):
                assert of_norms[head] == pytest.approx(wanted[layer, head, f"norm_{name}"][0], abs=1e-10)
                assert change[head] == pytest.approx(wanted[layer, head, f"{name}_change"][0], abs=1e-10)
        for head, value in enumerate(record.statistics["moved"].value.tolist()):
            assert value == pytest.approx(wanted[layer, head, "moved"][0], abs=1e-10)


PICTURE = {"image_size": 20, "patch_size": 5}
SIZES = {"hidden_size": 48, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 6}

PROJECTED_BY = {
    "projection": lambda: transformers.BlipVisionModel(transformers.BlipVisionConfig(**SIZES, **PICTURE)),
    "projection_layer": lambda: transformers.InternVLVisionModel(
        transformers.InternVLVisionConfig(**SIZES, image_size=[20, 20], patch_size=[5, 5])
    ),
    "linear_out": lambda: transformers.Wav2Vec2BertModel(
        transformers.Wav2Vec2BertConfig(**SIZES, feature_projection_input_dim=20)
    ),
    "post_proj": lambda: transformers.FunnelBaseModel(
        transformers.FunnelConfig(vocab_size=97, block_sizes=[1, 1], d_model=48, n_head=6, d_head=8, d_inner=37)
    ),
}


@pytest.mark.parametrize("name", PROJECTED_BY)
def test_projections_with_other_names_are_confirmed(name):
    torch.manual_seed(1)
    model = tiny.with_distinct_heads(PROJECTED_BY[name]()).double()
    assert any(path.endswith(f".{name}") for path, _ in model.named_modules())
    batch = {
        "projection": {"pixel_values": torch.randn(2, 3, 20, 20).double()},
        "projection_layer": {"pixel_values": torch.randn(2, 3, 20, 20).double()},
        "linear_out": {"input_features": torch.randn(2, 13, 20).double()},
        "post_proj": {"input_ids": torch.randint(5, 97, (2, 13))},
    }[name]
    table = hw.norm_weighted(model, [batch])
    assert len(table.rows) == 12
    assert all(math.isfinite(row.statistics["norm_entropy"].value) for row in table.rows)


class Block(torch.nn.Module):
    """Attention written by hand: by SDPA or by a softmax, with a gate before the projection or without projection."""

    def __init__(self, kind="sdpa"):
        super().__init__()
        self.kind = kind
        self.q, self.k, self.v, self.gate, self.out_proj = (torch.nn.Linear(21, 21) for _ in range(5))

    def forward(self, x):
        q, k, v = (each(x).unflatten(-1, (3, 7)).transpose(1, 2) for each in (self.q, self.k, self.v))
        if self.kind == "softmax":
            out = (q @ k.mT / 7**0.5).softmax(-1) @ v
        else:
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        out = out.transpose(1, 2).flatten(2)
        if self.kind == "gated":
            out = out * self.gate(x).sigmoid()
        return x + out if self.kind == "no projection" else x + self.out_proj(out)


def blocks(*kinds):
    """Return a model of blocks of these kinds with the same weights for each place."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(Block(kind) for kind in kinds)).double()


def test_a_softmax_written_by_hand_gives_the_same():
    batch = [torch.randn(2, 11, 21, dtype=torch.float64, generator=torch.Generator().manual_seed(2))]
    one, other = (hw.norm_weighted(blocks(kind, kind), batch) for kind in ("sdpa", "softmax"))
    assert len(one.rows) == 6
    for a, b in zip(one.rows, other.rows, strict=True):
        for name in a.statistics:
            assert a.statistics[name] == pytest.approx(b.statistics[name], abs=1e-10, nan_ok=True)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("gated", "the output projection was not seen to map the outputs of the heads of these modules, as where a ga"),
        ("no projection", "the output projection was not seen to map the outputs"),
    ],
)
def test_modules_without_a_confirmed_projection_are_refused_by_name(kind, reason):
    batch = [torch.randn(2, 11, 21, dtype=torch.float64)]
    with pytest.warns(UserWarning, match=f"^{reason}.*: 1$"):
        table = hw.norm_weighted(blocks("sdpa", kind), batch)
    for row in table.rows:
        assert all(math.isnan(each.value) == (row.layer == 1) for each in row.statistics.values())
    with (
        pytest.warns(UserWarning, match=reason),
        pytest.raises(hw.InputError, match="^model: expected an output projection that is seen to map the outputs of"),
    ):
        hw.norm_weighted(blocks(kind), batch)


def test_a_head_that_writes_nothing_has_no_norms():
    model = blocks("sdpa")
    model[0].out_proj.weight.data[:, 7:14] = 0.0
    table = hw.norm_weighted(model, [torch.randn(3, 11, 21, dtype=torch.float64)])
    silent = table.head(0, 1)
    assert {each.n for each in silent.statistics.values()} == {0}
    assert all(each.n == 3 for row in table.rows if row.head != 1 for each in row.statistics.values() if each.n)
    assert table.head(0, 0).statistics["norm_entropy"].n == 3


def test_tables_have_columns_and_are_drawn():
    model = model_of("llama")
    texts = hw.Texts(tiny.texts(20, 9, 30), tiny.tokenizer("decoder"))
    table = hw.norm_weighted(model, texts)
    assert table.metadata["settings"]["analysis"] == "norm-weighted"
    columns = set(table.table())
    assert {"norm_entropy", "entropy_change", "entropy_change_q", "moved", "norm_preference_p"} <= columns
    assert not {"norm_entropy_p", "moved_p"} & columns
    joined = hw.profile(model, texts, repeats=False).table().merge(table.table(), on=["layer", "head"])
    difference = joined["norm_entropy"] - joined["entropy"] - joined["entropy_change"]
    assert float(difference.abs().max()) < 1e-10
    table.plot()
    table.plot("moved", kind="scatter", against="norm_first")
