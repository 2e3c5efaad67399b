"""Inputs of a recipe: its model, texts and loss, checked before any step runs."""

import json
import warnings
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from headwise.analysis.causality import require_causal
from headwise.compression.pruning.pruning_plan import PruningPlan
from headwise.compression.recipe.before_after import require_report
from headwise.compression.recipe.common_text import count_common_sequences
from headwise.compression.recipe.held_out import HeldOutText
from headwise.compression.recipe.merge_check import require_merge
from headwise.compression.recipe.recipe import DTYPES, CompressionRecipe
from headwise.compression.recipe.whole_model import load_whole_model, loss_of
from headwise.compression.scores.named_scores import require_scores
from headwise.data.batches import digest_of, to_device
from headwise.data.models import ModelSource, find_model
from headwise.data.texts import Texts
from headwise.runs.data_pass import tokenize
from headwise.runs.fingerprint import run_settings
from headwise.wording import counted


@dataclass(frozen=True)
class RecipeInputs:
    """Model, texts and loss of a recipe.

    Attributes:
        recipe: the recipe.
        source: location of the dense model.
        dense: the dense model.
        tokenizer: its tokenizer.
        texts: texts for scores, fitting and healing.
        verify: other texts, for the report.
        held_out: their sequences by length.
        loss: loss of the model.
    """

    recipe: CompressionRecipe
    source: ModelSource
    dense: nn.Module
    tokenizer: Any
    texts: Texts
    verify: Texts
    held_out: HeldOutText
    loss: Any

    def settings(self, plan: PruningPlan | None) -> dict[str, Any]:
        """Return everything that the models depend on, JSON-compatible: the recipe without [report], versions of
        packages, and hashes of the model, the texts and a plan that the recipe names.
        """
        run = run_settings(self.dense, None, self.source.title)
        hashes = {
            "data": digest_of(self.texts.sequences),
            "verify": self.held_out.digest,
            "plan": None if plan is None else digest_of([plan.to_json()]),
        }
        return {**recipe_settings(self.recipe), "model": run["model"], "versions": run["versions"], "hashes": hashes}


def recipe_settings(recipe: CompressionRecipe) -> dict[str, Any]:
    """Return the settings of a run that its recipe states, without the report, as JSON-compatible values."""
    return {"recipe": json.loads(json.dumps(asdict(replace(recipe, report=None))))}


def load_inputs(
    recipe: CompressionRecipe, plan: PruningPlan | None, device: torch.device, *, shown: bool
) -> RecipeInputs:
    """Load the model and the texts of a recipe. Mistakes in the recipe are reported now, and those that can be seen
    without the weights before the model is loaded.

    Args:
        recipe: the recipe.
        plan: the plan that the recipe names; None for a new one.
        device: device for the model.
        shown: show a progress bar.
    """
    source = find_model(recipe.model, recipe.revision)
    tokenizer = source.tokenizer()
    loss = loss_of(source, tokenizer)
    if recipe.prune is not None and recipe.prune.keep is not None:
        require_scores(recipe.prune.scores, recipe.prune.constraint, loss)
    texts = Texts(recipe.data.path, tokenizer, **recipe.data.options())
    tokenize(texts, shown=shown)
    options = recipe.data.options() | {"limit": None} | recipe.verify.options()
    HeldOutText.of(Texts(recipe.verify.path, tokenizer, **options))
    dense = load_whole_model(source, DTYPES.get(recipe.dtype or "")).to(device)
    verify, texts = Texts(recipe.verify.path, tokenizer, **options).within(dense), texts.within(dense)
    held_out = HeldOutText.of(verify)
    require_causal(loss, dense, (to_device(batch, device) for batch in held_out.batches()))
    if recipe.report is not None:
        require_report(recipe.report, dense, tokenizer, loss)
    require_merge(recipe, dense, to_device(next(iter(texts)), device), plan)
    _warn_of_common_text(texts, verify)
    return RecipeInputs(recipe, source, dense, tokenizer, texts, verify, held_out, loss)


def _warn_of_common_text(texts: Texts, held_out: Texts) -> None:
    """Warn if the held-out text is among that which the model is made smaller with."""
    common = count_common_sequences(texts, held_out)
    if common:
        of_all = f"{common} of {counted(len(held_out.sequences), 'sequence')}"
        share = "shares" if common == 1 else "share"
        warnings.warn(f"{of_all} in [verify] {share} text with [data], so that the report is too good", stacklevel=4)
