"""Views of a few sequences of a data set, for pages that show a profile or another table of heads."""

from typing import Any

import torch
from torch import nn

from headwise.analysis.head_view import ViewedText
from headwise.analysis.view import KEPT_TOKENS, view_of
from headwise.analysis.view_result import View
from headwise.analysis.view_set import ViewSet
from headwise.checks import require_module, whole_number
from headwise.data.batches import device_of, evaluation_mode
from headwise.data.texts import Texts
from headwise.data.tokenization import SpecialTokens, decoded_words, text_model
from headwise.errors import InputError
from headwise.intercept.model_name import model_name
from headwise.progress import progress_bar


def view_examples(
    model: nn.Module, texts: Texts, *, count: int = 8, tokens: int = 96, seed: int = 0, title: str | None = None
) -> ViewSet:
    """View the attention of each head on some sequences of a data set, drawn at random without replacement.

    Args:
        model: a `transformers` model; of an encoder-decoder, the encoder is viewed.
        texts: the data set.
        count: number of sequences; all if there are fewer.
        tokens: number of tokens of a sequence, from its start, that the model reads; special tokens stay at both ends.
        seed: of the random choice.
        title: name of the model, for display; by default that of its hub id, folder or class.

    Raises:
        InputError: an argument cannot be used; no self-attention over the sequences was intercepted.

    Example:
        >>> texts = headwise.Texts("corpus.jsonl", tokenizer)  # doctest: +SKIP
        >>> seen = headwise.view_examples(model, texts)  # doctest: +SKIP
        >>> headwise.write_page("page.html", headwise.profile(model, texts), seen)  # doctest: +SKIP
    """
    require_module(model)
    if not isinstance(texts, Texts):
        raise InputError("texts", expected="headwise.Texts", got=type(texts).__name__)
    whole_number("count", count, least=1)
    whole_number("tokens", tokens, least=1)
    title = model_name(model) if title is None else title
    model, sequences = text_model(model), texts.within(text_model(model)).sequences
    order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(seed))[:count]
    special_tokens = SpecialTokens.of(texts.tokenizer)
    chosen = [_shortened(sequences[index].tolist(), special_tokens, tokens) for index in sorted(order.tolist())]
    with evaluation_mode(model), progress_bar("examples", len(chosen), "texts", transient=True) as bar:
        return ViewSet(tuple(_view_ids(model, texts.tokenizer, ids, title, cut) for ids, cut in bar.track(chosen)))


def _shortened(ids: list[int], special_tokens: SpecialTokens, length: int) -> tuple[list[int], bool]:
    """Return the first tokens of a sequence, and True if some were cut off. Special tokens that the tokenizer adds to
    every text stay at both ends.
    """
    if len(ids) <= length:
        return ids, False
    before, after = special_tokens
    inner = ids[len(before) :] if ids[: len(before)] == before else ids
    if after and inner[-len(after) :] == after:
        inner = inner[: -len(after)]
    return special_tokens.around(inner[: max(length - special_tokens.size, 1)]), True


def _view_ids(model: Any, tokenizer: Any, ids: list[int], title: str, is_cut: bool) -> View:
    """Return the view of one sequence of token ids."""
    tensor, decoded = torch.tensor([ids]), decoded_words(tokenizer, ids)
    shown = "".join(decoded.pieces).strip()
    text = ViewedText("text", shown, is_cut, decoded.tokens, decoded.words, decoded.word_of, tensor)
    inputs = {"input_ids": tensor.to(device_of(model))}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    return view_of(model, [text], inputs, title=title, keep_all=KEPT_TOKENS)
