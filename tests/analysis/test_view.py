"""Views of all-MiniLM-L6-v2 and tiny models against eager attention, and models and texts that are refused."""

import copy
import unicodedata

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

import headwise as hw
import tiny
from headwise.analysis.view import view
from headwise.attention.backends.blockwise import tiles
from headwise.data.models import find_model
from oracles import statistics_of

SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


@pytest.fixture(scope="module")
def eager(minilm):
    """Eager attention weights of MiniLM on the question of the demo, `(layers, heads, tokens, tokens)`."""
    model = transformers.AutoModel.from_pretrained(minilm.model.config._name_or_path, attn_implementation="eager")
    inputs = minilm.tokenizer("Which do you like better, coffee or tea?", return_tensors="pt")
    with torch.no_grad():
        return torch.cat(model(**inputs, output_attentions=True).attentions)


def test_all_statistics_of_all_72_heads_equal_their_definition(coffee, eager):
    assert [(head.layer, head.head) for head in coffee.heads] == [(x, y) for x in range(6) for y in range(12)]
    special = [word.special for word in coffee.words]
    for head in coffee.heads:
        expected = statistics_of(eager[head.layer, head.head], range(12), special)
        for name, value in expected.items():
            assert head.means[name] == pytest.approx(value, rel=1e-4, abs=1e-5), (head.name, name)


def test_words_pictures_and_largest_weights_equal_eager_attention(coffee, eager):
    text = "[CLS] Which do you like better , coffee or tea ? [SEP]"
    assert [word.text for word in coffee.words] == text.split()
    assert [word.special for word in coffee.words] == [True, *[False] * 10, True]
    for head in coffee.heads:  # each word is one token here
        torch.testing.assert_close(head.picture, eager[head.layer, head.head], rtol=1e-4, atol=1e-6)
        weights, keys = eager[head.layer, head.head].topk(8)
        torch.testing.assert_close(head.top_weights, weights, rtol=1e-4, atol=1e-6)
        assert (head.top_keys == keys).float().mean() > 0.95  # equal weights may come in another order


def test_heads_0_2_and_1_8_attend_to_the_tokens_before_and_after(coffee):
    head = coffee.head(0, 2)
    assert (head.role.name, coffee.head(1, 8).role.name) == ("previous token", "next token")
    assert head.means["previous"] > 0.99
    assert head.means["entropy"] < 0.02


def links(shown, layer, head):
    """Return the links of a head by the texts of their two words (query, key)."""
    head_links = shown.head(layer, head).links
    return {(shown.words[link.query].text, shown.words[link.key].text): link for link in head_links}


def test_head_0_9_links_tea_to_coffee_and_head_0_3_links_both_ways(coffee):
    one_way = links(coffee, 0, 9)["tea", "coffee"]
    assert one_way.weight == pytest.approx(0.144, abs=0.001)
    assert one_way.back is None
    both = links(coffee, 0, 3)["coffee", "tea"]
    assert (both.weight, both.back) == pytest.approx((0.322, 0.171), abs=0.001)
    assert ("tea", "coffee") not in links(coffee, 0, 3)  # one link per pair


def test_links_join_two_words_and_no_punctuation_or_special_tokens(coffee):
    for head in coffee.heads:
        for link in head.links:
            assert link.query != link.key
            assert coffee.words[link.query].lexical
            assert coffee.words[link.key].lexical
        weights = [round(link.weight, 4) for link in head.links]
        assert weights == sorted(weights, reverse=True)


