"""Scores by least squares: by how much the output of an attention module changes if heads are removed and the output
projection is fitted again to the outputs of the dense model, or keeps its weights.
"""

import math
import warnings
from collections.abc import Sequence
from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.losses import Loss
from headwise.checks import flag
from headwise.compression.calibration.calibration_data import (
    ScoredHead,
    calibration_batches,
    folds_of,
    heads_of_batches,
)
from headwise.compression.calibration.derivatives import (
    WeightGradients,
    effects_on_loss,
    require_slope,
    token_weights,
    weight_gradients,
    weights_of,
)
from headwise.compression.calibration.least_squares_fits import FoldedMoments, OutputMoments
from headwise.compression.calibration.reconstruction import columns_of_heads, fit_projection, moments_of, output_weight
from headwise.compression.calibration.recording import projection_inputs
from headwise.compression.healing.distillation import distillation_loss
from headwise.compression.pruning.pruning_plan import Head, PlannedModule
from headwise.data.batches import (
    call_model,
    copied,
    count_sequences_and_tokens,
    documents_of,
    evaluation_mode,
    select_examples,
)
from headwise.errors import InputError
from headwise.families.head_module import HeadModule
from headwise.families.registry import head_module
from headwise.page.columns import ModelIdentity
from headwise.progress import progress_bar, shown_progress
from headwise.removal.torch_layers import with_own_layers
from headwise.runs.fingerprint import identity_of


