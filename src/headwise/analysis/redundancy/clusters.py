"""Clusters of similar heads."""

from typing import Any

import torch
from torch import Tensor

from headwise.errors import require
from headwise.shapes import Float


def require_linkage() -> Any:
    """Import and return `scipy.cluster.hierarchy`; raise `MissingExtra` if scipy is not installed."""
    return require("scipy.cluster.hierarchy", purpose="clusters of heads", extra="tables")


def find_clusters(similarity: Float[Tensor, "heads heads"], threshold: float) -> list[list[int]]:
    """Group heads into clusters in which every two heads have a similarity of at least `threshold`. Return the clusters
    of two or more heads, each as a list of head indices.

    Complete-linkage clustering: the two most similar sets are joined first, where the similarity of two sets is that of
    their least similar pair. SciPy decides the order of equally similar pairs. Each head is in at most one cluster.

    Args:
        similarity: symmetric matrix of similarities up to 1; NaN, for a pair that was not compared, is below every
            threshold.
        threshold: least similarity within a cluster, above 0.

    Raises:
        MissingExtra: scipy is not installed.
    """
    hierarchy = require_linkage()
    if len(similarity) < 2:
        return []
    # In the matrix's dtype, so that a similarity that equals the threshold is not below it by rounding.
    largest_distance = 1 - torch.tensor(threshold, dtype=similarity.dtype)
    if largest_distance < 0:
        return []
    distances = (1 - similarity).nan_to_num(nan=2.0).clamp(0.0, 2.0)
    above_diagonal = tuple(torch.triu_indices(len(similarity), len(similarity), offset=1))
    tree = hierarchy.linkage(distances[above_diagonal].double().numpy(), method="complete")
    clusters: dict[int, list[int]] = {}
    for head, cluster in enumerate(hierarchy.fcluster(tree, t=largest_distance.item(), criterion="distance")):
        clusters.setdefault(int(cluster), []).append(head)
    return sorted(heads for heads in clusters.values() if len(heads) > 1)