def test_pieces_of_a_word_are_merged(minilm, monkeypatch):
    text = "Unbelievably, headwise tokenizes antidisestablishmentarianism"
    shown = view(minilm.model, minilm.tokenizer, text)
    assert [word.text for word in shown.words if word.lexical] == text.replace(",", "").split()
    assert shown.tokens > len(shown.words)
    for head in shown.heads:
        torch.testing.assert_close(head.picture.sum(-1), torch.ones(len(shown.words)))
    for rows in (1, 2):  # words span blocks
        monkeypatch.setattr(tiles, "rows_of", lambda *_, rows=rows: rows)
        for head, again in zip(shown.heads, view(minilm.model, minilm.tokenizer, text).heads, strict=True):
            torch.testing.assert_close(again.picture, head.picture)
            torch.testing.assert_close(again.top_weights, head.top_weights)
            assert again.means == pytest.approx(head.means, rel=1e-4, abs=1e-5, nan_ok=True)
            assert [(link.query, link.key) for link in again.links] == [(link.query, link.key) for link in head.links]


def test_a_long_text_is_pooled(minilm):
    shown = view(minilm.model, minilm.tokenizer, "one two three four " * 40)
    head = shown.head(0, 2)
    assert head.picture.shape == (64, 64)
    assert head.top_keys.shape == (len(shown.words), 8)
    torch.testing.assert_close(head.picture.sum(-1), torch.ones(64))
    assert head.role.name == "previous token"
    assert head.picture.diagonal().sum() + head.picture.diagonal(-1).sum() > 50


@pytest.fixture(scope="module")
def smollm2_tokenizer():
    """Tokenizer of SmolLM2, without its model."""
    return find_model("smollm2").tokenizer()


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize("text", ["", "   \n"])
def test_an_empty_text_is_refused(minilm, text):
    with pytest.raises(hw.InputError, match="^text: expected at least one word, got an empty text"):
        view(minilm.model, minilm.tokenizer, text)


def test_a_text_longer_than_the_limit_of_the_model_is_refused(minilm):
    text = "word " * 600
    with pytest.raises(hw.InputError, match="^text: expected at most 512 tokens, .*, got 602; --truncate"):
        view(minilm.model, minilm.tokenizer, text)
    assert view(minilm.model, minilm.tokenizer, text, truncate=True).tokens == 512
    # The start may be cut off, too.
    words = " ".join(f"w{number}" for number in range(300))
    tokenizer = copy.deepcopy(minilm.tokenizer)
    tokenizer.truncation_side = "left"
    shown = view(minilm.model, tokenizer, words, truncate=True).texts[0]
    assert shown.truncated
    assert words.endswith(shown.text)
    assert shown.text.startswith(shown.words[1].text)


def test_a_missing_layer_or_head_is_refused(coffee):
    assert [head.name for head in coffee.select(layers=[0, 5], heads=[9]).heads] == ["0.9", "5.9"]
    with pytest.raises(hw.InputError, match="^layer: expected 0 to 5, got 6"):
        coffee.select(layers=[6])
    with pytest.raises(hw.InputError, match="^head: expected 0 to 11, got -1"):
        coffee.select(heads=[-1])
    with pytest.raises(hw.InputError, match=r"^head: expected a \(layer, head\) of this view, got \(6, 0\)"):
        coffee.head(6, 0)


def test_attention_that_is_not_a_softmax_is_refused_by_name(minilm, monkeypatch):
    def odd(module, *args, **kwargs):
        out, weights = sdpa_attention_forward(module, *args, **kwargs)
        out[:, :, 3] *= 1.01  # one head of twelve, one percent
        return out, weights

    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", odd)
    reason = "^model: .* got none in encoder.layer.0.* output in these modules is not that of softmax attention$"
    with pytest.raises(hw.InputError, match=reason):
        view(minilm.model, minilm.tokenizer, "more than a softmax")


def test_the_view_does_not_depend_on_the_implementation(minilm, coffee):
    eager = transformers.AutoModel.from_pretrained(minilm.model.config._name_or_path, attn_implementation="eager")
    for ours, theirs in zip(view(eager.eval(), minilm.tokenizer, coffee.text).heads, coffee.heads, strict=True):
        assert ours.means == pytest.approx(theirs.means, abs=1e-5, nan_ok=True)
        assert ours.role is theirs.role


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_decoder_has_the_same_visible_keys_under_both_implementations(implementation):
    model = tiny.model("decoder", attn_implementation=implementation)
    for parameter in model.parameters():
        parameter.data.zero_()  # uniform attention
    for head in view(model, tiny.tokenizer("decoder"), "w5 w6 w7 w5 w6 w7").heads:
        assert head.means["evenness"] == pytest.approx(1.0)
        assert head.role.name == "broad"


