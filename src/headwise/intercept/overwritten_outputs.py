"""Functions that overwrite an attention output in place, between attention and the output projection.

A model keeps a tensor that it overwrites, so an interceptor must change the tensor itself before.
"""

from dataclasses import replace

from headwise.intercept.function_call import FunctionCall
from headwise.intercept.in_place_changes import overwritten_tensor, share_memory
from headwise.intercept.output_use import FollowedOutput
from headwise.intercept.refusals import CHANGED_IN_PLACE, HEADS_UNKNOWN
from headwise.intercept.session import current_session

_RESHAPING = frozenset(
    {"transpose_", "t_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "resize_", "resize_as_", "as_strided_"}
)
"""Names of methods that change the axes of a tensor in place."""


def before_overwriting(call: FunctionCall) -> None:
    """If a function call is about to overwrite an attention output in place, first write the interceptors' changes into
    this output. If the model may also use a view of a part of the same memory, exclude the output from the results.
    """
    written = overwritten_tensor(call)
    session = current_session()
    for followed in [] if written is None else list(session.attention.outputs.get(written) or ()):
        assert written is not None
        followed.output.on_overwritten(written)
        if getattr(call.function, "__name__", "") in _RESHAPING:
            followed.output.refuse(HEADS_UNKNOWN)
            continue
        changed = followed.changed()
        if changed is None:
            continue
        aliases = [
            (other, all_followed)
            for other, all_followed in session.attention.outputs.items()
            if share_memory(other, written)
        ]
        if any(other.numel() != written.numel() for other, _ in aliases):
            followed.output.refuse(CHANGED_IN_PLACE)
            continue
        with session.paused():
            written.copy_(changed)
        for other, all_followed in aliases:
            session.attention.outputs.set(other, [_changed_already(each, followed) for each in all_followed])


def _changed_already(each: FollowedOutput, followed: FollowedOutput) -> FollowedOutput:
    """Return the record `each` of a tensor, marked as containing the interceptors' changes, if it was computed from the
    same attention output as `followed`. Otherwise return it unchanged.
    """
    return replace(each, rearranged=None) if each.output is followed.output else each
