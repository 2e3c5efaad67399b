"""Special tokens that a tokenizer adds around every text."""

from typing import Any, NamedTuple


def special_ids(tokenizer: Any) -> set[int]:
    """Return the ids of a tokenizer's special tokens. The unknown token, which stands for an ordinary word, is none of
    them, unless it is also another special token, such as the one that ends a text.
    """
    names = ("bos", "eos", "sep", "pad", "cls", "mask")
    others = {getattr(tokenizer, f"{name}_token_id", None) for name in names}
    unknown = {tokenizer.unk_token_id} - others
    return set(tokenizer.all_special_ids) - unknown


class SpecialTokens(NamedTuple):
    """Ids of the special tokens that a tokenizer adds before and after every text, such as `[CLS]` and `[SEP]`."""

    before: list[int]
    after: list[int]

    @staticmethod
    def of(tokenizer: Any) -> "SpecialTokens":
        """Return the ids of the special tokens that a tokenizer adds before and after a text, found by tokenizing a
        short text.
        """
        encoded = tokenizer("a", return_special_tokens_mask=True, verbose=False)
        ids, is_text = encoded["input_ids"], [not special for special in encoded["special_tokens_mask"]]
        start, stop = is_text.index(True), len(is_text) - is_text[::-1].index(True)
        return SpecialTokens(ids[:start], ids[stop:])

    @property
    def size(self) -> int:
        """Number of special tokens that are added to a text."""
        return len(self.before) + len(self.after)

    def around(self, ids: list[int]) -> list[int]:
        """Return the token ids of a text with the special tokens added before and after them."""
        return [*self.before, *ids, *self.after]
