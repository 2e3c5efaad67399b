"""Inputs of a recipe: its model, texts and loss, checked before any step runs."""

import json
import math
import warnings
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.causality import require_causal
from headwise.analysis.losses import loss_by_name, next_token_loss
from headwise.compression.merging.merge_kv import MERGEABLE, mergeable_modules
from headwise.compression.pruning.plan_pruning import plan_pruning
from headwise.compression.pruning.prune import prune
from headwise.compression.pruning.pruning_plan import PruningPlan
from headwise.compression.recipe.recipe import DTYPES, CompressionRecipe
from headwise.compression.scores.measured import MagnitudeScores
from headwise.compression.scores.named_scores import require_scores
from headwise.data.batches import digest_of, to_device
from headwise.data.models import ModelSource, find_model
from headwise.data.texts import Texts
from headwise.data.tokenization import SpecialTokens, max_input_tokens
from headwise.errors import InputError, require
from headwise.families.registry import head_module
from headwise.runs.data_pass import tokenize
from headwise.runs.fingerprint import run_settings
from headwise.settings import LOSSES
from headwise.shapes import Int
from headwise.wording import counted

WINDOW = 13
"""Number of consecutive tokens that two data sets do not share by chance (Brown et al. 2020, appendix C)."""

FACTOR = 6_364_136_223_846_793_005
"""Factor of the polynomial hash of windows, modulo 2^64 (Knuth 1997, section 3.3.4)."""


@dataclass(frozen=True)
class RecipeInputs:
    """Inputs of a compression recipe, loaded and checked: the dense model with its location, the tokenizer, the texts
    for the steps of the recipe (`texts`), the held-out texts (`verify`), and the loss.

    Attributes:
        source: location of the dense model.
        texts: texts for scores, fitting and healing.
        verify: held-out texts.
        loss: function of a model and a batch that returns the loss of each example.
    """

    recipe: CompressionRecipe
    source: ModelSource
    dense: nn.Module
    tokenizer: Any
    texts: Texts
    verify: Texts
    loss: Any

    def settings(self, plan: PruningPlan | None) -> dict[str, Any]:
        """Return JSON-compatible values of everything that the compressed model depends on: the recipe without
        [report], versions of packages, and hashes of the model, of the texts, and of the pruning plan that the recipe
        names.
        """
        run = run_settings(self.dense, None, self.source.title)
        hashes = {
            "data": digest_of([*self.texts.sequences, self.texts.document_numbers()]),  # folds depend on documents
            "verify": digest_of([*self.verify.sequences, self.verify.document_numbers()]),
            "plan": None if plan is None else digest_of([plan.to_json()]),
        }
        return {**recipe_settings(self.recipe), "model": run["model"], "versions": run["versions"], "hashes": hashes}


def recipe_settings(recipe: CompressionRecipe) -> dict[str, Any]:
    """Return the content of a recipe, without its section [report], as JSON-compatible values. An interrupted run can
    resume only if these values are unchanged.
    """
    return {"recipe": json.loads(json.dumps(asdict(replace(recipe, report=None))))}


def load_inputs(
    recipe: CompressionRecipe, plan: PruningPlan | None, device: torch.device, *, shown: bool
) -> RecipeInputs:
    """Load the model and the texts of a recipe, and check all of the recipe against them. Mistakes that do not depend
    on the weights are reported before the model is loaded.
    """
    source = find_model(recipe.model, recipe.revision)
    tokenizer, lm_head = source.tokenizer(), source.lm_head()
    # The loss that the model was trained with; without a language-model head, the distance from the dense embeddings.
    loss: Any = loss_by_name(next(name for name, head in LOSSES.items() if head == lm_head), tokenizer)
    if recipe.prune is not None and recipe.prune.keep is not None:
        require_scores(recipe.prune.scores, recipe.prune.constraint, loss)
    texts = Texts(recipe.data.path, tokenizer, **recipe.data.options())
    tokenize(texts, shown=shown)
    options = recipe.data.options() | {"limit": None} | recipe.verify.options()
    Texts(recipe.verify.path, tokenizer, **options).tokenize(lambda _: None)  # read before the model is loaded
    dense = load_whole_model(source, DTYPES.get(recipe.dtype or "")).to(device)
    verify, texts = Texts(recipe.verify.path, tokenizer, **options).within(dense), texts.within(dense)
    require_causal(loss, dense, (to_device(batch, device) for batch in verify))
    if recipe.report is not None:
        require("scipy.stats", purpose="a compression report", extra="tables")
        limit, tokens = max_input_tokens(dense, tokenizer), recipe.report.prompt
        tokens += recipe.report.new_tokens if loss is next_token_loss else 0
        if limit is not None and tokens > limit:
            expected = f"at most {limit} tokens of prompt and new_tokens in [report], the model's limit"
            raise InputError("prompt", expected=expected, got=tokens)
    _require_merge(recipe, dense, to_device(next(iter(texts)), device), plan)
    common = count_common_sequences(texts, verify)
    if common:
        of_all = f"{common} of {counted(len(verify.sequences), 'sequence')}"
        share = "shares" if common == 1 else "share"
        warnings.warn(f"{of_all} in [verify] {share} text with [data], so that the report is too good", stacklevel=3)
    return RecipeInputs(recipe, source, dense, tokenizer, texts, verify, loss)


