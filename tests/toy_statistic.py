"""The smallest statistic: its entry in `STATISTICS`, and its definition entry by entry."""

from headwise.statistics.registry import MeanOfRows

SQUARES = MeanOfRows(
    "squares",
    "share",
    "Mean sum of the squared attention weights of a query.",
    "sum_j A_ij^2, which is 1 / n with uniform attention to n keys",
    lambda row_block: row_block.weights.square().sum(-1),
)


def squares(weights) -> float:
    """Return the statistic of a head from its attention weights `(queries, keys)`, each row of which has a key."""
    rows = [sum(float(weight) ** 2 for weight in row) for row in weights]
    return sum(rows) / len(rows)
