"""Logit attribution: the parts of everything that writes into the residual stream sum to the logit."""

import math

import pytest
import torch
import transformers
from torch import nn

import headwise as hw
from headwise.analysis.attribution import Attribution, logit_attribution
from prompt_models import ANSWER, CLEAN, PADDED, WRONG, causal

pytestmark = pytest.mark.usefixtures("as_user")

SIZES = {"vocab_size": 97, "num_hidden_layers": 2, "num_attention_heads": 6, "hidden_size": 48}
ROTARY = SIZES | {"intermediate_size": 37, "num_key_value_heads": 2, "head_dim": 10}

WRITERS = {
    "llama": ["model.embed_tokens", "model.layers.{}.self_attn.o_proj", "model.layers.{}.mlp"],
    "gpt2": ["transformer.wte", "transformer.wpe", "transformer.h.{}.attn.c_proj", "transformer.h.{}.mlp"],
}
NORMS = {"llama": "model.norm", "gpt2": "transformer.ln_f"}


@torch.no_grad()
def parts(kind, model, inputs, words, places):
    """Return what each module adds to the logits of `words`, by name: each head, the biases, MLPs and embeddings.

    The norm is written out: its scale is that of the whole stream.
    """
    wrote, read = {}, {}
    names = [name.format(layer) for name in WRITERS[kind] for layer in range(2 if "{}" in name else 1)]

    def keep(name):
        return lambda module, given, output: wrote.update({name: output}) or read.update({name: given[0]})

    hooks = [model.get_submodule(name).register_forward_hook(keep(name)) for name in [*names, NORMS[kind]]]
    logits = model(**inputs).logits
    for hook in hooks:
        hook.remove()
    rows = torch.arange(len(places))
    stream, norm = read[NORMS[kind]][rows, places], model.get_submodule(NORMS[kind])
    if kind == "llama":
        scale = (stream.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    else:
        scale = (stream.var(-1, keepdim=True, correction=0) + norm.eps).sqrt()

    def adds(written):
        centred = written if kind == "llama" else written - written.mean(-1, keepdim=True)
        return (words * norm.weight * centred / scale).sum(-1)

    found = {}
    for name in names:
        written = wrote[name].expand(len(places), -1, -1)[rows, places]
        if not name.endswith(("o_proj", "c_proj")):
            found[name] = adds(written)
            continue
        module = model.get_submodule(name)
        weight = module.weight.mT if kind == "gpt2" else module.weight  # (out, heads x value_dim)
        of_heads = read[name][rows, places].unflatten(-1, (6, -1))
        for head in range(6):
            found[name, head] = adds(of_heads[:, head] @ weight.unflatten(1, (6, -1))[:, head].mT)
        if kind == "gpt2":
            found[f"{name}.bias"] = adds(module.bias.expand(len(places), -1))
    if kind == "gpt2":
        found["ln_f.bias"] = words @ norm.bias
    return found, logits[rows, places]


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("against", [False, True])
@pytest.mark.parametrize("kind", WRITERS)
def test_parts_of_heads_and_other_modules_sum_to_the_logit(kind, against, padding):
    model, places = causal(kind), torch.tensor([10, 10, 10])
    if kind == "llama":
        model.model.norm = nn.RMSNorm(48, eps=1e-6).double()  # which that of transformers rounds to float32
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(0.3 if name.endswith("weight") else 0.0, 0.5)
    inputs = {"input_ids": CLEAN}
    if padding is not None:
        inputs["attention_mask"], places = PADDED[padding][0], torch.tensor(PADDED[padding][1])
    embedding = model.get_output_embeddings().weight
    words = embedding[ANSWER] - embedding[WRONG] if against else embedding[ANSWER]
    expected, logits = parts(kind, model, inputs, words, places)
    whole = logits[torch.arange(3), ANSWER] - (logits[torch.arange(3), WRONG] if against else 0.0)
    torch.testing.assert_close(sum(expected.values()), whole, rtol=1e-10, atol=1e-10)

    found = logit_attribution(model, inputs, answer=ANSWER, wrong=WRONG if against else None)
    attention = next(name for name in WRITERS[kind] if name.endswith("_proj"))
    for head in found.heads:
        of_head = expected[attention.format(head.layer), head.head]
        value, sem, n, _ = head.statistics["logit"]
        assert value == pytest.approx(of_head.mean().item(), rel=1e-9, abs=1e-12)
        assert sem == pytest.approx(of_head.std().item() / math.sqrt(3), rel=1e-9)
        assert n == 3
    of_heads = sum(head.statistics["logit"].value for head in found.heads)
    rest = sum(part.mean().item() for name, part in expected.items() if not isinstance(name, tuple))
    assert len(found.heads) == 12
    assert of_heads + rest == pytest.approx(whole.mean().item(), rel=1e-10)
    assert found.metadata["measured"] == {
        "sequences": 3,
        "logit": pytest.approx(whole.mean().item()),
        "heads": pytest.approx(of_heads),
    }


OTHERS = {
    "gemma, a norm whose weight is 1 + w": lambda: transformers.GemmaConfig(**ROTARY),
    "olmo, a norm without weights": lambda: transformers.OlmoConfig(**SIZES, intermediate_size=37),
    "gpt-neox, attention parallel to the MLP": lambda: transformers.GPTNeoXConfig(**SIZES, intermediate_size=37),
    "qwen3, norms of queries and keys": lambda: transformers.Qwen3Config(**ROTARY),
    "an odd width": lambda: transformers.GPTNeoXConfig(
        vocab_size=97, hidden_size=35, num_hidden_layers=2, num_attention_heads=5, intermediate_size=37, rotary_pct=0.3
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_part_of_a_head_in_the_last_layer_is_its_effect_on_the_logit(name):
    """By definition the part is what the logit loses without the head's output, with the norm's scale held constant."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(OTHERS[name]()).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    found = logit_attribution(model, CLEAN[:1], answer=7)
    with torch.no_grad(), hw.record_outputs(model) as run:
        hidden = model.base_model(CLEAN[:1]).last_hidden_state[0, -1]
    (site, (out,)) = list(run.by_site.items())[-1]
    module = model.get_submodule(site.path)
    width = out.shape[1] * out.shape[3]
    projection = [part for part in module.children() if getattr(part, "in_features", 0) == width][-1]
    slices = projection.weight.detach().unflatten(1, (out.shape[1], -1))
    norm = [part for part in model.base_model.children() if "norm" in type(part).__name__.lower()][-1]
    given = []
    hook = norm.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    with torch.no_grad():
        model(CLEAN[:1])
    hook.remove()
    stream = given[0][0, -1]
    embedding = model.get_output_embeddings().weight[7].detach()
    bias = norm(torch.zeros_like(stream)).detach()
    for head in range(out.shape[1]):
        adds = slices[:, head] @ out[0, head, -1]

        def logit(share, adds=adds):
            """Return the norm of x with the scale of the stream in place of that of x."""
            x = stream - share * adds
            spread = (lambda y: y.std(correction=0)) if "LayerNorm" in type(norm).__name__ else (lambda y: y.norm())
            return embedding @ (bias + (norm(x) - bias) * spread(x) / spread(stream))

        with torch.no_grad():
            expected = (logit(0.0) - logit(1.0)).item()
        number = found.heads[-out.shape[1] + head].statistics["logit"].value
        assert number == pytest.approx(expected, rel=1e-4, abs=1e-6)  # the norm's epsilon is in the scale
    assert found.metadata["measured"]["logit"] == pytest.approx((embedding @ hidden).item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attribution_in_16_bit_dtypes(dtype):
    model = causal("gpt2")
    exact = logit_attribution(model, CLEAN, answer=ANSWER, wrong=WRONG)
    found = logit_attribution(model.to(dtype), CLEAN, answer=ANSWER, wrong=WRONG)
    largest = max(abs(head.statistics["logit"].value) for head in exact.heads)
    for one, other in zip(found.heads, exact.heads, strict=True):
        near = pytest.approx(other.statistics["logit"].value, abs=largest * (1e-4 if dtype == torch.float32 else 0.15))
        assert one.statistics["logit"].value == near


def test_it_is_a_table(tmp_path):
    found = logit_attribution(causal(), CLEAN, answer=7, at=[0, 3, -2])
    found.save(tmp_path)
    assert Attribution.load(tmp_path).heads == found.heads
    assert found.statistics == ("logit",)
    assert found.plot().images[0].get_array().shape == (2, 6)


class Bare(nn.Module):
    """Attention in a residual stream that ends with a norm and dropout, with or without an output projection."""

    def __init__(self, out=None):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(97, 12), nn.LayerNorm(12), nn.Linear(12, 97)
        self.out, self.dropout, self.attends = out, nn.Dropout(0.5), True

    def get_output_embeddings(self):
        return self.head

    def forward(self, ids):
        x = self.embed(ids)
        if self.attends:
            heads = x.unflatten(-1, (3, 4)).transpose(1, 2)
            self.given = nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
            x = self.stream = x + (self.given if self.out is None else self.out(self.given))
        return self.head(self.dropout(self.norm(x)))


@torch.no_grad()
def test_modules_after_the_final_norm_may_return_their_input():
    model = Bare(nn.Linear(12, 12)).double().train()
    found = logit_attribution(model, CLEAN, answer=7)
    model.eval()(CLEAN)
    words = model.head.weight[7] * model.norm.weight / model.stream[:, -1:].std(-1, correction=0)
    for head in range(3):
        some = slice(4 * head, 4 * head + 4)
        written = model.given[:, -1, some] @ model.out.weight[:, some].mT
        expected = ((written - written.mean(-1, keepdim=True)) * words).sum(-1).mean().item()
        assert found.heads[head].statistics["logit"].value == pytest.approx(
            expected, rel=1e-3
        )  # epsilon is in the scale
    assert found.metadata["measured"]["logit"] == pytest.approx(model(CLEAN)[:, -1, 7].mean().item())


INDIRECT = "model: expected one whose output embedding reads, through a final norm, the sum that heads write into, got "
BERT = SIZES | {"intermediate_size": 37}
REFUSED = {
    "post-norm": (lambda: transformers.BertConfig(**BERT, is_decoder=True), f"{INDIRECT}BertLMHeadModel; ablate or"),
    "post-norm, no head of its own": (
        lambda: transformers.OpenAIGPTConfig(vocab_size=97, n_embd=48, n_layer=2, n_head=6),
        f"{INDIRECT}OpenAIGPTLMHeadModel; ablate or patch heads instead",
    ),
    "a norm of what heads write": (lambda: transformers.Gemma2Config(**ROTARY), f"{INDIRECT}Gemma2ForCausalLM; abl"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_models_whose_heads_do_not_write_directly_into_the_stream_are_refused(why):
    config, sentence = REFUSED[why]
    model = transformers.AutoModelForCausalLM.from_config(config(), attn_implementation="eager").eval()
    with pytest.raises(hw.InputError) as refused:
        logit_attribution(model, CLEAN, answer=7)
    assert str(refused.value).startswith(sentence)


def test_models_without_a_needed_part_are_refused():
    with pytest.raises(hw.InputError, match="^model: expected one that names its output embedding .*, got Linear$"):
        logit_attribution(nn.Linear(2, 2), CLEAN, answer=7)
    model = Bare()
    with pytest.raises(
        hw.InputError, match="^model: expected heads that can be gated, got outputs of the heads .* not linear"
    ):
        logit_attribution(model, CLEAN, answer=7)
    model.attends = False
    with pytest.raises(hw.InputError, match="^model: expected attention in a way that can be seen, got none in Bare$"):
        logit_attribution(model, CLEAN, answer=7)
    with pytest.raises(hw.InputError, match="^answer: expected ids from 0 to 96, got 97$"):
        logit_attribution(causal(), CLEAN, answer=97)
