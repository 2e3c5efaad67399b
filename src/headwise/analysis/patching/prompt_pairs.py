"""Pairs of prompts whose answers differ: their tokens, the model's run on each, and the scale between both runs."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.head_pass import TableT
from headwise.analysis.nonfinite import nonfinite_error
from headwise.analysis.prompts import AnswerTokens, one_batch
from headwise.analysis.recording import RecordedOutputs, RecordedRun
from headwise.analysis.repeated_runs import restored_state
from headwise.checks import head_pairs, require_module
from headwise.data.batches import call_model, copied, evaluation_mode
from headwise.errors import InputError
from headwise.intercept.install import intercepted
from headwise.intercept.interceptor import SiteKey
from headwise.runs.fingerprint import run_settings
from headwise.runs.rows import HeadRow, MeanEstimate
from headwise.settings import PATCH_DIRECTIONS
from headwise.shapes import Float

LayerHead = tuple[int | str, int]
"""A head: its layer's number, or the path of its attention module, and its index in the layer."""

SiteHead = tuple[SiteKey, dict[str, Any]]
"""A head: its site (a module's self- or cross-attention), and its labels in result tables."""

CallKey = tuple[SiteKey, int]
"""Attention call in a run of the model: its site (a module's self- or cross-attention), and its number there."""


def patching_prompts(
    tokenizer: Any,
    clean: str | Sequence[str],
    corrupted: str | Sequence[str],
    *,
    answer: str | Sequence[str],
    wrong: str | Sequence[str],
) -> dict[str, Any]:
    """Tokenize pairs of prompts and their answers. Return a dictionary of the arguments `clean`, `corrupted`, `answer`
    and `wrong` of the patching functions, which are called with `**pair`. Shorter prompts are padded on the right.

        pair = hw.patching_prompts(tokenizer, "Paris is in", "Rome is in", answer=" France", wrong=" Italy")
        hw.activation_patching(model, **pair)

    The two prompts of a pair must have equally many tokens, since patching puts the output at one token into the run at
    the same token. An answer must continue each prompt of its pair with one and the same token: the tokens of prompt
    and answer together are compared with those of the prompt. Answers usually start with a space.

    Args:
        tokenizer: a tokenizer of `transformers` that puts no special token after a text.
        clean: one prompt or several, which the model answers correctly.
        corrupted: as many prompts, which differ in what decides the answer.
        answer: right answer of each clean prompt; one for all, or one per prompt.
        wrong: right answer of each corrupted prompt, in the same form.

    Returns:
        `clean` and `corrupted`, each a dictionary of `input_ids` and `attention_mask`, both `(prompts, length)`;
        `answer` and `wrong`, token ids `(prompts,)`.

    Raises:
        InputError: another number of prompts or answers; prompts of a pair with different numbers of tokens; an answer
            that is not one token; a tokenizer that ends every text with a special token.
    """
    prompts = {
        name: [(text, _prompt_tokens(tokenizer, name, text)) for text in _texts(name, given)]
        for name, given in (("clean", clean), ("corrupted", corrupted))
    }
    number, got = len(prompts["clean"]), len(prompts["corrupted"])
    if got != number:
        raise InputError("corrupted", expected=f"{number} prompts, as many as in clean", got=got)
    pairs = list(zip(prompts["clean"], prompts["corrupted"], strict=True))
    for index, ((_, one), (_, other)) in enumerate(pairs):
        if len(one) != len(other):
            expected = f"as many tokens in the corrupted prompt of pair {index} as in the clean one, {len(one)}"
            raise InputError("corrupted", expected=expected, got=len(other))
    found: dict[str, Any] = {}
    for name, of_prompts in prompts.items():
        length, filler = max(len(ids) for _, ids in of_prompts), getattr(tokenizer, "pad_token_id", None) or 0
        padding = [length - len(ids) for _, ids in of_prompts]
        found[name] = {
            "input_ids": torch.tensor([ids + [filler] * n for (_, ids), n in zip(of_prompts, padding, strict=True)]),
            "attention_mask": torch.tensor([[1] * (length - n) + [0] * n for n in padding]),
        }
    for name, given in (("answer", answer), ("wrong", wrong)):
        texts = _texts(name, given)
        if len(texts) not in (1, number):
            raise InputError(name, expected=f"one answer for all prompts, or {number}", got=len(texts))
        texts = texts * number if len(texts) == 1 else texts
        ids = [_answer_token(tokenizer, name, text, pair) for text, pair in zip(texts, pairs, strict=True)]
        found[name] = torch.tensor(ids)
    return found


