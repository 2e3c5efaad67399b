"""Training steps with dropout under `watch`: bit for bit those without, with statistics of weights before dropout."""

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import headwise as hw
from tiny import PADDED, TOKENS

SIZES = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 37}
WIDTH, HEADS, LENGTH, BATCH = 33, 3, 7, 2


def bert(implementation: str) -> nn.Module:
    config = transformers.BertConfig(**SIZES, attention_probs_dropout_prob=0.3, attn_implementation=implementation)
    return transformers.BertModel(config, add_pooling_layer=False)


def llama(implementation: str) -> nn.Module:
    sizes = {**SIZES, "num_key_value_heads": 2, "attention_dropout": 0.3}
    return transformers.LlamaModel(transformers.LlamaConfig(**sizes, attn_implementation=implementation))


class Attention(nn.Module):
    """Self-attention with dropout of the weights, written in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.qkv, self.out_proj, self.way, self.num_heads = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            way,
            HEADS,
        )
        self.dropout = nn.Dropout(0.3)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if self.way == "sdpa":
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3 if self.training else 0.0)
        else:
            weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
            if self.way == "dropout, then a fill":
                weights = self.dropout(weights).masked_fill(torch.eye(LENGTH).bool(), 0.0)
            else:
                weights = self.dropout(weights)
            out = weights @ v
        return self.out_proj(out.transpose(1, 2).flatten(2))


class TorchAttention(nn.Module):
    """`nn.MultiheadAttention` with dropout, which may be asked for its weights."""

    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.attention, self.need_weights = (
            nn.MultiheadAttention(WIDTH, HEADS, dropout=0.3, batch_first=True),
            need_weights,
        )

    def forward(self, x):
        return self.attention(x, x, x, need_weights=self.need_weights)[0]


MODELS = {
    "BERT, sdpa": lambda: bert("sdpa"),
    "BERT, eager": lambda: bert("eager"),
    "Llama, sdpa": lambda: llama("sdpa"),
    "Llama, eager": lambda: llama("eager"),
    "SDPA": lambda: nn.Sequential(Attention("sdpa")),
    "softmax": lambda: nn.Sequential(Attention("softmax")),
    "softmax, dropout, then a fill": lambda: nn.Sequential(Attention("dropout, then a fill")),
    "torch's layer": lambda: TorchAttention(need_weights=False),
    "torch's layer, with weights": lambda: TorchAttention(need_weights=True),
    "our layer": lambda: hw.MultiHeadAttention(WIDTH, HEADS, dropout=0.3),
}


def inputs_of(model: nn.Module) -> dict[str, torch.Tensor]:
    if isinstance(model, transformers.PreTrainedModel):
        return {"input_ids": TOKENS, "attention_mask": PADDED["right"]}
    name = {nn.Sequential: "input"}.get(type(model), "x")
    return {name: torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(5))}


def training_step(model: nn.Module) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return output, gradients and new parameters of a training step, and the random state after it."""
    torch.manual_seed(3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    out = model(**inputs_of(model))
    out = out if isinstance(out, torch.Tensor) else out.last_hidden_state
    out.square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    optimizer.step()
    parameters = [parameter.detach().clone() for parameter in model.parameters()]
    return [out.detach(), *gradients, *parameters], torch.get_rng_state()


@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_under_watch_is_the_step_without_bit_for_bit(name):
    torch.manual_seed(0)
    model = MODELS[name]().train()
    watched, gated = copy.deepcopy(model), copy.deepcopy(model)
    tensors, state = training_step(model)
    with hw.watch(watched):
        watched_tensors, watched_state = training_step(watched)
    assert torch.equal(watched_state, state)
    for tensor, other in zip(tensors, watched_tensors, strict=True):
        assert torch.equal(tensor, other)
    with hw.watch(gated), hw.gate(gated, {(0, 1): 1.0}):
        gated_tensors, gated_state = training_step(gated)
    assert torch.equal(gated_state, state)
    torch.testing.assert_close(gated_tensors, tensors)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_statistics_in_training_are_of_the_weights_before_dropout(name):
    torch.manual_seed(0)
    model = MODELS[name]().train()
    if hasattr(model, "embeddings"):
        model.embeddings.dropout.p = 0.0  # it would change the input of the first layer
    inputs = inputs_of(model)
    with hw.watch(model) as in_training:
        model(**inputs)
    with hw.watch(model.eval()) as in_evaluation:
        model(**inputs)
    first_layer = slice(in_training.records[0].heads)
    for row, other in zip(in_training.rows()[first_layer], in_evaluation.rows()[first_layer], strict=True):
        assert row.pop("module") == other.pop("module")
        assert row.pop("kind") == other.pop("kind")
        assert row == pytest.approx(other, rel=1e-4, abs=1e-6, nan_ok=True)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_evaluation_under_watch_draws_no_random_numbers(name):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    state = torch.get_rng_state()
    with hw.watch(model), hw.gate(model, {(0, 1): 0.5}):
        model(**inputs_of(model))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_module_that_overwrites_its_weights_by_dropout_is_named():
    model = nn.Sequential(Attention("softmax"), Attention("softmax")).train()
    model[1].dropout.inplace = True
    named = pytest.warns(UserWarning, match="^attention of these modules was not seen: 1$")
    with torch.no_grad(), named, hw.watch(model) as heads:
        model(**inputs_of(model))
    assert {row["module"] for row in heads.rows()} == {"0"}
