"""`watch`: what every head of any model does while it runs, in numbers."""

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.backends.blockwise.row_block import RowBlock
from headwise.errors import InputError, require
from headwise.intercept.install import intercepted
from headwise.intercept.interceptor import Call, Observation, Site
from headwise.intercept.output_projection import gram_of, output_projection
from headwise.intercept.sites import SiteRegistry
from headwise.shapes import Float
from headwise.statistics.registry import Tally
from headwise.statistics.weight_capture import CapturedWeights, WeightCapture


class _OfThread(threading.local):
    """What is known of the calls that a model makes in this thread, by the tensors that say it."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, int], tuple[CallContext, object]] = {}


class Heads(SiteRegistry):
    """Every head of a model that was watched, once it has run. Sequences count alike, and calls add up."""

    def __init__(self, model: nn.Module, special: Collection[int], detail: WeightCapture | None = None) -> None:
        super().__init__(model)
        self._special = torch.tensor(sorted(special), dtype=torch.int64)
        self._detail = detail
        self._kept: dict[Site, CapturedWeights] = {}
        self._projections: dict[str, nn.Module | None] = {}
        self._of_thread, self._lock = _OfThread(), threading.Lock()

    # -- what is told while it runs -----------------------------------------------------------------------------------

    def on_model_call(self) -> None:
        """See `Interceptor`: what is known of the calls of another run is forgotten."""
        self._of_thread.known = {}

    def observe(self, call: Call) -> Observation:
        """See `Interceptor`."""
        record = self.register(call)
        tally, kept = (
            Tally(self._gram(call)),
            None if self._detail is None else CapturedWeights(self._detail, call.grid),
        )

        def observer(rows: RowBlock) -> None:
            tally.add(rows)
            if kept is not None:
                kept.add(rows)

        def ends() -> None:
            with self._lock:
                record.add(tally)
                if kept is not None:
                    self._kept[call.site] = kept

        return Observation(observer, self._known(call), ends)

    def _gram(self, call: Call) -> Float[Tensor, "heads value_dim value_dim"] | None:
        """What says how much of a head's output is written, where the output projection is found."""
        heads, width = call.grid.heads, call.value_dim
        if width is None:
            return None
        if call.site.path not in self._projections:
            self._projections[call.site.path] = output_projection(self._modules[""], call.site.path, heads * width)
        found = self._projections[call.site.path]
        return None if found is None else gram_of(found, heads, width)

    def _known(self, call: Call) -> CallContext:
        """What the inputs say of a call of self-attention over all of them: the same object in every layer."""
        grid, shape = call.grid, (call.grid.batch, call.grid.keys)
        is_own = not call.site.cross and grid.queries == grid.keys
        tokens, padding = (
            each if is_own and each is not None and each.shape == shape else None
            for each in (call.tokens, call.padding)
        )
        kept, question = self._of_thread.known, (id(tokens), id(padding))
        if question not in kept:
            special = None
            if tokens is not None and len(self._special):
                special = torch.isin(tokens, self._special.to(tokens.device))
            real = None if padding is None or bool(padding.all()) else padding.bool()
            kept[question] = CallContext(tokens, special, real), (tokens, padding)  # which keep their identities
        return kept[question][0]

    # -- what is asked afterwards -------------------------------------------------------------------------------------

    @property
    def details(self) -> dict[str, CapturedWeights]:
        """What was kept of the last call of each module, by its path; `path, cross` where it attends in both ways."""
        found = {}
        for record in self.records:
            path, cross = record.site
            both = Site(path, not cross) in self._records
            kept = self._kept.get(record.site)
            if kept is not None:
                found[f"{path}, cross" if both and cross else path] = kept
        return found

    def rows(self) -> list[dict[str, Any]]:
        """One row a head: layer, head, kv_head, module, kind, and the mean of every statistic over the sequences."""
        self.require_attention()
        values = {
            id(record): {name: moments.value.tolist() for name, moments in record.statistics.items()}
            for record in self.records
        }
        return [
            {**place, **{name: of_heads[place["head"]] for name, of_heads in values[id(record)].items()}}
            for record, place in self.head_labels()
        ]

    def table(self) -> Any:
        """The rows as a pandas DataFrame; see `rows`.

        Raises:
            InputError: nothing was seen.
            MissingExtra: pandas is not installed.
        """
        pandas = require("pandas", purpose="a table", extra="tables")
        return pandas.DataFrame(self.rows())


@contextmanager
def watch(model: Any, *, special: Collection[int] = (), detail: Any = None) -> Iterator[Heads]:
    """Within the context, every attention call of the model adds to the statistics of its heads.

    Args:
        model: any module, of torch, `transformers` or one's own. It computes what it did, but for rounding.
        special: ids of the tokens that count as special, such as `tokenizer.all_special_ids`.
        detail: a `WeightCapture`: what to keep of the weights of the last call of each module, for `Heads.details`.

    Raises:
        InputError: when the context ends, if the model ran and nothing was seen; no module; a compiled one; an
            attention implementation of `transformers` whose masks cannot be read.

    Warns:
        UserWarning: when the context ends, of modules that ran and are called attention, but were not seen to compute
            any.
    """
    if not isinstance(model, nn.Module):
        raise InputError("model", expected="a torch module", got=type(model).__name__)
    if detail is not None and not isinstance(detail, WeightCapture):
        raise InputError("detail", expected="a headwise.WeightCapture or None", got=type(detail).__name__)
    heads = Heads(model, special, detail)
    with intercepted(model, heads):
        yield heads
    if heads.ran:
        heads.require_attention()
    heads.warn_of_unread()
