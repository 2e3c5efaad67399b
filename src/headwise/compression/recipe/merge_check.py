"""Check of the number of merged key/value heads in a recipe, before any step runs."""

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

from torch import nn

from headwise.compression.merging.merge_kv import MERGEABLE, mergeable_modules
from headwise.compression.pruning.plan_pruning import plan_pruning
from headwise.compression.pruning.prune import prune
from headwise.compression.pruning.pruning_plan import PruningPlan
from headwise.compression.recipe.recipe import CompressionRecipe
from headwise.compression.scores.magnitude import MagnitudeScores
from headwise.errors import InputError
from headwise.families.registry import head_module
from headwise.wording import counted


def require_merge(
    recipe: CompressionRecipe, model: nn.Module, batch: Mapping[str, Any], plan: PruningPlan | None
) -> None:
    """Raise `InputError` if the key/value heads that remain after [prune] cannot be merged as [merge] states. A copy of
    the model without numbers is pruned, by scores that need one call of the model: under the constraints "uniform" and
    "groups", the number of remaining heads does not depend on the scores.

    Args:
        recipe: the recipe.
        model: the dense model.
        batch: arguments of the model.
        plan: the plan that the recipe names; None for a new one.
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