class TestInputs:
    """Refused models, tokenizers and texts."""

    pytestmark = pytest.mark.usefixtures("as_user")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"text": None}, "text: expected a string, got NoneType"),
            ({"text": "caf\udce9"}, "text: expected text that can be written as UTF-8"),
            ({"model": "minilm"}, "model: expected a transformers model, got str"),
            ({"model": torch.nn.Linear(2, 2)}, "model: expected a model in evaluation mode, got training"),
            (
                {"model": torch.nn.Linear(2, 2).eval()},
                r"model: expected a model that takes these tokens, got RuntimeError \(",
            ),
            (
                {"model": torch.nn.Embedding(60000, 2).eval()},
                "model: expected attention in a way that can be seen, got none in Embedding",
            ),
            ({"processor": None}, "tokenizer: expected a transformers tokenizer, got NoneType"),
        ],
    )
    def test_wrong_types_are_refused(self, minilm, change, message):
        arguments = {"model": minilm.model, "processor": minilm.tokenizer, "text": "hi"} | change
        with pytest.raises(hw.InputError, match="^" + message):
            view(**arguments)

    def test_a_model_in_training_mode_is_refused(self, minilm):
        minilm.model.train()
        try:
            with pytest.raises(hw.InputError, match="^model: expected a model in evaluation mode, got training; call"):
                view(minilm.model, minilm.tokenizer, "hi")
        finally:
            minilm.model.eval()

    def test_a_vision_model_is_refused(self, minilm):
        model = transformers.ViTModel(transformers.ViTConfig(**SMALL, image_size=4, patch_size=2)).eval()
        with pytest.raises(hw.InputError, match="^model: expected a model that reads text, got one .* pixel_values"):
            view(model, minilm.tokenizer, "hi")

    def test_a_tokenizer_of_another_model_is_refused(self, minilm):
        model = transformers.BertModel(transformers.BertConfig(vocab_size=50, **SMALL)).eval()
        with pytest.raises(hw.InputError, match="^tokenizer: expected ids below 50, the model's vocabulary, got"):
            view(model, minilm.tokenizer, "hi")


def test_the_encoder_of_an_encoder_decoder_is_viewed(minilm):
    sizes = {"d_model": 24, "encoder_layers": 2, "decoder_layers": 1, "encoder_ffn_dim": 8}
    heads = {"encoder_attention_heads": 3, "decoder_attention_heads": 3}
    config = transformers.BartConfig(vocab_size=minilm.tokenizer.vocab_size, **sizes, **heads)
    shown = view(transformers.BartModel(config).eval(), minilm.tokenizer, "the encoder alone")
    assert len(shown.heads) == 2 * 3


def test_the_limit_of_positions_that_start_after_the_padding_index(minilm):
    sizes = {"vocab_size": minilm.tokenizer.vocab_size, "max_position_embeddings": 34}
    config = transformers.RobertaConfig(**sizes, pad_token_id=1, **SMALL)
    model = transformers.RobertaModel(config).eval()
    assert view(model, minilm.tokenizer, "word " * 30).tokens == 32
    with pytest.raises(hw.InputError, match="^text: expected at most 32 tokens"):
        view(model, minilm.tokenizer, "word " * 31)


def test_layers_that_share_a_module_are_viewed_separately(minilm):
    sizes = SMALL | {"vocab_size": minilm.tokenizer.vocab_size, "num_hidden_layers": 3}
    config = transformers.AlbertConfig(**sizes, embedding_size=8)
    shown = view(transformers.AlbertModel(config).eval(), minilm.tokenizer, "one layer three times")
    assert sorted({head.layer for head in shown.heads}) == [0, 1, 2]


