"""The sink rate against means of whole attention matrices."""

import math

import pytest
import torch
import transformers

import headwise as hw
import tiny
from full_attention import weights_of
from prompt_models import HEADS, LAYERS, PADDED, language_model

pytestmark = pytest.mark.usefixtures("as_user")

IDS = torch.randint(5, 97, (3, 11), generator=torch.Generator().manual_seed(5))


def importance(model, ids, mask, places):
    """Return the mean weight on tokens at places, over the tokens that see them: (batch, layers, heads, places)."""
    weights = weights_of(model, ids, attention_mask=mask)
    is_causal = model.config.model_type != "bert"
    found = torch.full((len(ids), LAYERS, HEADS, len(places)), math.nan, dtype=torch.float64)
    for row in range(len(ids)):
        real = mask[row].nonzero()[:, 0]
        for index, place in enumerate(places):
            if place < len(real):
                queries = real[place:] if is_causal else real
                found[row, ..., index] = weights[:, row, :, queries][..., real[place]].mean(-1)
    return found


def of_heads(table, name):
    """Return the values of a column as (layers, heads)."""
    return torch.tensor([row.statistics[name].value for row in table.rows], dtype=torch.float64).view(LAYERS, HEADS)


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_rates_are_those_of_the_whole_matrix(kind, padding):
    model = language_model(kind)
    mask = torch.ones_like(IDS) if padding is None else PADDED[padding][0]
    batches = [{"input_ids": IDS, "attention_mask": mask}, {"input_ids": IDS[:, :1], "attention_mask": mask[:, :1] | 1}]
    table = hw.sink_rate(model, batches, epsilon=0.2, positions=(0, 2, 5))
    expected = torch.cat([importance(model, each["input_ids"], each["attention_mask"], (0, 2, 5)) for each in batches])
    for index, place in enumerate((0, 2, 5)):
        alpha = expected[..., index]
        is_value = ~alpha[:, 0, 0].isnan()
        alpha = alpha[is_value]
        torch.testing.assert_close(of_heads(table, f"attention_{place}"), alpha.mean(0), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(of_heads(table, f"sink_{place}"), (alpha > 0.2).double().mean(0))
        row = table.head(1, 3).statistics[f"attention_{place}"]
        sem = alpha[:, 1, 3].std().item() / math.sqrt(len(alpha))
        assert (row.n, row.sem) == (len(alpha), pytest.approx(sem, rel=1e-8))
        shares = (alpha > 0.2).double().mean((1, 2))
        of_model = table.metadata["measured"]["model"][f"sink_{place}"]
        assert of_model["value"] == pytest.approx(shares.mean().item())
        assert of_model["sem"] == pytest.approx(shares.std().item() / math.sqrt(len(alpha)))


def test_the_attention_on_the_first_token_is_the_statistic_first_except_under_a_window():
    model = language_model("llama")
    with hw.watch(model) as heads:
        model(IDS)
    first = torch.tensor([row["first"] for row in heads.rows()], dtype=torch.float64).view(LAYERS, HEADS)
    torch.testing.assert_close(of_heads(hw.sink_rate(model, [IDS]), "attention_0"), first, rtol=1e-10, atol=1e-10)
    sizes = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6}
    config = transformers.MistralConfig(**sizes, intermediate_size=37, num_key_value_heads=3, sliding_window=4)
    window = tiny.with_distinct_heads(transformers.MistralForCausalLM(config)).double()
    with hw.watch(window) as heads:
        window(IDS)
    first = torch.tensor([row["first"] for row in heads.rows()], dtype=torch.float64).view(LAYERS, HEADS)
    # 4 of 11 queries see the first token.
    torch.testing.assert_close(
        of_heads(hw.sink_rate(window, [IDS]), "attention_0"), first * 11 / 4, rtol=1e-6, atol=1e-7
    )


def test_errors_are_clustered_by_document():
    texts = hw.Texts(tiny.texts(12, 9, 12), tiny.tokenizer("decoder"), documents="cut", context=4)
    table = hw.sink_rate(tiny.model("decoder"), texts)
    assert table.metadata["measured"]["sequences"] == 9
    assert {row.statistics["sink_0"].n for row in table.rows} == {3}


def test_packed_documents_are_refused():
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]])
    packed = torch.full((1, 1, 11, 11), torch.finfo(torch.float64).min, dtype=torch.float64)
    for part in (slice(0, 5), slice(5, 11)):
        size = part.stop - part.start
        packed[..., part, part] = packed[..., part, part] * torch.ones(size, size).triu(1).double()
    batch = {"input_ids": IDS[:1], "position_ids": positions, "attention_mask": packed}
    with pytest.raises(hw.InputError, match="^dataset: expected sequences of one document each, got several first tok"):
        hw.sink_rate(language_model("llama"), [batch])


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("^positions: expected a whole number of 0 or more", {"positions": (-1,)}),
        ("^positions: expected at least one number, each once, got \\[\\]", {"positions": ()}),
        ("^epsilon: expected a finite number", {"epsilon": "a"}),
    ],
)
def test_arguments_that_are_refused(message, options):
    with pytest.raises(hw.InputError, match=message):
        hw.sink_rate(language_model("llama"), [IDS], **options)
    with pytest.raises(hw.InputError, match="^dataset: expected at least one batch, got none"):
        hw.sink_rate(language_model("llama"), [])
