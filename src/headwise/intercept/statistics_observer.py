"""The interceptor of `watch`: it adds the statistics of every attention call to the heads' results."""

import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from headwise.attention.backends.blockwise.row_block import RowBlock
from headwise.intercept.call_contexts import OF_COMMON_POSITIONS, CallContexts
from headwise.intercept.heads import Heads
from headwise.intercept.interceptor import NO_EFFECT, Call, Interceptor, Observation
from headwise.intercept.layer_index import is_inside
from headwise.intercept.observed_call import ObservedCall
from headwise.intercept.sequences_of_calls import QueryParts, Recurrence, SequenceClusters
from headwise.intercept.session import current_session
from headwise.intercept.sites import SiteRecord
from headwise.intercept.stated_padding import StatedPadding
from headwise.intercept.written_norms import NOT_CONFIRMED, WrittenNorms
from headwise.shapes import Float
from headwise.statistics.attend_observed import WholeCall
from headwise.statistics.registry import LARGEST, OF_TOKENS, STATISTICS
from headwise.statistics.tally import FurtherStatistics, FurtherSums, Tally
from headwise.statistics.weight_capture import CapturedWeights, WeightCapture

ATTENDS_AGAIN = (
    "queries of the same tokens attend several times in one call of these modules, so all statistics of these modules "
    "are left out (see docs/watch.md)"
)
"""Reason for modules whose queries have several matrices of attention weights."""

OF_UNKNOWN_DOCUMENTS = (
    "calls of these modules have another number of sequences than the data, so their documents are unknown, and "
    "standard errors of their heads are NaN"
)
"""Reason for modules whose sequences cannot be assigned to documents."""

OF_UNKNOWN_SEQUENCES = (
    "calls of these modules in one call of the model have different numbers of sequences, so it is unknown which of "
    "them are the same, and standard errors of their heads are NaN"
)
"""Reason for modules whose calls have an unknown number of values of each sequence, without a data set."""

OF_UNKNOWN_SCORES = (
    "the scores behind the attention weights of these modules are unknown, so the largest logits are left out"
)
"""Reason for modules that compute weights from scores that cannot be read."""

ADDED_LATER = (
    "these modules were added to the model while it was watched, so their attention is reported as that of the modules "
    "around them"
)
"""Reason for modules without hooks."""


