"""Prompts and what a model answers at one token of each: logits of the right token and of a wrong one."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.analysis.recording import Outputs
from headwise.checks import whole_numbers
from headwise.data.batches import call_model, device_of, iterate_batches, to_device
from headwise.errors import InputError
from headwise.intercept.interceptor import Call, Change
from headwise.intercept.sites import SiteRegistry
from headwise.shapes import Bool, Float, Int

ONE_OR_EACH = "one for all prompts, or (batch,)"


class Recorded(SiteRegistry, Outputs):
    """A visitor that keeps what every head gave in a run, and where that was."""

    def __init__(self, model: nn.Module) -> None:
        SiteRegistry.__init__(self, model)
        Outputs.__init__(self)

    def change(self, call: Call) -> Change | None:
        """See `Interceptor`."""
        self.register(call)
        return super().change(call)


class Question(NamedTuple):
    """What is asked of each prompt, or of all.

    Attributes:
        answer: the id of the right token.
        wrong: of the one it is held against; None for the logit of the answer alone.
        at: which of a prompt's tokens the answer follows, padding not counted: 0 the first, -1 the last.
    """

    answer: Int[Tensor, "*prompts"]
    wrong: Int[Tensor, "*prompts"] | None
    at: Int[Tensor, "*prompts"]

    @classmethod
    def of(cls, answer: Any, wrong: Any, at: Any) -> "Question":
        """From what a caller gave. `InputError` where these are no whole numbers."""
        answer, at = (
            whole_numbers(name, given, dimensions=(0, 1), shape=ONE_OR_EACH)
            for name, given in (("answer", answer), ("at", at))
        )
        if wrong is not None:
            wrong = whole_numbers("wrong", wrong, dimensions=(0, 1), shape=ONE_OR_EACH)
        return cls(answer, wrong, at)

    def place(self, batch: Mapping[str, Any], like: Float[Tensor, "prompts length _"]) -> Int[Tensor, " prompts"]:
        """Where in a batch the token stands that the answer follows. `InputError` where a prompt has none there."""
        real = _real(batch, like)
        at, numbers = _each("at", self.at, real), real.sum(1)
        number = torch.where(at < 0, at + numbers, at)
        if bool(((number < 0) | (number >= numbers)).any()):
            shortest = int(numbers.min())
            expected = f"from {-shortest} to {shortest - 1}, the tokens of the shortest prompt"
            raise InputError("at", expected=expected, got=self.at.tolist())
        return (real & (real.cumsum(1) - 1 == number[:, None])).int().argmax(1)

    def ids(self, prompts: Tensor, vocabulary: int) -> tuple[Int[Tensor, " prompts"], Int[Tensor, " prompts"] | None]:
        """Of each prompt the right token and the wrong one. `InputError` where they are not in the vocabulary."""
        found = []
        for name, given in (("answer", self.answer), ("wrong", self.wrong)):
            if given is not None and not bool(((given >= 0) & (given < vocabulary)).all()):
                raise InputError(name, expected=f"ids from 0 to {vocabulary - 1}", got=given.tolist())
            found.append(None if given is None else _each(name, given, prompts))
        answer, wrong = found
        assert answer is not None
        return answer, wrong

    def difference(self, model: nn.Module, batch: Mapping[str, Any]) -> Float[Tensor, " prompts"]:
        """What the model answers: the logit of the right token less that of the wrong one.

        Where an output embedding gives the logits, they are those of one token a prompt.
        """
        with self._only_there(model, batch) as places:
            logits = call_model(model, batch)
        logits = getattr(logits, "logits", logits)
        if not isinstance(logits, Tensor) or logits.ndim != 3:
            remedy = "AutoModelForCausalLM gives them"
            expected = "one that gives logits (batch, length, vocabulary)"
            raise InputError("model", expected=expected, got=type(model).__name__, remedy=remedy)
        prompts = torch.arange(len(logits), device=logits.device)
        of_place = logits[:, 0] if places else logits[prompts, self.place(batch, logits)]
        of_place = of_place.to(torch.promote_types(logits.dtype, torch.float32))
        answer, wrong = self.ids(prompts, logits.shape[-1])
        found = of_place[prompts, answer]
        return found if wrong is None else found - of_place[prompts, wrong]

    @contextmanager
    def _only_there(self, model: Any, batch: Mapping[str, Any]) -> Iterator[list[Tensor]]:
        """Within the context the output embedding is given nothing but the tokens that answers follow: their places."""
        places: list[Tensor] = []

        def chosen(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
            if not given or not isinstance(given[0], Tensor) or given[0].ndim != 3:
                return None
            places[:] = [self.place(batch, given[0])]
            prompts = torch.arange(len(given[0]), device=given[0].device)
            return given[0][prompts, places[0]][:, None], *given[1:]

        embedding = output_embedding(model)
        hook = None if embedding is None else embedding.register_forward_pre_hook(chosen)
        try:
            yield places
        finally:
            if hook is not None:
                hook.remove()


def output_embedding(model: Any) -> nn.Module | None:
    """The module that gives a model of `transformers` its logits; None where it names none."""
    found = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return found if isinstance(found, nn.Module) else None


def one_batch(model: nn.Module, given: Any) -> dict[str, Any]:
    """A batch as arguments by name, on the model's device. `InputError` where it is none."""
    return next(to_device(batch, device_of(model)) for batch in iterate_batches([given]))


def _real(batch: Mapping[str, Any], like: Float[Tensor, "prompts length _"]) -> Bool[Tensor, "prompts length"]:
    """Which tokens are no padding."""
    name = "decoder_attention_mask" if "decoder_input_ids" in batch else "attention_mask"
    mask = batch.get(name)
    if isinstance(mask, Tensor) and mask.shape == like.shape[:2]:
        return mask.bool()
    return torch.ones(like.shape[:2], dtype=torch.bool, device=like.device)


def _each(name: str, given: Int[Tensor, "*prompts"], like: Tensor) -> Int[Tensor, " prompts"]:
    """A number for each prompt, of which `like` has one a row."""
    if given.ndim and given.shape != (len(like),):
        raise InputError(name, expected=f"one number, or {len(like)}, one a prompt", got=len(given))
    return given.to(like.device).expand(len(like))
