"""Answer of one intercepted attention call: its rows go to the observers, its output through the changes."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.attention.attend import uniform_output
from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.backends.blockwise.row_block import RowBlock
from headwise.attention.masks.grid import Grid
from headwise.attention.problem import Answer, Problem
from headwise.intercept.accelerated_modules import OWN_BACKEND, accelerated_modules
from headwise.intercept.foreign_functions import is_sdpa_foreign
from headwise.intercept.interceptor import Call, Change, HeadOutput, InputSources, Interceptor, Observation, SiteKey
from headwise.intercept.layer_index import layer_number_of
from headwise.intercept.module_call import ModuleCall, must_trace, tokens_and_padding
from headwise.intercept.packed_sequences import PackedSequences
from headwise.intercept.plans import PlannedCall, Recording, Step, are_in_order
from headwise.intercept.received_mask import NO_MASK_SOURCE, MaskSource, ReceivedMask
from headwise.intercept.session import current_session
from headwise.intercept.trace.lineage import CallOrigins, attends_to_earlier_calls, names_of_layer
from headwise.intercept.trace.tokens import CallTokens
from headwise.intercept.unreadable_tensors import why_not_observed
from headwise.shapes import Float
from headwise.statistics.attend_observed import WholeCall, attend_observed
from headwise.statistics.kernel_statistics import fastest_or_reference
from headwise.statistics.row_blocks import row_blocks_of_weights


class CallHandlers(NamedTuple):
    """Functions that interceptors (objects that observe or change a model's attention) returned for one attention call:
    some observe the call, others change its output. Methods of this class pass the attention weights to the observing
    functions, and the head outputs through the changing ones.

    Attributes:
        observations: how the call is observed.
        changes: functions that change its output, that of the innermost context last.
    """

    observations: list[Observation]
    changes: list[Change]

    def answer(
        self, read_problem: Callable[[], Problem], compute: Callable[[], Answer], keeps_output: bool = False
    ) -> Answer:
        """Compute one attention call and return its answer, before interceptors change it. Without observers, call
        `compute`, the model's own function. With observers, read the call by `read_problem`, and pass its attention
        weights to the observers in row blocks (some query rows at a time). Then notify the observers that the call has
        ended.

        With observers, headwise's own blockwise attention may compute the answer in place of `compute`. It does not if
        an observer has a check or requires the model's output, if the call has dropout, or if `keeps_output` is True.
        With dropout, `compute` draws the same random numbers as without observers, and the weights before dropout are
        observed.

        Args:
            read_problem: function that states the call as a `Problem`; called only if there are observers.
            compute: the model's own function, which answers where there is no observer or one with a check.
            keeps_output: let `compute` answer with observers, too, and compute the weights in addition.
        """
        with current_session().paused():
            if not self.observations:
                return compute()
            problem = read_problem()
            with _outside_torch_modes(problem.q):
                if self._has_check:
                    answer = compute()
                    self._observe_checked_problem(problem, answer.out)
                elif problem.dropout > 0 or keeps_output or self.keeps_output:
                    answer = compute()
                    # Statistics are those without dropout, also those of the output.
                    known = fastest_or_reference if problem.dropout > 0 else lambda _: answer
                    with torch.no_grad():
                        attend_observed(
                            problem.without_dropout(), self._observe, self._call_context, known, self._whole_call
                        )
                else:
                    answer = attend_observed(
                        problem, self._observe, self._call_context, lambda _: compute(), self._whole_call
                    )
        self._end()
        return answer

    def observe_weights(
        self,
        weights: Float[Tensor, "batch heads queries keys"],
        received: ReceivedMask | None,
        out: Float[Tensor, "batch heads queries value_dim"] | None,
        values: Float[Tensor, "batch kv_heads keys value_dim"] | None = None,
        is_unchecked: bool = False,
        scores: Callable[[], tuple[Tensor | None, Tensor | None]] = lambda: (None, None),
    ) -> None:
        """Pass attention `weights` that the model itself has computed to the observers, in row blocks (some query rows
        at a time). Then notify the observers that the call has ended. Each row block also contains the head outputs of
        its rows, taken from `out`. If `is_unchecked` is True and an observer has a check, the outputs are instead
        computed as weights times values, and the check compares them with `out`.

        Args:
            weights: the weights.
            received: the mask of the call; None if it is unknown, so that keys of weight 0 count as hidden.
            out: output that the model computed; None if the weights have several products.
            values: the values; None if unknown.
            is_unchecked: True if `out` is not known to be the product of the weights and the values.
            scores: function that returns the scores `(batch, heads, queries, keys)` behind the weights, and those
                before a softcap; each is None if it is unknown, or without a softcap.
        """
        if not self.observations:
            return
        weights, out = weights.detach(), None if out is None else out.detach()
        visible = None if received is None else received.block
        with current_session().paused(), torch.no_grad(), _outside_torch_modes(weights):
            row_blocks = partial(row_blocks_of_weights, weights, out, self._call_context, visible, values)
            if self._has_check and is_unchecked and out is not None:
                for row_block in row_blocks(with_output=True, scores=scores()):
                    self._check_and_observe(out, row_block)
            else:
                for row_block in row_blocks(scores=scores()):
                    self._observe(row_block)
        self._end()

    def observe_problem(self, problem: Problem, out: Float[Tensor, "batch heads queries value_dim"]) -> None:
        """Compute the attention weights of a call again, without dropout, after the model itself has computed its
        output `out`. Pass the weights to the observers in row blocks (some query rows at a time), then notify them that
        the call has ended. Without observers, do nothing.

        Args:
            problem: the attention call.
            out: output that the model computed.
        """
        if not self.observations:
            return
        with current_session().paused(), torch.no_grad(), _outside_torch_modes(problem.q):
            if self._has_check:
                self._observe_checked_problem(problem, out)
            else:
                undropped, answer = problem.without_dropout(), Answer(out, None, None)
                attend_observed(undropped, self._observe, self._call_context, lambda _: answer, self._whole_call)
        self._end()

    def changed(
        self,
        out: Float[Tensor, "batch heads queries value_dim"],
        uniform_output: Callable[[], Float[Tensor, "batch heads queries value_dim"]],
        read_problem: Callable[[], Problem | None],
    ) -> Float[Tensor, "batch heads queries value_dim"]:
        """Return the head outputs `out` after all changes that interceptors requested, each applied to the result of
        the previous one. Changes may call `uniform_output`, which computes the head outputs under uniform attention.
        They may also call `read_problem`, which returns the call as a `Problem` (its tensors and options), or None if
        these are unknown.
        """
        with current_session().paused():
            for change in self.changes:
                out = change(HeadOutput(out, uniform_output, read_problem))
        return out

    @property
    def keeps_output(self) -> bool:
        """True if an observer requires that the model's own function computes the output, so that observation does not
        change a single bit of it.
        """
        return any(observation.keeps_output for observation in self.observations)

    @property
    def _call_context(self) -> CallContext:
        """`CallContext` (token ids and padding) of the observed attention call. It is read from the first of the call's
        observations.
        """
        return self.observations[0].call_context

    @property
    def _has_check(self) -> bool:
        """True if at least one observation has a check, which compares the head outputs computed from the observed
        weights with the model's own.
        """
        return any(observation.check is not None for observation in self.observations)

    @property
    def _whole_call(self) -> WholeCall | None:
        """Statistics that the native kernels may compute without passing row blocks to an observer. They are those of
        the call's only observation, if it needs no attention weights of single rows. None if there are several
        observations, or if the only one needs the weights.
        """
        return self.observations[0].whole_call if len(self.observations) == 1 else None

    def _observe(self, row_block: RowBlock) -> None:
        """Pass one row block (attention weights of some query rows) to the observer function of every observation of
        this call. Each observer receives the row block with the tokens and padding that its own observation stores.
        """
        for observation in self.observations:
            observation.observer(row_block.with_call_context(observation.call_context))

    def _observe_checked_problem(self, problem: Problem, out: Float[Tensor, "batch heads queries value_dim"]) -> None:
        """Compute the attention weights and outputs of a problem (one attention call) in row blocks, some query rows at
        a time. Each observation that has a check compares these outputs with the model's own output `out`. Then pass
        the blocks to every observer.
        """
        answer, observe = Answer(out, None, None), partial(self._check_and_observe, out)
        with torch.no_grad():
            attend_observed(
                problem.without_dropout(), observe, self._call_context, lambda _: answer, computes_output=True
            )

    def _check_and_observe(self, out: Float[Tensor, "batch heads queries value_dim"], row_block: RowBlock) -> None:
        """Call the check of every observation that has one, with a row block (attention weights of some query rows) and
        the same rows of the model's own output `out`. Then pass the block to every observer.
        """
        for observation in self.observations:
            if observation.check is not None:
                observation.check(row_block, out[row_block.tile.row_slices])
        self._observe(row_block)

    def _end(self) -> None:
        """Notify every observation that the attention call has ended."""
        with current_session().paused():
            for observation in self.observations:
                observation.on_end()


def handlers_of_call(
    grid: Grid,
    kv_heads: int,
    value_dim: int | None,
    module_calls: Sequence[ModuleCall] | None = None,
    mask_source: MaskSource = NO_MASK_SOURCE,
    origins: CallOrigins | None = None,
    *,
    is_observed: bool = True,
    keys: Tensor | None = None,
    appended_keys: int = 0,
    is_aligned: bool = False,
    step: Step | None = None,
    packed: PackedSequences | None = None,
) -> CallHandlers:
    """Report one attention call to the interceptors (objects that observe or change attention) of the models whose
    modules are among `module_calls`. Return the functions by which the interceptors observe or change the call. Within
    a context `exclusive_to`, report the call only to the interceptor that this context selects.

    Args:
        grid: size of the scores: batch, heads, queries, keys.
        kv_heads: number of key/value heads.
        value_dim: features of a value.
        module_calls: the module calls in which the call happened; by default those running in this thread.
        mask_source: the mask that the call received; by default it is unknown.
        origins: sources of the call's queries, keys and values; by default they are unknown.
        is_observed: False if its weights were observed in another call.
        keys: the keys `(batch, kv_heads, keys, head_dim)`, or features of the values, if they are known.
        appended_keys: number of keys at the end that stand for no token.
        is_aligned: True if the call itself states the positions of its queries and keys.
        step: the call as it is recorded for a plan, or as a plan states it; by default there is no plan for calls of
            the model.
        packed: places of the queries among the tokens of the model, if the call packs sequences of different lengths.
    """
    session = current_session()
    module_calls = session.module_calls if module_calls is None else module_calls
    handlers = CallHandlers([], [])
    is_observed = is_observed and grid.batch * grid.heads * grid.queries * grid.keys > 0
    planned, unobserved = None if step is None else step.planned, why_not_observed(grid.device)
    following = session.following
    sources = _input_sources(origins) if planned is None or following is None else following.sources_of(planned, grid)
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
                tokens = session.lineage.tokens_of_call(argument, origins.q, (sizes[0], sizes[1]), module_calls)
        if planned is None:
            site = session.site_of_call(module_call, grid, origins)
            has_argument = tokens.ids is argument and not tokens.are_unknown and not tokens.are_moved
            if not has_argument or not session.lineage.ids.are_of_arguments:
                must_trace(module_calls)
            if step is not None:
                with session.paused():
                    _record(step, module_calls[0].recording, site, grid, sources, origins)
        else:
            part = module_call.parts.index_of(planned.site.cross, planned.query_maps)
            site = planned.site._replace(part=part)
            module_call.parts.add_self_attention(planned.key_maps)
            for weights in planned.weights:
                alive = [weight for reference in weights if (weight := reference()) is not None]
                interceptor.on_projected(module_call.path, alive)
        if packed is not None:  # the arguments of the modules have the layout of the packed tokens
            tokens, padding = tokens._replace(ids=packed.token_ids(tokens.ids)), None
        call = Call(
            site,
            layer_number_of(module_call.module),
            nested[0].count_call(site),
            grid,
            kv_heads,
            value_dim,
            tokens,
            padding,
            mask_source=mask_source,
            is_recomputation=session.is_recomputing,
            keys=keys,
            appended_keys=appended_keys,
            is_aligned=is_aligned,
            sources=sources,
            module_arguments=() if packed is not None else tuple(outer.arguments for outer in reversed(nested)),
            real_queries=None if packed is None else packed.is_real,
            real_keys=None if packed is None else packed.real_keys,
        )
        with session.paused():
            observation = interceptor.observe(call) if is_observed and unobserved is None else None
            if unobserved is not None and type(interceptor).observe is not Interceptor.observe:
                interceptor.on_unreadable(module_call.path, unobserved)
            change = interceptor.change(call)
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
) -> None:
    """Record an attention call for a plan, with what was derived about it. There is no plan if something about the call
    is derived from the tensors of each call, such as the order of its tokens.
    """
    tokens = sources.tokens
    if recording is None or step.number is None:
        return
    is_in_order = tokens is not None and are_in_order(tokens, grid)
    is_of_this_call = not (sources.may_be_cached or sources.is_recurrent or sources.are_moved)
    if not is_of_this_call or (tokens is not None and not is_in_order):
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
    return InputSources(of_queries, of_keys, may_be_cached, is_recurrent, origins.tokens, origins.are_moved)


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


def answer_intercepted(problem: Problem, run: Callable[[Problem], Answer]) -> Answer:
    """Compute an attention call that was passed to `headwise.attend` as a `Problem`, by calling `run`, and return the
    answer. While an intercepted model is running, interceptors may observe the attention weights and change the head
    outputs. If they observe, blockwise attention may compute the answer in place of `run`.
    """
    session = current_session()
    with accelerated_modules.paused(OWN_BACKEND):
        if not session.intercepts:
            return run(problem)
        with session.paused():
            return _answer_to_interceptors(problem, run)


def _answer_to_interceptors(problem: Problem, run: Callable[[Problem], Answer]) -> Answer:
    """Compute an attention call of `headwise.attend` inside an intercepted model. Report the call to the interceptors,
    let them observe the weights and change the output, and return the answer.
    """
    mask_source = MaskSource(lambda: ReceivedMask.of_problem(problem))
    session = current_session()
    step = session.step("headwise.attend", problem.q, problem.k, problem.v)
    if step is None:
        return run(problem)
    origins = session.origins_of(problem.q, problem.k, problem.v)
    handlers = handlers_of_call(
        problem.grid,
        problem.k.shape[1],
        problem.v.shape[-1],
        mask_source=mask_source,
        origins=origins,
        keys=problem.k,
        is_aligned=True,
        step=step,
    )
    answer = handlers.answer(lambda: problem, lambda: run(problem), is_sdpa_foreign())
    out = handlers.changed(answer.out, lambda: uniform_output(problem), lambda: problem)
    if origins is not None:
        session.lineage.set_attended(out, origins)
    return answer._replace(out=out)


def _outside_torch_modes(tensor: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which operations bypass torch's function modes, so that the thousands of small operations of
    an observation are fast. If `tensor` belongs to a subclass of Tensor, which relies on torch's function protocol, the
    context does nothing.
    """
    return torch._C.DisableTorchFunction() if type(tensor) is Tensor else nullcontext()
