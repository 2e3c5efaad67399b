"""Gates on heads, compared in float64 with the same models with scaled columns of the output projection."""

import copy
import math
import threading
from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.modeling_utils import AttentionInterface

import headwise as hw
from tiny import model as tiny

TOKENS = torch.randint(5, 97, (2, 13), generator=torch.Generator().manual_seed(1))
PADDING = (torch.arange(13) < torch.tensor([[13], [8]])).long()
ENCODER, DECODER = "encoder.layer.1.attention.self", "layers.1.self_attn"
BUDGET = {"rtol": 0.0, "atol": 1e-12}


SIZES = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 37, "num_hidden_layers": 2}


def spread(model):
    """Return the model in float64, with random weights that make its heads differ by more than rounding."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


def encoder():
    return tiny("encoder").double()


def decoder(**options):
    return tiny("decoder", **options).double()


def gptj():
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 64, "rotary_dim": 4}
    return spread(transformers.GPTJModel(transformers.GPTJConfig(**sizes)))


def neox():
    """Return a decoder whose norms compute in float64."""
    torch.manual_seed(0)
    config = transformers.GPTNeoXConfig(**SIZES, num_attention_heads=6, rotary_pct=0.5)
    return spread(transformers.GPTNeoXModel(config))


class Ours(nn.Module):
    """Two layers of headwise with 6 query heads and 2 key/value heads of 7 features."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(97, 11)
        options = {"num_kv_heads": 2, "head_dim": 7, "mask": hw.causal(), "rotary": hw.Rotary(width=4)}
        self.layers = nn.ModuleList(hw.MultiHeadAttention(11, 6, **options) for _ in range(2))

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return x


def ours():
    torch.manual_seed(0)
    return Ours().double()


MODELS = {
    "encoder": (encoder, ENCODER, "encoder.layer.1.attention.output.dense"),
    "decoder": (decoder, DECODER, "layers.1.self_attn.o_proj"),
    "neox": (neox, "layers.1.attention", "layers.1.attention.dense"),
    "gptj": (gptj, "h.1.attn", "h.1.attn.out_proj"),
    "ours": (ours, "layers.1", "layers.1.out_proj"),
}


def hidden(model, **inputs):
    output = model(TOKENS, **inputs)
    return getattr(output, "last_hidden_state", output)


