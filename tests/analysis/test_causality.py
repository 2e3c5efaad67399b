"""Models whose next-token loss has no meaning are refused, and causal models are not."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

import headwise as hw
import tiny
from headwise.analysis.causality import require_causal

SIZES = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 64, "max_position_embeddings": 512}

REFUSED = "^loss: expected hw.next_token_loss for a causal model, got BertForMaskedLM, whose logits depend on later"


def encoder(dtype=torch.float32):
    """Return BERT with its default initialization, in which one token has little influence on others."""
    torch.manual_seed(0)
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)).eval().to(dtype)


def tokens(rows, length):
    return torch.randint(6, 97, (rows, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("length", [2, 3, 16, 128, 400])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_an_encoder_is_refused_at_any_length_and_dtype(length, dtype):
    batches = [{"input_ids": tokens(1, 1)}, {"input_ids": tokens(2, length)}]
    with pytest.raises(hw.InputError, match=REFUSED):
        require_causal(hw.next_token_loss, encoder(dtype), batches)
    require_causal(hw.MaskedTokenLoss(1), encoder(dtype), batches)


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_longest_row_is_changed(side):
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[0, 1:] = 0
    mask[1, -3:] = 0
    mask = mask if side == "right" else mask.flip(1)
    with pytest.raises(hw.InputError, match=REFUSED):
        require_causal(hw.next_token_loss, encoder(), [{"input_ids": tokens(2, 10), "attention_mask": mask}])


@pytest.mark.parametrize("token", [0, 1, 96])
def test_a_text_of_one_token_that_repeats_is_changed_too(token):
    with pytest.raises(hw.InputError, match=REFUSED):
        require_causal(hw.next_token_loss, encoder(), [{"input_ids": torch.full((1, 8), token)}])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("side", ["left", "right", "no padding"])
def test_causal_models_are_accepted(side, dtype):
    experts = transformers.MixtralConfig(**SIZES, num_key_value_heads=2)
    for model in (
        tiny.model("decoder", top="ForCausalLM"),
        tiny.with_distinct_heads(transformers.MixtralForCausalLM(experts)),
        transformers.BertLMHeadModel(transformers.BertConfig(**SIZES, is_decoder=True)),
    ):
        batch = {"input_ids": tiny.TOKENS, "attention_mask": tiny.PADDED[side]}
        training, before = model.training, tiny.TOKENS.clone()
        require_causal(hw.next_token_loss, model.to(dtype), [batch])
        assert torch.equal(batch["input_ids"], before)
        assert model.training == training


class Rounding(nn.Module):
    """Model with logits of equal numbers, to which it adds a number of units of rounding in its second call."""

    def __init__(self, units):
        super().__init__()
        self.units, self.calls = units, 0

    def forward(self, input_ids):
        self.calls += 1
        added = self.units * torch.finfo(torch.float32).eps * (self.calls - 1) if self.calls > 1 else 0.0
        return SimpleNamespace(logits=torch.ones(*input_ids.shape, 5) + added)


def test_rounding_is_accepted():
    require_causal(hw.next_token_loss, Rounding(8), [{"input_ids": tokens(1, 6)}])
    for units in (1000, torch.nan):
        with pytest.raises(hw.InputError, match="got Rounding, whose logits depend on later tokens; a remedy$"):
            require_causal(hw.next_token_loss, Rounding(units), [{"input_ids": tokens(1, 6)}], remedy="a remedy")


class Attending(nn.Module):
    """Model whose logits depend on all tokens that a mask makes visible."""

    def __init__(self, is_visible):
        super().__init__()
        self.is_visible, self.embedding, self.start = is_visible, nn.Embedding(97, 32), 0.0

    def forward(self, input_ids, logits_to_keep=0):
        x = self.embedding(input_ids)
        visible = self.is_visible(*torch.meshgrid(*[torch.arange(x.shape[1])] * 2, indexing="ij"))
        scores = (x @ x.mT / x.shape[-1]).masked_fill(~visible, -torch.inf)
        logits = (scores.softmax(-1) @ x) @ self.embedding.weight.T
        logits[:, 0] += self.start
        return SimpleNamespace(logits=logits[:, -logits_to_keep:])


@pytest.mark.parametrize("length", [16, 17, 32, 64])
@pytest.mark.parametrize(
    "is_visible",
    [
        lambda query, key: query // 8 == key // 8,
        lambda query, key: query // 2 == key // 2,
        lambda query, key: (key <= query) | (key < 2),
        lambda query, key: (key <= query) | (query >= 12),
    ],
    ids=["chunks of 8", "chunks of 2", "a prefix of 2", "the end"],
)
def test_later_tokens_that_are_visible_in_a_part_of_the_text_are_found(is_visible, length):
    torch.manual_seed(0)
    with pytest.raises(hw.InputError, match="whose logits depend on later tokens"):
        require_causal(hw.next_token_loss, Attending(is_visible), [{"input_ids": tokens(2, length)}])


def test_logits_of_some_tokens_alone_are_not_compared():
    model = Attending(lambda query, key: key <= query)
    require_causal(hw.next_token_loss, model, [{"input_ids": tokens(2, 9)}])
    require_causal(hw.next_token_loss, model, [{"input_ids": tokens(2, 9), "logits_to_keep": 1}])
    model.start = torch.nan
    require_causal(hw.next_token_loss, model, [{"input_ids": tokens(2, 9)}])
