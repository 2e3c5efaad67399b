"""`merge_kv`: a copy of a model with fewer key/value heads, each of which replaces several."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from headwise.checks import flag, require_module, size_argument
from headwise.compression.calibration.calibration_data import calibration_batches, heads_of_batches
from headwise.compression.calibration.reconstruction import reconstruct as fit_output_projections
from headwise.compression.calibration.recording import projection_inputs
from headwise.compression.calibration.same_outputs import (
    ALIGNED,
    MERGED,
    outputs_of,
    remove_heads_checked,
    require_same,
)
from headwise.compression.merging.kv_alignment import (
    Freedom,
    align,
    key_freedom,
    pairwise_gains,
    similar_groups,
    value_freedom,
)
from headwise.data.batches import call_model, copied, documents_of, evaluation_mode
from headwise.errors import InputError
from headwise.families.head_module import HeadModule, HeadPart, KeptHeads
from headwise.families.registry import FAMILIES, family_of, head_module
from headwise.nn.multihead import MultiHeadAttention
from headwise.progress import progress_bar, shown_progress
from headwise.removal.head_changes import average_heads, check_parameters, multiply_features, reorder_heads
from headwise.removal.remove_heads import RECORD, has_record, remove_heads
from headwise.settings import MergeGrouping, MergeMethod
from headwise.shapes import Float

PARTS: tuple[HeadPart, ...] = ("query", "key", "value")
"""Parts of heads whose moments are summed."""


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
    """Return a copy of a model in which several key/value heads are merged into one, so that the key/value cache is
    smaller: multi-head attention becomes grouped-query or multi-query attention. The configuration of the copy states
    the new number of heads, and plain `transformers` can load it.

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
    if method not in ("mean", "weighted_mean", "procrustes"):
        raise InputError("method", expected="'mean', 'weighted_mean' or 'procrustes'", got=repr(method))
    if grouping not in ("adjacent", "similarity"):
        raise InputError("grouping", expected="'adjacent' or 'similarity'", got=repr(grouping))
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
            moments = kv_moments(model, modules, batches)
            with progress_bar("alignment", len(modules), "layers") as bar:
                for path, module in bar.track(modules.items()):
                    weights[path] = _align(merged, module, num_kv_heads, moments[path], method, grouping)
            expected, used = outputs_of(model, modules, batches)
            require_same(merged, expected, outputs_of(merged, modules, used)[0], ALIGNED)
        firsts = {}
        for path, module in modules.items():  # the heads of each group become equal: their weighted mean
            size = module.num_kv_heads // num_kv_heads
            average_heads(merged, module, *(_shares(of_part, size) for of_part in weights[path]))
            # All query heads remain, and the first of the equal key/value heads of each group.
            firsts[path] = KeptHeads(tuple(range(module.num_heads)), tuple(range(0, module.num_kv_heads, size)))
        if reconstruct:
            heads = {path: module.kept(range(module.num_heads)) for path, module in modules.items()}
            fit_output_projections(model, merged, heads, batches, documents_of(calibration))
        if batches:
            remove_heads_checked(merged, firsts, batches, may_record=False, claim=MERGED)
        else:
            remove_heads(merged, firsts, may_record=False)
    return merged


def mergeable_modules(model: nn.Module, num_kv_heads: int) -> dict[str, HeadModule]:
    """Return the attention modules of a model whose key/value heads can be merged into `num_kv_heads`, by path. Raise
    `InputError` if there are none, or if `num_kv_heads` is not a proper divisor of a module's number of key/value
    heads.
    """
    if has_record(getattr(model, "config", None)):
        raise InputError("model", expected="a model whose configuration states its heads", got=f"a record {RECORD}")
    names = {path: type(module).__name__ for path, module in model.named_modules()}
    modules = {path: head_module(model, path) for path, name in names.items() if name in MERGEABLE}
    if not modules:
        known = [module for module in model.modules() if family_of(module) is not None]
        named = [module for module in model.modules() if "Attention" in type(module).__name__]
        other = (known or named or [model])[0]
        family, reason = family_of(other), ""
        if family is not None:
            reason = f" with {family.why_not_removed or 'no number of key/value heads in its configuration'}"
        expected = f"attention modules of {', '.join(MERGEABLE)}"
        raise InputError("model", expected=expected, got=f"{type(other).__name__}{reason}")
    for path, module in modules.items():
        present = module.num_kv_heads
        if num_kv_heads >= present or present % num_kv_heads:
            expected = f"a number below {present} that divides it, the key/value heads of {path}"
            raise InputError("num_kv_heads", expected=expected, got=num_kv_heads)
    check_parameters(model, list(modules.values()))
    return modules


MERGEABLE = tuple(name for family in FAMILIES if family.merges_kv_heads for name in family.classes)
"""Names of the classes of attention modules that state a number of key/value heads."""

_HeadWeights = tuple[Float[Tensor, "_"], Float[Tensor, "_"]]
"""Weights of the keys, and of the values, of each old key/value head in the mean of its group."""

_Moments = tuple[Float[Tensor, "_"], Float[Tensor, "_ _ _ _"], Float[Tensor, "_ _ _ _"]]
"""Sums over tokens, in float64, of projected queries, keys and values, before norms and rotary positions: of `|q_h|^2`
for each query head h, and of `k_i k_j^T` and `v_i v_j^T` for key/value heads i and j, `(kv_heads, kv_heads, width,
width)`."""