@torch.no_grad()
def scaled(model, projection, factors):
    """Return a copy of the model with each head's columns of an output projection multiplied by its factor."""
    other = copy.deepcopy(model)
    weight = other.get_submodule(projection).weight
    weight.mul_(torch.as_tensor(factors, dtype=weight.dtype).repeat_interleave(weight.shape[1] // len(factors)))
    return other


def ones_but(**factors):
    return [factors.get(f"h{head}", 1.0) for head in range(6)]


def projected(model, path, **inputs):
    """Return the input of an output projection, `(batch, queries, heads, head_dim)`."""
    given = []
    hook = model.get_submodule(path).register_forward_pre_hook(lambda _, args: given.append(args[0].detach()))
    model(TOKENS, **inputs)
    hook.remove()
    return given[-1].unflatten(-1, (6, -1))


# -- what it multiplies -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_number_multiplies_the_columns_of_a_head(name):
    make, path, projection = MODELS[name]
    model = make()
    for head, value in ((0, 0.0), (2, 0.1), (5, -3.0)):
        with hw.gate(model, {(path, head): value}):
            found = hidden(model)
        torch.testing.assert_close(found, hidden(scaled(model, projection, ones_but(**{f"h{head}": value}))), **BUDGET)
    with hw.gate(model, {(path, 1): 0.5, (path, 4): 2.0, path: 3.0}):
        found = hidden(model)
    expected = hidden(scaled(model, projection, [3.0, 1.5, 3.0, 3.0, 6.0, 3.0]))
    torch.testing.assert_close(found, expected, **BUDGET)


@torch.no_grad()
def test_layers_have_numbers_and_paths(as_user):
    import numpy

    for make, number, path in ((encoder, 1, ENCODER), (decoder, 1, DECODER), (gptj, 0, "h.0.attn")):
        model = make()
        with hw.gate(model, {(path, 3): 0.25}):
            expected = hidden(model)
        for key in ((number, 3), (numpy.int64(number), numpy.int64(3))):
            with hw.gate(model, {key: numpy.float32(0.25)}):
                assert torch.equal(hidden(model), expected)
        assert not torch.equal(hidden(model), expected)


@pytest.mark.parametrize("name", ["decoder", "ours"])
@torch.no_grad()
def test_groups_share_keys_and_values(name):
    make, path, projection = MODELS[name]
    model = make()
    with hw.gate(model, {(path, 1): 0.3}, groups=True):
        found = hidden(model)
    torch.testing.assert_close(found, hidden(scaled(model, projection, [1.0] * 3 + [0.3] * 3)), **BUDGET)
    with hw.gate(model, {path: torch.tensor([0.2, -1.0], dtype=torch.float64)}, groups=True):
        found = hidden(model)
    torch.testing.assert_close(found, hidden(scaled(model, projection, [0.2] * 3 + [-1.0] * 3)), **BUDGET)
    with hw.gate(model, {path: torch.rand(2, 2, 13)}, groups=True):
        assert hidden(model).isfinite().all()


TENSORS = {
    "a head, a number": (2, ()),
    "a head, queries": (2, (13,)),
    "a head, batch": (2, (2, 1)),
    "a head, one row": (2, (1, 13)),
    "a head, batch and queries": (2, (2, 13)),
    "a layer, a number": (None, ()),
    "a layer, heads": (None, (6,)),
    "a layer, batch and heads": (None, (2, 6)),
    "a layer, batch, heads and queries": (None, (2, 6, 13)),
}


@pytest.mark.parametrize("form", TENSORS)
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_tensor_multiplies_the_input_of_the_projection(name, form):
    make, path, projection = MODELS[name]
    model, (head, shape) = make(), TENSORS[form]
    value = torch.randn(shape, dtype=torch.float64)
    if head is None:
        axes = {0: (1, 1, 1), 1: (1, 6, 1), 2: (2, 6, 1), 3: (2, 6, 13)}[len(shape)]
        factor = value.reshape(axes).expand(2, 6, 13)
    else:
        factor = torch.ones(2, 6, 13, dtype=torch.float64)
        factor[:, head] = value
    expected = projected(model, projection) * factor.transpose(1, 2)[..., None]
    with hw.gate(model, {path if head is None else (path, head): value}):
        torch.testing.assert_close(projected(model, projection), expected, **BUDGET)


OF_EACH_EXAMPLE = torch.rand(2, 13, generator=torch.Generator().manual_seed(6)) < 0.4
POSITIONS = {
    "whole numbers": ([0, 4, -1], [0, 4, 12]),
    "a range": (range(3, 6), [3, 4, 5]),
    "a tensor": (torch.tensor([7]), [7]),
    "none of them": ([], []),
    "a mask": (OF_EACH_EXAMPLE[0], OF_EACH_EXAMPLE[0]),
    "a mask of each example": (OF_EACH_EXAMPLE, OF_EACH_EXAMPLE),
}


@pytest.mark.parametrize("form", POSITIONS)
@pytest.mark.parametrize("value", [0.3, hw.replacements.zero()])
@torch.no_grad()
def test_positions(form, value):
    positions, there = POSITIONS[form]
    is_gated = torch.zeros(2, 13, dtype=torch.bool)
    is_gated[there if isinstance(there, torch.Tensor) and there.ndim == 2 else (slice(None), there)] = True
    for model, projection in ((decoder(), "layers.1.self_attn.o_proj"), (gptj(), "h.1.attn.out_proj")):
        expected = projected(model, projection).clone()
        expected[..., 2, :][is_gated] *= value if isinstance(value, float) else 0.0
        with hw.gate(model, {(1, 2): value}, positions=positions):
            torch.testing.assert_close(projected(model, projection), expected, **BUDGET)


# -- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["encoder", "neox", "gptj", "ours"])
def test_the_gradient_of_a_gate_is_its_finite_difference(name):
    make, path, _ = MODELS[name]
    model, target = make(), torch.randn(2, 13, 11 if name == "ours" else 48, dtype=torch.float64)

    def loss(value):
        with hw.gate(model, {path: value}):
            return (hidden(model) * target).sum()

    value = torch.ones(6, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(loss(value), value)
    with torch.no_grad():
        steps = 1e-5 * torch.eye(6, dtype=torch.float64)
        expected = torch.stack([(loss(1 + step) - loss(1 - step)) / 2e-5 for step in steps])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert found.abs().min() > 1e-3
    assert len(set(found.tolist())) == 6

    one = torch.ones((), dtype=torch.float64, requires_grad=True)
    with hw.gate(model, {(path, 4): one}):
        (alone,) = torch.autograd.grad((hidden(model) * target).sum(), one)
    torch.testing.assert_close(alone, found[4], **BUDGET)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_the_model_are_those_of_the_model_without_the_head(name):
    make, path, projection = MODELS[name]
    model = make()
    other = scaled(model, projection, ones_but(h3=0.0))
    hidden(other).square().sum().backward()
    with hw.gate(model, {(path, 3): 0.0}):
        hidden(model).square().sum().backward()
    width = model.get_submodule(projection).weight.shape[1] // 6
    for (parameter, mine), its in zip(model.named_parameters(), other.parameters(), strict=True):
        assert (mine.grad is None) == (its.grad is None)
        if mine.grad is None:
            continue
        expected = its.grad.clone()
        if parameter == f"{projection}.weight":  # what reads nothing learns nothing
            expected[:, 3 * width : 4 * width] = 0.0
        torch.testing.assert_close(mine.grad, expected, rtol=1e-10, atol=1e-9)


# -- together ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_an_inner_gate_changes_the_output_of_an_outer_one():
    model, projection = decoder(), "layers.1.self_attn.o_proj"
    with hw.gate(model, {(1, 2): 0.5}), hw.gate(model, {(1, 2): 0.25, (1, 4): 3.0}):
        found = hidden(model)
    torch.testing.assert_close(found, hidden(scaled(model, projection, ones_but(h2=0.125, h4=3.0))), **BUDGET)
    plain = projected(model, projection)
    with hw.gate(model, {(1, 2): hw.replacements.uniform()}):
        even = projected(model, projection)[..., 2, :]
    with hw.gate(model, {(1, 2): 0.5}), hw.gate(model, {(1, 2): hw.replacements.uniform()}):
        torch.testing.assert_close(projected(model, projection)[..., 2, :], even, **BUDGET)
    with hw.gate(model, {(1, 2): hw.replacements.uniform()}), hw.gate(model, {(1, 2): 0.5}):
        torch.testing.assert_close(projected(model, projection)[..., 2, :], even / 2, **BUDGET)
    with hw.gate(model, {(1, 2): hw.replacements.uniform(), 1: 0.5}):
        found = projected(model, projection)
    torch.testing.assert_close(found[..., 2, :], even / 2, **BUDGET)
    torch.testing.assert_close(found[..., 3, :], plain[..., 3, :] / 2, **BUDGET)


@torch.no_grad()
def test_gates_of_a_model_and_of_a_part_nest_in_either_order():
    model, projection = decoder(), "layers.1.self_attn.o_proj"
    part = model.layers[1]
    for outer, inner in (
        ({(1, 2): 0.5}, {("self_attn", 2): hw.replacements.zero()}),
        ({(1, 2): hw.replacements.zero()}, {("self_attn", 2): 0.5}),
    ):
        with hw.gate(model, outer), hw.gate(part, inner):
            assert projected(model, projection)[..., 2, :].abs().max() == 0
    with hw.gate(part, {("self_attn", 2): 0.5}), hw.gate(model, {(1, 2): hw.replacements.uniform()}):
        found = projected(model, projection)
    with hw.gate(model, {(1, 2): hw.replacements.uniform()}):
        torch.testing.assert_close(found, projected(model, projection), **BUDGET)


@pytest.mark.parametrize("outside", ["watch", "gate"])
@torch.no_grad()
def test_watch_reports_attention_before_gates(outside):
    model = decoder(num_hidden_layers=3)
    without = scaled(model, "layers.1.self_attn.o_proj", ones_but(h2=0.0))
    with hw.watch(model) as plain, hw.watch(without) as after_it:
        model(TOKENS)
        without(TOKENS)
    with ExitStack() as stack:
        if outside == "gate":
            stack.enter_context(hw.gate(model, {(1, 2): 0.0}))
        heads = stack.enter_context(hw.watch(model))
        if outside == "watch":
            stack.enter_context(hw.gate(model, {(1, 2): 0.0}))
        model(TOKENS)
    names = ("entropy", "confidence", "distance", "first", "previous", "output_norm")
    for row, before, after in zip(heads.rows(), plain.rows(), after_it.rows(), strict=True):
        expected = before if row["layer"] < 2 else after
        assert [row[name] for name in names] == pytest.approx([expected[name] for name in names], rel=1e-5)
    above = heads.rows()[13], plain.rows()[13]
    assert above[0]["entropy"] != pytest.approx(above[1]["entropy"], rel=1e-3)


def test_gates_of_several_threads_are_separate():
    models, found = [decoder(), gptj(), decoder(seed=1)], {}
    gates = [{(1, 2): 0.0}, {(0, 3): 0.5}, {(0, 1): 2.0}]
    expected = []
    with torch.no_grad():
        for model, values in zip(models, gates, strict=True):
            with hw.gate(model, values):
                expected.append(hidden(model))

    @torch.no_grad()
    def run(number):
        for _ in range(5):
            with hw.gate(models[number], gates[number]):
                found.setdefault(number, []).append(hidden(models[number]))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(found[number]) for number in range(3)] == [5, 5, 5]
    assert all(torch.equal(each, expected[number]) for number in range(3) for each in found[number])


# -- how models are run -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@torch.no_grad()
def test_generation(cache):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_attention_heads=6, num_key_value_heads=2, head_dim=10)
    model = spread(transformers.LlamaForCausalLM(config))
    options = {"max_new_tokens": 7, "do_sample": False, "cache_implementation": cache, "pad_token_id": 0}
    options |= {"disable_compile": True}
    inputs = {"input_ids": TOKENS, "attention_mask": PADDING.flip(1), "output_logits": True}
    inputs |= {"return_dict_in_generate": True}
    plain = model.generate(**inputs, **options)
    expected = scaled(model, "model.layers.1.self_attn.o_proj", ones_but(h2=0.0)).generate(**inputs, **options)
    with hw.gate(model, {(1, 2): 0.0}):
        found = model.generate(**inputs, **options)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), **BUDGET)
    assert (found.logits[0] - plain.logits[0]).abs().max() > 1e-3


