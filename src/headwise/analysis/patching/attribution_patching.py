"""Attribution patching: estimate of the effect of patching each head, for all heads from one backward pass.

Activation patching runs the model once per head. Attribution patching (Nanda 2023; Syed, Rager and Conmy 2023)
estimates its results to first order, from the derivatives of the difference of logits with respect to the outputs of
heads. The estimate misleads where that difference is strongly curved, such as where a head's attention or a norm is
saturated (Kramar et al. 2024). Derivatives at several points between the two runs (Sundararajan, Taly and Yan 2017)
reduce this error.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.importance.gradients import gauss_legendre
from headwise.analysis.patching.activation_patching import Patching
from headwise.analysis.patching.prompt_pairs import CallKey, LayerHead, PromptPairs, output_of_shape, prompt_pairs
from headwise.analysis.recording import RecordedOutputs
from headwise.analysis.repeated_runs import RepeatedRuns, restored_state
from headwise.checks import whole_number
from headwise.data.batches import frozen_parameters
from headwise.errors import InputError
from headwise.intercept.install import intercepted
from headwise.intercept.interceptor import Call, Change, HeadOutput, SiteKey
from headwise.intercept.sites import SiteRegistry
from headwise.progress import progress_bar
from headwise.runs.rows import HeadRow
from headwise.shapes import Float


class AttributionPatching(Patching):
    """Table of the estimated effect of patching each head, one row per head. Patching replaces the head's output by its
    output in a run on other prompts. The logit difference after patching is estimated from derivatives, not measured.
    The columns are those of activation patching: `difference` and `recovered`.

    With d the logit of the right answer minus that of the wrong one, o the output of the head in the run that is
    patched, and o' its output in the other run, each pair of prompts has

        difference  d + sum over tokens and features of (o' - o) * dd/do
        recovered   (difference - d_corrupted) / (d_clean - d_corrupted)

    (Nanda 2023, "Attribution patching"; Syed, Rager and Conmy 2023). dd/do includes the effect through later layers.

    With `steps`, dd/do is averaged over the straight line from o to o' by Gauss-Legendre quadrature (integrated
    gradients; Sundararajan, Taly and Yan 2017, equation 1). All heads of a layer move along their lines together, one
    layer at a time, while everything after them is computed as usual. The effects of the heads of a layer then add up
    to the effect of patching all of them at once, up to the error of the quadrature.
    `metadata["measured"]["completeness_gap"]` is the largest absolute deviation from this, over layers and prompt
    pairs, in the unit of `difference`. In a layer with one head, the estimate is the result of activation patching.
    """

    NAME = "attribution_patching"


def attribution_patching(
    model: nn.Module,
    clean: Tensor | Mapping[str, Any],
    corrupted: Tensor | Mapping[str, Any],
    *,
    answer: Any,
    wrong: Any,
    heads: Collection[LayerHead] | None = None,
    at: Any = -1,
    direction: str = "denoise",
    steps: int | None = None,
    progress: bool = False,
) -> AttributionPatching:
    """Estimate the results of `activation_patching` from derivatives, without a run of the model for each head. A patch
    replaces a head's output in the run on the corrupted prompts by its output in the run on the clean prompts. With the
    direction "noise", the two runs change places. The table states how much of the logit difference between the right
    and the wrong answer each patch recovers.

    `AttributionPatching` has the formulas (Nanda 2023; Syed, Rager and Conmy 2023, arXiv 2310.10348). `hw.agreement`
    compares the estimates with measured effects:

        estimated = hw.attribution_patching(model, clean, corrupted, answer=mary, wrong=john)
        measured = hw.activation_patching(model, clean, corrupted, answer=mary, wrong=john)
        hw.agreement(estimated, measured).spearman

    The model runs in evaluation mode: once on each batch, and backward once. With `steps`, it also runs `steps` times
    forward and backward for each layer, and once more to measure the completeness gap. All head outputs, and what the
    backward pass needs, are kept in memory.

    Args:
        model: any module that `watch` supports and that returns logits `(batch, length, vocabulary)` with gradients.
        clean: prompts that the model answers correctly, as for `activation_patching`.
        corrupted: as many prompts, with the same shapes and the same padding.
        answer: token ids of the right answers, `(batch,)`, or one for all.
        wrong: token ids of the answers that the corrupted prompts ask for, in the same form.
        heads: heads of the table, `(layer, head)`, zero-based; all by default.
        at: index of the token that the answer follows, as for `activation_patching`.
        direction: "denoise" patches from the clean run into the corrupted one; "noise" patches the other way.
        steps: number of points at which derivatives are averaged; None for those in the unpatched run alone.
        progress: show a progress bar of the layers on standard error, if there are `steps`.

    Raises:
        InputError: as for `activation_patching`; the model records no gradients, or its attention modules do not attend
            to one prompt per row of the batch.
        MissingExtra: rich is not installed and `progress` is set.
    """
    if steps is not None:
        whole_number("steps", steps, least=1)
    answers = {"answer": answer, "wrong": wrong, "at": at}
    with prompt_pairs(model, clean, corrupted, direction, **answers) as pairs, frozen_parameters(model):
        table_heads = pairs.heads(heads)
        gradients, gaps = _OutputGradients(model, pairs.source_run), []
        with intercepted(model, gradients):
            sites = {site for site, _ in table_heads}
            with restored_state(model), torch.enable_grad():
                difference = pairs.difference()
                effects = gradients.products(difference, sites)
            pairs.set_unpatched(difference)
            if steps is not None:
                gradients.reset()
                runs = RepeatedRuns(model, pairs.paths)
                runs.run_unchanged(pairs.difference)
                with progress_bar("attribution", len(sites), "layers", shown=progress) as bar:
                    for site in bar.track(sites):
                        effects[site], gap = _integrated_effects(pairs, gradients, runs, site, steps)
                        gaps.append(gap)
        rows = [
            HeadRow(**labels, statistics=pairs.estimates(pairs.unpatched + effects[site][:, labels["head"]]))
            for site, labels in table_heads
        ]
        further = {} if steps is None else {"completeness_gap": max(gaps, default=0.0)}
        return pairs.table(AttributionPatching, rows, further, heads=len(rows), steps=steps)


def _integrated_effects(
    pairs: PromptPairs, gradients: "_OutputGradients", runs: RepeatedRuns, site: SiteKey, steps: int
) -> tuple[Float[Tensor, "pairs heads"], float]:
    """Estimate how patching each head of one attention module changes the logit difference, by integrated gradients
    from the unpatched to the patched head outputs. Also return the largest absolute error over prompt pairs. The error
    is the sum of the estimates minus the measured effect of patching all heads of the module together.
    """

    def products() -> Tensor:
        return gradients.products(pairs.difference(), [site])[site]

    effects = torch.zeros((), dtype=torch.float64)
    for point, weight in gauss_legendre(steps):
        gradients.reset(site, point)
        with torch.enable_grad():
            effects = effects + weight * runs.run_gated(products, [site.path])
    gradients.reset(site, 1.0)
    together = runs.run_gated(pairs.difference, [site.path]).double() - pairs.unpatched.double()
    return effects, (effects.sum(1) - together).abs().max().item()


class _OutputGradients(SiteRegistry):
    """Interceptor with which a logit difference can be differentiated with respect to head outputs. It adds a tensor of
    zeros, which requires gradients, to the head outputs of each attention call. The derivatives include the effect
    through all later layers.

    After `reset` with an attention module, its head outputs are replaced by points on the straight line from their
    values in the destination run to those in the run `source`, and only these outputs have derivatives. The
    destination run is the last run before such a `reset`.
    """

    def __init__(self, model: nn.Module, source: RecordedOutputs) -> None:
        super().__init__(model)
        self._source = source
        self._destination: dict[CallKey, Float[Tensor, "batch heads queries value_dim"]] = {}
        self._inputs: dict[CallKey, Float[Tensor, "batch heads queries value_dim"]] = {}
        self._moved: SiteKey | None = None
        self._share = 0.0

    def reset(self, moved: SiteKey | None = None, share: float = 0.0) -> None:
        """Prepare the next run, in which the outputs of all heads of the attention module `moved` are replaced. They
        become `1 - share` times their values in the destination run (on the batch that is patched) plus `share` times
        their values in the source run. If `moved` is None, no outputs are replaced.
        """
        self._inputs, self._moved, self._share = {}, moved, share

    def change(self, call: Call) -> Change | None:
        """Return the function that makes the head outputs of an attention call depend on a tensor that requires
        gradients. If `reset` selected an attention module, return None for calls of all other modules.
        """
        if not call.is_recomputation:
            self.register(call)
        if self._moved not in (None, call.site):
            return None
        key, is_moved, share = (call.site, call.index), self._moved is not None, self._share

        def change(attended: HeadOutput) -> Tensor:
            if key not in self._inputs:
                if is_moved:
                    destination = self._destination[key]
                    tensor = torch.lerp(destination, output_of_shape(self._source, key, destination.shape), share)
                else:
                    self._destination[key] = attended.out.detach()
                    tensor = torch.zeros_like(self._destination[key])
                self._inputs[key] = tensor.requires_grad_(torch.is_grad_enabled())
            return self._inputs[key] if is_moved else attended.out + self._inputs[key]

        return change

    def products(
        self, result: Float[Tensor, " pairs"], sites: Collection[SiteKey]
    ) -> dict[SiteKey, Float[Tensor, "pairs heads"]]:
        """Return a first-order estimate of the effect of patching, for each prompt pair and each head of the attention
        modules `sites`. It is the derivative of `result` with respect to the head's output, times the change of this
        output. The change is from the destination run (on the batch that is patched) to the source run. The product is
        summed over queries and features.
        """
        if not result.requires_grad:
            got = "none" if self._inputs else "none, as heads could not be changed"
            raise InputError("model", expected="one that records gradients", got=got)
        calls = {key: tensor for key, tensor in self._inputs.items() if key[0] in sites}
        gradients = torch.autograd.grad(result.sum(), list(calls.values()), materialize_grads=True)
        products: dict[SiteKey, Tensor] = {}
        for key, gradient in zip(calls, gradients, strict=True):
            site = key[0]
            if len(gradient) != len(result):
                remedy = "use activation_patching"
                expected = f"a batch of {len(result)} in {site.path}, one row per prompt pair"
                raise InputError("model", expected=expected, got=len(gradient), remedy=remedy)
            destination = self._destination[key].double()
            moved = output_of_shape(self._source, key, destination.shape).double() - destination
            product = (moved * gradient.double()).sum((2, 3))
            products[site] = products[site] + product if site in products else product
        for site in sites:
            differentiated, recorded = sum(key[0] == site for key in calls), len(self._source.by_site[site])
            if differentiated != recorded:
                expected = f"{recorded} calls of {site.path} whose outputs can be changed"
                raise InputError("model", expected=expected, got=differentiated)
        return products
