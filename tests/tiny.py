"""A tiny random model and a tokenizer of a hundred words, for what is run over texts."""

import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers, processors

WORDS = [f"w{number}" for number in range(5, 97)]
SPECIAL = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[END]": 4}


def tokenizer(kind: str):
    """Of an encoder, which puts every text between two special tokens, or of a decoder, which adds none."""
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
    """BERT or Llama with 2 layers of 6 heads; on top of it what `transformers` calls "ForCausalLM", or nothing."""
    sizes = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6}
    sizes |= {"intermediate_size": 37, "max_position_embeddings": 128} | options
    if kind == "encoder":
        config = transformers.BertConfig(**sizes)
    else:
        config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, head_dim=10)
    torch.manual_seed(seed)
    made = getattr(transformers, f"AutoModel{top}").from_config(config)
    for parameter in made.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)  # so that heads differ by more than rounding
    return made.eval()


def texts(*lengths: int) -> list[str]:
    """Texts of so many words, some of which come again."""
    generator = torch.Generator().manual_seed(7)
    return [" ".join(WORDS[i] for i in torch.randint(0, 23, (n,), generator=generator)) for n in lengths]