def words_of(tokenizer, text):
    from headwise.data.tokenization import encode_text

    class Model(torch.nn.Module):
        config = transformers.BertConfig(max_position_embeddings=1000)

        def get_input_embeddings(self):
            return torch.nn.Embedding(60000, 1)

    encoded = encode_text(Model(), tokenizer, text, False)
    return [(word.text, word.special, word.lexical) for word in encoded.words], encoded.word_of.tolist()


def test_words_of_a_tokenizer_without_pre_tokenization():
    letters = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", "▁", *"abcde,"])}
    tokenizer = transformers.LlamaTokenizer(vocab=letters, merges=[])
    pieces = tokenizer("abc de, a").word_ids()
    assert len(set(pieces) - {None}) == 1  # the trap: one piece, many words
    names = [name for name, special, _ in words_of(tokenizer, "abc de, a")[0] if not special]
    assert names == ["abc", "de,", "a"]


JOINED = [
    "👨\u200d👩\u200d👧",
    "🇩🇪",
    "🇯🇵🇫🇷",
    "👍🏽",
    "❤️\u200d🔥",
    "cafe\u0301",
    "नमस्ते",
    "🏴\U000e0067\U000e0062\U000e007f",
    "نمی\u200c",
]
"""Words with characters that consist of several: a family, flags, a skin tone, letters with marks."""


def bytes_tokenizer():
    """Return a tokenizer whose tokens are bytes, and which splits letters, marks and other characters apart."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_of = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    bytes_of.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_of.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bytes_of)


@pytest.mark.parametrize("word", JOINED)
def test_a_character_that_readers_see_as_one_is_in_one_word(word):
    from headwise.data.tokenization import decoded_words

    tokenizer = bytes_tokenizer()
    words, word_of = words_of(tokenizer, f"a {word} b")
    assert [text for text, *_ in words if text != "␣"] == ["a", word, "b"]
    assert word_of == sorted(word_of)
    decoded = decoded_words(tokenizer, tokenizer(f"a {word} b")["input_ids"])
    assert [each.text for each in decoded.words if each.text != "␣"] == ["a", word, "b"]


def test_invisible_characters_that_join_nothing_are_written_as_escapes():
    words, _ = words_of(bytes_tokenizer(), "a\u200bb \u200d x\u202ey")
    assert "".join(text for text, *_ in words) == "a\\u200bb\\u200dx\\u202ey"


def test_long_words_are_cut_between_characters_as_readers_see_them():
    from headwise.analysis.view_result import shortened

    family = "👨\u200d👩\u200d👧"
    assert shortened(family * 30) == f"{family * 10}…{family * 9}"
    assert shortened(family * 20) == family * 20
    assert shortened("x" * 30) == f"{'x' * 10}…{'x' * 9}"


@pytest.mark.slow
def test_words_of_the_tokenizer_of_smollm2(smollm2_tokenizer):
    words, word_of = words_of(smollm2_tokenizer, "<|im_start|>user\nunbelievable  你喜<|im_end|>")
    assert words == [
        ("<|im_start|>", True, False),
        ("user", False, True),
        ("\\n", False, False),
        ("unbelievable", False, True),
        ("␣", False, False),
        ("␣", False, False),
        ("你", False, True),
        ("喜", False, True),
        ("<|im_end|>", True, False),
    ]
    assert len(word_of) > len(words)
    assert word_of == sorted(word_of)


BERT = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 37}
RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
GPT = {"vocab_size": 97, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 64}
OWN_SOFTMAX = {
    "bloom": transformers.BloomConfig(vocab_size=97, hidden_size=48, n_layer=2, n_head=6),
    "gptj": transformers.GPTJConfig(**GPT, rotary_dim=4),
    "mpt": transformers.MptConfig(vocab_size=97, d_model=48, n_layers=2, n_heads=6),
    "deberta-v2": transformers.DebertaV2Config(**BERT, **RELATIVE),
    "mpnet": transformers.MPNetConfig(**BERT),
    "xlnet": transformers.XLNetConfig(vocab_size=97, d_model=48, n_layer=2, n_head=6, d_inner=37),
}


@torch.no_grad()
def eager_attentions(model, tokenizer, text):
    """Return the attention weights of a model on a text, under eager attention."""
    if model.config._attn_implementation != "eager":  # as of models with a softmax of their own
        model.set_attn_implementation("eager")
    return model(**tokenizer(text, return_tensors="pt"), output_attentions=True).attentions


def require_view_of(shown, attentions):
    """Compare a view's weights, pictures and entropies with the weights of a text whose tokens are one word each."""
    layers = sorted({head.layer for head in shown.heads})
    assert len(layers) == len(attentions)
    assert [(head.layer, head.head) for head in shown.heads] == [(x, y) for x in layers for y in range(6)]
    for head in shown.heads:
        weights = attentions[layers.index(head.layer)][0, head.head]
        for found in (head.picture, head.attention.tiles, head.attention.weights.weights):
            torch.testing.assert_close(found, weights, rtol=1e-4, atol=1e-6)
        assert head.means["entropy"] == pytest.approx(torch.special.entr(weights).sum(-1).mean().item(), rel=1e-4)


