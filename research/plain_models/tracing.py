"""One softmax of a model, and further runs of the model in which results of operators are replaced."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from research.plain_models.dispatcher import Operation, Replacement, Run, record

Call = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Tracing:
    """A softmax in a plain run of a model.

    Attributes:
        model: the model.
        call: a function that calls it.
        run: its plain run.
        softmax: the softmax in this run.
    """

    model: nn.Module
    call: Call
    run: Run
    softmax: Operation

    def repeated(self, results: Mapping[int, Replacement], last: int | None = None) -> Run:
        """Return another run with replacements of results, by the number of the operator call.

        Args:
            results: the replacements.
            last: number of the operator call after which the run may stop.
        """
        return record(self.model, self.call, results=results, last=last)
