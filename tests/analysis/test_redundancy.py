"""Similarity of heads, compared with the definitions over all tokens at once; clusters and their costs."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import headwise as hw
import tiny
from headwise.analysis.losses import next_token_loss
from headwise.analysis.redundancy import comparison
from headwise.analysis.redundancy.redundancy import find_clusters, redundancy
from headwise.analysis.redundancy.similarity import OutputProducts, WeightDistances, chance_of

pytestmark = pytest.mark.usefixtures("as_user")

MEASURES = ("cosine", "cka", "distance")
IDS = torch.randint(5, 97, (5, 13), generator=torch.Generator().manual_seed(3))
REAL = (torch.arange(13) < torch.tensor([[13], [7], [11], [2], [5]])).long()
LEFT = REAL.flip(1)


def models(kind, implementation="sdpa"):
    return tiny.model(kind, attn_implementation=implementation).double()


def projection(model, kind, layer):
    """Return the heads' slices of the output projection, `(heads, value_dim, width)`."""
    if kind == "encoder":
        weight = model.encoder.layer[layer].attention.output.dense.weight
    else:
        weight = model.layers[layer].self_attn.o_proj.weight
    return weight.detach().unflatten(1, (6, -1)).permute(1, 2, 0)


def aligned(x, y):
    """Return the debiased CKA of x, y `(tokens, width)`, from Gram matrices without their diagonals."""
    k, l = ((each @ each.mT).fill_diagonal_(0.0) for each in (x, y))  # noqa: E741
    n = len(x)

    def dependence(k, l):  # noqa: E741
        rows = (k.sum(1) * l.sum(1)).sum() / (n - 2)
        return (k * l).sum() + k.sum() * l.sum() / ((n - 1) * (n - 2)) - 2 * rows

    return dependence(k, l) / (dependence(k, k) * dependence(l, l)).sqrt()


def shannon(p, q):
    """Return the Jensen-Shannon distance of two rows: the root of H(m) - (H(p) + H(q)) / 2."""
    entropy = lambda row: -sum(x * math.log(x) for x in row if x > 0)  # noqa: E731
    middle = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    return math.sqrt(max(entropy(middle) - (entropy(p) + entropy(q)) / 2, 0.0))


