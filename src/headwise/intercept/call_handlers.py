"""Answer of one intercepted attention call: its rows go to the observers, its output through the changes."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from headwise.attention.backends.blockwise.row_block import RowBlock
from headwise.attention.masks.grid import Grid
from headwise.attention.problem import Answer, Problem
from headwise.errors import InputError
from headwise.intercept.accelerated_sdpa import OBSERVED, accelerated_modules
from headwise.intercept.attention_call import AttentionCall, KnownWeights
from headwise.intercept.interceptor import Call, Change, HeadOutput, InputSources, Interceptor, Observation, SiteKey
from headwise.intercept.layer_index import layer_number_of
from headwise.intercept.module_call import ModuleCall, must_trace, tokens_and_padding
from headwise.intercept.plans import PlannedCall, Recording, Step, are_in_order
from headwise.intercept.received_mask import MaskSource, fill_hidden_rows_as_torch, is_uniform_where_hidden
from headwise.intercept.session import current_session
from headwise.intercept.trace.lineage import CallOrigins, attends_to_earlier_calls, names_of_layer
from headwise.intercept.trace.tokens import CallTokens
from headwise.intercept.unreadable_tensors import why_not_observed
from headwise.shapes import Float
from headwise.statistics.attend_observed import WholeCall, attend_observed
from headwise.statistics.kernel_statistics import fastest_or_reference
from headwise.statistics.row_blocks import row_blocks_of_weights


@dataclass(frozen=True, eq=False)
class CallHandlers:
    """Functions that interceptors (objects that observe or change a model's attention) returned for one attention call:
    some observe the call, others change its output. Methods of this class pass the attention weights to the observing
    functions, and the head outputs through the changing ones.

    Attributes:
        call: the attention call.
        observations: how the call is observed.
        changes: functions that change its output, that of the innermost context last.
    """

    call: AttentionCall
    observations: list[Observation] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)

    def answer(self, compute: Callable[[], Answer], *, keeps_output: bool = False) -> Answer:
        """Compute the attention call, inside of `Session.paused()`, and return its answer, without the interceptors'
        changes. Without observers, that is the answer of `compute`, the model's own function, with the output `(batch,
        heads, queries, value_dim)`. With observers, pass the attention weights to them.

        With observers, headwise's own attention computes the answer of a replaceable call in place of `compute`. It
        does not if the weights are known, if an observer has a check or requires the model's output, if the call has
        dropout, if `keeps_output` is True, or if an additive mask hides all keys of a row by numbers under which
        torch's softmax is not uniform. With dropout, `compute` draws the same random numbers as without observers, and
        the weights before dropout are observed.
        """
        call = self.call
        if not self.observations:
            return compute()
        keeps_output |= not call.is_replaceable or self._has_check or call.has_weights
        keeps_output |= any(observation.keeps_output for observation in self.observations)
        if keeps_output or call.problem.dropout > 0 or not is_uniform_where_hidden(call.mask):
            answer = compute()
            self.observe(answer.out)
            return answer
        computed: list[Answer] = []

        def compute_and_keep(problem: Problem) -> Answer:
            computed.append(compute())
            return computed[0]

        problem, context = call.problem, self.observations[0].call_context
        with _outside_torch_modes(problem.q):
            answer = attend_observed(problem, self._observe, context, compute_and_keep, self._whole_call)
            answer = answer._replace(out=fill_hidden_rows_as_torch(answer.out, problem.v, call.mask))
        if not computed and accelerated_modules.is_accelerated:
            accelerated_modules.record(OBSERVED)
        self._end()
        return answer

    def observe(self, out: Float[Tensor, "batch heads queries value_dim"]) -> None:
        """Pass the attention weights of the call, which has computed the output `out`, to the observers. Then notify
        them that the call has ended. The weights are known, or computed again without dropout. If an observer has a
        check, row blocks contain the products of weights and values, which the check compares with `out`.
        """
        if not self.observations:
            return
        with current_session().paused(), torch.no_grad():
            known = self.call.weights(out.detach())
            with _outside_torch_modes(out):
                if known is None:
                    self._observe_problem(out)
                else:
                    self._observe_weights(known)
            self._end()

    def _observe_problem(self, out: Float[Tensor, "batch heads queries value_dim"]) -> None:
        """Compute the attention weights of the call again, and pass them to the observers."""
        problem, answer, context = self.call.problem, Answer(out, None, None), self.observations[0].call_context
        observe, known = self._observe, lambda _: answer
        if self._has_check:
            observe = partial(observe, checked=out)
        elif problem.dropout > 0:
            known = fastest_or_reference  # statistics are those without dropout, also those of the output
        whole_call, problem = None if self._has_check else self._whole_call, problem.without_dropout()
        attend_observed(problem, observe, context, known, whole_call, computes_output=self._has_check)

    def _observe_weights(self, known: KnownWeights) -> None:
        """Pass attention weights that are known to the observers."""
        visible, context = self.call.received().block, self.observations[0].call_context
        checked = known.out if self._has_check and not known.is_checked else None
        for row_block in row_blocks_of_weights(
            *(known.weights.detach(), known.out, context, visible, known.values),
            with_output=checked is not None,
            scores=known.scores(),
        ):
            self._observe(row_block, checked)

    def changed(self, out: Float[Tensor, "batch heads queries value_dim"], *, has_inputs: bool = True) -> Tensor:
        """Return the head outputs `out` after all changes that interceptors requested, each applied to the result of
        the previous one. `has_inputs` is False if the model has overwritten tensors of the call, such as its values.

        Raises:
            InputError: a change reads tensors of the call that the model has overwritten.
        """
        readers = self.call.uniform_output, self.call.stated_problem
        with current_session().paused():
            for change in self.changes:
                out = change(HeadOutput(out, *(readers if has_inputs else (self._refuse_overwritten,) * 2)))
        return out

    def _refuse_overwritten(self) -> NoReturn:
        running = current_session().module_calls if self.call.module_calls is None else self.call.module_calls
        names = ", ".join(each.path or type(each.module).__name__ for each in running[-1:])
        raise InputError(
            "values",
            expected="numbers or tensors for modules that overwrite their queries, keys or values",
            got=f"a replacement that reads these in {names}",
        )

    @property
    def _has_check(self) -> bool:
        """True if at least one observation has a check (function that compares the output with the product of weights
        and values).
        """
        return any(observation.check is not None for observation in self.observations)

    @property
    def _whole_call(self) -> WholeCall | None:
        """Statistics that kernels may compute without row blocks: those of the only observation, if it needs no weights
        of single rows.
        """
        return self.observations[0].whole_call if len(self.observations) == 1 else None

    def _observe(
        self, row_block: RowBlock, checked: Float[Tensor, "batch heads queries value_dim"] | None = None
    ) -> None:
        """Pass one row block to the observers, with the tokens and padding that each observation stores. Before, call
        the checks with the same rows of the output `checked`, if there is one.
        """
        for observation in self.observations:
            if checked is not None and observation.check is not None:
                observation.check(row_block, checked[row_block.tile.row_slices])
        for observation in self.observations:
            observation.observer(row_block.with_call_context(observation.call_context))

    def _end(self) -> None:
        """Notify every observation that the attention call has ended."""
        for observation in self.observations:
            observation.on_end()


def handlers_of_call(call: AttentionCall) -> CallHandlers:
    """Report one attention call to the interceptors (objects that observe or change attention) of a set of models.
    These are the models whose modules are running now or, for a call that is reported later, were running when it
    happened. Return the functions by which the interceptors observe or change the call. Within a context
    `exclusive_to`, report only to the interceptor that it selects.
    """
    session, grid, origins, step, packed = current_session(), call.grid, call.origins, call.step, call.packed
    module_calls = session.module_calls if call.module_calls is None else call.module_calls
    handlers = CallHandlers(call)
    is_observed = call.is_observed and grid.batch * grid.heads * grid.queries * grid.keys > 0
    planned, unobserved = None if step is None else step.planned, why_not_observed(grid.device)
    following = session.following
    sources = _input_sources(origins) if planned is None or following is None else following.sources_of(planned, grid)
    # Torch counts no changes in place of tensors made in inference mode: the same tensor may be another mask.
    is_counted = not any(isinstance(each, Tensor) and each.is_inference() for each in call.mask_origin)
    mask_source = MaskSource(call.received, call.mask_origin if is_counted else (object(),))
    if unobserved is not None or step is None:
        must_trace(module_calls)
    for module_call in _innermost_of_each_interceptor(module_calls):
        interceptor = module_call.interceptor
        nested = [other for other in module_calls if other.interceptor is interceptor]
        for other in nested:
            other.on_attention()
        argument, padding = tokens_and_padding(nested)
        tokens = CallTokens(argument)
        if origins is not None:
            with session.paused():
                sizes = (grid.batch, grid.queries) if packed is None or argument is None else argument.shape[:2]
                tokens = session.lineage.tokens_of_call(argument, origins, (sizes[0], sizes[1]), module_calls)
        if planned is None:
            site = session.site_of_call(module_call, grid, origins)
            has_argument = tokens.ids is argument and not tokens.are_unknown and not tokens.are_moved
            if not has_argument or not session.lineage.ids.are_of_arguments:
                must_trace(module_calls)
            if step is not None:
                with session.paused():
                    given = [value for other in nested for value in other.arguments.values()]
                    _record(step, module_calls[0].recording, site, grid, sources, origins, given)
        else:
            part = module_call.parts.index_of(planned.site.cross, planned.query_maps)
            site = planned.site._replace(part=part)
            module_call.parts.add_self_attention(planned.key_maps)
            for weights in planned.weights:
                alive = [weight for reference in weights if (weight := reference()) is not None]
                interceptor.on_projected(module_call.path, alive)
        if packed is not None:  # the arguments of the modules have the layout of the packed tokens
            ids, padding = packed.token_ids(tokens.ids), None
            is_lost = ids is None and tokens.ids is not None
            tokens = tokens._replace(ids=ids, are_unknown=tokens.are_unknown or is_lost)
        reported = Call(
            site,
            layer_number_of(module_call.module),
            nested[0].count_call(site),
            grid,
            call.kv_heads,
            call.value_dim,
            tokens,
            padding,
            mask_source=mask_source,
            is_recomputation=session.is_recomputing,
            keys=call.keys,
            appended_keys=call.appended_keys,
            is_aligned=call.is_aligned,
            sources=sources,
            module_arguments=() if packed is not None else tuple(outer.arguments for outer in reversed(nested)),
            real_queries=None if packed is None else packed.is_real,
            real_keys=None if packed is None else packed.real_keys,
        )
        with session.paused():
            observation = interceptor.observe(reported) if is_observed and unobserved is None else None
            if unobserved is not None and type(interceptor).observe is not Interceptor.observe:
                interceptor.on_unreadable(module_call.path, unobserved)
            change = interceptor.change(reported)
        handlers.observations.extend([] if observation is None else [observation])
        handlers.changes.extend([] if change is None else [change])
    return handlers


def _record(
    step: Step,
    recording: Recording | None,
    site: SiteKey,
    grid: Grid,
    sources: InputSources,
    origins: CallOrigins | None,
    given: Sequence[Any],
) -> None:
    """Record an attention call for a plan, with what was derived about it. There is no plan if something about the call
    is derived from the tensors of each call, such as the order of its tokens, or from which of the modules' arguments
    `given` the keys are computed.
    """
    tokens = sources.tokens
    if recording is None or step.number is None:
        return
    is_in_order = tokens is not None and are_in_order(tokens, grid)
    is_cached = sources.may_be_cached and not recording.has_cache
    has_other_keys = not site.cross and tokens is not None and bool(tokens.tensors_of_keys(given))
    if (
        has_other_keys
        or is_cached
        or sources.is_recurrent
        or sources.are_moved
        or (tokens is not None and not is_in_order)
    ):
        recording.fail()
    of_keys = frozenset() if site.cross or origins is None or origins.k is None else origins.k.maps
    sources, site = sources._replace(tokens=None), site._replace(part=0)
    recording.add(step.number, PlannedCall(site, sources, is_in_order, names_of_layer(origins), of_keys))


def _input_sources(origins: CallOrigins | None) -> InputSources:
    """Return the inputs of the model on which the queries and the keys of an attention call depend, before the query
    and key projections. Parameters and other tensors that are not inputs are left out. The result also states which
    token each query, key and value belongs to, as numbers.
    """
    if origins is None:
        return InputSources()
    lineage, tensors = current_session().lineage, (origins.q, origins.k)
    of_keys_only = 0 if origins.k is None else origins.k.sources & ~origins.q.sources
    is_recurrent = attends_to_earlier_calls(origins.q, origins.k, lineage)
    may_be_cached = is_recurrent or bool(of_keys_only & (lineage.outside | lineage.given))
    of_queries, of_keys = (0 if each is None else lineage.content(each) & ~lineage.state for each in tensors)
    are_moved = origins.are_moved or lineage.are_mixed(origins)
    return InputSources(of_queries, of_keys, may_be_cached, is_recurrent, origins.tokens, are_moved)


def _innermost_of_each_interceptor(module_calls: Sequence[ModuleCall]) -> list[ModuleCall]:
    """Return the innermost running module call for each interceptor (object that observes or changes attention) that
    receives reports now. The module call of the innermost context comes first.
    """
    session = current_session()
    interceptors = [interception.interceptor for interception in session.current_interceptions]
    innermost: dict[int, ModuleCall] = {}
    for module_call in reversed(module_calls):
        if session.only_interceptor in (None, module_call.interceptor) and module_call.interceptor in interceptors:
            innermost.setdefault(id(module_call.interceptor), module_call)
    return list(innermost.values())


def _outside_torch_modes(tensor: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which operations bypass torch's function modes, so that the thousands of small operations of
    an observation are fast. If `tensor` belongs to a subclass of Tensor, which relies on torch's function protocol, the
    context does nothing.
    """
    return torch._C.DisableTorchFunction() if type(tensor) is Tensor else nullcontext()