def _texts(name: str, given: Any) -> list[str]:
    """Return the texts of an argument as a list; a single text becomes a list of one. Raise `InputError` for anything
    else, and for empty texts.
    """
    texts = [given] if isinstance(given, str) else list(given) if isinstance(given, Sequence) else []
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise InputError(name, expected="a text or a sequence of texts, none of them empty", got=repr(given))
    return texts


def _prompt_tokens(tokenizer: Any, name: str, prompt: str) -> list[int]:
    """Return the token ids of a prompt. Raise `InputError` if the tokenizer puts a special token at the end."""
    ids = [int(token) for token in tokenizer(prompt)["input_ids"]]
    bare = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    if not ids or not bare or ids[len(ids) - len(bare) :] != list(bare):
        last = tokenizer.convert_ids_to_tokens(ids[-1]) if ids else "no token"
        expected = "a tokenizer that ends a text with the text's last token"
        remedy = "tokenize the prompts yourself, and pass at="
        raise InputError(name, expected=expected, got=f"{last} at the end", remedy=remedy)
    return ids


def _answer_token(tokenizer: Any, name: str, answer: str, prompts: Iterable[tuple[str, list[int]]]) -> int:
    """Return the id of the single token by which an answer continues every prompt. `prompts` are pairs of a text and
    its token ids. Raise `InputError` if the answer is several tokens, or different ones after different prompts.
    """
    found = set()
    for prompt, ids in prompts:
        together = [int(token) for token in tokenizer(prompt + answer)["input_ids"]]
        if together[: len(ids)] != ids or len(together) != len(ids) + 1:
            got = f"{answer!r}, which is {tokenizer.convert_ids_to_tokens(together[len(ids) :])} after {prompt!r}"
            expected = "an answer that continues the prompt with one token"
            raise InputError(name, expected=expected, got=got, remedy="most answers start with a space")
        found.add(together[-1])
    if len(found) != 1:
        got = f"{answer!r}, with the tokens {tokenizer.convert_ids_to_tokens(sorted(found))}"
        raise InputError(name, expected="an answer that is the same token after both prompts", got=got)
    return found.pop()


