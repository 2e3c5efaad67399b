"""Prompts and a model's answers: the logit of the right token and of a wrong one, at one position of each prompt."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.checks import whole_numbers
from headwise.data.batches import arguments_of, call_model, device_of, real_tokens, to_device
from headwise.data.tokenization import output_embeddings
from headwise.errors import InputError
from headwise.shapes import Float, Int

ONE_OR_PER_PROMPT = "one for all prompts, or (batch,)"


class AnswerTokens(NamedTuple):
    """Token ids of the right and of the wrong answer to prompts, and the position in the prompt that the answer
    follows. Each is one number for all prompts, or one per prompt.

    Attributes:
        answer: token id of the right answer.
        wrong: token id that it is compared with; None for the logit of the right answer alone.
        at: index of the prompt's token that the answer follows, without padding: 0 the first, -1 the last.
    """

    answer: Int[Tensor, "*prompts"]
    wrong: Int[Tensor, "*prompts"] | None
    at: Int[Tensor, "*prompts"]

    @classmethod
    def from_arguments(cls, answer: Any, wrong: Any, at: Any) -> "AnswerTokens":
        """Check the arguments `answer`, `wrong` and `at` of a public function, and return them as tensors in one
        object. Each is a whole number, or a list or tensor with one number per prompt; `wrong` may be None.
        """
        answer, at = (
            whole_numbers(name, value, dimensions=(0, 1), shape=ONE_OR_PER_PROMPT)
            for name, value in (("answer", answer), ("at", at))
        )
        if wrong is not None:
            wrong = whole_numbers("wrong", wrong, dimensions=(0, 1), shape=ONE_OR_PER_PROMPT)
        return cls(answer, wrong, at)

    def positions(self, batch: Mapping[str, Any], like: Float[Tensor, "prompts length _"]) -> Int[Tensor, " prompts"]:
        """Return, for each prompt, the index of the token that the answer follows, in the padded batch. It is computed
        from `at`, which does not count padding, and the attention mask. `like` is any tensor with the axes of prompts
        and tokens.
        """
        of_decoder = "decoder_attention_mask" if "decoder_input_ids" in batch else "attention_mask"
        is_real = real_tokens(batch, like, of_decoder)
        at, lengths = _per_prompt("at", self.at, is_real), is_real.sum(1)
        index = torch.where(at < 0, at + lengths, at)
        if bool(((index < 0) | (index >= lengths)).any()):
            shortest = int(lengths.min())
            expected = f"from {-shortest} to {shortest - 1}, the tokens of the shortest prompt"
            raise InputError("at", expected=expected, got=self.at.tolist())
        return (is_real & (is_real.cumsum(1) - 1 == index[:, None])).int().argmax(1)

    def ids_per_prompt(
        self, prompts: Tensor, vocabulary: int
    ) -> tuple[Int[Tensor, " prompts"], Int[Tensor, " prompts"] | None]:
        """Return the token ids of the right answer and of the wrong answer to each prompt. The second result is None if
        there are no wrong answers. Raise `InputError` for ids that are not below `vocabulary`. `prompts` is any tensor
        with one row per prompt.
        """
        ids = []
        for name, value in (("answer", self.answer), ("wrong", self.wrong)):
            if value is not None and not bool(((value >= 0) & (value < vocabulary)).all()):
                raise InputError(name, expected=f"ids from 0 to {vocabulary - 1}", got=value.tolist())
            ids.append(None if value is None else _per_prompt(name, value, prompts))
        answer, wrong = ids
        assert answer is not None
        return answer, wrong

    def logit_difference(self, model: nn.Module, batch: Mapping[str, Any]) -> Float[Tensor, " prompts"]:
        """Run the model on a batch of prompts. Return, for each prompt, the logit of the right answer at the token that
        the answer follows. If there is a wrong answer, its logit is subtracted. If the model names its output
        embedding, logits of other positions are not computed.
        """
        restricted_to: list[Tensor] = []

        def select_positions(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            """Forward pre-hook of the output embedding that keeps only one position of each prompt: the token that the
            answer follows. It changes nothing if the input does not have three axes.
            """
            if not args or not isinstance(args[0], Tensor) or args[0].ndim != 3:
                return None
            hidden = args[0]
            restricted_to[:] = [self.positions(batch, hidden)]
            prompts = torch.arange(len(hidden), device=hidden.device)
            return hidden[prompts, restricted_to[0]][:, None], *args[1:]

        embedding = output_embeddings(model)
        with nullcontext() if embedding is None else embedding.register_forward_pre_hook(select_positions):
            output = call_model(model, batch)
        logits = getattr(output, "logits", output)
        if not isinstance(logits, Tensor) or logits.ndim != 3:
            expected = "one that returns logits (batch, length, vocabulary)"
            remedy = "load it with AutoModelForCausalLM"
            raise InputError("model", expected=expected, got=type(model).__name__, remedy=remedy)
        prompts = torch.arange(len(logits), device=logits.device)
        answer_logits = logits[:, 0] if restricted_to else logits[prompts, self.positions(batch, logits)]
        answer_logits = answer_logits.to(torch.promote_types(logits.dtype, torch.float32))
        answer, wrong = self.ids_per_prompt(prompts, logits.shape[-1])
        right = answer_logits[prompts, answer]
        return right if wrong is None else right - answer_logits[prompts, wrong]


def one_batch(model: nn.Module, batch: Any, argument: str = "batch") -> dict[str, Any]:
    """Return a batch (a tensor, or a mapping of the model's arguments) as a dictionary with tensors on the model's
    device. A single tensor has the empty string as its key. `argument` is the name of the batch in error messages.
    """
    arguments = arguments_of(batch)
    if arguments is None:
        expected = "a batch: a tensor, or a mapping of tensors, as the model takes it"
        remedy = 'tokenizer(texts, return_tensors="pt") makes a batch of texts'
        raise InputError(argument, expected=expected, got=type(batch).__name__, remedy=remedy)
    return to_device(arguments, device_of(model))


def _per_prompt(name: str, numbers: Int[Tensor, "*prompts"], like: Tensor) -> Int[Tensor, " prompts"]:
    """Return `numbers` with one number per prompt; a single number is repeated. `like` is a tensor with one row per
    prompt. `name` is the name of the argument in error messages.
    """
    if numbers.ndim and numbers.shape != (len(like),):
        raise InputError(name, expected=f"one number, or {len(like)}, one per prompt", got=len(numbers))
    return numbers.to(like.device).expand(len(like))
