"""Losses per example, compared with the cross-entropy of all logits and with explicit cosines."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import headwise as hw
import tiny
from headwise.analysis import losses, token_cross_entropy

IDS = torch.randint(5, 97, (3, 17), generator=torch.Generator().manual_seed(1))
REAL = torch.ones_like(IDS)
REAL[1, :4], REAL[2, 11:] = 0, 0
BATCH = {"input_ids": IDS, "attention_mask": REAL}


@torch.no_grad()
def next_token(model, ids, real):
    """Return the next-token loss of each sequence, computed token by token."""
    log_p = model(input_ids=ids, attention_mask=real).logits.log_softmax(-1)
    found = []
    for row in range(len(ids)):
        pairs = [t for t in range(ids.shape[1] - 1) if real[row, t] and real[row, t + 1]]
        found.append(-sum(float(log_p[row, t, ids[row, t + 1]]) for t in pairs) / len(pairs))
    return torch.tensor(found, dtype=log_p.dtype)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_next_token_loss_without_all_logits(bias, monkeypatch):
    monkeypatch.setattr(token_cross_entropy, "POSITIONS_PER_TILE", 7)
    monkeypatch.setattr(token_cross_entropy, "TOKENS_PER_TILE", 11)
    model = tiny.model("decoder", top="ForCausalLM").double()
    if bias:
        model.lm_head = nn.Linear(48, 97).double()
    made = []
    model.lm_head.register_forward_hook(lambda *_: made.append(None))
    hooked = hw.next_token_loss(model, BATCH)  # somebody reads the logits, so they are made
    assert len(made) == 1
    model.lm_head._forward_hooks.clear()
    assert "forward" not in vars(model.lm_head)
    found = hw.next_token_loss(model, BATCH)
    assert "forward" not in vars(model.lm_head)
    torch.testing.assert_close(found, next_token(model, IDS, REAL), atol=1e-12, rtol=0)
    torch.testing.assert_close(found, hooked, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    "loss", [hw.next_token_loss, hw.MaskedTokenLoss(4), hw.EmbeddingDistance()], ids=["next", "masked", "distance"]
)
def test_masks_that_do_not_state_the_padding_are_refused(loss):
    model = tiny.model("decoder", top="" if isinstance(loss, hw.EmbeddingDistance) else "ForCausalLM")
    if isinstance(loss, hw.EmbeddingDistance):
        loss.prepare(model, {"input_ids": IDS})
    mask = torch.ones(17, 17, dtype=torch.bool).tril().expand(3, 1, 17, 17)
    expected = r"expected the argument attention_mask of shape \(3, 17\), .* got {}; use such"
    cases = [(mask, r"one of shape \(3, 1, 17, 17\)")]
    cases += [] if isinstance(loss, hw.EmbeddingDistance) else [({"full_attention": mask}, "dict")]
    for value, got in cases:
        with pytest.raises(hw.InputError, match=expected.format(got)):
            loss(model, {"input_ids": IDS, "attention_mask": value})


def test_losses_of_encoder_decoders():
    """The last hidden states are those of the targets; `next_token_loss` knows sources alone."""
    sizes = {"vocab_size": 97, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1}
    config = transformers.BartConfig(**sizes, encoder_attention_heads=2, decoder_attention_heads=2)
    torch.manual_seed(0)
    model = transformers.BartModel(config).eval()
    targets = IDS.flip(0)
    masks = {"attention_mask": REAL, "decoder_attention_mask": REAL.flip(0)}
    batch = {"input_ids": IDS, "decoder_input_ids": targets, **masks}
    loss = hw.EmbeddingDistance()
    with torch.no_grad():
        before = model(**batch).last_hidden_state
        loss.prepare(model, batch)
        model.decoder.layers[0].fc2.weight.mul_(3.0)
        found, after = loss(model, batch), model(**batch).last_hidden_state
    means = [torch.stack([x[row][REAL.flip(0)[row].bool()].mean(0) for row in range(3)]) for x in (before, after)]
    torch.testing.assert_close(found, 1.0 - F.cosine_similarity(*means, dim=-1), atol=1e-6, rtol=0)
    with pytest.raises(hw.InputError, match="^loss: expected a decoder for next_token_loss, got the encoder-decoder"):
        hw.next_token_loss(model, batch)


def test_masked_tokens_of_a_batch_without_names():
    model, loss = tiny.model("encoder", top="ForMaskedLM"), hw.MaskedTokenLoss(4)
    with torch.no_grad():
        assert torch.equal(loss(model, {"": IDS}), loss(model, {"input_ids": IDS}))


def test_gradient_of_the_next_token_loss_is_that_of_all_logits():
    model = tiny.model("decoder", top="ForCausalLM").double()
    embeddings = model.get_input_embeddings()(IDS).detach().requires_grad_()
    gradients = []
    for hooked in (False, True):
        handle = model.lm_head.register_forward_hook(lambda *_: None) if hooked else None
        model.get_input_embeddings().register_forward_hook(lambda *_: embeddings)
        gradients.append(torch.autograd.grad(hw.next_token_loss(model, BATCH).sum(), embeddings)[0])
        if handle is not None:
            handle.remove()
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=1e-12)


def test_processed_logits_are_used():
    sizes = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 6, "head_dim": 8}
    config = transformers.Gemma2Config(**sizes, num_key_value_heads=2, intermediate_size=37)
    config.final_logit_softcapping = 0.3
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    for _ in range(2):  # the second time it is known
        found = hw.next_token_loss(model, BATCH)
        torch.testing.assert_close(found, next_token(model, IDS, REAL), atol=1e-12, rtol=0)
        assert "forward" not in vars(model.lm_head)


def test_a_model_may_return_logits_as_a_tensor():
    model = nn.Sequential(nn.Embedding(97, 13), nn.Linear(13, 97)).double()
    found = hw.next_token_loss(model, {"": IDS})
    wanted = F.cross_entropy(model(IDS)[:, :-1].flatten(0, 1), IDS[:, 1:].flatten(), reduction="none")
    torch.testing.assert_close(found, wanted.view(3, -1).mean(1), atol=1e-12, rtol=0)


@torch.no_grad()
def test_masked_token_loss():
    model = tiny.model("encoder", top="ForMaskedLM").double()
    seen = []
    handle = model.register_forward_pre_hook(lambda _, args, given: seen.append(given["input_ids"]), with_kwargs=True)
    loss = hw.MaskedTokenLoss(1, special=[5, 6, 7], share=0.2)
    found = loss(model, BATCH)
    handle.remove()
    masked = seen[-1] == 1
    assert masked.sum(1).tolist() == [
        -(-int(n) * 2 // 10) for n in ((REAL == 1) & ~torch.isin(IDS, torch.tensor([5, 6, 7]))).sum(1)
    ]
    assert not masked[REAL == 0].any()
    assert not torch.isin(IDS[masked], torch.tensor([5, 6, 7])).any()
    log_p = model(input_ids=IDS.masked_fill(masked, 1), attention_mask=REAL).logits.log_softmax(-1)
    wanted = [-log_p[row, masked[row], IDS[row, masked[row]]].mean() for row in range(3)]
    torch.testing.assert_close(found, torch.stack(wanted), atol=1e-12, rtol=0)
    assert torch.equal(loss(model, BATCH), found)  # the same tokens again
    padded = {name: F.pad(values, (0, 5)) for name, values in BATCH.items()}
    torch.testing.assert_close(loss(model, padded), found, atol=1e-12, rtol=0)  # with more padding as well
    other = hw.MaskedTokenLoss(1, special=[5, 6, 7], share=0.2, seed=1)(model, BATCH)
    assert not torch.equal(other, found)
    assert hw.MaskedTokenLoss(1, special=range(97))(model, BATCH).isnan().all()


@torch.no_grad()
def test_embedding_distance():
    model, loss = tiny.model("encoder").double(), hw.EmbeddingDistance()
    with pytest.raises(hw.InputError, match=r"loss: expected prepare\(model, batch\) before the first loss, got none"):
        loss(model, BATCH)
    loss.prepare(model, BATCH)
    assert loss(model, BATCH).abs().max() < 1e-12

    def embedding():
        hidden = model(**BATCH).last_hidden_state
        return torch.stack([hidden[row, REAL[row] == 1].mean(0) for row in range(3)])

    whole = embedding()
    with hw.gate(model, {(1, 2): 0.0}):
        found, without = loss(model, BATCH), embedding()
    wanted = 1 - (whole * without).sum(-1) / whole.norm(dim=-1) / without.norm(dim=-1)
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)
    assert found.min() > 1e-4


REFUSED = {
    "model: expected one that returns logits, got BaseModelOutput": lambda: hw.next_token_loss(
        tiny.model("decoder"), BATCH
    ),
    r"loss: expected batches with input_ids \(batch, length\), got pixels": lambda: hw.next_token_loss(
        tiny.model("decoder", top="ForCausalLM"), {"pixels": IDS}
    ),
    "loss: expected one of next-token, masked-token, .*, got 'lm'": lambda: losses.loss_by_name("lm", None),
    "loss: expected a tokenizer with a mask token, got one without": lambda: losses.loss_by_name(
        "masked-token", tiny.tokenizer("decoder")
    ),
    "special: expected token ids, got 'x'": lambda: hw.MaskedTokenLoss(1, special="x"),
    "mask_id: expected a whole number of 0 or more, got None": lambda: hw.MaskedTokenLoss(None),
    "share: expected a probability": lambda: hw.MaskedTokenLoss(1, share=1.5),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_losses_that_are_refused(sentence, as_user):
    with pytest.raises(hw.InputError, match=sentence):
        REFUSED[sentence]()