class LeastSquaresScores:
    """Pruning scores of sets of heads. The heads are removed from an attention module, and its output projection is
    fitted again by least squares to its old output y. The score is the rise of the mean squared error on sequences left
    out of the fit. It is divided by the mean of `|y|^2` (about the mean of y if the projection has a bias). Tokens are
    weighted by the mean squared derivative of the model's output with respect to y at the token.

    State with `fitted` whether the projections will be fitted (`hw.prune` with calibration data) or keep their weights.

    Without a loss, `plan_pruning` makes three plans: by these scores, by those without a fit, and by those without a
    fit in which all tokens count equally. It takes the plan whose model differs least from the dense model on held-out
    sequences; see `choose`.

    With a loss, scores of different modules can be compared. A score is then the mean over sequences of the squared
    change of the loss, to first order, when the heads are removed (and the projection is fitted again): twice the rise
    of the loss to second order, with the empirical Fisher matrix of the projection's weights in place of their second
    derivatives (Hassibi and Stork 1992; Theis et al. 2018). It needs memory for one matrix as large as the output
    projection, for each module and sequence.

    Args:
        model: the model.
        calibration: `Texts`, or batches.
        loss: function of model and batch, such as `hw.next_token_loss`; None for errors that cannot be compared between
            modules.
        fitted: True if the output projection is fitted again after the removal, False if its weights are kept.
        progress: show progress bars on standard error.

    Attributes:
        name: name of the scores, for display.
        rows: the heads.
        identity: identity of the model.
        batches: the data.
        is_comparable: True if scores of different modules can be compared.

    Raises:
        InputError: there are no calibration data, they are padding alone, or their padding is not stated by a mask of
            two axes; the model has attention modules of no known family; or the loss is a distance from the unchanged
            model, where its derivatives are 0.

    Example:
        >>> scores = headwise.LeastSquaresScores(model, texts, headwise.next_token_loss)  # doctest: +SKIP
        >>> plan = headwise.plan_pruning(scores, keep=0.7, constraint="free")  # doctest: +SKIP
    """

    rounds: int | None = None

    def __init__(
        self,
        model: nn.Module,
        calibration: Any,
        loss: Loss | None = None,
        *,
        fitted: bool = True,
        progress: bool = False,
    ) -> None:
        self.name = "least squares" + ("" if fitted else " without a fit")
        self.name += "" if loss is None else ", weighted by derivatives of the loss"
        self._is_fitted = flag("fitted", fitted)
        self.is_comparable = loss is not None
        if loss is not None:
            require_slope(loss)
        identity = identity_of(model)
        model = with_own_layers(model)
        with evaluation_mode(model), torch.no_grad(), shown_progress(flag("progress", progress)):
            self.batches = batches = calibration_batches(model, calibration)
            self.rows: Sequence[ScoredHead] = heads_of_batches(model, batches)
            self.identity: ModelIdentity | None = identity
            self._modules = {row.module: head_module(model, row.module) for row in self.rows}
            for path in self._modules if loss is not None else ():
                if not getattr(model.get_submodule(path), "batch_first", True):
                    remedy, got = "leave out the loss, or use batch_first=True", f"{path} with tokens first"
                    raise InputError("model", expected="layers with the batch first", got=got, remedy=remedy)
            folds = folds_of(batches, documents_of(calibration))
            self._fold_of_sequences = torch.tensor([fold for of_batch in folds for fold in of_batch])
            self._model, self._folds = model, folds
            self._moments, self._unweighted = _dense_moments(model, self._modules, batches, folds)
            self._gradients: dict[str, WeightGradients] = {}
            if loss is not None:
                outputs = [module.output for module in self._modules.values()]
                self._gradients = weight_gradients(model, outputs, batches, loss)
        self._known: dict[tuple[Any, ...], list[float]] = {}

    def of(self, units: Sequence[tuple[Head, ...]], removed: frozenset[Head]) -> list[float]:
        """Return the score of each unit, a set of heads of one module, in the model from which the heads `removed` are
        already removed.
        """
        module_of = {(row.layer, row.head): row.module for row in self.rows}
        scores: dict[tuple[Head, ...], float] = {}
        with progress_bar("least squares", len(self._modules), "layers") as bar:
            for path in bar.track(self._modules):
                own = tuple(unit for unit in units if module_of[unit[0]] == path)
                gone = tuple(sorted(head for layer, head in removed if module_of[layer, head] == path))
                key = path, own, gone
                if own and key not in self._known:
                    self._known[key] = self._of_module(*key)
                scores.update(zip(own, self._known.get(key, []), strict=True))
        return [scores[unit] for unit in units]

    def candidates(self) -> list["LeastSquaresScores"]:
        """Return these scores and alternative scores from the same data; `plan_pruning` makes a pruning plan from each
        of them. The alternative scores assume that output projections keep their weights. They weigh tokens by
        derivatives, or all tokens equally. Scores with a loss have no alternatives.
        """
        if self.is_comparable:
            return [self]
        unfitted, unweighted = copy(self), copy(self)
        for scores, name in ((unfitted, self.name), (unweighted, "least squares with equal weights of tokens")):
            scores.name, scores._is_fitted, scores._known = f"{name} without a fit", False, {}
        unweighted._moments = self._unweighted
        return [self, unfitted, unweighted] if self._is_fitted else [self, unweighted]

    def choose(self, plans: Sequence[Sequence[PlannedModule]]) -> int:
        """Return the index of the pruning plan whose model differs least from the dense model on held-out sequences.
        The held-out sequences are the last cross-validation fold of the calibration data: whole documents with about a
        quarter of the tokens (see `folds_of`).

        The output projections of each model are fitted to the dense module on the other folds, or keep their weights if
        these scores are `fitted=False`. The difference is that of `distillation_loss`: for logits the Kullback-Leibler
        divergence from the dense model, otherwise the relative squared error of the output.

        Warns:
            UserWarning: the difference cannot be computed, for example since a tensor of the batches does not have the
                sequences as its first axis; the first plan is chosen.
        """
        held_out = int(self._fold_of_sequences.max())
        numbers = [[index for index, fold in enumerate(fold_of) if fold == held_out] for fold_of in self._folds]
        parts: list[dict[str, Any]] = []
        for batch, chosen in zip(self.batches, numbers, strict=True):
            lengths = (1,), (count_sequences_and_tokens(batch)[0],)
            if chosen and any(isinstance(each, Tensor) and each.shape[:1] not in lengths for each in batch.values()):
                _warn_of_first_plan(len(plans), "a tensor of the batches does not have the sequences as its first axis")
                return 0
            parts += [select_examples(batch, torch.tensor(chosen))] if chosen else []
        changed, errors = deepcopy(self._model), []
        with evaluation_mode(self._model), evaluation_mode(changed), torch.no_grad():
            for plan in plans:
                self._change(changed, plan, held_out)
                try:
                    errors.append(self._difference(changed, parts))
                except Exception as error:  # an output of another kind, or a model that needs the whole batch
                    _warn_of_first_plan(len(plans), str(error))
                    return 0
        return errors.index(min(errors))

    def _change(self, changed: nn.Module, plan: Sequence[PlannedModule], held_out: int) -> None:
        """Change the output projections of `changed`, a copy of the original model, as a pruning plan states. The
        columns of removed heads become 0. If these scores use fits, the projections are fitted to all data except the
        fold `held_out`; otherwise, the columns of the remaining heads keep their weights.
        """
        for planned in plan:
            module, moments = self._modules[planned.module], self._moments[planned.module]
            original = self._model.get_submodule(module.output)
            changed.get_submodule(module.output).load_state_dict(original.state_dict())
            if self._is_fitted:
                left_out = held_out if held_out in moments.folds else None
                fit_projection(changed, module, planned.kept, moments, left_out)
            else:
                removed = set(range(module.num_heads)) - set(planned.kept)
                output_weight(changed, module)[:, columns_of_heads(module, sorted(removed))] = 0.0

    def _difference(self, changed: nn.Module, parts: Sequence[dict[str, Any]]) -> float:
        """Return the distillation loss between the outputs of a changed model and of the original model, as a mean over
        the tokens of all batches in `parts`. If the loss is NaN, return infinity.
        """
        total = tokens = 0.0
        for part in parts:
            new, old = (call_model(each, copied(part)) for each in (changed, self._model))
            count = count_sequences_and_tokens(part)[1]
            total += count * float(distillation_loss(new, old, changed, part))
            tokens += count
        return math.inf if math.isnan(total) else total / tokens

    def _of_module(self, path: str, units: Sequence[tuple[Head, ...]], removed: Sequence[int]) -> list[float]:
        """Return the score of each unit (set of heads) of the attention module at `path`, from which the heads
        `removed` are already removed.
        """
        module, moments = self._modules[path], self._moments[path]
        blocks = [columns_of_heads(module, [head for _, head in unit]) for unit in units]
        gone = columns_of_heads(module, removed)
        removals = (moments.fitted_removals if self._is_fitted else moments.unfitted_removals)(blocks, gone)
        if not self.is_comparable:
            return [error for error, _ in removals]
        gradients, scores = self._gradients[module.output], []
        for _, changes in removals:
            squares = 0.0
            for fold, change in changes.items():  # the change in each fold was fitted to the other folds
                chosen = self._fold_of_sequences == fold
                effects = effects_on_loss((gradients[0][chosen], gradients[1][chosen]), *change)
                squares += float(effects.double().square().sum())
            scores.append(squares / len(self._fold_of_sequences))
        return scores


