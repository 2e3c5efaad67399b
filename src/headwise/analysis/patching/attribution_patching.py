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

from headwise.analysis.importance.gate_gradients import frozen_parameters
from headwise.analysis.patching.output_gradients import OutputGradients
from headwise.analysis.patching.prompt_pair import LayerHead, PromptPairs, prompt_pairs
from headwise.analysis.patching.table import AttributionPatching
from headwise.analysis.prompts import AnswerTokens
from headwise.analysis.quadrature import gauss_legendre
from headwise.analysis.repeated_runs import RepeatedRuns, restored_state
from headwise.checks import whole_number
from headwise.intercept.install import intercepted
from headwise.intercept.interceptor import SiteKey
from headwise.progress import progress_bar
from headwise.runs.fingerprint import run_settings
from headwise.runs.rows import HeadRow
from headwise.shapes import Float


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
    """Estimate the results of `activation_patching` for all heads from derivatives: how much of the logit difference
    between the right and the wrong answer is recovered if one head's output in the run on the corrupted prompts is
    replaced by its output in the run on the clean prompts (or the other way round, depending on `direction`).

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
    tokens = AnswerTokens.from_arguments(answer, wrong, at)
    if steps is not None:
        whole_number("steps", steps, least=1)
    with prompt_pairs(model, clean, corrupted, tokens, direction) as pairs, frozen_parameters(model):
        table_heads = pairs.heads(heads)
        effects, gap = _estimated_effects(pairs, {site for site, _ in table_heads}, steps, progress)
        rows = [
            HeadRow(**labels, statistics=pairs.estimates(pairs.unpatched + effects[site][:, labels["head"]]))
            for site, labels in table_heads
        ]
        settings = run_settings(model, None, None, direction=direction, heads=len(rows), steps=steps)
        return AttributionPatching(tuple(rows), {**settings, "measured": {**pairs.measured, **gap}})


def _estimated_effects(
    pairs: PromptPairs, sites: Collection[SiteKey], steps: int | None, progress: bool
) -> tuple[dict[SiteKey, Float[Tensor, "pairs heads"]], dict[str, float]]:
    """Return for each site (a module's self- or cross-attention) the estimated effects of patching each of its heads on
    the difference of logits. With `steps`, derivatives are averaged over as many points, and a second dictionary has
    the completeness gap; otherwise it is empty.
    """
    gradients = OutputGradients(pairs.model, pairs.source_run)
    with intercepted(pairs.model, gradients):
        effects = _first_order_effects(pairs, gradients, sites)
        if steps is None:
            return effects, {}
        lines = _LineIntegrals(pairs, gradients, steps)
        with progress_bar("attribution", len(sites), "layers", shown=progress) as bar:
            for site in bar.track(sites):
                effects[site] = lines.effects(site)
    return effects, {"completeness_gap": lines.largest_gap}


def _first_order_effects(
    pairs: PromptPairs, gradients: OutputGradients, sites: Collection[SiteKey]
) -> dict[SiteKey, Float[Tensor, "pairs heads"]]:
    """Run the model on the destination batch, forward and backward, and return for each site (a module's self- or
    cross-attention) the estimated effects of patching each of its heads on the difference of logits, to first order.
    """
    gradients.reset()
    with restored_state(pairs.model), torch.enable_grad():
        difference = pairs.difference()
        effects = gradients.products(difference, sites)
    pairs.set_unpatched(difference)
    return effects


class _LineIntegrals:
    """Integrated gradients along the straight lines from the head outputs in the unpatched run to those in the source
    run, for the heads of one site (a module's self- or cross-attention) at a time.

    Attributes:
        largest_gap: largest absolute difference so far, over sites and prompt pairs, between the sum of the effects of
            all heads of a site and the effect of patching them at once.

    Args:
        pairs: the prompts.
        gradients: interceptor, with the head outputs of the unpatched run.
        steps: number of points on each line.
    """

    def __init__(self, pairs: PromptPairs, gradients: OutputGradients, steps: int) -> None:
        self._pairs, self._gradients, self._points = pairs, gradients, gauss_legendre(steps)
        self.largest_gap = 0.0
        paths = {record.site.path for record in pairs.source_run.records}
        self._runs = RepeatedRuns(pairs.model, paths, reuse=True)
        gradients.reset()
        self._runs.run_unchanged(pairs.difference)

    def effects(self, site: SiteKey) -> Float[Tensor, "pairs heads"]:
        """Return the effect of each head of a site: the derivative of the difference of logits, averaged over the line,
        times the change of the head's output.
        """
        integral = sum(weight * self._products(site, point) for point, weight in self._points)
        assert isinstance(integral, Tensor)
        self._gradients.reset(site, 1.0)
        together = self._runs.run_gated(self._pairs.difference, [site.path]).double() - self._pairs.unpatched.double()
        self.largest_gap = max(self.largest_gap, (integral.sum(1) - together).abs().max().item())
        return integral

    def _products(self, site: SiteKey, share: float) -> Float[Tensor, "pairs heads"]:
        """Return the product of derivative and change of each head of a site at one point of the line."""
        self._gradients.reset(site, share)

        def differentiate() -> Tensor:
            return self._gradients.products(self._pairs.difference(), [site])[site]

        with torch.enable_grad():
            return self._runs.run_gated(differentiate, [site.path])