class PromptPairs:
    """Clean batch and corrupted batch of prompts for patching. Patching replaces values in the run on one batch (the
    destination) by values from the run on the other batch (the source). With the direction "denoise", the clean batch
    is the source; with "noise", the corrupted batch is. The model runs on the source batch when the object is created.

    Attributes:
        source_run: head outputs in the run on the source batch.
        paths: paths of the modules that attend in this run.
        unpatched: difference of logits of each prompt pair in the unpatched run on the destination batch; NaN before
            `set_unpatched`.
    """

    def __init__(
        self, model: nn.Module, clean: dict[str, Any], corrupted: dict[str, Any], tokens: AnswerTokens, direction: str
    ) -> None:
        self.model, self._tokens, self._direction = model, tokens, direction
        both = (clean, corrupted)
        self._source, self._destination = both if direction == "denoise" else both[::-1]
        self.source_run = RecordedRun(model)
        with restored_state(model), intercepted(model, self.source_run):
            self._source_difference = tokens.logit_difference(model, copied(self._source))
        self.source_run.require_attention()
        self._require_finite(self._source_difference, self._source)
        self.paths = {record.site.path for record in self.source_run.records}
        self.unpatched = torch.full_like(self._source_difference, math.nan)

    def difference(self) -> Float[Tensor, " pairs"]:
        """Run the model on the destination batch (the one that is patched). Return for each prompt the logit of the
        right answer minus that of the wrong one.
        """
        return self._tokens.logit_difference(self.model, copied(self._destination))

    def difference_in_other_context(self) -> Float[Tensor, " pairs"]:
        """Run the model on a mixture of the two batches, and return the logit difference (right minus wrong answer) of
        each prompt. The tokens that the answers directly follow are from the destination batch (the one that is
        patched). All other tokens are from the source batch.
        """
        batch = dict(self._destination)
        for name, own in self._destination.items():
            other = self._source[name]
            if not isinstance(own, Tensor) or not isinstance(other, Tensor) or own.ndim < 2:
                continue
            try:
                positions = self._tokens.positions(self._destination, own.new_zeros(*own.shape[:2], 1))
            except InputError:  # an argument of another length than the prompts
                continue
            is_kept = torch.zeros(own.shape[:2], dtype=torch.bool, device=own.device)
            is_kept[torch.arange(len(own), device=own.device), positions] = True
            batch[name] = torch.where(is_kept.view(*own.shape[:2], *(1,) * (own.ndim - 2)), own, other)
        return self._tokens.logit_difference(self.model, copied(batch))

    def set_unpatched(self, difference: Float[Tensor, " pairs"]) -> None:
        """Store the logit differences of the run on the destination batch (the one that is patched), without patches,
        in the attribute `unpatched`. Raise `InputError` if one of them is NaN or infinite.
        """
        self.unpatched = difference.detach()
        self._require_finite(self.unpatched, self._destination)

    def _require_finite(self, difference: Float[Tensor, " pairs"], batch: dict[str, Any]) -> None:
        """Raise `InputError` if a logit difference (right minus wrong answer) is NaN or infinite. The error names the
        first module whose output contains NaN or infinity in a run on `batch`.
        """
        is_finite = difference.isfinite()
        if not bool(is_finite.all()):
            error = nonfinite_error(self.model, lambda: call_model(self.model, copied(batch)), batch, ~is_finite)
            raise error or InputError("model", expected="finite logits", got="NaN or infinity")

    @property
    def _clean_and_corrupted(self) -> tuple[Tensor, Tensor]:
        """Logit differences (right minus wrong answer) in the clean run and in the corrupted run, without patches."""
        both = (self._source_difference, self.unpatched)
        return both if self._direction == "denoise" else both[::-1]

    def estimates(self, difference: Float[Tensor, " pairs"]) -> dict[str, MeanEstimate]:
        """Return two means over prompt pairs. `difference` is the mean of the given logit differences. `recovered` is
        the mean of these differences on a scale from 0 (value in the corrupted run) to 1 (value in the clean run).
        Pairs with the same logit difference in the corrupted and the clean run are left out of `recovered`.
        """
        if not bool(difference.isfinite().all()):
            raise InputError("model", expected="finite logits in each patched run", got="NaN or infinity")
        clean, corrupted = self._clean_and_corrupted
        gap = (clean - corrupted).double()
        recovered = ((difference - corrupted) / gap).masked_fill(gap == 0, math.nan)
        return {"recovered": MeanEstimate.of(recovered.tolist()), "difference": MeanEstimate.of(difference.tolist())}

    def heads(self, heads: Iterable[LayerHead] | None, argument: str = "heads") -> list[SiteHead]:
        """Return the heads that an argument lists, each once and in the order of the model; all heads if `heads` is
        None. Raise `InputError`, which names the `argument`, for a head that the model does not have.
        """
        all_heads = [(record.site, labels) for record, labels in self.source_run.head_labels()]
        if heads is None:
            return all_heads
        wanted = head_pairs(argument, heads)
        names = [{(labels["layer"], labels["head"]), (labels["module"], labels["head"])} for _, labels in all_heads]
        for head in wanted:
            if not any(head in names_of_head for names_of_head in names):
                raise InputError(argument, expected="each a (layer, head) of this model", got=head)
        return [head for head, own in zip(all_heads, names, strict=True) if not own.isdisjoint(wanted)]

    def table(
        self, table_type: type[TableT], rows: Sequence[HeadRow], further: Mapping[str, Any], **settings: Any
    ) -> TableT:
        """Return a table of the type `table_type` with the given rows. Its metadata has the number of prompt pairs, the
        mean logit difference in the clean and in the corrupted run, and the entries in `further`.
        """
        clean, corrupted = self._clean_and_corrupted
        measured = {"sequences": len(clean), "clean": clean.mean().item(), "corrupted": corrupted.mean().item()}
        metadata = run_settings(self.model, None, None, direction=self._direction, **settings)
        return table_type(tuple(rows), {**metadata, "measured": {**measured, **further}})


