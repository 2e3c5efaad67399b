"""One softmax of a model: its weights, the products that used them, and the layout of its heads."""

from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from research.dispatcher_truth.operator_graph import Scores


class Unresolved(Exception):
    """The layout of a softmax cannot be derived; the message says why."""


@dataclass
class Projection:
    """The product in front of which heads and value dimensions are one axis.

    Attributes:
        path: module that computed it.
        rows: tags of its input, `(rows, columns)`; the columns are the contracted axis.
        operand: the other factor, or weight.
        operator: name of the operator.
        inputs: its input, of the shape of `rows`.
    """

    path: str
    rows: Tensor
    operand: Tensor
    operator: str
    inputs: Tensor

    @property
    def matrix(self) -> Tensor | None:
        """The other factor as a matrix `(columns, width)`, a view of it; None if it is no single matrix."""
        operand = self.operand
        if self.operator == "convolution":
            operand = operand.flatten(1).T if operand[0, 0].numel() == 1 else operand
        elif operand.dim() == 3 and operand.shape[0] == 1:
            operand = operand[0]
        return operand if operand.dim() == 2 and operand.shape[0] == self.rows.shape[1] else None


@dataclass
class SoftmaxCall:
    """One call of softmax, and what was derived about it while the model ran.

    A *line* is what softmax normalises: all weights of one query of one head. Lines are numbered in the order of the
    weights' axes without the softmax axis.

    Attributes:
        path: innermost module that was running.
        result: result of softmax, with the softmax axis last, float64.
        start: first tag of the weights; line tags follow the weight tags.
        forms: how the weights were multiplied by values: "bmm" or "sum", in order.
        notes: peculiarities, such as weights that were changed after softmax.
        used: True for the weights that were multiplied by values, in the shape of `result`.
        applied: weights as they entered the product, 0 elsewhere, in the shape of `result`.
        group_of_line: number of the batch entry of the product in which a line occurred; -1 for none.
        outputs: sum of weights times values before dropout, `(lines, value_dim)`; None before the first product.
        projection: the output projection; None if it was not found.
        paths: all modules that were running, the outermost first.
        single: first linear layer after the product in which every row has one head.
        scores: origin of the scores.
        is_hidden: True for the lines in which a mask hides every key, `(lines,)`; softmax may be uniform there.
        has_underflow: True if the weight of a key that no mask hides is rounded to 0.
        is_divided: True if several output projections have different lines, such as those of experts.
    """

    path: str
    result: Tensor
    start: int
    is_hidden: Tensor
    paths: tuple[str, ...] = ()
    forms: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    outputs: Tensor | None = None
    projection: Projection | None = None
    single: Projection | None = None
    scores: Scores = field(default_factory=Scores)
    has_underflow: bool = False
    is_divided: bool = False

    def __post_init__(self) -> None:
        self.keys = self.result.shape[-1]
        self.lines = prod(self.result.shape[:-1])
        self.used = torch.zeros(self.lines, self.keys, dtype=torch.bool)
        self.applied = torch.zeros(self.lines, self.keys, dtype=torch.float64)
        self.group_of_line = torch.full((self.lines,), -1)

    @property
    def line_start(self) -> int:
        """Tag of the first line."""
        return self.start + self.lines * self.keys

    @property
    def end(self) -> int:
        """First tag after those of this call."""
        return self.line_start + self.lines

    def note(self, text: str) -> None:
        """Add a note once."""
        if text not in self.notes:
            self.notes.append(text)

    # -- the product with values --------------------------------------------------------------------------------------

    def lines_of(self, tags: Tensor) -> Tensor | None:
        """Return the line of each row of weights `(..., keys)` that is contracted over its last axis, -1 for rows
        without weights of this call. Return None if a row mixes lines or repeats a key: that is no weighted average.
        """
        is_weight = (tags >= self.start) & (tags < self.line_start)
        number = (tags - self.start).long()
        line, key = number // self.keys, number % self.keys
        low = torch.where(is_weight, line, self.lines).amin(-1)
        high = torch.where(is_weight, line, -1).amax(-1)
        has_weights = is_weight.any(-1)
        if not bool((low == high)[has_weights].all()):
            return None
        order = torch.where(is_weight, key, -1 - torch.arange(tags.shape[-1])).sort(-1).values
        if bool((order.diff(dim=-1) == 0).any()):
            return None
        return torch.where(has_weights, low, -1)

    def add_product(self, form: str, tags: Tensor, weights: Tensor, values: Tensor | None, output: Tensor) -> None:
        """Record a product with values.

        Args:
            form: "bmm" or "sum".
            tags: tags of the weights, `(groups, queries, keys)`.
            weights: the weights as they entered the product, of the same shape.
            values: `(groups, keys, value_dim)`; None if the product is `output` alone.
            output: `(groups, queries, value_dim)`.
        """
        lines = self.lines_of(tags)
        assert lines is not None
        self.forms.append(form)
        is_weight = (tags >= self.start) & (tags < self.line_start)
        number = (tags - self.start).long()[is_weight]
        self.used.view(-1)[number] = True
        self.applied.view(-1)[number] = weights[is_weight].double()
        group = torch.arange(tags.shape[0])[:, None].expand(lines.shape)
        fresh = lines >= 0
        fresh &= (self.group_of_line[lines.clamp(min=0)] < 0) | (self.group_of_line[lines.clamp(min=0)] == group)
        self.group_of_line[lines[fresh]] = group[fresh]
        if values is not None:
            plain = torch.zeros(tags.shape, dtype=torch.float64)
            plain[is_weight] = self.result.reshape(-1)[number]
            output = plain @ values.double()
        row, found = output.double().reshape(-1, output.shape[-1]), (lines >= 0).reshape(-1)
        total = torch.zeros(self.lines, row.shape[-1], dtype=torch.float64)
        total[lines.reshape(-1)[found]] = row[found]
        if self.outputs is None:
            self.outputs = total
        elif self.outputs.shape == total.shape:
            self.outputs = self.outputs + total
        else:
            self.note("products of different value dimensions")

    def has_other_lines(self, tags: Tensor) -> bool:
        """Return True if tags of lines of this call are among these, but not in its output projection."""
        assert self.projection is not None
        is_line = (tags >= self.line_start) & (tags < self.end)
        return not bool(torch.isin(tags[is_line], self.projection.rows).all())

    # -- the layout ---------------------------------------------------------------------------------------------------

    def heads_and_rows(self) -> tuple[Tensor, Tensor, int]:
        """Return for each line its head (-1 for none), its row of the output projection's input, and the number of
        heads. A head is a block of columns; heads are numbered by their first column.
        """
        projection = self.projection or self.single
        if projection is None:
            raise Unresolved("no output projection was found")
        tags = projection.rows
        is_line = (tags >= self.line_start) & (tags < self.end)
        rows, columns = is_line.nonzero(as_tuple=True)
        line = (tags[rows, columns] - self.line_start).long()
        row_of_line = torch.full((self.lines,), tags.shape[0]).scatter_reduce(0, line, rows, "amin")
        first = torch.full((self.lines,), tags.shape[1]).scatter_reduce(0, line, columns, "amin")
        present = first < tags.shape[1]
        starts = first[present].unique()
        head = torch.full((self.lines,), -1)
        head[present] = torch.searchsorted(starts, first[present])
        return head, row_of_line, len(starts)

    def resolved(self) -> "Layout":
        """Return the weights by sequence and head.

        Raises:
            Unresolved: no product, no output projection, or lines that do not form a grid.
        """
        if not self.forms:
            raise Unresolved("its result is not multiplied by values over the softmax axis")
        if self.is_divided:
            raise Unresolved("its output is divided among several output projections")
        head, row, heads = self.heads_and_rows()
        group, present = self.group_of_line, (head >= 0)
        if not bool(present.any()):
            raise Unresolved("its output does not reach the output projection")
        lines = present.nonzero()[:, 0]
        block = head[lines] * (int(group.max()) + 1) + group[lines]
        order = (block * self.lines + lines).argsort()
        queries = block.unique(return_counts=True)[1]
        blocks = head[lines][order][:: int(queries[0])].bincount(minlength=heads)
        if bool((queries != queries[0]).any()) or bool((blocks != blocks[0]).any()):
            raise Unresolved("its lines do not form a grid of sequences, heads and queries")
        grid = lines[order].view(heads, -1, int(queries[0])).transpose(0, 1)  # (sequences, heads, queries)
        return Layout(grid, row[grid], self.used.any(0))


@dataclass(frozen=True)
class Layout:
    """Lines of a softmax by sequence, head and query.

    Attributes:
        lines: `(sequences, heads, queries)`.
        rows: row of the output projection's input for each line, of the same shape.
        keys: True for the keys that any product used, `(keys,)`.
    """

    lines: Tensor
    rows: Tensor
    keys: Tensor
