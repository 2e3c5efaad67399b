"""Runs of a model for path patching: with all heads frozen but the senders, and with new inputs of the receivers."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.patching.path_interceptor import ALL_FROZEN, CallKey, PathInterceptor
from headwise.analysis.patching.prompt_pair import PromptPairs, SiteHead
from headwise.analysis.patching.receivers import HeadInputs
from headwise.analysis.recording import RecordedRun
from headwise.analysis.repeated_runs import RepeatedRuns, restored_state
from headwise.analysis.residual_stream import ModuleOutputs, ResidualStream, projection_weight, require_direct
from headwise.errors import InputError
from headwise.intercept.install import intercepted
from headwise.intercept.interceptor import SiteKey
from headwise.intercept.layer_index import is_inside
from headwise.intercept.sites import SiteRegistry
from headwise.shapes import Float

TOLERANCE = 1e-4
"""Largest difference of results, absolute or relative, that counts as rounding."""

MLP_NAMES = ("mlp", "feedforward", "feed_forward", "ffn", "moe", "experts")
"""Parts of the names of classes that compute the MLP of a layer, in lower case."""


class PathRuns:
    """Runs of a model on the destination batch of `pairs` with patched paths from senders to receivers.

    The model runs on that batch at creation, without patches.

    Args:
        pairs: the two batches, and the run that outputs of senders are taken from.
        receivers: heads whose inputs are patched; none to patch the paths to the logits.
        names: which of their inputs, "q", "k" or "v".
        freeze_mlps: freeze the MLPs where all heads but the senders are frozen.

    Raises:
        InputError: some attention cannot be frozen, the inputs of a receiver cannot be patched, or the MLPs cannot be
            frozen.
    """

    def __init__(
        self, pairs: PromptPairs, receivers: Iterable[SiteHead], names: Sequence[str], *, freeze_mlps: bool
    ) -> None:
        self._pairs, self._model, self._patches_heads = pairs, pairs.model, bool(names)
        heads: dict[SiteKey, list[int]] = {}
        for site, labels in receivers:
            heads.setdefault(site, []).append(labels["head"])
        if names and not heads:
            raise InputError("receivers", expected="'logits', or at least one head", got="none")
        self._unpatched = RecordedRun(self._model)
        self._interceptor = PathInterceptor(pairs.source_run, self._unpatched, heads, names)
        self._sites = sites = {record.site.path for record in pairs.source_run.records}
        self._mlps = ModuleOutputs(_mlps_of(self._model, sites)) if freeze_mlps else None
        self._record_unpatched()
        _require_all_intercepted(pairs.source_run, self._unpatched)
        # Outputs are frozen by the number of the call, which a run that skips calls of the same site would change.
        calls_once = all(len(outputs) == 1 for outputs in self._unpatched.by_site.values())
        self._runs = RepeatedRuns(self._model, sites, reuse=calls_once and self._mlps is None)
        with self.intercepted():
            self._interceptor.leave()
            expected = "one whose results stay the same if heads get their own outputs"
            self._require_unpatched(self._runs.run_unchanged(pairs.difference), expected)
            self._require_unpatched(self._frozen_difference([]), expected)
            self._interceptor.freeze([])
            with restored_state(self._model):
                expected = "one in which intercepted attention heads, and nothing else, mix tokens"
                self._require_unpatched(pairs.difference_in_other_context(), expected)
            if self._mlps is not None:
                self._require_frozen_mlps()

    @contextmanager
    def intercepted(self) -> Iterator[None]:
        """Intercept the attention of the model while the context is active; other methods need it."""
        with intercepted(self._model, self._interceptor):
            yield

    def difference(self, senders: Collection[tuple[SiteKey, int]]) -> Float[Tensor, " pairs"]:
        """Return the difference of logits of each prompt pair in the run on the destination batch in which the direct
        paths from all `senders` to the receivers are patched.
        """
        difference = self._frozen_difference(senders)
        if not self._patches_heads:
            return difference
        changed = {key: inputs for key, inputs in self._interceptor.recorded.items() if self._has_changed(key, inputs)}
        if not changed:
            return self._pairs.unpatched
        self._interceptor.patch(changed)
        return self._runs.run_gated(self._pairs.difference, {site.path for site, _ in changed})

    @property
    def note(self) -> dict[str, str]:
        """Note for the results, if all runs computed all layers because reuse of layer outputs would change results."""
        return {} if self._runs.note is None else {"note": self._runs.note}

    def _record_unpatched(self) -> None:
        """Run the model without patches. Record its head outputs, the inputs of the receivers and the MLPs' outputs."""
        recorded_mlps = nullcontext() if self._mlps is None else self._mlps.recorded()
        self._interceptor.record()
        with restored_state(self._model), intercepted(self._model, self._unpatched), recorded_mlps, self.intercepted():
            self._pairs.set_unpatched(self._pairs.difference())
        self._inputs: Mapping[CallKey, HeadInputs] = self._interceptor.recorded

    def _frozen_difference(self, senders: Collection[tuple[SiteKey, int]]) -> Float[Tensor, " pairs"]:
        """Run the model with all heads frozen but the senders, which have their outputs of the source run. Return the
        differences of logits. Without senders, no layer outputs are reused.
        """
        self._interceptor.freeze(senders)
        with nullcontext() if self._mlps is None else self._mlps.replayed():
            return self._runs.run_gated(self._pairs.difference, {site.path for site, _ in senders} or self._sites)

    def _has_changed(self, key: CallKey, inputs: HeadInputs) -> bool:
        """Return True if inputs of receivers differ from those in the unpatched run.

        Raises:
            InputError: the unpatched run has no such call.
        """
        if key not in self._inputs:
            got = f"call {key[1]} of {key[0].path} in a patched run alone"
            raise InputError("receivers", expected="heads that attend in the same calls in all runs", got=got)
        return any(not torch.equal(inputs[name], self._inputs[key][name]) for name in inputs)

    def _require_unpatched(self, difference: Float[Tensor, " pairs"], expected: str) -> None:
        """Raise `InputError` if a run that should change nothing has another result than the unpatched run. `expected`
        describes a model for which this cannot happen.
        """
        unpatched = self._pairs.unpatched
        if not torch.allclose(difference, unpatched, TOLERANCE, TOLERANCE, equal_nan=True):
            got = f"logit differences {difference.tolist()} in place of {unpatched.tolist()}"
            raise InputError("model", expected=expected, got=got)

    def _require_frozen_mlps(self) -> None:
        """Raise `InputError` unless, with MLPs frozen, a change of head outputs changes the end of the residual stream
        by the same change after the output projections, and by nothing else. All heads are changed at once.
        """
        stream = ResidualStream(self._model)
        with stream.followed():
            self._frozen_difference([])
        before = stream.final_norm_call().input
        source, written = self._pairs.source_run, torch.zeros_like(before)
        every = [(record.site, head) for record in source.records for head in range(record.heads)]
        with stream.followed():
            self._frozen_difference(every)
        for site, outputs in self._unpatched.by_site.items():
            for index, out in enumerate(outputs):
                change = (source.output_of_call(site, index) - out).transpose(1, 2).flatten(2)
                weight = projection_weight(self._model, site.path, change.shape[-1], before)
                if change.shape[:2] != before.shape[:2]:
                    expected = "a model with one residual stream for all heads"
                    raise InputError("model", expected=expected, got=f"another one in {site.path}")
                written += change.to(before.dtype) @ weight.mT
        require_direct(self._model, stream.final_norm_call().input - before, written, before)


def _mlps_of(model: nn.Module, sites: Collection[str]) -> list[nn.Module]:
    """Return the MLPs of a model: modules named so by their class, outside of each other, and without attention.

    Raises:
        InputError: there are none.
    """
    paths: list[str] = []
    for path, module in model.named_modules():
        is_mlp = any(name in type(module).__name__.lower() for name in MLP_NAMES)
        has_attention = any(path == site or is_inside(site, path) or is_inside(path, site) for site in sites)
        if is_mlp and not has_attention and not any(is_inside(path, other) for other in paths):
            paths.append(path)
    if not paths:
        expected = "'recompute' for a model whose MLPs are not modules with such a name"
        raise InputError("mlps", expected=expected, got=f"'freeze' for {type(model).__name__}")
    return [model.get_submodule(path) for path in paths]


def _require_all_intercepted(*runs: SiteRegistry) -> None:
    """Raise `InputError` if attention of a module was not intercepted in one of the runs, so that not all heads can be
    frozen.
    """
    names: set[Any] = set().union(*(run.unread for run in runs))
    if names:
        got = f"attention that was not intercepted in {', '.join(sorted(names))}"
        raise InputError("model", expected=ALL_FROZEN, got=got)
