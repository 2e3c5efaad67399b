"""Replacements for the output of a head: zero, its mean, uniform attention, its output on another input.

Leave-one-out ablation is `zero` (Michel, Levy and Neubig 2019, section 3.2). `mean` and `resample` keep the input of
later layers close to what they were trained on (Chan et al. 2022, "Causal scrubbing"). `patch` is activation patching
(Vig et al. 2020; Meng et al. 2022).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.recording import OutputReader, RecordedOutputs
from headwise.data.batches import (
    call_model,
    device_of,
    digest_of,
    digest_of_batches,
    evaluation_mode,
    iterate_batches,
    to_device,
)
from headwise.data.texts import Texts
from headwise.errors import InputError
from headwise.intercept.call_contexts import CallContexts
from headwise.intercept.install import intercepted
from headwise.intercept.interceptor import Call, Change, HeadOutput, SiteKey
from headwise.intercept.session import current_session
from headwise.shapes import Bool, Float


def zero() -> "Replacement":
    """Return an object that replaces a head's output by zeros. You can pass it as a value of `gate` or as the
    `replacement` of `ablate`.

    Unlike a gate of 0, it also removes infinite and NaN outputs.
    """
    return Zero()


def uniform() -> "Replacement":
    """Return an object that replaces a head's output by its output under uniform attention over the visible keys. You
    can pass it as a value of `gate` or as the `replacement` of `ablate`.

    Each query gets the mean of the values of all keys that the mask lets it attend to.
    """
    return Uniform()


def mean(dataset: Texts | Iterable[Any]) -> "Replacement":
    """Return an object that replaces a head's output by its mean over all tokens of a data set that are not padding.
    You can pass it as a value of `gate` or as the `replacement` of `ablate`.

    The model runs over the data once, when a gate with this replacement is entered: in evaluation mode, without
    gradients, and unaffected by other active gates. A module that attends several times in a run has one mean per call.

    Args:
        dataset: `Texts`, or an iterable of batches, each a tensor or a mapping of the model's arguments.

    Raises:
        InputError: when the gate is entered, for data that cannot be used.
    """
    return Mean(dataset)


def resample(batch: Tensor | Mapping[str, Any]) -> "Replacement":
    """Return an object that replaces a head's output by the same head's output in a run of the model on `batch`. You
    can pass it as a value of `gate` or as the `replacement` of `ablate`.

    The model runs on `batch` once, when a gate with this replacement is entered: in evaluation mode, without gradients,
    and unaffected by other active gates.

    Args:
        batch: a tensor, or a mapping of the model's arguments. It has the shape of the gated input, or a batch size
            of 1.

    Raises:
        InputError: when the gate is entered or the model runs, for a batch that cannot be used.
    """
    return Resample(batch)


def patch(run: RecordedOutputs) -> "Replacement":
    """Return an object that replaces a head's output by the same head's output in `run`, a run recorded with
    `record_outputs`. You can pass it as a value of `gate`.

    Args:
        run: outputs of the same model on inputs of the same shape, or with a batch size of 1.

    Raises:
        InputError: `run` is not a recorded run; when the model runs, for a run whose sizes do not fit.
    """
    if not isinstance(run, RecordedOutputs):
        remedy = "with hw.record_outputs(model) as run: model(...)"
        raise InputError("run", expected="a run of record_outputs(model)", got=type(run).__name__, remedy=remedy)
    return Patch(run)


class Replacement:
    """Base class of objects that compute a tensor to use in place of a head's output, such as zeros or a mean. The same
    object can be used for several heads and models.
    """

    def prepare(self, model: nn.Module, modules: Collection[str]) -> "Replacement":
        """Return a replacement that is ready for use in the attention modules at the paths `modules`. The base class
        returns this object itself. Subclasses that need outputs of the model run the model in this method.
        """
        return self

    def digest(self, model: nn.Module) -> str | None:
        """Return a hash of the data or the recorded outputs from which the replacement is computed for a model. Return
        None if the replacement is computed without data, or if the data can be read only once.
        """
        return None

    def output(self, attended: HeadOutput, call: Call) -> Float[Tensor, "#batch heads #queries #value_dim"]:
        """Return the tensor to use in place of the outputs of all heads in an attention call. It can be broadcast to
        the shape of the outputs. Subclasses implement this.
        """
        raise NotImplementedError


class Zero(Replacement):
    """Object that replaces a head's output by zeros. The function `zero` creates such objects."""

    def output(self, attended: HeadOutput, call: Call) -> Float[Tensor, "#batch heads #queries #value_dim"]:
        return attended.out.new_zeros(1, call.grid.heads, 1, 1)


class Uniform(Replacement):
    """Object that replaces a head's output by its output under uniform attention over the visible keys. The function
    `uniform` creates such objects.
    """

    def output(self, attended: HeadOutput, call: Call) -> Float[Tensor, "#batch heads #queries #value_dim"]:
        return attended.uniform_output()


