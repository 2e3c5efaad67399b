"""Repeated runs of a model on one batch, with different heads gated, that reuse layer outputs and do not influence each
other.

A model can pass values from one layer to another in ways that reuse of layer outputs skips: by a shared dictionary, a
cache, an attribute, a hook. And it can keep values from one run for the next. Both are detected once per data set, by
runs of the unchanged model after a run in which the outputs of all heads were halved. All that the model kept is then
different from what it should be. A complete run must have the same results as the first run nevertheless. So must runs
that reuse layer outputs, for each layer up to which outputs can be reused.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from headwise.analysis.gate import GateInterceptor, HeadGate
from headwise.data.batches import digest_of
from headwise.errors import InputError
from headwise.intercept.install import intercepted
from headwise.intercept.module_calls import Replay, module_calls

SIDE_EFFECTS = "the model passes values between layers in other ways than layer outputs, so all runs were complete"
"""Note for results of a model in which reuse of layer outputs would change other results."""

ROUNDING = "runs of the unchanged model differ by rounding, so all runs were complete"
"""Note for results of a model whose runs are equal except for rounding."""

LARGEST_ROUNDING = 1e-3
"""Largest difference between two results, absolute or relative, that counts as rounding."""

Compute = Callable[[], Tensor]
"""Function that runs the model on the current batch, and returns one result per example."""


class RepeatedRuns:
    """Object that runs a model on one batch after another. For each batch, the unchanged model runs first, and then,
    several times, the model with gated heads (whose outputs are multiplied or replaced). The runs with gated heads
    reuse layer outputs of the first run, if a check shows that this does not change results.

    Attributes:
        note: statement for the results why no layer outputs were reused; None if the model allows it.
    """

    def __init__(self, model: nn.Module, sites: Collection[str], *, reuse: bool = True) -> None:
        self._model, self._sites, self._replay = model, sites, Replay(model, sites)
        self._reuses, self._is_checked = reuse, False
        self.note: str | None = None

    def run_unchanged(self, compute: Compute) -> Tensor:
        """Run the unchanged model on the current batch by calling `compute`, and return the results of this call. Layer
        outputs are recorded, for later runs with gated heads (whose outputs are multiplied or replaced). On the first
        batch, also check whether recorded outputs can be reused.
        """
        if not self._reuses:
            return self._results(compute)[0]
        with self._replay.recording():
            recorded, digests = self._results(compute)
        if not self._is_checked:
            self.note = self._why_not_reuse(compute, recorded, digests)
            self._reuses, self._is_checked = self.note is None, True
        return recorded

    def run_gated(self, compute: Compute, paths: Collection[str]) -> Tensor:
        """Run the model on the current batch by calling `compute`, and return the results of this call. The caller has
        gated heads (multiplied or replaced their outputs) only in the attention modules at `paths`. If layer outputs
        can be reused, layers that end before these modules return their recorded outputs.
        """
        with restored_state(self._model), self._replay.reused_until(paths) if self._reuses else nullcontext():
            return compute()

    def _why_not_reuse(self, compute: Compute, recorded: Tensor, digests: list[str]) -> str | None:
        """Check whether recorded layer outputs can be reused. Return None if they can, and otherwise a note for the
        user with the reason. `recorded` are the results of the run that recorded the outputs. `digests` are hashes of
        these results and of tensors that the model returned in this run.

        The last module up to which outputs can be reused is checked first. So each run with reused outputs finds what
        the run with halved head outputs left in the layers that are not computed.
        """
        self._run_halved(compute)
        complete, complete_digests = self._results(compute)
        if complete_digests != digests:
            if torch.allclose(complete, recorded, LARGEST_ROUNDING, LARGEST_ROUNDING, equal_nan=True):
                return ROUNDING
            got = f"{complete.tolist()} after {recorded.tolist()}"
            remedy = "it keeps values between runs, or it or the loss draws random numbers outside of torch"
            expected = "one with the same results each time that it runs on the same batch"
            raise InputError("model", expected=expected, got=got, remedy=remedy)
        self._run_halved(compute)
        for path in self._replay.sites_by_start:
            try:
                with self._replay.reused_until([path]):
                    _, reused_digests = self._results(compute)
            except Exception:  # such as a KeyError, for a value that a skipped layer did not leave
                return SIDE_EFFECTS
            if reused_digests != digests:
                return SIDE_EFFECTS
        return None

    def _run_halved(self, compute: Compute) -> None:
        """Run the model with the outputs of all heads multiplied by 1/2."""
        halves = GateInterceptor({path: [HeadGate(None, 0.5)] for path in self._sites})
        with restored_state(self._model), intercepted(self._model, halves):
            compute()

    def _results(self, compute: Compute) -> tuple[Tensor, list[str]]:
        """Run the model by calling `compute`, and return the results of this call, one per example, with a list of
        hashes. The hashes are of the results, and of the tensors that the model and its stacks of layers returned.
        Tensors on the meta device, which have no content, are not hashed.
        """
        digests: list[str] = []

        def add_digest(_number: int, _args: Any, output: Any) -> None:
            leaves = pytree.tree_leaves(output)
            digests.append(digest_of(leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_meta))

        modules = dict(enumerate((self._model, *self._replay.stacks)))
        with restored_state(self._model), module_calls(modules, add_digest):
            values = compute()
        return values, [digest_of([values]), *digests]


@contextmanager
def restored_state(model: nn.Module) -> Iterator[None]:
    """Restore, at the end of the context, what a run of the model changes: the model's buffers, and the state of
    torch's random number generators on the CPU and on the model's GPUs.
    """
    buffers = [
        (module, name, buffer, buffer._version, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and not buffer.is_inference()
    ]
    gpus = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    try:
        with torch.random.fork_rng(gpus):
            yield
    finally:
        for module, name, buffer, version, content in buffers:
            module._buffers[name] = buffer
            if buffer._version != version:
                buffer.copy_(content)
