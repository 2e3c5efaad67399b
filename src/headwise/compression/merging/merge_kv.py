"""`merge_kv`: a copy of a model with fewer key/value heads, each of which replaces several."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.checks import flag, require_module, size_argument
from headwise.compression.calibration.reconstruction import reconstruct as fit_output_projections
from headwise.compression.calibration.same_outputs import (
    ALIGNED,
    MERGED,
    outputs_of,
    remove_heads_checked,
    require_same,
)
from headwise.compression.calibration.scored_heads import calibration_batches
from headwise.compression.merging.head_freedom import Freedom, key_freedom, value_freedom
from headwise.compression.merging.kv_alignment import align, pairwise_gains, similar_groups
from headwise.compression.merging.kv_moments import KVMoments, kv_moments
from headwise.data.batches import documents_of, evaluation_mode
from headwise.errors import InputError
from headwise.families.head_module import HeadModule, KeptHeads
from headwise.families.registry import FAMILIES, family_of, head_module
from headwise.nn.multihead import MultiHeadAttention
from headwise.progress import progress_bar, shown_progress
from headwise.removal.head_changes import average_heads, check_parameters, multiply_features, reorder_heads
from headwise.removal.remove_heads import RECORD, remove_heads
from headwise.settings import MergeGrouping, MergeMethod
from headwise.shapes import Float


def merge_kv(
    model: nn.Module,
    *,
    num_kv_heads: int,
    calibration: Any = None,
    method: MergeMethod = "mean",
    grouping: MergeGrouping = "adjacent",
    reconstruct: bool | None = None,
    progress: bool = False,
) -> nn.Module:
    """Return a copy of a model with fewer key/value heads, and so a smaller cache: multi-head attention becomes
    grouped-query or multi-query attention. Its configuration states the new number, and plain `transformers` loads it.

    Each new key/value head replaces equally many old ones, and serves all their query heads:

    - "mean": the mean of their projections (Ainslie et al. 2023, section 2.1);
    - "weighted_mean": keys weighted by `E|q|^2`, summed over the query heads of an old head, because an error e of the
      keys changes scores by `q^T e`; values weighted by the squared norms of the columns of the output projection that
      read them, because an error e of the values changes the output by `W e`. Queries and errors are taken as
      uncorrelated and without preferred direction. Layers that normalise keys weigh them equally;
    - "procrustes": the mean after generalised Procrustes alignment (Gower 1975). Keys and values of each old head are
      multiplied by an orthogonal matrix, which queries and output projection undo, such that the heads of a group
      differ least on the calibration data. Keys have only the freedom that rotary positions and norms leave.

    Args:
        model: a model of a family whose configuration states key/value heads, or with headwise's own layers.
        num_kv_heads: key/value heads of each attention module of the result.
        calibration: `Texts`, or batches of the model's arguments.
        method: "mean", "weighted_mean" or "procrustes"; the last two need calibration data.
        grouping: "adjacent" merges consecutive heads. "similarity" merges heads whose keys and values, aligned as the
            method aligns them, differ least on the calibration data; query heads change their order accordingly.
        reconstruct: True to fit the output projections by least squares to the outputs of the dense modules, as `prune`
            does. Default True with calibration data.
        progress: show progress bars on standard error.

    Raises:
        InputError: the model is of another family; `num_kv_heads` does not divide the present number, or is not below
            it; calibration data are needed, or empty; heads were removed before that the configuration records; or, on
            the calibration data, a module computes something else than its class name says.

    Example:
        >>> merged = headwise.merge_kv(model, num_kv_heads=1, calibration=texts, method="procrustes")  # doctest: +SKIP
        >>> merged.save_pretrained("smaller")  # doctest: +SKIP
    """
    _check_options(method, grouping)
    needs = method != "mean" or grouping == "similarity" or reconstruct
    if needs and calibration is None:
        option = f"method={method!r}" if method != "mean" else "reconstruct=True" if reconstruct else f"{grouping=}"
        raise InputError("calibration", expected=f"calibration data for {option}", got="None")
    reconstruct = calibration is not None if reconstruct is None else flag("reconstruct", reconstruct)
    modules = mergeable_modules(require_module(model), size_argument("num_kv_heads", num_kv_heads))
    merged = deepcopy(model)
    shown = shown_progress(flag("progress", progress))
    with evaluation_mode(model), evaluation_mode(merged), torch.no_grad(), shown:
        batches = [] if calibration is None else calibration_batches(model, calibration)
        weights = {path: _equal_weights(module) for path, module in modules.items()}
        if method != "mean" or grouping == "similarity":
            weights = _align_all(model, merged, modules, num_kv_heads, batches, method, grouping)
        _average_all(merged, modules, num_kv_heads, weights)
        if reconstruct:
            fit_output_projections(model, merged, _all_heads(modules), batches, documents_of(calibration))
        _remove_equal(merged, modules, num_kv_heads, batches)
    return merged


def _check_options(method: Any, grouping: Any) -> None:
    """Raise `InputError` for another method or grouping."""
    if method not in ("mean", "weighted_mean", "procrustes"):
        raise InputError("method", expected="'mean', 'weighted_mean' or 'procrustes'", got=repr(method))
    if grouping not in ("adjacent", "similarity"):
        raise InputError("grouping", expected="'adjacent' or 'similarity'", got=repr(grouping))


def mergeable_modules(model: nn.Module, num_kv_heads: int) -> dict[str, HeadModule]:
    """Return the places of heads in the attention modules of a model whose key/value heads can be merged, by path.

    Raises:
        InputError: there are none; their heads cannot be merged to `num_kv_heads`; the configuration records heads that
            were removed.
    """
    if getattr(getattr(model, "config", None), RECORD, None) is not None:
        raise InputError("model", expected="a model whose configuration states its heads", got=f"a record {RECORD}")
    names = {path: type(module).__name__ for path, module in model.named_modules()}
    modules = {path: head_module(model, path) for path, name in names.items() if name in MERGEABLE}
    if not modules:
        others = [name for name in names.values() if "Attention" in name] or [type(model).__name__]
        raise InputError("model", expected=f"attention modules of {', '.join(MERGEABLE)}", got=others[0])
    for path, module in modules.items():
        present = module.num_kv_heads
        if num_kv_heads >= present or present % num_kv_heads:
            expected = f"a number below {present} that divides it, the key/value heads of {path}"
            raise InputError("num_kv_heads", expected=expected, got=num_kv_heads)
    check_parameters(model, list(modules.values()))
    return modules


MERGEABLE = tuple(name for family in FAMILIES if family.merges_kv_heads for name in family.classes)
"""Names of the classes of attention modules that state a number of key/value heads."""


class _HeadWeights(NamedTuple):
    """Weight of each old key/value head in the mean of its group.

    Attributes:
        keys: for keys.
        values: for values.
    """

    keys: Float[Tensor, " kv_heads"]
    values: Float[Tensor, " kv_heads"]


def _equal_weights(module: HeadModule) -> _HeadWeights:
    """Return equal weights of all key/value heads."""
    return _HeadWeights(*torch.ones(2, module.num_kv_heads).double())


def _align_all(
    model: nn.Module,
    merged: nn.Module,
    modules: Mapping[str, HeadModule],
    num_kv_heads: int,
    batches: Sequence[dict[str, Any]],
    method: MergeMethod,
    grouping: MergeGrouping,
) -> dict[str, _HeadWeights]:
    """Align the key/value heads of all attention modules of a copy of the model, in place, and return their weights.

    Raises:
        InputError: on the batches, the copy then returns something else than the model.
    """
    moments = kv_moments(model, modules, batches)
    with progress_bar("alignment", len(modules), "layers") as bar:
        weights = {
            path: _align(merged, module, num_kv_heads, moments[path], method, grouping)
            for path, module in bar.track(modules.items())
        }
    expected, used = outputs_of(model, modules, batches)
    require_same(merged, expected, outputs_of(merged, modules, used)[0], ALIGNED)
    return weights


def _align(
    model: nn.Module,
    module: HeadModule,
    num_kv_heads: int,
    moments: KVMoments,
    method: MergeMethod,
    grouping: MergeGrouping,
) -> _HeadWeights:
    """Let the key/value heads of each group in an attention module stand side by side, in place, aligned by the method.
    The module's output does not change. Return the weights of the heads in the mean of their group.
    """
    weights = _equal_weights(module)
    aligns = method == "procrustes"
    keys = key_freedom(model, module) if aligns else Freedom(module.head_dim)
    values = value_freedom(model, module) if aligns else Freedom(module.value_dim)
    if method == "weighted_mean":
        weights = _energies(model, module, moments)
    if grouping == "similarity":
        order = _similar_order(moments, keys, values, num_kv_heads)
        reorder_heads(model, module, order)
        moments = KVMoments(
            moments.queries, moments.keys[order][:, order], moments.values[order][:, order]
        )  # the energies of queries are in `weights`
        weights = _HeadWeights(weights.keys[order], weights.values[order])
    if aligns:
        size = module.num_kv_heads // num_kv_heads
        matrices = (_aligned(moments.keys, keys, size), _aligned(moments.values, values, size))
        multiply_features(model, module, *matrices)
    return weights


def _similar_order(moments: KVMoments, keys: Freedom, values: Freedom, groups: int) -> list[int]:
    """Return the key/value heads in an order in which similar ones stand side by side."""
    gains = pairwise_gains(moments.keys, keys) + pairwise_gains(moments.values, values)
    return [head for group in similar_groups(gains, groups) for head in group]


def _aligned(
    products: Float[Tensor, "heads heads width width"], freedom: Freedom, size: int
) -> Float[Tensor, "heads width width"]:
    """Return the matrices that align the heads of each group of `size` consecutive heads."""
    groups = (slice(start, start + size) for start in range(0, len(products), size))
    return torch.cat([align(products[group, group], freedom) for group in groups])


def _energies(model: nn.Module, module: HeadModule, moments: KVMoments) -> _HeadWeights:
    """Return the weights of "weighted_mean"."""
    heads, attention = module.num_kv_heads, model.get_submodule(module.path)
    queries = moments.queries
    if (family := family_of(attention)) is not None and family.norms(attention):
        queries = torch.ones_like(queries)
    elif isinstance(attention, MultiHeadAttention) and attention.temperature is not None:
        queries = queries / attention.temperature.double().square()
    output = model.get_parameter(f"{module.output}.weight").double()
    columns = output.square().sum(0).view(heads, -1)
    return _HeadWeights(queries.view(heads, -1).sum(1), columns.sum(1))


def _shares(weights: Float[Tensor, " kv_heads"], size: int) -> Float[Tensor, "groups members"]:
    """Return the share of each head in its group; equal shares in a group without weight."""
    grouped = weights.view(-1, size)
    grouped = torch.where(grouped.sum(1, keepdim=True) > 0, grouped, torch.ones_like(grouped))
    return grouped / grouped.sum(1, keepdim=True)


def _all_heads(modules: Mapping[str, HeadModule]) -> dict[str, KeptHeads]:
    """Return all heads of each module."""
    return {path: module.kept(range(module.num_heads)) for path, module in modules.items()}


def _average_all(
    merged: nn.Module, modules: Mapping[str, HeadModule], num_kv_heads: int, weights: Mapping[str, _HeadWeights]
) -> None:
    """Let the key/value heads of each group become equal, in place: their weighted mean."""
    for path, module in modules.items():
        size = module.num_kv_heads // num_kv_heads
        average_heads(merged, module, _shares(weights[path].keys, size), _shares(weights[path].values, size))


def _remove_equal(
    merged: nn.Module, modules: Mapping[str, HeadModule], num_kv_heads: int, batches: Sequence[dict[str, Any]]
) -> None:
    """Remove all key/value heads but the first of each group of equal ones, in place, and verify this on batches."""
    firsts = {path: _first_of_groups(module, num_kv_heads) for path, module in modules.items()}
    if batches:
        remove_heads_checked(merged, firsts, batches, may_record=False, claim=MERGED)
    else:
        remove_heads(merged, firsts, may_record=False)


def _first_of_groups(module: HeadModule, groups: int) -> KeptHeads:
    """Return all query heads, and the first of the equal key/value heads of each group."""
    return KeptHeads(
        tuple(range(module.num_heads)), tuple(range(0, module.num_kv_heads, module.num_kv_heads // groups))
    )