class StatisticsObserver(Interceptor):
    """Interceptor that computes the statistics of every attention call of a model and adds them to `heads`, the result
    of `watch`. `capture` may select attention weights to store; those of the last call at each site (attention module,
    self or cross) are kept.

    Args:
        model: the intercepted model.
        heads: results to add to.
        special: ids of special tokens.
        capture: weights to keep of each site's last call; None for none.
        padding: padding that the user states, as in `watch`.
        further: statistics to compute in addition to those of `watch`; None for none.
        measured: names of the statistics of `watch` to compute; None for all, or for those that `further` states.
        keeps_output: True if the model's own functions must answer all calls, so that the outputs have the same bits.

    Raises:
        InputError: `padding` has another form, or names a module that the model has not.
    """

    def __init__(
        self,
        model: nn.Module,
        heads: Heads,
        special: Collection[int],
        capture: WeightCapture | None,
        padding: Any = None,
        further: FurtherStatistics | None = None,
        measured: frozenset[str] | None = None,
        *,
        keeps_output: bool = False,
    ) -> None:
        self._model, self._heads, self._capture, self._further = model, heads, capture, further
        self._measured = measured if further is None else further.measured
        self._all_names = (*STATISTICS, *(() if further is None else further.names))
        self._needs_projection = self._measured is None or "written_norm" in self._measured
        self._needs_projection |= further is not None and further.unconfirmed is not None
        self._keeps_output = keeps_output
        self._known = set(model.modules())
        self._written_norms = WrittenNorms(model, self._leave_out_written_norm)
        self._stated_padding = StatedPadding(padding, model)
        self._contexts = CallContexts(special, self._stated_padding, heads.on_left_out)
        self._parts, self._recurrence = QueryParts(), Recurrence()
        self._sequences = SequenceClusters()
        self._lock = threading.Lock()

    def on_model_call(self) -> None:
        """Discard the cached tokens and padding (call contexts) of the previous call of the model in this thread."""
        self._contexts.on_model_call()
        self._parts.on_model_call()
        self._recurrence.on_model_call()
        self._sequences.on_model_call()
        self._written_norms.on_model_call()

    def on_module_call(self, path: str) -> None:
        """Record in the result of `watch` that the module at `path` ran."""
        self._heads.on_module_call(path)

    def on_module_end(self, path: str, arguments: Mapping[str, Any], output: Any) -> None:
        """When a call of the module at `path` ends, compare its input and output with head outputs if the module may be
        an output projection of attention.
        """
        self._written_norms.on_module_end(path, arguments, output)

    def needs_end_of(self, path: str) -> bool:
        """Return True if head outputs are stored until the module at `path`, their output projection, ends its call."""
        return self._written_norms.waits_for(path)

    def on_unreadable(self, path: str, reason: str) -> None:
        """Record in the result of `watch` that the module at `path` computed something like attention that could not be
        observed, and the reason.
        """
        self._heads.on_unreadable(path, reason)

    def on_projected(self, path: str, weights: Sequence[Tensor]) -> None:
        """Record the weights of a linear map that the model applies to the head outputs of the module at `path`. They
        show if the output projection, which headwise finds by its name, is the right one.
        """
        self._written_norms.on_projected(path, weights)

    def on_left_out(self, path: str, reason: str) -> None:
        """Record in the result of `watch` that some statistics of the module at `path` are left out, for a `reason`."""
        self._heads.on_left_out(path, reason)

    def observe(self, call: Call) -> Observation | None:
        """Return an `Observation` of an attention call: two functions, and the call's tokens and padding. The first
        function adds up statistics of the attention weights and, if a capture was requested, copies the chosen weights.
        The second one runs at the end of the call: it adds the statistics, and stores the copied weights, in the result
        of `watch`.
        """
        if call.is_recomputation:
            return NO_EFFECT
        call = self._recurrence.with_first_call(call)
        path, grid = call.site.path, call.grid
        record, observed = self._heads.register(call), self._contexts.read(call)
        if observed.lacks_positions:  # a mean over the other calls of the site alone would be another statistic
            record.discard(*OF_COMMON_POSITIONS, "first")
        record.discard(*(observed.context.left_out & {"first"}), *(OF_TOKENS if observed.lacks_tokens else ()))
        if observed.lacks_positions and observed.continues:  # the same key may have another index in each call
            record.discard("received")
        if observed.lacks_rows:
            record.discard(*self._all_names)
        if self._parts.attends_again(call):
            record.discard(*self._all_names)
            self._heads.on_left_out(path, ATTENDS_AGAIN)
        # Further layers that one module computes have projections that it is not known for.
        value_dim = None if call.site.part else call.value_dim
        if call.site.part and self._needs_projection:
            self._heads.on_left_out(path, NOT_CONFIRMED)
        tally = self._tally(call, observed, value_dim)
        index, continues = self._parts.sequences_of(call, observed.continues)
        source = threading.get_ident(), index
        is_compared = tally.gram is not None and self._written_norms.needs_outputs(path)
        head_outputs: list[Float[Tensor, "batch heads queries value_dim"]] = []  # one tensor, if there are outputs
        # Unknown where a module attends to windows of a picture, or several times to some of the sequences.
        clusters = self._sequences.of_call(record.site, index, grid.batch, self._heads.clusters)
        if clusters is None:
            record.has_unknown_documents = True
            self._heads.on_left_out(
                path, OF_UNKNOWN_SEQUENCES if self._heads.clusters is None else OF_UNKNOWN_DOCUMENTS
            )
        captured = None if self._capture is None else CapturedWeights(self._capture, grid)

        running = current_session().module_calls

        def observer(row_block: RowBlock) -> None:
            tally.add(row_block)
            if is_compared and row_block.out is not None:
                out = row_block.tile.by_head(row_block.out.detach())
                if not head_outputs:
                    head_outputs.append(out.new_zeros(grid.batch, grid.heads, grid.queries, out.shape[-1]))
                head_outputs[0][row_block.tile.row_slices] = out
            if captured is not None:
                captured.add(row_block)

        def on_end() -> None:
            with self._lock:
                record.add(tally, source, continues, clusters, may_wait=self._heads.clusters is None)
                self._leave_out_missing(record, tally)
                if head_outputs:
                    may_be_gated = any(type(each.interceptor).change is not Interceptor.change for each in running)
                    self._written_norms.on_head_outputs(path, head_outputs[0], may_be_gated=may_be_gated)
                if captured is not None:
                    self._heads.set_captured(call.site, captured)

        on_output = (lambda out: head_outputs.append(out.detach())) if is_compared else None
        needs_weights = captured is not None or (tally.further is not None and tally.further.needs_weights)
        needed = None if needs_weights else WholeCall(tally, on_output)
        return Observation(observer, observed.context, on_end, whole_call=needed, keeps_output=self._keeps_output)

    def _tally(self, call: Call, observed: ObservedCall, value_dim: int | None) -> Tally:
        """Return an empty tally, which adds up the statistics of one attention call over its query rows. If additional
        statistics cannot be computed for this call, remove them from the module's results: a mean over the other calls
        alone would be a different statistic.
        """
        projected = call.site.path, call.grid.heads, value_dim
        gram = self._written_norms.gram(*projected) if self._needs_projection else None
        if self._further is None:
            return Tally(gram, observed.first_token, measured=self._measured)
        slices = None if self._further.unconfirmed is None else self._written_norms.slices(*projected)
        sums: FurtherSums | str = self._further.start(call.grid, observed.context, slices)
        if isinstance(sums, str):
            self._heads.register(call).discard(*self._further.names)
            self._heads.on_left_out(call.site.path, sums)
        further = None if isinstance(sums, str) else sums
        return Tally(gram, observed.first_token, measured=self._measured, further=further)

    def _leave_out_missing(self, record: SiteRecord, tally: Tally) -> None:
        """Remove statistics that this attention call lacks from the module's results, since a maximum or mean over the
        other calls alone would be a different statistic. A call lacks the largest logits if its scores are unknown, and
        additional statistics if they could not be computed. Report the module, unless only the logits before a softcap
        are missing.
        """
        missing = (LARGEST if tally.measured is None else LARGEST & tally.measured) - tally.other_sums.keys()
        if tally.row_sums is not None and missing:
            record.discard(*missing)
            if "max_logit" in missing:
                self._heads.on_left_out(record.site.path, OF_UNKNOWN_SCORES)
        if self._further is not None and tally.further is not None and tally.further.refused is not None:
            record.discard(*self._further.names)
            self._heads.on_left_out(record.site.path, tally.further.refused)

    def finish(self) -> None:
        """End the observation. Remove the statistic `written_norm` of modules whose output projection no call has
        confirmed. Report modules that were added to the model during the observation.

        Raises:
            InputError: the padding that the user states fits no attention call.
        """
        self._written_norms.finish()
        modules = self._model.named_modules()
        new = [path for path, module in modules if module not in self._known and any(module.children())]
        paths = [record.site.path for record in self._heads.records]
        for path in new:
            if any(is_inside(path, other) for other in paths) and not any(is_inside(path, other) for other in new):
                self._heads.on_left_out(path, ADDED_LATER)
        if self._heads.records:
            self._stated_padding.require_used()

    def _leave_out_written_norm(self, path: str) -> None:
        """Remove the statistic `written_norm`, and additional statistics that need the output projection, from the
        results of the attention module at `path`. Report the module, so that a warning names it.
        """
        if not self._needs_projection:
            return
        unconfirmed = None if self._further is None else self._further.unconfirmed
        names = () if self._further is None or unconfirmed is None else self._further.names
        for record in self._heads.records:
            if record.site.path == path:
                record.discard("written_norm", *names)
        self._heads.on_left_out(path, NOT_CONFIRMED if unconfirmed is None else unconfirmed)
