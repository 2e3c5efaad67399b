"""Interface of an adapter: an `Engine` names the functions of a library, and reads their calls as `AttentionCall`.

The engine itself computes the output. Headwise computes the statistics in addition, and multiplies the output by gates.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor

from headwise.attention.masks.base import Mask
from headwise.attention.masks.factories import padding
from headwise.attention.masks.grid import MAX_DISTANCE, Grid
from headwise.attention.masks.kinds import Band
from headwise.attention.problem import Answer
from headwise.errors import InputError
from headwise.intercept.answer import answered, held
from headwise.intercept.attention_call import AttentionCall, PackedSequences, both
from headwise.intercept.module_call import report_unreadable
from headwise.intercept.session import current_session
from headwise.intercept.trace.functions import tensors_among
from headwise.intercept.trace.outputs import follow_log_sums, refuse_multiplied
from headwise.shapes import Float, Int

UNEXPECTED = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
"""Errors of an adapter for a call of a form that it does not expect, as of another version of the library."""


class UnreadableCall(Exception):
    """Raised by an adapter (code that reads the calls of one attention library) for a call that it cannot read. The
    message names the argument or value that is the reason, such as "with qv". It is inserted into the sentence
    "attention of these modules by flash_attn_func ... cannot be read".
    """


class Arguments:
    """Arguments, by name, of one call of an attention function of another library. It also records which arguments were
    read.

    Args:
        values: the arguments, also those that the call leaves at their defaults.
        defaults: the function's own defaults.
    """

    def __init__(self, values: dict[str, Any], defaults: dict[str, Any]) -> None:
        self._values, self._defaults, self._unread = values, defaults, set(values)

    @staticmethod
    def of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Arguments":
        """Return an object with the arguments of a call of a Python function: `args`, passed by position, and `kwargs`,
        passed by name. Arguments that the call leaves out have their defaults.
        """
        parameters = signature(function).parameters
        bound = signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        values = dict(bound.arguments)
        for name, parameter in parameters.items():
            if parameter.kind is Parameter.VAR_KEYWORD:
                values |= values.pop(name)
        return Arguments(values, {name: each.default for name, each in parameters.items()})

    def take(self, name: str, default: Any = None) -> Any:
        """Return the argument `name`, which then counts as read. Return `default` if the function has no such
        argument.
        """
        self._unread.discard(name)
        return self._values.get(name, default)

    def has(self, name: str) -> bool:
        """Return True if the function has an argument `name`."""
        return name in self._values

    def ignore(self, *names: str) -> None:
        """Count arguments as read, although their values are not used: they change neither attention weights nor head
        outputs.
        """
        self._unread.difference_update(names)

    def require_read(self) -> None:
        """Raise `UnreadableCall` if some argument differs from its default and was not read, so that its effect is
        unknown.
        """
        for name in sorted(self._unread):
            if not _is_default(self._values[name], self._defaults.get(name)):
                raise UnreadableCall(f"with {name}")


def _is_default(value: Any, default: Any) -> bool:
    """Return True if an argument has the value `default`. None, False and 0 count as equal, since each of them turns an
    option off.
    """
    if value is default:
        return True
    if not isinstance(value, int | float | str | tuple | None):
        return False
    return bool(value == default) or not (value or default)


@dataclass(frozen=True, eq=False)
class Engine:
    """Description of an attention library: the names of its attention functions and of their modules, and a function
    that reads a call of them.

    Attributes:
        modules: names of the modules that define the functions. A name without a dot also stands for modules of other
            packages whose last name is the same.
        functions: names of the functions. They are intercepted if they are Python functions: no other callable object
            is, such as an operator of `torch.library`, a `functools.partial` or a function in C.
        read: function that reads a call: it receives the function's name and the arguments, and returns an
            `AttentionCall`. If the queries have three axes, the heads are in the axis of the batch, which later
            functions of the model show. `read` is called after the engine has computed its output. It raises
            `UnreadableCall`, or `InputError`, if the call cannot be read.
    """

    modules: tuple[str, ...]
    functions: tuple[str, ...]
    read: Callable[[str, Arguments], AttentionCall]

    def is_module(self, name: str) -> bool:
        """Return True if a loaded module with this name may define the functions of this attention engine (a library
        such as FlashAttention).
        """
        return name in self.modules or name.rpartition(".")[2] in self.modules


def answered_by_engine(name: str, compute: Callable[[], Any], read: Callable[[], AttentionCall]) -> Any:
    """Compute an attention call by an engine (a library such as FlashAttention), and return the result with the
    interceptors' changes. If the call cannot be read, report this, and return the result unchanged.

    Args:
        name: name of the engine's function, for the report.
        compute: the engine's function, with the arguments of the call.
        read: function that reads the call; called after `compute`.
    """
    with current_session().paused():
        result = compute()
    return finished(name, result, read)


def finished(name: str, result: Any, read: Callable[[], AttentionCall]) -> Any:
    """Return the `result` of an attention engine's function (such as FlashAttention) with the interceptors' changes. If
    the call cannot be read, report this, and return the result unchanged.
    """
    session = current_session()
    out = result[0] if isinstance(result, tuple) else result
    if not isinstance(out, Tensor):
        return result
    try:
        call = read()
        if call.q.ndim == 4:
            with session.paused():
                call.problem  # noqa: B018 - checks the tensors
    except (UnreadableCall, InputError, *UNEXPECTED) as error:
        report_unread(name, str(error) if isinstance(error, UnreadableCall) else f"({type(error).__name__}: {error})")
        return result
    if session.reports_unreadable(call.q):
        return result
    with session.paused():
        if call.q.ndim == 4:
            changed = answered(name, call, lambda: Answer(out, None, None)).out
        else:
            call.origins = session.origins_of(call.q, call.k, call.v)
            refuse_multiplied(call.q, call.k, call.v)
            changed = held(call, out)
    if isinstance(result, tuple) and call.origins is not None:
        follow_log_sums(changed, tensors_among(result[1:]))
    if changed is out:
        return result
    if not isinstance(result, tuple):
        return changed
    others = (changed, *result[1:])
    return type(result)(*others) if hasattr(result, "_fields") else others


def report_unread(name: str, reason: str) -> None:
    """Report to the interceptors that attention in the running modules cannot be read, since they call the function
    `name` of an attention library in a way that is not supported. `reason` states this way, such as "with qv".
    """
    report_unreadable(current_session().module_calls, f"attention of these modules by {name} {reason} cannot be read")


# -- packed sequences, keys in pages and windows around the query -----------------------------------------------------

Lengths = Int[Tensor, " _"]
"""A number for each sequence."""


def band(left: int | None, right: int | None) -> Mask | None:
    """Return the mask by which a query attends to at most `left` keys before its own and `right` keys after it. For
    each of the two, None or a negative number stands for any number of keys. Return None if the mask hides nothing.
    """
    left, right = (None if side is None or side < 0 else int(side) for side in (left, right))
    if left is None and right is None:
        return None
    return Band(None if left is None else left + 1, MAX_DISTANCE if right is None else right)


def alibi_bias(slopes: Float[Tensor, "..."], grid: Grid) -> Float[Tensor, "#batch heads queries keys"]:
    """Return the bias of ALiBi for slopes of the heads, `(heads,)` or `(batch, heads)`: minus the slope times the
    distance between query and key (Press et al. 2022), at least in float32.
    """
    of_queries = torch.arange(grid.queries, device=grid.device) + grid.offset
    distances = (of_queries[:, None] - torch.arange(grid.keys, device=grid.device)).abs()
    slopes = slopes.detach().to(torch.promote_types(slopes.dtype, torch.float32))
    slopes = slopes[None] if slopes.ndim == 1 else slopes
    return -slopes[..., None, None] * distances


def offsets(name: str, cumulative: Any, total: int) -> tuple[Lengths, Lengths]:
    """Return the starts and the lengths of packed sequences. `cumulative` has the index of each sequence's first token,
    followed by the end of the last sequence. `name` is the argument's name for error messages.

    Raises:
        UnreadableCall: the offsets do not rise from 0 to at most `total`, the number of tokens.
    """
    if not isinstance(cumulative, Tensor) or cumulative.ndim != 1 or len(cumulative) < 2:
        raise UnreadableCall(f"with {name} of another form than (sequences + 1,)")
    starts, lengths = cumulative[:-1].long(), cumulative.long().diff()
    if int(starts[0]) != 0 or bool((lengths < 0).any()) or int(cumulative[-1]) > total:
        raise UnreadableCall(f"with {name} that do not rise from 0 to the number of tokens")
    return starts, lengths


def places_in_pages(table: Int[Tensor, "sequences pages"], page_size: int, longest: int) -> Int[Tensor, "..."]:
    """Return for each sequence the indices of its first `longest` keys in a paged cache, counted over the keys of all
    pages. `table` has the numbers of the pages of each sequence.
    """
    key = torch.arange(longest, device=table.device)
    return table.long()[:, key // page_size] * page_size + key % page_size


def packed_call(
    q: Float[Tensor, "tokens heads head_dim"],
    k: Float[Tensor, "places kv_heads head_dim"],
    v: Float[Tensor, "places kv_heads value_dim"],
    of_queries: tuple[Lengths, Lengths],
    of_keys: tuple[Lengths, Lengths],
    mask: Mask | None = None,
    *,
    slopes: Tensor | None = None,
    is_top_left: bool = False,
    pages: Int[Tensor, "_ _"] | None = None,
    has_batch_axis: bool = False,
    mask_origin: tuple[Any, ...] = (),
    **options: Any,
) -> AttentionCall:
    """Return an attention call with packed sequences (concatenated without padding) as an `AttentionCall`. Each
    sequence becomes a row of the batch, with padding that does not count.

    Args:
        q: queries of all sequences.
        k: keys of all sequences, or of all pages.
        v: values, in the same places.
        of_queries: start and length of each sequence among the queries.
        of_keys: start and length of each sequence among the keys; starts in pages are not used.
        mask: rule that goes by the distance between query and key alone; None to hide nothing.
        slopes: slopes of ALiBi; None without.
        is_top_left: True if the first query of a sequence has the position of its first key; by default the last query
            has the position of the last key.
        pages: index of each key among those of all pages, if keys and values are stored in pages.
        has_batch_axis: True if the engine's output has its queries in two axes, of which the first is a batch.
        mask_origin: values that determine the mask, as in `AttentionCall`.
        options: further options of `AttentionCall`.
    """
    (_, query_lengths), (_, key_lengths) = of_queries, of_keys
    if len(query_lengths) != len(key_lengths):
        raise UnreadableCall("with other numbers of sequences for queries than for keys")
    goes_by_position = mask is not None or slopes is not None
    has_equal_lengths = bool((query_lengths == key_lengths).all())
    # With padding on the left, the last query of each sequence has the position of the last key.
    is_padded_left = goes_by_position and not has_equal_lengths and not is_top_left
    queries = PackedSequences.of(*of_queries, len(q), is_padded_left=is_padded_left)
    keys = PackedSequences.of(*of_keys, len(k), is_padded_left=is_padded_left)
    if pages is not None:
        keys = PackedSequences(pages.gather(1, _rank(keys)), keys.is_real, len(k))
    q_padded, k_padded, v_padded = (
        places.padded(tensor).transpose(1, 2) for places, tensor in ((queries, q), (keys, k), (keys, v))
    )
    grid = Grid(len(query_lengths), q.shape[1], queries.index.shape[1], keys.index.shape[1], q.device)
    if is_top_left and goes_by_position and not has_equal_lengths:
        options["query_positions"], options["key_positions"] = (
            _rank(places).masked_fill(~places.is_real, -1) for places in (queries, keys)
        )
    elif not bool(keys.is_real.all()):
        mask = both(padding(key_lengths, "left" if is_padded_left else "right"), mask)
    if slopes is not None:
        options["bias"] = alibi_bias(slopes, grid)
    return AttentionCall(
        q_padded,
        k_padded,
        v_padded,
        options={"mask": mask, **options},
        layout=queries.layout(has_batch_axis=has_batch_axis),
        packed=replace(queries, real_keys=keys.is_real),
        mask_origin=mask_origin,
    )


def _rank(places: PackedSequences) -> Int[Tensor, "sequences longest"]:
    """Return the index of each token in its sequence, for packed sequences that were padded to a batch. At
    padding it is the index of the last token before, or 0 if there is none.
    """
    return (places.is_real.cumsum(1) - 1).clamp(min=0)
