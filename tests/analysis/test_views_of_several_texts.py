"""Views of decoder texts, generated text, several texts and examples of a data set, against eager attention."""

import dataclasses
import math

import pytest
import torch
import transformers
from tokenizers import processors

import headwise as hw
import tiny
from headwise.page.contents import AllWeights

BART = {
    "vocab_size": 97,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 37,
    "decoder_ffn_dim": 37,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 4,
    "decoder_start_token_id": 4,
    "forced_eos_token_id": None,
}
T5 = {"vocab_size": 97, "d_model": 48, "num_layers": 2, "num_heads": 6, "d_kv": 8, "d_ff": 37}
PAIRS = {
    "bart": transformers.BartConfig(**BART),
    "t5": transformers.T5Config(**T5, decoder_start_token_id=0, pad_token_id=0, eos_token_id=4),
}


def pair_model(name, implementation="eager"):
    """Return a tiny encoder-decoder with distinct heads."""
    torch.manual_seed(0)
    model = transformers.AutoModelForSeq2SeqLM.from_config(PAIRS[name], attn_implementation=implementation)
    return tiny.with_distinct_heads(model)


def require_weights(shown, kind, queries, keys, attentions):
    """Compare the weights of all heads from one text to another, in the order of the layers."""
    chosen = [
        head
        for head in shown.heads
        if (head.kind, head.attention.queries, head.attention.keys) == (kind, queries, keys)
    ]
    assert all(isinstance(head.attention.weights, AllWeights) for head in chosen)
    found = torch.stack([head.attention.weights.weights for head in chosen])
    torch.testing.assert_close(found, torch.cat(attentions).flatten(0, 1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("target", ["w10 w11 w12", "w10 w11 w12 w13"])
@pytest.mark.parametrize("name", PAIRS)
def test_a_source_and_a_target_are_viewed(name, target):
    model, tokenizer = pair_model(name), tiny.tokenizer("encoder")
    source = "w5 w6 w7"  # with special tokens as long as the longer target
    shown = hw.view(model, tokenizer, source, target=target)
    inputs = tokenizer(source, return_tensors="pt")
    labels = tokenizer(target, return_tensors="pt").input_ids
    with torch.no_grad():
        output = model(input_ids=inputs.input_ids, labels=labels, output_attentions=True)
    require_weights(shown, "self", 0, 0, output.encoder_attentions)
    require_weights(shown, "self", 1, 1, output.decoder_attentions)
    require_weights(shown, "cross", 1, 0, output.cross_attentions)
    assert len(shown.heads) == 36
    assert [text.name for text in shown.texts] == ["source", "target"]
    assert [word.text for word in shown.texts[1].words[1:]] == ["[CLS]", *target.split()]  # shifted by one
    cross = next(head for head in shown.heads if head.kind == "cross")
    assert set(cross.means).isdisjoint({"distance", "previous", "next", "self", "duplicate", "induction"})


def test_the_heads_of_a_pair_are_named_as_in_tables():
    model, tokenizer = pair_model("bart", "sdpa"), tiny.tokenizer("encoder")
    shown = hw.view(model, tokenizer, "w5 w6", target="w7 w8 w9")
    with hw.watch(model) as heads:
        inputs = tokenizer("w5 w6", return_tensors="pt")
        model(**inputs, labels=tokenizer("w7 w8 w9", return_tensors="pt").input_ids)
    names = [(row["layer"], row["head"], row["module"], row["kind"]) for row in heads.rows()]
    assert sorted((head.layer, head.head, head.module, head.kind) for head in shown.heads) == sorted(names)


def test_a_decoder_continues_a_text():
    model, tokenizer = tiny.model("decoder", top="ForCausalLM", eos_token_id=None), tiny.tokenizer("decoder")
    shown = hw.view(model, tokenizer, "w5 w6 w7", generate=6)
    ids = model.generate(**tokenizer("w5 w6 w7", return_tensors="pt"), max_new_tokens=6, do_sample=False)
    assert shown.texts[0].first_generated == 3
    assert [word.text for word in shown.words] == tokenizer.convert_ids_to_tokens(ids[0])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(ids, output_attentions=True).attentions
    require_weights(shown, "self", 0, 0, attentions)


def test_generated_ids_that_the_tokenizer_lacks_are_shown_by_their_number():
    model, tokenizer = tiny.model("decoder", top="ForCausalLM", vocab_size=128), tiny.tokenizer("decoder")
    model.lm_head.weight.data[: len(tokenizer)] = 0
    seen = hw.view(model, tokenizer, "w5 w6 w7", generate=3)
    ids = seen.texts[0].ids[0, -3:].tolist()
    assert min(ids) >= len(tokenizer)
    assert [word.text for word in seen.texts[0].words[-3:]] == [f"token {each}" for each in ids]


@pytest.mark.parametrize("name", PAIRS)
def test_an_encoder_decoder_generates_a_text(name):
    model, tokenizer = pair_model(name), tiny.tokenizer("encoder")
    model.generation_config.eos_token_id = None
    shown = hw.view(model, tokenizer, "w5 w6 w7", generate=5)
    inputs = tokenizer("w5 w6 w7", return_tensors="pt")
    ids = model.generate(input_ids=inputs.input_ids, max_new_tokens=5, do_sample=False)
    assert len(shown.texts[1].tokens) == ids.shape[1] == 6
    assert shown.texts[1].first_generated == 1
    with torch.no_grad():
        output = model(input_ids=inputs.input_ids, decoder_input_ids=ids, output_attentions=True)
    require_weights(shown, "cross", 1, 0, output.cross_attentions)


def test_a_model_that_decodes_differently_is_refused():
    class Forgetful(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, past_key_values=None, **options):
            if input_ids.shape[1] == 1:  # while it generates, its tokens are shifted
                input_ids = (input_ids + 1) % 97
            return super().forward(input_ids=input_ids, past_key_values=past_key_values, **options)

    torch.manual_seed(0)
    model = tiny.with_distinct_heads(Forgetful(tiny.model("decoder").config))
    model.generation_config.eos_token_id = None
    sentence = "^generate: expected a model whose logits in one call for all tokens equal those during generation, got"
    with pytest.raises(hw.InputError, match=sentence):
        hw.view(model, tiny.tokenizer("decoder"), "w5 w6 w7", generate=5)


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize(
    ("kind", "top", "options", "message"),
    [
        ("decoder", "", {"generate": 3}, "^model: expected a model that generates text, got LlamaModel; load it with"),
        ("encoder", "", {"target": "w5"}, "^target: expected None for a model that is not an encoder-decoder"),
        ("decoder", "ForCausalLM", {"generate": 126}, "^generate: expected at most 128 tokens, the model's limit"),
        ("decoder", "ForCausalLM", {"generate": -1}, "^generate: "),
        ("decoder", "ForCausalLM", {"keep_all": "x"}, "^keep_all: "),
    ],
)
def test_impossible_wishes_are_named(kind, top, options, message):
    with pytest.raises(hw.InputError, match=message):
        hw.view(tiny.model(kind, top=top), tiny.tokenizer(kind), "w5 w6 w7", **options)


def test_several_texts_are_averaged():
    model, tokenizer = tiny.model("encoder"), tiny.tokenizer("encoder")
    texts = tiny.texts(5, 11, 8)
    shown = hw.view(model, tokenizer, texts, title="tiny")
    single = [hw.view(model, tokenizer, text) for text in texts]
    assert len(shown) == 3
    records = {(row["layer"], row["head"]): row for row in shown.records()}
    for index, head in enumerate(shown[0].heads):
        row = records[head.layer, head.head]
        values = [view.heads[index].means["entropy"] for view in single]
        mean = math.fsum(values) / 3
        error = math.sqrt(sum((value - mean) ** 2 for value in values) / 2 / 3)
        assert (row["entropy"], row["entropy_sem"], row["entropy_n"]) == pytest.approx((mean, error, 3))
    assert list(shown.table()["role"]) == [shown.role(index).name for index in range(12)]
    assert [view.text for view in shown.select(layers=[1])] == texts
    assert len(shown.select(layers=[1])[0].heads) == 6


def test_a_list_of_texts_needs_a_text_and_as_many_targets():
    model, tokenizer = pair_model("bart"), tiny.tokenizer("encoder")
    with pytest.raises(hw.InputError, match="^text: expected a text, or a list of at least one text"):
        hw.view(model, tokenizer, [])
    with pytest.raises(hw.InputError, match="^target: expected a list of 2 texts, one per text, got 'w5'"):
        hw.view(model, tokenizer, ["w5", "w6"], target="w5")
    assert len(hw.view(model, tokenizer, ["w5", "w6"], target=["w7", "w8 w9"])) == 2
    sentence = "^generate: expected 0 with a target, which the decoder reads instead, got 3"
    with pytest.raises(hw.InputError, match=sentence):
        hw.view(model, tokenizer, "w5", target="w6", generate=3)


@pytest.mark.usefixtures("as_user")
def test_examples_are_sequences_of_the_data_set():
    model, tokenizer = tiny.model("encoder"), tiny.tokenizer("encoder")
    texts = hw.Texts(tiny.texts(*range(3, 23)), tokenizer)
    shown = hw.view_examples(model, texts, count=4, tokens=9, seed=1)
    again = hw.view_examples(model, texts, count=4, tokens=9, seed=1)
    other = hw.view_examples(model, texts, count=4, tokens=9, seed=2)
    words = [[word.text for word in view.words] for view in shown]
    assert words == [[word.text for word in view.words] for view in again]
    assert words != [[word.text for word in view.words] for view in other]
    whole = [tokenizer.convert_ids_to_tokens(ids.tolist()) for ids in texts.sequences]
    shortened = [[*ids[:8], "[SEP]"] if len(ids) > 9 else ids for ids in whole]
    assert all(each in shortened for each in words)
    assert [view.truncated for view in shown] == [each not in whole for each in words]
    assert len({tuple(each) for each in words}) == 4
    assert len(hw.view_examples(model, texts, count=99)) == 20
    with pytest.raises(hw.InputError, match="^texts: expected headwise.Texts, got list"):
        hw.view_examples(model, ["w5"])


def test_a_role_needs_two_rows_over_all_texts():
    model, tokenizer = tiny.model("decoder"), tiny.tokenizer("decoder")
    seen = hw.view(model, tokenizer, ["w5 w6 w5", "w7 w8 w9", "w9 w8 w9"])
    for index, head in enumerate(seen[0].heads):
        assert head.rows["duplicate"] == 1
        rows = [view.heads[index].rows.get("duplicate", 0) for view in seen]
        assert rows == [1, 0, 1]
        means = dict.fromkeys(head.means, 0.0) | {"duplicate": 0.9}
        copying = tuple(
            dataclasses.replace(view, heads=(dataclasses.replace(view.heads[index], means=means),)) for view in seen
        )
        assert hw.ViewSet(copying).role(0).name == "duplicate token"
        assert hw.ViewSet(copying[:2]).role(0).name == "mixed"  # one row


def test_a_text_that_its_tokenizer_ends_is_continued_with_a_warning():
    model, tokenizer = tiny.model("decoder", top="ForCausalLM"), tiny.tokenizer("decoder")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("$A [END]", None, [("[END]", 4)])
    with pytest.warns(UserWarning, match=r"^the tokenizer ends the text with \[END\]; the model continues after it$"):
        hw.view(model, tokenizer, "w5 w6", generate=2)
