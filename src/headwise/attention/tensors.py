"""Shapes of the tensors of an attention call, by name."""

from torch import Tensor

from headwise.shapes import Bool, Float, Int

Queries = Float[Tensor, "batch heads queries head_dim"]
Keys = Float[Tensor, "batch kv_heads keys head_dim"]
Values = Float[Tensor, "batch kv_heads keys value_dim"]
Bias = Float[Tensor, "#batch #heads #queries #keys"]
Outputs = Float[Tensor, "batch heads queries value_dim"]
Weights = Float[Tensor, "batch heads queries keys"]

PerRow = Float[Tensor, "batch heads queries"]
"""One number for each query row, such as the log-sum-exp of its scores."""

RowColumn = Float[Tensor, "batch heads queries 1"]
"""The same, with an axis that broadcasts over features or keys."""

PerHead = Float[Tensor, " heads"]

QueryPositions = Int[Tensor, "#batch queries"]
KeyPositions = Int[Tensor, "#batch keys"]

KeyRanges = Int[Tensor, "#batch #heads queries ranges 2"]
"""Start and stop of each range of keys that a query attends to."""

Matrix = Bool[Tensor, "#batch #heads #queries #keys"]
"""True where a query attends to a key."""

Stacked = Float[Tensor, "kv stacked columns"]
"""Scores or weights of a tile of the score matrix: one first index for each pair of sequence and key/value head, and
the query rows of all heads that share it stacked on the second axis.
"""

StackedColumn = Float[Tensor, "kv stacked 1"]
"""One number for each of these rows."""

RowsByHead = Float[Tensor, "batch heads rows"]
"""One number for each row of a tile."""
