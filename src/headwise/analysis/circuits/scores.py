"""Scores of heads from their OV and QK matrices."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.analysis.circuits.matrices import SCORES, CircuitMatrices, FactoredMatrix, positive_share
from headwise.analysis.circuits.module_maps import ModuleMaps
from headwise.errors import InputError
from headwise.progress import progress_bar
from headwise.runs.head_table import HeadTable
from headwise.runs.rows import HeadRow, MeanEstimate


class CircuitScores(HeadTable[HeadRow]):
    """Table of scores of each head from its weights, one row per head.

    E is what each token adds to the residual stream, U is the output embedding times the linear part of the final norm,
    and l are the eigenvalues of a matrix of vocabulary by vocabulary:

        copying     sum(l).real / sum(|l|) for U OV E^T: the logit that the head adds to each token, for each token that
                    it attends to. 1 if attending to a token only raises the logit of that token (and of others like
                    it), -1 if it only lowers it (Elhage et al. 2021, section "Detecting copying behavior").
        matching    the same for E QK E^T: the score of each token as query and each as key. It is 1 if the head attends
                    to tokens that are equal (or alike), -1 if to tokens that are not.
        ov_norm     Frobenius norm of OV.
        ov_largest  largest singular value of OV.
        qk_norm     Frobenius norm of QK.
        qk_largest  largest singular value of QK.

    The eigenvalues are exact: all of them but head_dim are 0, and the others are those of a matrix of head_dim by
    head_dim. Weights are no sample: scores have no standard error, which is NaN.
    """

    NAME = "circuits"
    ROW_TYPE = HeadRow
    SIGNED = ("copying", "matching")
    SAMPLES = "model"


def score_table(circuits: CircuitMatrices, names: Sequence[str], distance: int) -> CircuitScores:
    """Return the table of the scores `names`, or of all that a model has.

    Raises:
        InputError: the model does not have a score that is named.
    """
    names = available(circuits, names, SCORES, "scores")
    values: dict[str, list[Tensor]] = {name: [] for name in names}
    paths = []
    modules = circuits.modules()
    with progress_bar("scores", len(modules), "layers") as bar:
        for maps in bar.track(modules):
            by_name = _module_scores(circuits, maps, names, distance)
            paths.append(maps.path)
            for name in names:
                values[name].append(by_name[name])
    rows = []
    for labels in circuits.heads:
        module, head = paths.index(labels["module"]), labels["head"]
        of_head = {name: MeanEstimate.exact(float(values[name][module][head])) for name in names}
        rows.append(HeadRow(**labels, statistics=of_head))
    settings = {**circuits.metadata["settings"], "distance": distance}
    return CircuitScores(tuple(rows), {**circuits.metadata, "settings": settings, "measured": {"sequences": 1}})


def available(circuits: CircuitMatrices, names: Sequence[str], known: Sequence[str], plural: str) -> tuple[str, ...]:
    """Return the scores that are named, or all `known` ones that a model has. Warn of the others.

    Raises:
        InputError: the model does not have a score that is named, or none of those that are known.
    """
    reasons = {name: circuits.why_not(name) for name in names or known}
    missing = {name: reason for name, reason in reasons.items() if reason is not None}
    present = tuple(name for name in reasons if name not in missing)
    if missing and (names or not present):
        name, reason = next(iter(missing.items()))
        others = [other for other in known if circuits.why_not(other) is None]
        remedy = f"the model has {', '.join(others)}" if others else "use the matrices of each head, ov and qk"
        raise InputError("model", expected=f"one that has {plural} of the name {name!r}", got=reason, remedy=remedy)
    for reason in dict.fromkeys(missing.values()):
        left_out = ", ".join(name for name, of_name in missing.items() if of_name == reason)
        warnings.warn(f"the {plural} {left_out} are left out: the model has {reason}", stacklevel=4)
    return present


def _module_scores(
    circuits: CircuitMatrices, maps: ModuleMaps, names: Sequence[str], distance: int
) -> dict[str, Tensor]:
    """Return the scores `names` of the heads of one module."""
    values: dict[str, Tensor] = {}
    for circuit, vocabulary_score in (("ov", "copying"), ("qk", "matching")):
        needed = [name for name in names if name == vocabulary_score or name.startswith(circuit)]
        if not needed:
            continue
        left, right = circuits.ov_factors(maps) if circuit == "ov" else circuits.qk_factors(maps, distance)
        if vocabulary_score in needed:
            # The eigenvalues of U (left right) E^T are those of right (E^T U) left, and 0.
            core = right @ circuits.vocabulary_product(vocabulary_score) @ left
            values[vocabulary_score] = positive_share(torch.linalg.eigvals(core))
        singular = FactoredMatrix(left, right).singular_values()
        values[f"{circuit}_norm"] = singular.norm(dim=-1)
        values[f"{circuit}_largest"] = singular.amax(-1)
    return values