def _warn_of_first_plan(count: int, reason: str) -> None:
    """Warn that the first of several pruning plans is used, because their models could not be compared for the stated
    reason.
    """
    because = f"the difference of their models on held-out data is not known: {reason}"
    warnings.warn(f"the first of {count} plans is used, because {because}", stacklevel=4)


def _dense_moments(
    model: nn.Module, modules: dict[str, HeadModule], batches: Sequence[dict[str, Any]], folds: Sequence[Sequence[int]]
) -> tuple[dict[str, FoldedMoments], dict[str, FoldedMoments]]:
    """Run the dense model, and return sums over tokens of the inputs and outputs of each module's output projection.
    There are two dictionaries by module path. The first has separate sums for each cross-validation fold, with tokens
    weighted by derivatives. The second has sums over all data, with equal weights.
    """
    moments, unweighted = ({path: moments_of(model, module) for path, module in modules.items()} for _ in range(2))
    outputs = {path: module.output for path, module in modules.items()}
    weights = token_weights(model, list(outputs.values()), batches)
    with progress_bar("outputs of heads", len(batches), "batches") as bar:
        for number, (batch, fold_of) in enumerate(bar.track(zip(batches, folds, strict=True), step=1)):
            with projection_inputs(model, list(outputs.values()), batch) as recorded:
                call_model(model, copied(batch))
            for path, output in outputs.items():
                projection = model.get_submodule(output)
                for index, (sequence, x) in enumerate(recorded[output]):
                    y, own = projection(x), weights_of(weights[output], number, index, x)
                    moments[path].add(fold_of[sequence], OutputMoments.of(x, y, own))
                    unweighted[path].add(0, OutputMoments.of(x, y))
    return {path: each.checked() for path, each in moments.items()}, unweighted