@torch.no_grad()
def test_generation_of_an_encoder_decoder():
    torch.manual_seed(0)
    sizes = {"d_model": 48, "num_layers": 2, "num_heads": 6, "d_kv": 7, "d_ff": 37, "decoder_start_token_id": 0}
    model = spread(transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=97, **sizes)))
    other = scaled(model, "encoder.block.1.layer.0.SelfAttention.o", ones_but(h2=0.0))
    other = scaled(other, "decoder.block.0.layer.1.EncDecAttention.o", ones_but(h4=0.0))
    options = {"max_new_tokens": 7, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected = other.generate(TOKENS, attention_mask=PADDING, **options)
    values = {("encoder.block.1.layer.0.SelfAttention", 2): 0.0, ("decoder.block.0.layer.1.EncDecAttention", 4): 0.0}
    with hw.gate(model, values):
        found = model.generate(TOKENS, attention_mask=PADDING, **options)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), **BUDGET)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_autocast(name):
    make, path, projection = MODELS[name]
    model = make().float()
    with torch.autocast("cpu", torch.bfloat16):
        expected = hidden(scaled(model, projection, ones_but(h2=0.0)))
        with hw.gate(model, {(path, 2): 0.0, (path, 3): torch.ones(2, 13)}):
            assert torch.equal(hidden(model), expected)
        with hw.gate(model, {(path, 2): hw.replacements.uniform()}):
            assert hidden(model).isfinite().all()


