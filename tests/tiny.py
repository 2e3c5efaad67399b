"""Tiny random models and a tokenizer of a hundred words, shared by tests."""

import json

import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers, processors

WORDS = [f"w{number}" for number in range(5, 97)]
SPECIAL = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[END]": 4}


def tokenizer(kind: str):
    """Return the tokenizer of an "encoder", which puts a text between two special tokens, or of a "decoder"."""
    vocabulary = SPECIAL | {word: number for number, word in enumerate(WORDS, 5)}
    words = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]"}
    if kind == "encoder":
        words.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 2), ("[SEP]", 3)])
        names |= {"cls_token": "[CLS]", "sep_token": "[SEP]"}
    else:
        names |= {"eos_token": "[END]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **names)


def model(kind: str, seed: int = 0, top: str = "", **options):
    """Return BERT ("encoder") or Llama ("decoder") with 2 layers of 6 heads, and a `top` such as "ForCausalLM"."""
    sizes = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6}
    sizes |= {"intermediate_size": 37, "max_position_embeddings": 128} | options
    if kind == "encoder":
        config = transformers.BertConfig(**sizes)
    else:
        config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, head_dim=10)
    torch.manual_seed(seed)
    return with_distinct_heads(getattr(transformers, f"AutoModel{top}").from_config(config))


def texts(*lengths: int) -> list[str]:
    """Return texts of these numbers of words, some of which repeat."""
    generator = torch.Generator().manual_seed(7)
    return [" ".join(WORDS[i] for i in torch.randint(0, 23, (n,), generator=generator)) for n in lengths]


def save(folder, kind: str, seed: int = 0, top: str = "", **options) -> None:
    """Save a model of a kind with its tokenizer in a folder."""
    model(kind, seed, top, **options).save_pretrained(folder)
    tokenizer(kind).save_pretrained(folder)


def write_texts(file, *lengths: int) -> None:
    """Write texts of these numbers of words to a file of JSON lines."""
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(*lengths)))


def with_distinct_heads(model):
    """Return the model in evaluation mode, with weights large enough that heads differ by more than rounding."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


# -- families of transformers -----------------------------------------------------------------------------------------

TOKENS = torch.randint(0, 97, (2, 13), generator=torch.Generator().manual_seed(1))
PADDED = {
    "no padding": torch.ones(2, 13, dtype=torch.long),
    "left": (torch.arange(13) >= torch.tensor([[0], [5]])).long(),
    "right": (torch.arange(13) < torch.tensor([[13], [8]])).long(),
}
"""Padding masks of `TOKENS`, by side."""

EAGER_ONLY = ("gemma2, softcap", "gpt-oss, sinks")
"""Families that transformers implements with eager attention alone."""


def configs() -> dict:
    """Return tiny configurations by name: encoders, decoders, grouped heads, windows, position bias; 3 layers each."""
    common = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6}
    rotary = common | {"intermediate_size": 37, "max_position_embeddings": 64}
    experts = rotary | {"hidden_size": 64, "intermediate_size": 64}  # their products need rows of 16 bytes
    t5 = {"vocab_size": 97, "d_model": 48, "num_layers": 3, "num_heads": 6, "d_kv": 11, "d_ff": 37}
    return {
        "bert": transformers.BertConfig(**common, intermediate_size=37),
        "gpt2": transformers.GPT2Config(vocab_size=97, n_embd=48, n_layer=3, n_head=6),
        "llama": transformers.LlamaConfig(**rotary, num_key_value_heads=2, head_dim=10),
        "mistral, window 4": transformers.MistralConfig(**rotary, num_key_value_heads=3, sliding_window=4),
        "gemma2, softcap": transformers.Gemma2Config(
            **rotary, num_key_value_heads=2, head_dim=10, attn_logit_softcapping=2.0, sliding_window=4
        ),
        "gpt-oss, sinks": transformers.GptOssConfig(
            **experts, num_key_value_heads=2, head_dim=10, num_local_experts=2, num_experts_per_tok=1, sliding_window=4
        ),
        "t5 encoder": transformers.T5Config(**t5),
    }


def family(name: str, implementation: str) -> torch.nn.Module:
    """Return the tiny model of a family in `configs`, under an attention implementation."""
    torch.manual_seed(0)
    config = configs()[name]
    config._attn_implementation = implementation
    return with_distinct_heads(
        transformers.T5EncoderModel(config) if name.startswith("t5") else transformers.AutoModel.from_config(config)
    )


FAMILIES = [(name, way) for name in configs() for way in ("sdpa", "eager") if way == "eager" or name not in EAGER_ONLY]
"""Names of `configs` with each attention implementation that transformers has for them."""
