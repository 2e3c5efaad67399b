"""Site of an attention call: its module, the kind of its attention, and the number of the layer in the module."""

from headwise.attention.masks.grid import Grid
from headwise.intercept.attention_kind import UNKNOWN_KIND, is_cross_attention, may_be_cached
from headwise.intercept.interceptor import SiteKey
from headwise.intercept.module_call import ModuleCall, must_trace
from headwise.intercept.origin import CallOrigins
from headwise.intercept.session import current_session


def site_of_call(module_call: ModuleCall, grid: Grid, origins: CallOrigins | None) -> SiteKey:
    """Return the site of an attention call: the path of its module, the kind (self- or cross-attention), and the number
    of the layer in the module. If the kind is neither derived nor stated by the user, the call counts as
    cross-attention, and the interceptor is notified that the kind is unknown.

    Raises:
        InputError: the user stated another kind or number of heads.
    """
    if module_call.stated is not None:
        module_call.stated.require_heads(grid.heads)
    is_cross = _is_cross(module_call, origins)
    session = current_session()
    if is_cross is None and not session.is_recomputing:
        must_trace(session.module_calls)
        module_call.interceptor.on_left_out(module_call.path, UNKNOWN_KIND)
    cross = is_cross is not False
    return SiteKey(module_call.path, cross, module_call.parts.index(cross, origins))


def number_layer(module_call: ModuleCall, origins: CallOrigins) -> None:
    """Assign a number to the layer of an attention call, if the module computes several attention layers itself. Layers
    are numbered in the order in which they attend. Calls may later be reported in another order.
    """
    module_call.parts.index(_is_cross(module_call, origins) is not False, origins)


def _is_cross(module_call: ModuleCall, origins: CallOrigins | None) -> bool | None:
    """Return True for cross-attention, False for self-attention. The kind is derived from the sources of queries and
    keys, or stated by the user; return None if neither is the case.
    """
    session = current_session()
    is_cross = None if origins is None else is_cross_attention(origins, session.lineage)
    if is_cross is None and origins is not None and may_be_cached(origins, session.lineage):
        is_cross = False if module_call.parts.was_self_attention(origins) else None
    if is_cross is False and origins is not None and origins.k is not None:
        module_call.parts.add_self_attention(origins.k.maps)
    return is_cross if module_call.stated is None else module_call.stated.resolved_cross(is_cross)
