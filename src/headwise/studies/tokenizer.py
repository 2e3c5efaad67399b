"""Byte-pair tokenizer trained on a text."""

from pathlib import Path
from typing import Any

from headwise.data.documents import read_documents
from headwise.errors import InputError, require

PAD, END, MASK = "<|pad|>", "<|end|>", "<|mask|>"
"""Special tokens of a trained tokenizer."""


def train_tokenizer(source: str | Path, column: str, vocabulary: int) -> Any:
    """Train a byte-level byte-pair tokenizer (Sennrich et al. 2016) on the texts of the file or folder `source`, and
    return it as a `transformers` tokenizer with at most `vocabulary` tokens. The same texts yield the same tokenizer.

    Args:
        source: file or folder: text, JSON lines, CSV or Parquet.
        column: column with the text.
        vocabulary: largest number of tokens.

    Returns:
        A `transformers` tokenizer with tokens for padding, end of text and masking.

    Raises:
        InputError: the data cannot be read or is empty; the vocabulary is smaller than the byte alphabet.
        MissingExtra: `transformers` is not installed.
    """
    require("transformers", purpose="training a tokenizer", extra="hf")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), [PAD, END, MASK]
    smallest = len(alphabet) + len(special)
    if vocabulary < smallest:
        raise InputError("vocabulary", expected=f"at least {smallest}, for bytes and special tokens", got=vocabulary)
    texts = [document.text for document in read_documents(source, column)]
    if not any(text.strip() for text in texts):
        raise InputError("data", expected="at least one document", got=f"no text in {source}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=special, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, mask_token=MASK)