def load_whole_model(source: ModelSource, dtype: torch.dtype | None = None) -> nn.Module:
    """Load a model that will be saved again, in its saved data type by default, with its language-model head if it has
    one. Raise `InputError` for a model with another head, such as a classifier's, because that head would be lost.
    """
    model: Any = source.model(source.lm_head(), dtype)
    saved = getattr(model.config, "architectures", None) or [type(model).__name__]
    if type(model).__name__ not in saved:
        expected, got = "one without a head, or with that of a language model", f"a {saved[0]}"
        remedy = f"load it with transformers.{saved[0]}, and use the functions of headwise in Python"
        raise InputError("model", expected=expected, got=got, remedy=remedy)
    loaded: nn.Module = model
    return loaded


def _require_merge(
    recipe: CompressionRecipe, model: nn.Module, batch: Mapping[str, Any], plan: PruningPlan | None
) -> None:
    """Raise `InputError` if the key/value heads that remain after the section [prune] cannot be merged as [merge]
    states. To count the remaining heads, a copy of the model on the device meta is pruned by the recipe's plan. If the
    recipe names no plan, one is made from simple scores: under the constraints "uniform" and "groups", the counts do
    not depend on the scores.
    """
    if recipe.merge is None:
        return
    remaining, section = model, recipe.prune
    if section is not None:
        if plan is None:
            assert section.keep is not None  # checked by the recipe
            if section.constraint == "free":
                expected = "uniform or groups in [prune] before [merge], which needs equally many heads in all layers"
                raise InputError("constraint", expected=expected, got="'free'")
            plan = plan_pruning(MagnitudeScores(model, batch), keep=section.keep, constraint=section.constraint)
        remaining = prune(deepcopy(model).to("meta"), replace(plan, identity=None))
    names = {path: type(module).__name__ for path, module in remaining.named_modules()}
    counts = {head_module(remaining, path).num_kv_heads for path, name in names.items() if name in MERGEABLE}
    wanted, common = recipe.merge.kv_heads, math.gcd(*counts)
    divisors = [str(number) for number in range(1, common) if common % number == 0]
    if counts and str(wanted) not in divisors:
        heads = " or ".join(counted(count, "key/value head") for count in sorted(counts))
        after = "" if section is None else " after [prune]"
        expected = f"{' or '.join(divisors) or 'no section [merge]'} for {heads} of a layer{after}"
        raise InputError("kv_heads", expected=expected, got=wanted)
    mergeable_modules(remaining, wanted)


def count_common_sequences(texts: Texts, others: Texts) -> int:
    """Return the number of sequences in `others` that share text with `texts`. A sequence shares text if 13 consecutive
    tokens occur in both data sets and one of them is in the sequence, or if the whole sequence is also in `texts`.

    Sequences are joined in the order of the data, without the special tokens around them. The same text is found in
    both, whatever their context and the option `documents`. The tokenizer is the same.
    """
    known, sequences = (
        [each[len(special.before) : len(each) - len(special.after)].long() for each in data.sequences]
        for data, special in ((each, SpecialTokens.of(each.tokenizer)) for each in (texts, others))
    )
    tokens = torch.cat(sequences)
    is_known = torch.isin(_hashes(tokens), _hashes(torch.cat(known)))
    is_common = torch.zeros_like(tokens, dtype=torch.bool)
    for offset in range(WINDOW):
        is_common[offset : offset + len(is_known)] |= is_known
    whole = {tuple(sequence.tolist()) for sequence in known}
    return sum(
        bool(common.any()) or tuple(sequence.tolist()) in whole
        for sequence, common in zip(sequences, torch.split(is_common, list(map(len, sequences))), strict=True)
    )


def _hashes(tokens: Int[Tensor, " tokens"]) -> Int[Tensor, " windows"]:
    """Return the hash of each window of 13 consecutive tokens; an empty tensor if there are fewer tokens."""
    count = max(0, len(tokens) - WINDOW + 1)
    hashes = torch.zeros(count, dtype=torch.int64)
    for offset in range(WINDOW):
        hashes = hashes * FACTOR + tokens[offset : offset + count] + 1
    return hashes
