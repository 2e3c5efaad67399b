"""In-context learning score of single sequences: the loss late in the context minus the loss early in it."""

from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.token_cross_entropy import token_cross_entropy
from headwise.checks import whole_number
from headwise.data.batches import POSITIONAL, with_cache_disabled
from headwise.errors import InputError
from headwise.shapes import Float, Int


class InContextLoss:
    """Score of a sequence by a causal model: the mean loss of the last tokens up to the token number `late`, minus that
    of the last tokens up to the token number `early` (Olsson et al. 2022, "In-context Learning and Induction Heads",
    with a window of one token). It is negative if the model predicts tokens better with more context.

    The loss of token number t, counted from 1, is -ln p(token t | tokens 1 to t - 1), in nats.

    Args:
        early: number of the early token.
        late: number of the late token; all sequences have at least as many tokens, without padding.
        window: number of tokens in each of the two means.

    Raises:
        InputError: a number that is not a positive whole number; windows that overlap, or contain the first token.
    """

    def __init__(self, early: int, late: int, window: int) -> None:
        self.window = whole_number("window", window, least=1)
        self.early, self.late = whole_number("early", early, least=2), whole_number("late", late, least=3)
        if self.early <= self.window:
            expected = "fewer tokens than early, since the first token of a sequence has no loss"
            raise InputError("window", expected=expected, got=f"{window} for early={early}")
        if self.late - self.window < self.early:
            got = f"{window} for early={early} and late={late}"
            raise InputError("window", expected="windows that do not overlap", got=got)
        self.__name__ = f"in_context_score(early={self.early}, late={self.late}, window={self.window})"

    def __call__(self, model: nn.Module, batch: dict[str, Any]) -> Float[Tensor, " batch"]:
        """Return the score of each sequence of a batch."""
        early, late = self.losses(model, batch)
        return late - early

    def losses(
        self, model: nn.Module, batch: dict[str, Any]
    ) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]:
        """Return the mean loss of each sequence in the early window and in the late one."""
        ids: Int[Tensor, "batch length"] = batch["input_ids" if "input_ids" in batch else POSITIONAL]
        ends = (self.early, self.late)
        tokens = torch.cat([torch.arange(end - self.window, end, device=ids.device) for end in ends])
        of_tokens = token_cross_entropy(model, with_cache_disabled(model, batch), tokens - 1, ids[:, tokens].long())
        early, late = torch.split(of_tokens, self.window, 1)
        return early.mean(1), late.mean(1)