class Mixed(nn.Module):
    def forward(self, q, v):
        return F.scaled_dot_product_attention(q, q, v)


@torch.no_grad()
def test_autocast_with_two_dtypes():
    model, q = Mixed(), torch.randn(2, 3, 5, 7)
    with torch.autocast("cpu", torch.bfloat16):
        plain = model(q, q.bfloat16())
        with hw.gate(model, {("", 1): 0.0}):
            found = model(q, q.bfloat16())
        with hw.gate(model, {("", 1): hw.replacements.uniform()}):
            even = model(q, q.bfloat16())[:, 1]
    assert torch.equal(found[:, [0, 2]], plain[:, [0, 2]])
    assert found[:, 1].abs().max() == 0
    mean = q.bfloat16()[:, 1].float().mean(1, keepdim=True).expand_as(even)
    torch.testing.assert_close(even.float(), mean, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_training_with_dropout(implementation):
    model = tiny("encoder", attention_probs_dropout_prob=0.2, hidden_dropout_prob=0.1).double().train()
    model.set_attn_implementation(implementation)
    torch.manual_seed(5)
    expected = hidden(scaled(model, "encoder.layer.1.attention.output.dense", ones_but(h2=0.0)))
    torch.manual_seed(5)
    with hw.gate(model, {(1, 2): 0.0}):
        found = hidden(model)
    torch.testing.assert_close(found, expected, **BUDGET)
    torch.manual_seed(6)
    assert not torch.equal(hidden(model), found)


def test_recomputed_layers_are_gated_in_the_context():
    model = decoder().train()
    other = scaled(model, "layers.1.self_attn.o_proj", ones_but(h2=0.3))
    hidden(other).square().sum().backward()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with hw.gate(model, {(1, 2): 0.3}):
        hidden(model, use_cache=False).square().sum().backward()
    for mine, its in ((model.layers[0], other.layers[0]), (model.embed_tokens, other.embed_tokens)):
        for parameter, expected in zip(mine.parameters(), its.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-10, atol=1e-9)


@torch.no_grad()
def test_gates_on_a_model_inside_another():
    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.other = decoder(), decoder(seed=1)

        def forward(self, tokens):
            return self.inner(tokens).last_hidden_state + self.other(tokens).last_hidden_state

    model = Around()
    expected = hidden(scaled(model, "inner.layers.1.self_attn.o_proj", ones_but(h2=0.0)))
    with hw.gate(model.inner, {(1, 2): 0.0}):
        torch.testing.assert_close(hidden(model), expected, **BUDGET)
    with hw.gate(model, {("inner.layers.1.self_attn", 2): 0.0}):
        torch.testing.assert_close(hidden(model), expected, **BUDGET)


# -- nothing is left --------------------------------------------------------------------------------------------------


def hooks_of(module):
    return {name: list(each) for name, each in vars(module).items() if "hooks" in name}


def everything(model):
    modules = dict(model.named_modules())
    return {
        "numbers": {name: each.clone() for name, each in [*model.named_parameters(), *model.named_buffers()]},
        "learning": [each.requires_grad for each in model.parameters()],
        "gradients": [each.grad for each in model.parameters()],
        "training": {path: module.training for path, module in modules.items()},
        "attributes": {path: sorted(vars(module)) for path, module in modules.items()},
        "hooks": {
            path: [
                len(vars(module)[name])
                for name in sorted(vars(module))
                if name.endswith(("hooks", "hooks_with_kwargs"))
            ]
            for path, module in modules.items()
        },
        "config": model.config.to_dict(),
        "functions": [
            *(F.scaled_dot_product_attention, F.softmax, F.dropout, F.multi_head_attention_forward, torch.bmm),
            AttentionInterface.get_interface,
        ],
        "mode": torch.overrides._get_current_function_mode(),
    }


def require_the_same(after, before):
    assert after["numbers"].keys() == before["numbers"].keys()
    assert all(torch.equal(after["numbers"][name], each) for name, each in before["numbers"].items())
    for name in before.keys() - {"numbers"}:
        assert after[name] == before[name], name


def interrupt(*_):
    raise KeyboardInterrupt


def interrupted(model, afterwards):
    model(TOKENS)
    if afterwards:
        raise RuntimeError


ENDS = {
    "ends": (None, None),
    "raises inside of the model": (ZeroDivisionError, lambda *_: 1 / 0),
    "is interrupted inside of the model": (KeyboardInterrupt, interrupt),
    "raises in the body": (RuntimeError, None),
}


@pytest.mark.parametrize("make", [encoder, decoder, gptj])
@pytest.mark.parametrize("how", ENDS)
@torch.no_grad()
def test_the_model_is_restored_however_the_context_ends(make, how):
    model, (error, hook) = make().train(), ENDS[how]
    first = next(module for path, module in model.named_modules() if path.endswith(("mlp", "intermediate")))
    first.eval()
    before = everything(model)
    handle = None if hook is None else first.register_forward_hook(hook)
    values = {(1, 2): 0.0, (1, 3): hw.replacements.uniform(), (0, 1): hw.replacements.zero()}
    values |= {} if hook else {(0, 4): hw.replacements.mean([TOKENS]), (0, 5): hw.replacements.resample(TOKENS)}
    if error is None:
        with hw.gate(model, values), hw.gate(model, {(1, 2): 0.5}, positions=[0]):
            model(TOKENS)
    else:
        with pytest.raises(error), hw.gate(model, values), hw.gate(model, {(1, 2): 0.5}):
            interrupted(model, hook is None)
    if handle is not None:
        handle.remove()
    require_the_same(everything(model), before)
    plain = hidden(model.eval())
    with hw.gate(model, {(1, 2): 1.0}):
        assert torch.equal(hidden(model), plain)


@torch.no_grad()
def test_the_model_is_restored_after_an_error_of_the_data_set():
    def batches():
        yield TOKENS
        raise OSError("the disk is gone")

    model = decoder().train()
    before = everything(model)
    with pytest.raises(OSError, match="the disk is gone"), hw.gate(model, {(1, 2): hw.replacements.mean(batches())}):
        pass
    require_the_same(everything(model), before)


# -- what cannot be -----------------------------------------------------------------------------------------------


def refused(sentence, values, model=None, **options):
    model = decoder() if model is None else model
    with torch.no_grad(), pytest.raises(hw.InputError, match=sentence), hw.gate(model, values, **options):
        model(TOKENS)


KINDS = (
    r"value: expected a number, a tensor, or one of hw.replacements: "
    r"zero\(\), uniform\(\), mean\(\), resample\(\), patch\(\), got "
)
WRONG = {
    "a head": ({(1, 6): 0.0}, r"^head: expected one of 0 to 5 in layers.1.self_attn, got 6$"),
    "a head before the first": ({(1, -1): 0.0}, r"^head: expected one of 0 to 5 in layers.1.self_attn, got -1$"),
    "a layer": ({(2, 0): 0.0}, "^layer: expected one of layers 0 to 1, got 2; name the module by its path"),
    "a path": (
        {("layers.9", 0): 0.0},
        "^layer: expected the path of a module, as watch.model. shows it, got 'layers.9'$",
    ),
    "no attention there": ({("layers.1.mlp", 0): 0.0}, "modules in which attention is seen, got none in layers.1.mlp$"),
    "a key": ({(1, 2, 3): 0.0}, r"^values: expected keys \(layer, head\) or layer, got \(1, 2, 3\)$"),
    "a key of floats": ({(1.0, 2): 0.0}, r"^values: expected keys \(layer, head\) or layer, got \(1.0, 2\)$"),
    "a key of booleans": ({(1, True): 0.0}, r"^values: expected keys \(layer, head\) or layer, got \(1, True\)$"),
    "no mapping": ([(1, 2)], r"^values: expected a mapping {\(layer, head\): value}, got list$"),
    "a boolean": ({(1, 2): True}, f"^{KINDS}True$"),
    "a string": ({(1, 2): "0"}, f"^{KINDS}'0'$"),
    "nothing": ({(1, 2): None}, f"^{KINDS}None$"),
    "a function": ({(1, 2): hw.replacements.zero}, f"^{KINDS}<function zero"),
    "NaN": ({(1, 2): math.nan}, "^value: expected a finite number, got nan$"),
    "infinity": ({(1, 2): -math.inf}, "^value: expected a finite number, got -inf$"),
    "whole numbers": (
        {(1, 2): torch.ones(13).long()},
        r"^value: expected a float tensor of at most 2 .* got torch.int64",
    ),
    "a head's axes": (
        {(1, 2): torch.ones(2, 6, 13)},
        r"^value: expected a float tensor of at most 2 dimensions, got .*3",
    ),
    "a layer's axes": ({1: torch.ones(2, 6, 13, 1)}, "^value: expected a float tensor of at most 3 dimensions, got"),
    "a head's shape": (
        {(1, 2): torch.ones(6)},
        r"^value: expected a number, or a tensor that broadcasts to \(batch, queries\) = \(2, 13\), got shape \(6,\)$",
    ),
    "a layer's shape": (
        {1: torch.ones(13)},
        r"^value: expected a number, or a tensor of shape \(6,\), \(2, 6\) or \(2, 6, 13\), got shape \(13,\)$",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_values_that_are_refused(what, as_user):
    refused(WRONG[what][1], WRONG[what][0])


def test_groups_that_are_refused(as_user):
    sentence = "^key/value group: expected one of 0 to 1 in layers.1.self_attn, got 2$"
    refused(sentence, {(1, 2): 0.0}, groups=True)
    refused(r"of shape \(2,\), \(2, 2\) or \(2, 2, 13\), got shape \(6,\)$", {1: torch.ones(6)}, groups=True)
    refused("^groups: expected True or False, got 1$", {(1, 0): 0.0}, groups=1)


FORMS = r"positions: expected whole numbers, or a boolean tensor \(queries,\) or \(batch, queries\), got "
NOWHERE = {
    "beyond": ([0, 13], r"^positions: expected from -13 to 12, got \[0, 13\]$"),
    "before": ([-14], r"^positions: expected from -13 to 12, got \[-14\]$"),
    "floats": ([0.5], f"^{FORMS}torch.float32"),
    "a number": (3, f"^{FORMS}3$"),
    "words": (["last"], rf"^{FORMS}\['last'\]$"),
    "too many axes": (torch.ones(1, 2, 13).bool(), f"^{FORMS}torch.bool"),
    "another length": (torch.ones(12).bool(), r"^positions: expected shape \(13,\) or \(2, 13\), got \(12,\)$"),
    "another batch": (torch.ones(3, 13).bool(), r"^positions: expected shape \(13,\) or \(2, 13\), got \(3, 13\)$"),
}


@pytest.mark.parametrize("what", NOWHERE)
def test_positions_that_are_refused(what, as_user):
    refused(NOWHERE[what][1], {(1, 2): 0.0}, positions=NOWHERE[what][0])


class Twice(nn.Module):
    """A module whose class is called attention runs after one that is not."""

    def __init__(self):
        super().__init__()
        self.plain, self.named = Block(), BlockAttention()

    def forward(self, tokens):
        return self.named(self.plain(torch.zeros(2, 13, 21)))


class Block(nn.Module):
    def forward(self, x):
        q = x.unflatten(-1, (3, 7)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)


class BlockAttention(Block):
    pass


def test_models_that_are_refused(as_user):
    with pytest.raises(hw.InputError, match="^model: expected a torch module, got str$"), hw.gate("llama", {}):
        pass
    refused(r"^layer: expected a model with modules called attention, got 0", {(0, 0): 0.0}, nn.Linear(2, 2))
    refused("^model: expected modules that run in Python, got a compiled one", {(0, 0): 0.0}, torch.compile(decoder()))
    nothing = nn.ModuleDict({"attention": nn.Identity()})
    nothing.forward = nothing["attention"].__call__
    refused(
        "^values: expected modules in which attention is seen, got none in attention$", {("attention", 0): 0.0}, nothing
    )
    sentence = (
        "^layer: expected the module of layer 0, got named, where the model ran plain; name modules by their paths"
    )
    refused(sentence, {(0, 1): 0.0}, Twice())
    with hw.gate(decoder(), {(0, 1): 0.0}):
        pass  # it did not run


def test_layers_are_numbered_in_the_order_of_modules():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = BlockAttention(), BlockAttention()

        def forward(self, x):
            return self.first(self.second(x))

    model, x = Backwards(), torch.randn(2, 13, 21)
    with hw.gate(model, {(1, 0): 0.0}):
        found = model(x)
    with hw.gate(model, {("second", 0): 0.0}):
        assert torch.equal(model(x), found)


def test_a_module_in_which_not_all_attention_can_be_gated_is_an_error():
    class Attention(nn.Module):
        num_heads = 3

        def forward(self, x):
            points = ((x @ x.mT).softmax(-1)[..., None] * x[:, :, None]).mean(-2)  # not a product of matrices
            return points + (x @ x.mT).softmax(-1) @ x

    model = nn.Sequential(Attention())
    sentence = (
        "^values: expected modules whose attention can be changed, got attention of .* was not seen, since .*: 0$"
    )
    with pytest.raises(hw.InputError, match=sentence), hw.gate(model, {("0", 1): 0.0}):
        model(torch.randn(2, 3, 5, 7))
