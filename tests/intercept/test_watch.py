"""Statistics of watched models, against the weights that eager attention returns."""

import math
import re
import threading

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.modeling_utils import AttentionInterface

import headwise as hw
from oracles import statistics_of
from tiny import FAMILIES, PADDED, TOKENS, family

SDPA = F.scaled_dot_product_attention


def require_statistics(heads, weights, real=None, tokens=None):
    """Compare the rows with the definitions on weights `(layers, batch, heads, queries, keys)`."""
    rows = iter(heads.rows())
    for layer, of_layer in enumerate(weights):
        for head in range(of_layer.shape[1]):
            row = next(rows)
            assert (row["layer"], row["head"]) == (layer, head)
            found = []
            for sequence in range(len(of_layer)):
                here, first, keys = of_layer[sequence, head].double().clone(), 0, None
                if real is not None:
                    here[~real[sequence]] = 0.0
                    first, keys = int(real[sequence].int().argmax()), real[sequence].tolist()
                ids = None if tokens is None else tokens[sequence].tolist()
                found.append(statistics_of(here, ids, first=first, real=keys))
            for name in set().union(*found):
                values = [each[name] for each in found if name in each]
                assert row[name] == pytest.approx(sum(values) / len(values), rel=1e-4, abs=1e-5), (layer, head, name)
    assert next(rows, None) is None


@pytest.mark.parametrize("padding", PADDED)
@pytest.mark.parametrize(("name", "implementation"), FAMILIES)
@torch.no_grad()
def test_statistics_of_a_transformers_model_are_those_of_eager_weights(name, implementation, padding):
    inputs = {"input_ids": TOKENS, "attention_mask": PADDED[padding]}
    weights = family(name, "eager")(**inputs, output_attentions=True).attentions
    model = family(name, implementation)
    plain = model(**inputs).last_hidden_state
    with hw.watch(model) as heads:
        output = model(**inputs).last_hidden_state
    real = PADDED[padding].bool()
    torch.testing.assert_close(output[real], plain[real], rtol=1e-4, atol=1e-4)
    require_statistics(heads, weights, real, TOKENS)