COMMON = {name: tiny.configs()[name] for name in ("bert", "llama", "mistral, window 4", "gpt-oss, sinks")}


@pytest.mark.parametrize(
    ("name", "implementation"),
    [*((name, None) for name in OWN_SOFTMAX), *((name, "eager") for name in COMMON)]
    + [(name, "sdpa") for name in COMMON if name not in tiny.EAGER_ONLY],
)
def test_views_of_models_equal_eager_attention(name, implementation):
    """Without an implementation, a model has a softmax of its own."""
    tokenizer, config = tiny.tokenizer("encoder"), (OWN_SOFTMAX | COMMON)[name]
    torch.manual_seed(0)
    model = tiny.with_distinct_heads(transformers.AutoModel.from_config(config, attn_implementation=implementation))
    (text,) = tiny.texts(27)
    shown = view(model, tokenizer, text)
    require_view_of(shown, eager_attentions(model, tokenizer, text))


class Plain(torch.nn.Module):
    """Encoder of torch.nn over token ids."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(97, 24)
        layer = torch.nn.TransformerEncoderLayer(24, 6, 37, batch_first=True, dropout=0.0)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens):
        return self.encoder(self.embedding(tokens))


class Named(Plain):
    """Encoder of torch.nn whose argument is named `input_ids`, as in transformers."""

    def forward(self, input_ids):
        return super().forward(input_ids)


@pytest.mark.parametrize("kind", [Plain, Named])
def test_a_torch_module_with_a_tokenizer_is_viewed(kind):
    torch.manual_seed(0)
    model, tokenizer = tiny.with_distinct_heads(kind()), tiny.tokenizer("encoder")
    (text,) = tiny.texts(17)
    shown = view(model, tokenizer, text)
    attentions = []
    with torch.no_grad():
        x = model.embedding(tokenizer(text, return_tensors="pt")["input_ids"])
        for layer in model.encoder.layers:
            attentions.append(layer.self_attn(x, x, x, average_attn_weights=False)[1])
            x = layer(x)
    require_view_of(shown, attentions)


def test_attention_over_other_than_the_tokens_is_refused_by_name():
    class Folded(Plain):
        def forward(self, tokens):
            return self.encoder(self.embedding(tokens).view(2, -1, 24))

    (text,) = tiny.texts(16)  # and two special tokens
    expected = "^model: expected self-attention over the 18 tokens of the text, got"
    with pytest.raises(hw.InputError, match=f"{expected} a batch of 2 with 9 queries and 9 keys in encoder"):
        view(Folded().eval(), tiny.tokenizer("encoder"), text)


def test_cross_attention_is_left_out_with_a_warning():
    torch.manual_seed(0)
    config = transformers.BertConfig(**BERT, is_decoder=True, add_cross_attention=True)
    model, tokenizer = tiny.with_distinct_heads(Crossed(config)), tiny.tokenizer("encoder")
    (text,) = tiny.texts(16)
    sentence = "^attention over something else than the text was left out: 18 queries and 5 keys in encoder.layer"
    with pytest.warns(UserWarning, match=sentence):
        shown = view(model, tokenizer, text)
    require_view_of(shown, eager_attentions(model, tokenizer, text))


def test_a_model_without_a_token_embedding_method_is_viewed():
    config = transformers.CanineConfig(hidden_size=48, num_hidden_layers=2, num_attention_heads=6, intermediate_size=37)
    with pytest.raises(NotImplementedError):
        transformers.CanineModel(config).get_input_embeddings()

    class Unnamed(transformers.BertModel):
        def get_input_embeddings(self):
            raise NotImplementedError

    model = Unnamed(transformers.BertConfig(**BERT)).eval()
    assert len(view(model, tiny.tokenizer("encoder"), "w5 w6").heads) == 12


class Crossed(transformers.BertModel):
    """BERT whose cross-attention attends to five additional vectors."""

    def forward(self, input_ids, **options):
        return super().forward(input_ids, encoder_hidden_states=torch.ones(1, 5, 48), **options)


def test_eager_attention_with_inconsistent_weights_and_output_is_refused_by_name(minilm, monkeypatch):
    from transformers.models.bert import modeling_bert

    eager = modeling_bert.eager_attention_forward

    def odd(*args, **kwargs):
        out, weights = eager(*args, **kwargs)
        return out, weights.roll(1, -1)

    monkeypatch.setattr(modeling_bert, "eager_attention_forward", odd)
    model = transformers.AutoModel.from_pretrained(minilm.model.config._name_or_path, attn_implementation="eager")
    with pytest.raises(hw.InputError, match=r"^model: .* got an output that differs by .*% in encoder.layer.0"):
        view(model.eval(), minilm.tokenizer, "weights of something else")


def test_a_view_leaves_no_trace_and_runs_inside_a_watch(minilm):
    with hw.watch(minilm.model) as heads:
        first = view(minilm.model, minilm.tokenizer, "seen twice")
    second = view(minilm.model, minilm.tokenizer, "seen twice")
    for head, again in zip(first.heads, second.heads, strict=True):
        torch.testing.assert_close(head.picture, again.picture, rtol=0, atol=0)
    for row, head in zip(heads.rows(), second.heads, strict=True):
        assert row["entropy"] == pytest.approx(head.means["entropy"], rel=1e-6)
        assert row["output_norm"] > 0
    assert not any(module._forward_hooks for module in minilm.model.modules())


def test_a_text_cut_by_a_tokenizer_without_spans_is_reported(minilm):
    tokenizer = transformers.ByT5Tokenizer(model_max_length=16)
    shown = view(minilm.model, tokenizer, "A text of more than sixteen bytes.", truncate=True).texts[0]
    assert shown.truncated
    assert shown.text == "A text of more "
    emoji = view(minilm.model, tokenizer, "a 😀").texts[0]
    assert len({word.text for word in emoji.words[2:6]}) == 4  # four different bytes, none of them blank


@pytest.mark.parametrize(
    ("text", "words"),
    [("résumés are café", ["résumés", "are", "café"]), ("हिन्दी भाषा", ["हिन्दी", "भाषा"])],
)
@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_accents_that_the_tokenizer_drops_do_not_split_a_word(minilm, text, words, form):
    shown = view(minilm.model, minilm.tokenizer, unicodedata.normalize(form, text))
    assert [unicodedata.normalize("NFC", word.text) for word in shown.words[1:-1]] == words