@torch.no_grad()
def by_definition(kind, model, mask):
    """Return all measures of every two heads, over all tokens at once, from sequences without padding."""
    eager = models(kind, "eager")
    eager.load_state_dict(model.state_dict())
    weights = []
    for ids, real in zip(IDS, mask.bool(), strict=True):
        alone = {"input_ids": ids[real][None], "position_ids": real.nonzero().mT}
        weights.append([each[0] for each in eager(**alone, output_attentions=True).attentions])
    with hw.record_outputs(model) as run:
        model(input_ids=IDS, attention_mask=mask)
    outs = [out[0].transpose(1, 2)[mask.bool()] for out in run.by_site.values()]  # (tokens, heads, value_dim)
    written = [torch.einsum("thd,hdw->thw", out, projection(model, kind, layer)) for layer, out in enumerate(outs)]
    outs, written = (torch.cat(each, 1) for each in (outs, written))
    found = {name: torch.full((12, 12), math.nan, dtype=torch.float64) for name in MEASURES}
    for a in range(12):
        for b in range(12):
            found["cosine"][a, b] = F.cosine_similarity(written[:, a], written[:, b], dim=-1).mean()
            found["cka"][a, b] = aligned(outs[:, a], outs[:, b])
            if a // 6 == b // 6 and a < b:
                of_layer = [each[a // 6] for each in weights]
                rows = [rows for each in of_layer for rows in zip(*each[[a % 6, b % 6]].tolist(), strict=True)]
                mean = sum(shannon(*row) for row in rows) / len(rows)
                found["distance"][a, b] = found["distance"][b, a] = mean
        found["distance"][a, a] = 0.0
    return found


def batches(mask, *sizes):
    return [{"input_ids": i, "attention_mask": m} for i, m in zip(IDS.split(sizes), mask.split(sizes), strict=True)]


def require_same(found, expected, pairs="all"):
    for name in MEASURES:
        here = expected[name].clone()
        if pairs == "layer":
            here[:6, 6:] = here[6:, :6] = math.nan
        torch.testing.assert_close(getattr(found, name), here, rtol=1e-9, atol=1e-7, equal_nan=True, msg=name)


@pytest.mark.parametrize("mask", [REAL, LEFT], ids=["right", "left"])
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_measures_equal_their_definition_over_all_tokens(kind, mask, monkeypatch):
    model = models(kind)
    expected = by_definition(kind, model, mask)
    require_same(redundancy(model, batches(mask, 2, 2, 1), pairs="all"), expected)
    monkeypatch.setattr(comparison, "TOKENS_AT_ONCE", 3)
    require_same(redundancy(model, batches(mask, 5), pairs="all"), expected)
    found = redundancy(model, batches(mask, 1, 3, 1))
    require_same(found, expected, "layer")
    assert found.names == tuple(f"{layer}.{head}" for layer in range(2) for head in range(6))
    assert found.metadata["measured"].items() >= {"sequences": 5, "tokens": 38}.items()


class Padded(nn.Module):
    """Attention of plain PyTorch, whose argument of padding has a name of its own."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(24, 3, batch_first=True)

    def forward(self, x, is_padding):
        return self.attention(x, x, x, key_padding_mask=is_padding, need_weights=False)[0]


def test_padding_that_only_the_mask_of_attention_shows_is_not_compared():
    torch.manual_seed(2)
    model, x, real = Padded().double(), torch.randn(2, 13, 24).double(), torch.arange(13) < torch.tensor([[13], [5]])
    found = redundancy(model, [{"x": x, "is_padding": ~real}])
    none = torch.zeros(1, 13).bool()
    alone = [{"x": x[i : i + 1, real[i]], "is_padding": none[:, real[i]]} for i in range(2)]
    require_same(found, {name: getattr(redundancy(model, alone), name) for name in MEASURES})


def test_distance_of_heads_in_different_tiles(monkeypatch):
    from headwise.attention.backends.blockwise import tiles

    ids = torch.randint(5, 97, (2, 100), generator=torch.Generator().manual_seed(5))
    whole = redundancy(models("decoder"), [ids])
    shapes = []
    add = WeightDistances.add
    monkeypatch.setattr(WeightDistances, "add", lambda self, rows: shapes.append(rows.tile.shape) or add(self, rows))
    monkeypatch.setattr(tiles, "TILE_BYTES", 1)
    parts = redundancy(models("decoder"), [ids])
    assert {heads for _, heads, _ in shapes} == {3}  # those of one key/value head
    torch.testing.assert_close(parts.distance, whole.distance, rtol=1e-9, atol=1e-12, equal_nan=True)
    assert not parts.distance[:6, :6].isnan().any()


def test_heads_whose_rows_are_computed_separately_have_no_distance():
    """Heads with very different masks are computed separately."""
    narrow, wide = hw.causal() & hw.window(8), hw.causal()

    class Model(nn.Module):
        def forward(self, x):
            return hw.attend(x, x, x, mask=hw.per_head([narrow, narrow, wide, wide]))

    x = torch.randn(1, 4, 1300, 3)
    found = redundancy(Model(), [x]).distance
    for mask, heads in ((narrow, slice(0, 2)), (wide, slice(2, 4))):
        weights = hw.attend(x[:, heads], x[:, heads], x[:, heads], mask=mask, return_weights=True)[1][0].double()
        entropy = lambda p: -torch.special.xlogy(p, p).sum(-1)  # noqa: E731
        square = entropy(weights.mean(0)) - (entropy(weights[0]) + entropy(weights[1])) / 2
        assert found[heads, heads][0, 1] == pytest.approx(square.clamp(min=0).sqrt().mean().item(), rel=1e-4)
    assert found[:2, 2:].isnan().all()


def twin(kind, layer, one, other):
    """Return a model with random weights in which one head is the copy of another."""
    model = models(kind)
    attention = model.encoder.layer[layer].attention if kind == "encoder" else model.layers[layer].self_attn
    own = attention.self if kind == "encoder" else attention
    names = ("query", "key", "value") if kind == "encoder" else ("q_proj",)
    with torch.no_grad():
        for part in [getattr(own, name) for name in names]:
            for parameter in part.parameters():
                parameter.unflatten(0, (6, -1))[other] = parameter.unflatten(0, (6, -1))[one]
        out = attention.output.dense if kind == "encoder" else attention.o_proj
        out.weight.unflatten(1, (6, -1))[:, other] = out.weight.unflatten(1, (6, -1))[:, one]
    return model


@pytest.mark.parametrize(("kind", "one", "other"), [("encoder", 1, 4), ("decoder", 3, 5)])
def test_a_head_and_its_copy(kind, one, other):
    found = redundancy(twin(kind, 1, one, other), batches(REAL, 2, 3), threshold=0.999)
    assert found.cosine[6 + one, 6 + other] == pytest.approx(1.0, abs=1e-9)
    assert found.cka[6 + one, 6 + other] == pytest.approx(1.0, abs=1e-9)
    assert found.distance[6 + one, 6 + other] == pytest.approx(0.0, abs=1e-7)
    assert found.clusters == (((1, one), (1, other)),)
    assert found.cluster_costs == ()


def test_a_rotated_copy_of_a_head():
    """A rotated and scaled copy has a CKA of 1, but writes other vectors into the stream."""
    model = twin("encoder", 0, 2, 3)
    turn = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64))[0] * 3
    with torch.no_grad():
        value = model.encoder.layer[0].attention.self.value
        for parameter in value.parameters():
            parameter.unflatten(0, (6, -1))[3] = turn @ parameter.unflatten(0, (6, -1))[3]
    found = redundancy(model, batches(REAL, 5))
    assert found.cka[2, 3] == pytest.approx(1.0, abs=1e-9)
    assert found.cosine[2, 3] < 0.9
    assert found.distance[2, 3] == pytest.approx(0.0, abs=1e-7)


def test_clusters_are_complete_linkage_clusters():
    near = torch.eye(5)

    def alike(a, b, value):
        near[a, b] = near[b, a] = value

    alike(0, 1, 0.95)
    alike(1, 2, 0.92)
    alike(0, 2, 0.5)  # so the chain 0-1-2 is no cluster
    alike(3, 4, 0.91)
    assert find_clusters(near, 0.9) == [[0, 1], [3, 4]]
    assert find_clusters(near, 0.93) == [[0, 1]]
    alike(0, 2, 0.9)
    assert find_clusters(near, 0.9) == [[0, 1, 2], [3, 4]]
    assert find_clusters(near, 0.99) == []
    alike(1, 2, math.nan)
    assert find_clusters(near, 0.9) == [[0, 1], [3, 4]]
    before = near.clone()
    find_clusters(near, 0.9)
    assert torch.equal(near.nan_to_num(7), before.nan_to_num(7))


class Saturates(nn.Module):
    """Four heads of 2 features, of which 0 and 2 are equal, and their sum by a projection, which may saturate."""

    def __init__(self, saturates):
        super().__init__()
        self.saturates = saturates
        self.register_buffer("sum_of_0_and_2", torch.eye(2).repeat(1, 4) * torch.tensor([1, 1, 0, 0, 1, 1, 0, 0]))

    def forward(self, x):
        heads = x.unflatten(-1, (4, 2)).transpose(1, 2)
        heads = torch.stack([heads[:, 0], heads[:, 1], heads[:, 0], heads[:, 3]], 1)
        out = F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
        together = F.linear(out, self.sum_of_0_and_2)
        return torch.tanh(2 * together) if self.saturates else together


def loss_of(model, batch):
    return -model(batch["x"]).sum((1, 2))


@pytest.mark.parametrize("saturates", [True, False])
def test_cluster_costs_of_heads_that_compensate_for_each_other(saturates):
    model = Saturates(saturates)
    data = [{"x": torch.rand(3, 5, 8) + 0.5}, {"x": torch.rand(2, 7, 8) + 0.5}]
    found = redundancy(model, data, threshold=0.999, loss=loss_of)
    assert found.clusters == (((0, 0), (0, 2)),)
    (cover,) = found.cluster_costs
    assert cover.heads == ((0, 0), (0, 2))

    def costs(heads):
        whole = torch.cat([loss_of(model, batch) for batch in data])
        with hw.gate(model, {("", head): 0.0 for head in heads}):
            return torch.cat([loss_of(model, batch) for batch in data]) - whole

    expected = [costs(heads).mean().item() for heads in ([0], [2], [0, 2])]
    for measured, value in zip([*cover.alone, cover.together], expected, strict=True):
        assert measured.value == pytest.approx(value, rel=1e-4, abs=1e-5)
        assert measured.n == 5
    assert cover.ratio == pytest.approx(expected[2] / (expected[0] + expected[1]), rel=1e-3)
    assert cover.ratio > 4 if saturates else cover.ratio == pytest.approx(1.0, rel=1e-4)


def test_encoder_and_decoder_heads_are_not_compared():
    sizes = {"d_model": 24, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    heads = {"encoder_attention_heads": 3, "decoder_attention_heads": 2}
    model = transformers.BartModel(transformers.BartConfig(vocab_size=97, **sizes, **heads)).eval()
    found = redundancy(model, [{"input_ids": IDS[:2], "decoder_input_ids": IDS[2:4]}], pairs="all")
    where = [head["module"].split(".")[0] for head in found.heads]
    assert [head["kind"] for head in found.heads].count("cross") == 4
    for a, one in enumerate(where):
        for b, other in enumerate(where):
            assert bool(found.cka[a, b].isnan()) == (one != other)


def test_a_module_that_attends_several_times_is_compared_call_by_call():
    """ALBERT's layers share one attention module, which reads the same tokens in every layer."""
    sizes = {"hidden_size": 24, "embedding_size": 12, "num_attention_heads": 3, "intermediate_size": 8}
    config = transformers.AlbertConfig(vocab_size=97, num_hidden_layers=3, **sizes)
    model = transformers.AlbertModel(config).double().eval()
    with hw.record_outputs(model) as run:
        model(input_ids=IDS)
    (calls,) = run.by_site.values()
    outs = torch.cat([out.transpose(1, 2).flatten(0, 1) for out in calls])  # (tokens of all calls, heads, value_dim)
    expected = torch.stack([torch.stack([aligned(outs[:, a], outs[:, b]) for b in range(3)]) for a in range(3)])
    for pairs in ("layer", "all"):
        found = redundancy(model, [IDS], pairs=pairs)
        torch.testing.assert_close(found.cka, expected, rtol=1e-9, atol=1e-9)


def test_outputs_of_unrelated_heads_have_no_alignment_on_average():
    """With few tokens, the plain CKA of unrelated outputs is near 1."""
    values = []
    for seed in range(200):
        outs = torch.randn(2, 40, 3, 24, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        products = OutputProducts(outs.unbind())
        products.add(outs.unbind(), outs.transpose(1, 2).unbind())
        values.append(products.dependence / (24 * 0.6))
    mean, spread = torch.stack(values).mean((0, 1, 2)), torch.stack(values).std((0, 1, 2)) / (200 * 9) ** 0.5
    assert abs(float(mean)) < 4 * float(spread)


def with_constant_heads(model, variation=0.0):
    """Return an encoder in which heads 1 and 4 of the first layer have the same value vector for all tokens, up to a
    relative variation.
    """
    value = model.encoder.layer[0].attention.self.value
    with torch.no_grad():
        torch.nn.init.normal_(value.bias)
        for head in (1, 4):
            value.weight.unflatten(0, (6, 8))[head] *= variation
    return model


@pytest.mark.parametrize("pairs", ["layer", "all"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_heads_whose_outputs_are_constant_up_to_rounding_have_no_alignment(dtype, implementation, pairs):
    model = with_constant_heads(tiny.model("encoder", attn_implementation=implementation).to(dtype))
    found = redundancy(model, batches(REAL, 2, 3), pairs=pairs).cka
    constant = torch.zeros(12).bool()
    constant[[1, 4]] = True
    is_compared = torch.ones(12, 12).bool() if pairs == "all" else torch.block_diag(*torch.ones(2, 6, 6)).bool()
    expected = is_compared & ~constant & ~constant[:, None]
    assert torch.equal(found.isfinite(), expected)
    assert torch.equal(found.isnan(), ~expected)


def test_outputs_that_vary_little_but_more_than_rounding_are_compared():
    """The variation is a thousand times that of rounding in float32, and a thousandth of the outputs."""
    model = with_constant_heads(models("encoder"), 1e-3)
    expected = redundancy(model, batches(REAL, 5)).cka
    found = redundancy(model.float(), batches(REAL, 5)).cka
    assert bool(expected[:6, :6].isfinite().all())
    torch.testing.assert_close(found[:6, :6], expected[:6, :6], rtol=0, atol=0.02)


@pytest.mark.parametrize("width", [1, 3, 64])
@pytest.mark.parametrize("tokens", [4, 5, 7, 11])
def test_the_chance_of_large_alignments_of_unrelated_outputs(tokens, width):
    """The standard deviation is that of the docs, and at no width are large values more than twice as frequent as
    `chance_of` states.
    """
    draws = 20000
    x, y = torch.randn(2, draws, tokens, width, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    k, l = ((each @ each.mT) * (1 - torch.eye(tokens)) for each in (x, y))  # noqa: E741

    def dependence(k, l):  # noqa: E741
        n, rows = tokens, (k.sum(2) * l.sum(2)).sum(1)
        return (k * l).sum((1, 2)) + k.sum((1, 2)) * l.sum((1, 2)) / ((n - 1) * (n - 2)) - 2 * rows / (n - 2)

    values = dependence(k, l) / (dependence(k, k) * dependence(l, l)).sqrt()
    assert values[0] == pytest.approx(float(aligned(x[0], y[0])), rel=1e-9)
    assert float(values.std()) == pytest.approx(math.sqrt(2 / (tokens * (tokens - 3))), rel=0.05)
    for threshold in (0.5, 0.9):
        share, stated = float((values >= threshold).double().mean()), chance_of(threshold, tokens)
        assert share <= 2 * stated + 4 * math.sqrt(stated / draws)
    if width == 1:
        assert float((values >= 0.5).double().mean()) >= chance_of(0.5, tokens) / 2


def test_comparisons_over_few_tokens_are_named():
    model = models("encoder")
    sentence = "outputs of heads were compared over only 5 tokens, .* 30 pairs .* a cka of 0.9 or more by chance"
    modules = r"encoder\.layer\.0\.attention\.self, encoder\.layer\.1\.attention\.self$"
    with pytest.warns(UserWarning, match=f"^{sentence}.*: {modules}"):
        redundancy(model, [IDS[:1, :5]])
    with pytest.warns(UserWarning, match=f"over fewer than 4 tokens, so cka is NaN for these modules: {modules}"):
        assert bool(redundancy(model, [IDS[:1, :3]]).cka.isnan().all())
    with pytest.warns(UserWarning, match="over only 7 tokens, so that some of 66 pairs"):
        redundancy(model, [IDS[:1, :7]], pairs="all")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        redundancy(model, [IDS[:1, :7]])
        redundancy(model, [IDS[:1, :5]], threshold=0.999)


def test_sums_of_two_processes_merge_to_those_of_all_tokens_whatever_their_mean():
    """The first tokens of each process determine by how much its outputs are shifted."""
    generator = torch.Generator().manual_seed(1)
    outs = [torch.randn(50, *shape, generator=generator, dtype=torch.float64) for shape in ((2, 5), (3, 7))]
    outs = [outs[0] + 30.0 * outs[0][:, :1], outs[1] - 20.0]
    directions = [F.normalize(out.transpose(0, 1)[..., :4], dim=-1) for out in outs]
    whole, merged, other = (OutputProducts([out[at : at + 5] for out in outs]) for at in (0, 0, 30))
    whole.add(outs, directions)
    for products, part in ((merged, slice(0, 15)), (merged, slice(15, 30)), (other, slice(30, 50))):
        products.add([out[part] for out in outs], [each[:, part] for each in directions])
    merged.merge(other)
    assert merged.tokens == 50
    torch.testing.assert_close(merged.dependence, whole.dependence, rtol=1e-9, atol=1e-9)
    shifted = [outs[0] + 1e4, outs[1] - 1e4]
    far = OutputProducts([out[:5] for out in shifted])
    far.add(shifted, directions)
    torch.testing.assert_close(far.dependence, whole.dependence, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(merged.mean_cosine, whole.mean_cosine, rtol=1e-12, atol=1e-12)
    for share in (0.1, 0.9, 0.99, 1.1):
        assert merged.varies(share).tolist() == whole.varies(share).tolist()


def test_a_table_and_a_picture():
    found = redundancy(models("encoder"), batches(REAL, 5))
    table = found.table()
    assert list(table.columns) == ["a", "b", "cosine", "cka", "distance"]
    assert len(table) == 2 * 15
    row = table[(table["a"] == "1.2") & (table["b"] == "1.5")].iloc[0]
    assert [row[name] for name in MEASURES] == [getattr(found, name)[8, 11].item() for name in MEASURES]
    for name in MEASURES:
        image = found.plot(name).images[0].get_array()
        assert image.shape == (12, 12)
        assert image[8, 11] == pytest.approx(getattr(found, name)[8, 11].item())
    with pytest.raises(hw.InputError, match="^statistic: expected one of cosine, cka, distance, got 'mask'$"):
        found.plot("mask")


def test_what_is_refused():
    model, data = models("decoder"), batches(REAL, 5)
    cases = [
        ((None, data), {}, "model: expected a torch module, got NoneType"),
        ((model, ["w5"]), {}, "dataset: expected batches: tensors, or mappings of them"),
        ((model, data), {"pairs": "head"}, "pairs: expected 'layer' or 'all', got 'head'"),
        ((model, data), {"threshold": "much"}, "threshold: expected a finite number above 0, got 'much'"),
        ((nn.Linear(2, 2), [torch.ones(2, 2)]), {}, "model: expected attention in a way that can be seen, got none in"),
        (
            (model, iter(data)),
            {"loss": next_token_loss},
            "dataset: expected batches that can be read twice, got an iterator; list(batches)",
        ),
    ]
    for arguments, options, sentence in cases:
        with pytest.raises(hw.InputError) as refused:
            redundancy(*arguments, **options)
        assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize("pairs", ["layer", "all"])
def test_outputs_that_are_not_finite_are_refused(pairs):
    model = tiny.model("decoder")
    with torch.no_grad():
        model.layers[1].self_attn.v_proj.weight[3] = math.nan
    with pytest.raises(hw.InputError, match=r"layers\.1\.self_attn"):
        hw.redundancy(model, [tiny.TOKENS], pairs=pairs)