def _equal_weights(module: HeadModule) -> _HeadWeights:
    """Return equal weights, all 1, for the keys and the values of all key/value heads of a module. When heads are
    merged, those in one group are averaged with these weights.
    """
    keys, values = torch.ones(2, module.num_kv_heads).double()
    return keys, values


def _align(
    model: nn.Module,
    module: HeadModule,
    num_kv_heads: int,
    moments: _Moments,
    method: MergeMethod,
    grouping: MergeGrouping,
) -> _HeadWeights:
    """Reorder the key/value heads of an attention module, in place, so that the heads of each group are adjacent, and
    align them if `method` is "procrustes". The module's output does not change. Return the weights of keys and of
    values with which the heads of each group are then averaged.
    """
    weights = _equal_weights(module)
    aligns = method == "procrustes"
    of_keys = key_freedom(model, module) if aligns else Freedom(module.head_dim)
    of_values = value_freedom(model, module) if aligns else Freedom(module.value_dim)
    queries, keys, values = moments
    if method == "weighted_mean":
        weights = _energies(model, module, queries)
    if grouping == "similarity":
        gains = pairwise_gains(keys, of_keys) + pairwise_gains(values, of_values)
        order = [head for group in similar_groups(gains, num_kv_heads) for head in group]
        reorder_heads(model, module, order)
        keys, values = keys[order][:, order], values[order][:, order]
        weights = weights[0][order], weights[1][order]
    if aligns:
        size = module.num_kv_heads // num_kv_heads
        multiply_features(model, module, _aligned(keys, of_keys, size), _aligned(values, of_values, size))
    return weights


def _aligned(
    products: Float[Tensor, "heads heads width width"], freedom: Freedom, size: int
) -> Float[Tensor, "heads width width"]:
    """Return one orthogonal matrix per head, from the set `freedom`. If the features of each head are multiplied by its
    matrix, the heads of each group of `size` consecutive heads differ least from the mean of their group.
    """
    groups = (slice(start, start + size) for start in range(0, len(products), size))
    return torch.cat([align(products[group, group], freedom) for group in groups])


def _energies(model: nn.Module, module: HeadModule, queries: Float[Tensor, " heads"]) -> _HeadWeights:
    """Return the weights of all key heads and of all value heads for the method "weighted_mean". The weight of a key
    head is the sum of the squared query norms `|q|^2` over its query heads, or the number of these query heads if the
    module normalises queries. The weight of a value head is the squared norm of its columns of the output projection.
    """
    heads, attention = module.num_kv_heads, model.get_submodule(module.path)
    if (family := family_of(attention)) is not None and family.norms(attention):
        queries = torch.ones_like(queries)
    elif isinstance(attention, MultiHeadAttention) and attention.temperature is not None:
        queries = queries / attention.temperature.double().square()
    output = model.get_parameter(f"{module.output}.weight").double()
    columns = output.square().sum(0).view(heads, -1)
    return queries.view(heads, -1).sum(1), columns.sum(1)


def _shares(weights: Float[Tensor, " kv_heads"], size: int) -> Float[Tensor, "groups members"]:
    """Return weights divided by their sum in each group of `size` consecutive heads. In a group whose weights are all
    0, heads have equal shares.
    """
    grouped = weights.view(-1, size)
    grouped = torch.where(grouped.sum(1, keepdim=True) > 0, grouped, torch.ones_like(grouped))
    return grouped / grouped.sum(1, keepdim=True)


def kv_moments(
    model: nn.Module, modules: Mapping[str, HeadModule], batches: Sequence[dict[str, Any]]
) -> dict[str, _Moments]:
    """Run a model on batches, and return three sums over all tokens that are not padding, for each attention module, by
    path. With queries q, keys k and values v, the first is the sum of `|q|^2` for each query head. The others are the
    sums of `k_i k_j^T` and of `v_i v_j^T` for each pair of key/value heads i and j.
    """
    heads_of_batches(model, batches)
    blocks_of = {
        (path, part): next(each for each in module.blocks if each.part == part and each.parameter.endswith(".weight"))
        for path, module in modules.items()
        for part in PARTS
    }
    path_of = {place: blocks.parameter.removesuffix(".weight") for place, blocks in blocks_of.items()}
    sums: dict[tuple[str, HeadPart], Tensor] = {}
    with progress_bar("keys and values", len(batches), "batches") as bar:
        for batch in bar.track(batches, step=1):
            with projection_inputs(model, list(path_of.values()), batch) as recorded:
                call_model(model, copied(batch))
            for (name, part), blocks in blocks_of.items():
                heads, width, path = blocks.heads, blocks.width, path_of[name, part]
                for _, x in recorded[path]:
                    features = model.get_submodule(path)(x)[:, blocks.start : blocks.start + heads * width].double()
                    if part == "query":
                        products = features.unflatten(1, (heads, width)).square().sum((0, 2))
                    else:
                        products = (features.mT @ features).view(heads, width, heads, width).transpose(1, 2)
                    sums[name, part] = sums[name, part] + products if (name, part) in sums else products
    for name, part in blocks_of:
        if (name, part) not in sums:
            raise InputError("calibration", expected=f"data on which {name} projects queries and keys", got="none")
    return {path: (sums[path, "query"], sums[path, "key"], sums[path, "value"]) for path in modules}