@contextmanager
def prompt_pairs(
    model: Any, clean: Any, corrupted: Any, direction: Any, *, answer: Any, wrong: Any, at: Any
) -> Iterator[PromptPairs]:
    """Check clean and corrupted prompts and their answers, and yield them as a `PromptPairs`. While the context is
    active, the model is in evaluation mode, and gradients are not recorded.
    """
    tokens = AnswerTokens.from_arguments(answer, wrong, at)
    require_module(model)
    if direction not in PATCH_DIRECTIONS:
        raise InputError("direction", expected=" or ".join(map(repr, PATCH_DIRECTIONS)), got=repr(direction))
    if tokens.wrong is None:
        raise InputError("wrong", expected="the ids that the answers are compared with", got=None)
    # Other numbers of ids are refused with the number of prompts. Equal answers differ by 0 in every run.
    has_one_for_all = not tokens.answer.ndim or not tokens.wrong.ndim
    if (has_one_for_all or tokens.answer.shape == tokens.wrong.shape) and bool((tokens.answer == tokens.wrong).any()):
        raise InputError("wrong", expected="other tokens than the right answers", got=tokens.wrong.tolist())
    clean, corrupted = one_batch(model, clean, "clean"), one_batch(model, corrupted, "corrupted")
    if clean.keys() != corrupted.keys():
        names = ", ".join(clean) or "a tensor"
        expected = f"the arguments of clean, {names}"
        raise InputError("corrupted", expected=expected, got=", ".join(corrupted) or "a tensor")
    for name, clean_value in clean.items():
        corrupted_value = corrupted[name]
        if not isinstance(clean_value, Tensor) or not isinstance(corrupted_value, Tensor):
            continue
        if clean_value.shape != corrupted_value.shape:
            expected = f"{name or 'tokens'} of shape {tuple(clean_value.shape)}, as in clean"
            raise InputError("corrupted", expected=expected, got=tuple(corrupted_value.shape))
        if name.endswith("attention_mask") and not torch.equal(clean_value.bool(), corrupted_value.bool()):
            remedy = "pair prompts with the same number of tokens"
            raise InputError("corrupted", expected="the padding of clean", got=f"another {name}", remedy=remedy)
    with evaluation_mode(model), torch.inference_mode(False), torch.no_grad():
        yield PromptPairs(model, clean, corrupted, tokens, direction)


def output_of_shape(
    run: RecordedOutputs, key: CallKey, shape: torch.Size
) -> Float[Tensor, "batch heads queries value_dim"]:
    """Return the recorded head outputs of an attention call in `run`. Raise `InputError` unless they have the given
    shape, which the outputs of the same call have in another run.
    """
    outputs = run.output_of_call(*key)
    if outputs.shape != shape:
        expected = f"head outputs of the same shape in all runs, {tuple(shape)} in {key[0].path}"
        raise InputError("corrupted", expected=expected, got=tuple(outputs.shape))
    return outputs