class Block(nn.Module):
    """Causal attention of 3 heads that calls SDPA, and keeps its weights for comparison."""

    def __init__(self, causal=True):
        super().__init__()
        self.qkv, self.out, self.causal = nn.Linear(24, 72), nn.Linear(24, 24), causal

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (3, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        heads = SDPA(q, k, v, is_causal=self.causal)  # the function itself, as `from ... import` gives it
        self.weights = (q @ k.mT * 8**-0.5).masked_fill(~torch.ones(x.shape[1], x.shape[1]).tril().bool(), -torch.inf)
        self.weights = self.weights.softmax(-1)
        return x + self.out(heads.transpose(1, 2).flatten(2))


@torch.no_grad()
def test_a_module_that_calls_sdpa_is_watched():
    model, x = nn.Sequential(Block(), nn.Identity(), Block()), torch.randn(2, 13, 24)
    plain = model(x)
    with hw.watch(model) as heads:
        torch.testing.assert_close(model(x), plain)
    assert [record.site.path for record in heads.records] == ["0", "2"]
    require_statistics(heads, [model[0].weights, model[2].weights])


class Attends(nn.Module):
    def forward(self, *tensors, **options):
        return F.scaled_dot_product_attention(*tensors, **options)


Q, K = torch.randn(2, 6, 5, 8), torch.randn(2, 6, 9, 8)
HIDES = torch.rand(2, 1, 5, 9, generator=torch.Generator().manual_seed(4)) < 0.6
FORMS = {
    "causal, more keys than queries": ((Q, K, K), {"is_causal": True}),
    "causal, more queries than keys": ((K, Q, Q), {"is_causal": True}),
    "a boolean mask": ((Q, K, K), {"attn_mask": HIDES}),
    "a float mask": ((Q, K, K), {"attn_mask": torch.randn(5, 9)}),
    "causal and a mask": ((K, K, K), {"is_causal": True, "attn_mask": torch.eye(9).roll(-1, 0) == 0}),
    "a scale": ((Q, K, K), {"scale": 0.3}),
    "grouped heads": ((Q, K[:, :2], K[:, :2]), {"enable_gqa": True}),
    "one head": ((Q[:, :1], K[:, :1], K[:, :1, :, :3]), {}),
    "one head, a mask": ((Q[:, :1], K[:, :1], K[:, :1]), {"attn_mask": HIDES}),
}


@pytest.mark.filterwarnings("ignore:positions of queries among the keys")
@pytest.mark.filterwarnings("ignore:a mask shows padding")
@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_every_argument_of_sdpa_is_read_as_torch_reads_it(form):
    tensors, options = FORMS[form]
    model = Attends()
    plain = model(*tensors, **options)
    with hw.watch(model) as heads:
        torch.testing.assert_close(model(*tensors, **options), plain)
    norm = plain.reshape(2, -1, *plain.shape[-2:]).norm(dim=-1).mean((0, 2))
    assert [row["output_norm"] for row in heads.rows()] == pytest.approx(norm.tolist(), rel=1e-5)


@pytest.mark.filterwarnings("ignore:positions of queries among the keys")
@torch.no_grad()
def test_statistics_under_autocast_are_computed_in_float32():
    model = Attends()
    with hw.watch(model) as plain:
        model(Q, K, K)
    with hw.watch(model) as cast, torch.autocast("cpu", torch.bfloat16):
        model(Q, K, K)
    for row, other in zip(plain.rows(), cast.rows(), strict=True):
        assert other["entropy"] == pytest.approx(row["entropy"], rel=1e-6)


@torch.no_grad()
def test_encoder_layers_of_torch_are_watched_in_spite_of_their_fast_path():
    layer = nn.TransformerEncoderLayer(24, 3, 37, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x, padding = torch.randn(2, 13, 24), torch.arange(13) >= torch.tensor([[13], [8]])
    plain = model(x, src_key_padding_mask=padding)
    with hw.watch(model) as heads:
        torch.testing.assert_close(model(x, src_key_padding_mask=padding)[~padding], plain[~padding])
    assert [record.site.path for record in heads.records] == ["layers.0.self_attn", "layers.1.self_attn"]
    attention = model.layers[0].self_attn
    weights = attention(x, x, x, key_padding_mask=padding, average_attn_weights=False)[1]
    weights = weights.masked_fill(padding[:, None, :, None], 0.0)  # rows of padding do not count
    seen = [statistics_of(weights[b, 0])["entropy"] for b in range(2)]
    assert heads.rows()[0]["entropy"] == pytest.approx(sum(seen) / 2, rel=1e-4)


@torch.no_grad()
def test_our_layer_is_watched():
    layer = hw.MultiHeadAttention(24, 6, num_kv_heads=2, rotary=hw.Rotary(), mask=hw.window(5))
    model, x = nn.ModuleDict({"attention": layer}), torch.randn(2, 13, 24)
    model.forward = layer.__call__
    plain, weights = layer(x, return_weights=True)
    with hw.watch(model) as heads:
        torch.testing.assert_close(model(x), plain)
        torch.testing.assert_close(layer(x, return_weights=True)[1], weights)
    require_statistics(heads, [weights])
    assert [row["kv_head"] for row in heads.rows()] == [0, 0, 0, 1, 1, 1]


@torch.no_grad()
def test_the_table_has_the_rows():
    model = family("bert", "sdpa")
    with hw.watch(model, special=[3, 5]) as heads:
        model(TOKENS)
    table = heads.table()
    assert list(table.columns[:5]) == ["layer", "head", "kv_head", "module", "kind"]
    assert len(table) == 18
    assert not table["induction"].isna().all()  # the tokens came without a name
    assert table["special"].tolist() == [row["special"] for row in heads.rows()]
    with hw.watch(model) as heads:
        model(TOKENS)
    assert "special" not in heads.table()


@torch.no_grad()
def test_self_and_cross_attention_have_records_of_their_own():
    sizes = {"d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    attention = {"encoder_attention_heads": 3, "decoder_attention_heads": 3}
    model = transformers.BartModel(transformers.BartConfig(vocab_size=97, **sizes, **attention)).eval()
    with hw.watch(model) as heads:
        model(TOKENS, decoder_input_ids=TOKENS[:, :7])
    kinds = {record.site.path: record.site.cross for record in heads.records}
    assert kinds == {path: "encoder_attn" in path for path in kinds}
    assert sum(kinds.values()) == 2
    assert heads.layers == [0, 1, 2, 3, 4, 5]


@torch.no_grad()
def test_each_sequence_has_the_same_weight_in_any_batch():
    model = family("llama", "sdpa")
    with hw.watch(model) as at_once:
        model(TOKENS)
    with hw.watch(model) as one_by_one:
        model(TOKENS[:1])
        model(TOKENS[1:])
    for record, other in zip(at_once.records, one_by_one.records, strict=True):
        for name, spread in record.statistics.items():
            close = {"rtol": 1e-5, "atol": 1e-6, "equal_nan": True}  # sums in float64 of numbers in float32
            torch.testing.assert_close(other.statistics[name].value, spread.value, **close)
            torch.testing.assert_close(other.statistics[name].standard_error, spread.standard_error, **close)


def replaced_functions() -> tuple:
    return (
        AttentionInterface.get_interface,
        F.scaled_dot_product_attention,
        torch.overrides._get_current_function_mode(),
    )


def test_functions_and_hooks_are_restored_after_an_exception_and_nested_contexts():
    before = replaced_functions()
    model, other = family("llama", "sdpa"), family("bert", "sdpa")
    with hw.watch(model) as outer:
        with hw.watch(model) as inner:
            model(TOKENS)
        model(TOKENS)
        other(TOKENS)
    assert replaced_functions() == before
    assert [record.statistics["entropy"].count.tolist() for record in outer.records] == [[4.0] * 6] * 3
    assert [record.statistics["entropy"].count.tolist() for record in inner.records] == [[2.0] * 6] * 3
    model.layers[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), hw.watch(model):
        model(TOKENS)
    assert replaced_functions() == before
    assert not any(module._forward_hooks for module in model.modules())


@torch.no_grad()
def test_functions_and_hooks_are_restored_after_a_keyboard_interrupt():
    def key(*_):
        raise KeyboardInterrupt

    before, model = replaced_functions(), family("llama", "sdpa")
    hook = model.layers[1].mlp.register_forward_pre_hook(key)
    with pytest.raises(KeyboardInterrupt), hw.watch(model) as outer, hw.watch(model):
        model(TOKENS)
    assert replaced_functions() == before
    hook.remove()
    with hw.watch(model) as heads:
        model(TOKENS)
    assert [record.statistics["entropy"].count.tolist() for record in heads.records] == [[2.0] * 6] * 3
    assert [record.statistics["entropy"].count.tolist() for record in outer.records] == [[2.0] * 6] * 2


@torch.no_grad()
def test_calls_in_other_threads_are_watched():
    model = family("llama", "sdpa")
    with hw.watch(model) as heads:
        threads = [threading.Thread(target=torch.no_grad()(model), args=(TOKENS,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert heads.records[0].statistics["entropy"].count.tolist() == [6.0] * 6


@torch.no_grad()
def test_a_call_between_attention_and_projection_in_another_thread_changes_nothing():
    model, threads = family("llama", "sdpa"), []

    def call_in_another_thread(module, inputs):
        if not threads:
            threads.append(threading.Thread(target=torch.no_grad()(model), args=(TOKENS,)))
            threads[0].start()
            threads[0].join()

    model.layers[0].self_attn.o_proj.register_forward_pre_hook(call_in_another_thread)
    with hw.watch(model) as heads:
        model(TOKENS)
    assert heads.records[0].statistics["written_norm"].count.tolist() == [4.0] * 6


def test_gradients_are_unchanged():
    model = family("llama", "sdpa")
    parameter = model.layers[0].self_attn.q_proj.weight
    (plain,) = torch.autograd.grad(model(TOKENS).last_hidden_state.square().sum(), parameter)
    with hw.watch(model):
        (watched,) = torch.autograd.grad(model(TOKENS).last_hidden_state.square().sum(), parameter)
    torch.testing.assert_close(watched, plain, rtol=1e-3, atol=1e-3)


def test_attention_that_is_not_observed_is_named():
    class Attention(nn.Module):
        def forward(self, x):
            return x

    missed, partly = nn.Sequential(Attention()), nn.Sequential(Block(), Attention())
    nothing = "model: expected attention in a way that can be seen, got none in 0"
    with pytest.raises(hw.InputError, match=nothing), hw.watch(missed):
        missed(torch.randn(2, 3))
    with pytest.warns(UserWarning, match="attention of these modules was not seen: 1"), hw.watch(partly):
        partly(torch.randn(2, 13, 24))
    with hw.watch(missed) as heads:
        pass
    with pytest.raises(hw.InputError, match="model: expected a model that ran while it was watched, got none; call it"):
        heads.rows()


def test_only_modules_can_be_watched():
    with pytest.raises(hw.InputError, match="model: expected a torch module, got str"), hw.watch("minilm"):
        pass


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize("special", [5, "ab", [0.5]])
def test_special_tokens_are_a_collection_of_ids(special):
    remedy = "; tokenizer.all_special_ids has the ids of special tokens" if special == "ab" else ""
    sentence = f"^special: expected token ids, got {re.escape(repr(special))}{remedy}$"
    with pytest.raises(hw.InputError, match=sentence), hw.watch(nn.Sequential(Block()), special=special):
        pass


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize(
    ("layers", "sentence"),
    [(5, "^layers: expected a collection of layers, got 5$"), ([[1]], r"^layer: expected .*, got \[1\]; name the")],
)
def test_layers_to_record_are_a_collection(layers, sentence):
    model = nn.Sequential(hw.MultiHeadAttention(8, 2))
    with pytest.raises(hw.InputError, match=sentence), hw.record_outputs(model, layers):
        pass


def test_compiled_and_scripted_models_are_refused():
    model = nn.Sequential(Block())
    compiled, scripted = torch.compile(model), torch.jit.trace(nn.Linear(2, 2), torch.ones(2))
    for refused, what in ((compiled, "compiled"), (scripted, "scripted")):
        reason = f"model: expected modules that run in Python, got a {what} one"
        with pytest.raises(hw.InputError, match=reason), hw.watch(refused):
            pass


@pytest.mark.parametrize("hidden", [torch.finfo(torch.float32).min, -1e9, -torch.inf])
def test_large_negative_numbers_in_a_mask_hide_keys(hidden):
    """Hidden keys are not visible; a row that hides all keys returns torch's output and does not count."""

    class Masked(nn.Module):
        def forward(self, x, mask):
            return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    x = torch.randn(2, 3, 6, 8)
    mask = torch.where(torch.ones(6, 6, dtype=torch.bool).tril(), 0.0, hidden)
    model, weights = Masked(), ((x @ x.mT) / 8**0.5 + mask).softmax(-1)
    if hidden < -1e9:
        mask[3] = hidden
        weights[:, :, 3] = 0.0
    plain = model(x, mask)
    with hw.watch(model) as heads:
        watched = model(x, mask)
    torch.testing.assert_close(watched, plain, rtol=1e-5, atol=1e-6)
    require_statistics(heads, [weights])


class Pair(nn.Module):
    """Torch's encoder-decoder with the arguments of `transformers`."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(97, 24)
        self.transformer = nn.Transformer(24, 4, 1, 1, 32, dropout=0.0, batch_first=True)

    def forward(self, input_ids, decoder_input_ids, attention_mask, decoder_attention_mask):
        hidden, hidden_target = attention_mask == 0, decoder_attention_mask == 0
        causal = nn.Transformer.generate_square_subsequent_mask(decoder_input_ids.shape[1])
        return self.transformer(
            *(self.embed(input_ids), self.embed(decoder_input_ids)),
            **{"tgt_mask": causal.isinf(), "src_key_padding_mask": hidden},
            **{"tgt_key_padding_mask": hidden_target, "memory_key_padding_mask": hidden},
        )


@torch.no_grad()
def test_padding_of_sources_is_none_of_longer_or_shorter_targets():
    torch.manual_seed(0)
    model, found = Pair().eval(), []
    targets = {"decoder_input_ids": TOKENS[:, :9], "decoder_attention_mask": torch.ones(2, 9).long()}
    targets["decoder_attention_mask"][1, 4:] = 0
    for sources in (PADDED["right"], torch.ones_like(TOKENS)):
        with hw.watch(model) as heads:
            model(input_ids=TOKENS, attention_mask=sources, **targets)
        rows = [row for row in heads.rows() if row["module"] == "transformer.decoder.layers.0.self_attn"]
        found.append([(row["entropy"], row["self"], row["first"]) for row in rows])
    assert len(found[0]) == 4
    assert found[0] == found[1]


@torch.no_grad()
def test_a_decoder_uses_its_own_tokens_and_padding():
    """The decoder is as long as its encoder, whose tokens repeat and end in padding; its own do neither."""
    torch.manual_seed(0)
    sizes = {"encoder_ffn_dim": 37, "decoder_ffn_dim": 37, "encoder_attention_heads": 6, "decoder_attention_heads": 6}
    config = transformers.BartConfig(vocab_size=97, d_model=48, encoder_layers=1, decoder_layers=1, **sizes)
    model, own = transformers.BartModel(config).eval(), torch.arange(26).view(2, 13)
    inputs = {"input_ids": TOKENS % 5, "attention_mask": PADDED["right"], "decoder_input_ids": own}
    with hw.watch(model) as heads:
        model(**inputs)
    rows = {row["module"]: row for row in heads.rows()}
    assert rows["encoder.layers.0.self_attn"]["duplicate"] > 0
    assert math.isnan(rows["decoder.layers.0.self_attn"]["duplicate"])
    model.set_attn_implementation("eager")
    weights = model(**inputs, output_attentions=True).decoder_attentions[0]
    expected = torch.special.entr(weights).sum(-1).mean((0, 2))
    found = [row["entropy"] for row in heads.rows() if row["module"] == "decoder.layers.0.self_attn"]
    assert found == pytest.approx(expected.tolist(), rel=1e-4)
