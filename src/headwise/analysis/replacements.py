"""What may be put in the place of a head's output: zero, a mean, even attention, that of another run.

Leave-one-out is `zero` (Michel, Levy and Neubig 2019, section 3.2). `mean` and `resample` leave the rest of the model
inputs of the kind that it knows (Chan et al. 2022, "Causal scrubbing"); `patch` is activation patching (Vig et al.
2020; Meng et al. 2022).
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.recording import Means, Outputs, Reader
from headwise.data.batches import call_model, device_of, evaluation_mode, iterate_batches, to_device
from headwise.data.texts import Texts
from headwise.errors import InputError
from headwise.intercept.call_stack import call_stack
from headwise.intercept.install import intercepted
from headwise.intercept.interceptor import Call, HeadOutput
from headwise.shapes import Float


class Replacement:
    """What stands in the place of the output of heads. One object may serve any number of heads and models."""

    def prepare(self, model: nn.Module, modules: Collection[str]) -> "Replacement":
        """What serves heads of these modules, once all is known that the model must be run for."""
        return self

    def output(self, attended: HeadOutput, call: Call) -> Float[Tensor, "#batch heads #queries #value_dim"]:
        """What stands there, for all heads of a call."""
        raise NotImplementedError


class Zero(Replacement):
    """See `zero`."""

    def output(self, attended: HeadOutput, call: Call) -> Float[Tensor, "#batch heads #queries #value_dim"]:
        """See `Replacement`."""
        return attended.out.new_zeros(1, call.grid.heads, 1, 1)


class Uniform(Replacement):
    """See `uniform`."""

    def output(self, attended: HeadOutput, call: Call) -> Float[Tensor, "#batch heads #queries #value_dim"]:
        """See `Replacement`."""
        return attended.uniform_output()


class Mean(Replacement):
    """See `mean`."""

    def __init__(self, dataset: Texts | Iterable[Any], means: Means | None = None) -> None:
        self.dataset, self.means = dataset, means

    def prepare(self, model: nn.Module, modules: Collection[str]) -> "Replacement":
        """See `Replacement`."""
        if self.means is not None and self.means.modules is not None and set(modules) <= set(self.means.modules):
            return self
        means = Means(set(modules))
        dataset = self.dataset.within(model) if isinstance(self.dataset, Texts) else self.dataset
        if not _run(model, dataset, means):
            raise InputError("dataset", expected="at least one batch", got="none")
        return Mean(self.dataset, means)

    def output(self, attended: HeadOutput, call: Call) -> Float[Tensor, "#batch heads #queries #value_dim"]:
        """See `Replacement`."""
        assert self.means is not None
        return self.means.call(call.site, call.index)[None, :, None, :]


class Patch(Replacement):
    """See `patch`."""

    def __init__(self, run: Outputs) -> None:
        self.run = run

    def output(self, attended: HeadOutput, call: Call) -> Float[Tensor, "#batch heads #queries #value_dim"]:
        """See `Replacement`."""
        found, here = self.run.call(call.site, call.index), attended.out.shape
        fits = found.shape[0] in (1, here[0]) and found.shape[1:] == here[1:]
        if not fits:
            shape, path = tuple(here), call.site.path
            expected = f"(batch, heads, queries, value_dim) = {shape} in {path}, as here, or a batch of 1"
            raise InputError("run", expected=expected, got=tuple(found.shape))
        return found


class Resample(Replacement):
    """See `resample`."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def prepare(self, model: nn.Module, modules: Collection[str]) -> "Replacement":
        """See `Replacement`."""
        outputs = Outputs(set(modules))
        _run(model, [self.batch], outputs)
        return Patch(outputs)


def _run(model: nn.Module, dataset: Texts | Iterable[Any], reader: Reader) -> int:
    """Run the model over batches for a reader, whom alone it concerns. How many there were."""
    number = 0
    with evaluation_mode(model), torch.no_grad(), call_stack.exclusive_to(reader), intercepted(model, reader):
        for number, batch in enumerate(iterate_batches(dataset), 1):  # noqa: B007
            call_model(model, to_device(batch, device_of(model)))
    return number


def zero() -> Replacement:
    """Nothing, in the place of a head's output: as a gate of 0, and also where that output is infinite or NaN."""
    return Zero()


def uniform() -> Replacement:
    """The mean of the values that each query may see: the head, if it gave them all the same weight."""
    return Uniform()


def mean(dataset: Texts | Iterable[Any]) -> Replacement:
    """The mean of the head's output over a data set, over all tokens that are no padding.

    A module that attends several times in a run has a mean for each.

    The model runs over the data once when a gate with it is entered, in evaluation mode, without gradients, and
    without what other contexts would see or change of it.

    Args:
        dataset: `Texts`, or batches as the model takes them.

    Raises:
        InputError: when the gate is entered, of data that cannot be used.
    """
    return Mean(dataset)


def resample(batch: Tensor | Mapping[str, Any]) -> Replacement:
    """The head's output on another batch, on which the model runs when a gate with it is entered, as for `mean`.

    Args:
        batch: as the model takes it, of the batch and length of the run in which it is put, or of a batch of 1.

    Raises:
        InputError: when the gate is entered or the model runs, of a batch that cannot be used.
    """
    return Resample(batch)


def patch(run: Outputs) -> Replacement:
    """The head's output in another run, as `record_outputs` kept it.

    Args:
        run: of the same model, on inputs of the same batch and length, or of a batch of 1.

    Raises:
        InputError: what is no such run; when the model runs, one whose sizes do not fit.
    """
    if not isinstance(run, Outputs):
        remedy = "with hw.record_outputs(model) as run: model(...)"
        raise InputError("run", expected="what record_outputs(model) gives", got=type(run).__name__, remedy=remedy)
    return Patch(run)
