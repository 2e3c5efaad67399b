"""`prune`: a copy of a model with fewer heads, whose output projections are fitted to those of the dense model."""

from copy import deepcopy
from typing import Any

from torch import nn

from headwise.checks import flag, require_module
from headwise.compression.calibration.calibration_data import calibration_batches
from headwise.compression.calibration.reconstruction import reconstruct
from headwise.compression.calibration.same_outputs import remove_heads_checked
from headwise.compression.pruning.pruning_plan import PruningPlan
from headwise.data.batches import documents_of, evaluation_mode
from headwise.errors import InputError
from headwise.families.head_module import KeptHeads
from headwise.families.registry import head_module
from headwise.progress import shown_progress
from headwise.removal.remove_heads import loader_of, remove_heads
from headwise.removal.torch_layers import replace_torch_layers, with_own_layers
from headwise.runs.fingerprint import identity_of


def prune(model: nn.Module, plan: PruningPlan, *, calibration: Any = None, progress: bool = False) -> nn.Module:
    """Return a copy of a model without the heads that a pruning plan removes. The rows and columns of these heads are
    cut from the projections, and the configuration states the remaining heads. Attention layers of torch are replaced
    by the equivalent layers of `headwise.compat`.

    With calibration data, the output projection of each attention module is fitted by least squares to what the dense
    module returns; without, the remaining weights are unchanged, and the copy equals the model with the outputs of the
    removed heads set to zero. That this is so is verified on calibration data; without them it follows from the class
    names of the attention modules, unless the plan was verified on the data of its scores.

    Args:
        model: a model of a known family.
        plan: the heads that remain, of `hw.plan_pruning`.
        calibration: `Texts`, or batches of the model's arguments; None for no reconstruction.
        progress: show progress bars on standard error.

    Raises:
        InputError: the plan is for another model; the model is of no known family, or computes something else than its
            class names say; the calibration data are empty, a planned module does not run on them, or their padding is
            not stated by a mask of two axes.

    Example:
        >>> pruned = headwise.prune(model, plan, calibration=texts)  # doctest: +SKIP
        >>> pruned.save_pretrained("smaller")  # doctest: +SKIP
    """
    require_module(model)
    flag("progress", progress)
    kept = _kept_heads(model, plan)
    pruned = replace_torch_layers(deepcopy(model))
    if calibration is None:
        remove_heads(pruned, kept)
        return pruned
    dense = with_own_layers(model)
    with evaluation_mode(dense), evaluation_mode(pruned), shown_progress(progress):
        batches = calibration_batches(dense, calibration)
        reconstruct(dense, pruned, kept, batches, documents_of(calibration))
        remove_heads_checked(pruned, kept, batches)
    return pruned


def _kept_heads(model: nn.Module, plan: PruningPlan) -> dict[str, KeptHeads]:
    """Return the heads that remain in each attention module of a plan, by the path of the module. Raise `InputError` if
    the plan does not fit the model.
    """
    if not isinstance(plan, PruningPlan):
        raise InputError("plan", expected="a PruningPlan of hw.plan_pruning", got=type(plan).__name__)
    plan.require_consistent()
    order = {path: index for index, (path, _) in enumerate(model.named_modules())}
    kept: dict[str, KeptHeads] = {}
    for planned in sorted(plan.modules, key=lambda each: order.get(each.module, -1)):
        if planned.module not in order:
            raise InputError("plan", expected="a plan for this model", got=f"one with a module {planned.module}")
        module = head_module(model, planned.module)
        if (module.num_heads, module.num_kv_heads) != (planned.num_heads, planned.num_kv_heads):
            got = f"{planned.num_heads} heads and {planned.num_kv_heads} key/value heads"
            expected = f"{module.num_heads} heads and {module.num_kv_heads} key/value heads in {planned.module}"
            raise InputError("plan", expected=expected, got=got)
        kept[planned.module] = module.kept(planned.kept)
    if plan.identity is not None and plan.identity.is_other(identity_of(model)):
        raise InputError("plan", expected="a plan for this model", got="one for a model with other weights")
    loader = None if plan.loader is None else loader_of(model, {path: heads.query for path, heads in kept.items()})
    if loader != plan.loader:
        expected = f"the loader {loader!r} for these heads"
        raise InputError("plan", expected=expected, got=repr(plan.loader), remedy="state null to leave it open")
    return kept