class MeanOutputs(OutputReader):
    """Interceptor that averages the output of each head over all tokens that are not padding, in float64. If a module
    attends several times in a run of the model, the means are separate for its first call, its second call, and so on.
    """

    def __init__(self, modules: Collection[str] | None = None) -> None:
        super().__init__(modules)
        self._sums: dict[tuple[SiteKey, int], tuple[Float[Tensor, "heads value_dim"], float]] = {}
        self._contexts = CallContexts()
        self._real_queries: dict[int, Bool[Tensor, "batch queries"] | None] = {}

    def on_model_call(self) -> None:
        """Start a new call of the model: discard the padding masks that were stored in the previous call."""
        self._contexts.on_model_call()
        self._real_queries = {}

    def change(self, call: Call) -> Change | None:
        """Determine which queries of an attention call are not padding. Return a function that passes the call's head
        outputs to `read`, or None if they are not read. In cross-attention, the padding of the queries is known from
        earlier calls of other modules.
        """
        if not call.is_recomputation:
            self._real_queries[id(call)] = self._contexts.read(call).context.real_queries
        return super().change(call)

    def read(self, call: Call, out: Float[Tensor, "batch heads queries value_dim"]) -> None:
        """Add the head outputs of one attention call, summed over tokens that are not padding, to running sums. Each
        module has separate sums for its first call in a run of the model, its second call, and so on.
        """
        batch, _, queries, _ = out.shape
        out, tokens = out.detach(), float(batch * queries)
        is_real = self._real_queries.pop(id(call))
        if is_real is not None:
            out, tokens = out.masked_fill(~is_real[:, None, :, None], 0.0), float(is_real.sum())
        total, key = out.sum((0, 2), dtype=torch.float64), (call.site, call.index)
        earlier_total, earlier_tokens = self._sums.get(key, (torch.zeros_like(total), 0.0))
        self._sums[key] = earlier_total + total, earlier_tokens + tokens

    def mean_of_call(self, site: SiteKey, index: int) -> Float[Tensor, "heads value_dim"]:
        """Return the mean output of each head in one attention call in a run of the model. `site` is a module's self-
        or cross-attention, and `index` is the number of its call in the run, from 0.
        """
        if (site, index) not in self._sums:
            expected = f"batches in which {site.path} attends {index + 1} times"
            raise InputError("dataset", expected=expected, got="none")
        total, tokens = self._sums[site, index]
        return total / max(tokens, 1.0)


class Mean(Replacement):
    """Object that replaces a head's output by its mean over a data set. The function `mean` creates the object without
    the means. `prepare` runs the model over the data set and returns an object that has them.

    Attributes:
        dataset: `Texts` or batches.
        means: mean outputs of the model's heads; None before `prepare`.
    """

    def __init__(self, dataset: Texts | Iterable[Any], means: MeanOutputs | None = None) -> None:
        self.dataset, self.means = dataset, means

    def prepare(self, model: nn.Module, modules: Collection[str]) -> "Replacement":
        """Return a replacement with the mean head outputs of the attention modules at the paths `modules`. If this
        object already has these means, return the object itself. Otherwise run the model over the data set to compute
        them.
        """
        if self.means is not None and self.means.modules is not None and set(modules) <= set(self.means.modules):
            return self
        means = MeanOutputs(set(modules))
        dataset = self.dataset.within(model) if isinstance(self.dataset, Texts) else self.dataset
        if not _run_batches(model, dataset, means):
            raise InputError("dataset", expected="at least one batch", got="none")
        return Mean(self.dataset, means)

    def digest(self, model: nn.Module) -> str | None:
        dataset = self.dataset.within(model) if isinstance(self.dataset, Texts) else self.dataset
        return None if isinstance(dataset, Iterator) else digest_of_batches(iterate_batches(dataset))

    def output(self, attended: HeadOutput, call: Call) -> Float[Tensor, "#batch heads #queries #value_dim"]:
        assert self.means is not None
        return self.means.mean_of_call(call.site, call.index)[None, :, None, :]


class Patch(Replacement):
    """Object that replaces a head's output by the same head's output in a recorded run of the model. The function
    `patch` creates such objects.

    Attributes:
        run: the recorded outputs.
    """

    def __init__(self, run: RecordedOutputs) -> None:
        self.run = run

    def digest(self, model: nn.Module) -> str | None:
        return digest_of(output for _, outputs in sorted(self.run.by_site.items()) for output in outputs)

    def output(self, attended: HeadOutput, call: Call) -> Float[Tensor, "#batch heads #queries #value_dim"]:
        recorded, shape = self.run.output_of_call(call.site, call.index), attended.out.shape
        if recorded.shape[0] not in (1, shape[0]) or recorded.shape[1:] != shape[1:]:
            expected = f"(batch, heads, queries, value_dim) = {tuple(shape)} in {call.site.path}, or a batch of 1"
            raise InputError("run", expected=expected, got=tuple(recorded.shape))
        return recorded


class Resample(Replacement):
    """Object that replaces a head's output by the same head's output on another batch. The function `resample` creates
    such objects. Their method `prepare` runs the model on that batch, and returns a `Patch` with the recorded outputs.

    Attributes:
        batch: a tensor, or a mapping of the model's arguments.
    """

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def digest(self, model: nn.Module) -> str | None:
        return digest_of_batches(iterate_batches([self.batch]))

    def prepare(self, model: nn.Module, modules: Collection[str]) -> "Replacement":
        outputs = RecordedOutputs(set(modules))
        _run_batches(model, [self.batch], outputs)
        return Patch(outputs)


def _run_batches(model: nn.Module, dataset: Texts | Iterable[Any], reader: OutputReader) -> int:
    """Run the model on all batches of a data set, while `reader` is the only active interceptor, and return the number
    of batches.
    """
    count = 0
    with evaluation_mode(model), torch.no_grad(), current_session().exclusive_to(reader), intercepted(model, reader):
        for batch in iterate_batches(dataset):
            call_model(model, to_device(batch, device_of(model)))
            count += 1
    return count
