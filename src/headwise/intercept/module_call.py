"""Running calls of the modules of an intercepted model, and what their arguments say about the attention inside."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from headwise.intercept.interceptor import Interceptor, SiteKey
from headwise.intercept.plans import Recording
from headwise.intercept.site import Site
from headwise.intercept.trace.lineage import SiteParts
from headwise.intercept.trace.modules import named_arguments

NON_TOKEN_ARGUMENTS = ("pixel_values", "input_features", "input_values")
"""Names of the arguments of modules that read images or sound, although the model around them reads tokens."""


@dataclass(eq=False)
class ModuleCall:
    """One running call of a module of an intercepted model: the module, the arguments of the call, and the number of
    attention calls that have happened inside this module call so far.

    Attributes:
        interceptor: the model's interceptor; with several, each has a `ModuleCall` of its own.
        path: path of the module in the model.
        module: the module.
        arguments: arguments of the call, by name.
        stated: what the user states about the attention of the module; None for nothing.
        parts: attention layers that the module computes itself, in all its calls.
        call_counts: number of attention calls so far inside this call, by site.
        recording: record from which a plan is made for later calls of the model; None if none is made.
        projected: numbers of elements of the linear maps that the module has computed so far, or since it attended, if
            it contains other modules.
        unfollowed: reasons why it may have attended in a way that is not followed, since it last attended.
    """

    interceptor: Interceptor
    path: str
    module: nn.Module
    arguments: dict[str, Any]
    stated: Site | None = None
    parts: SiteParts = field(default_factory=SiteParts)
    call_counts: dict[SiteKey, int] = field(default_factory=dict)
    recording: Recording | None = None
    projected: list[int] = field(default_factory=list)
    unfollowed: list[str] = field(default_factory=list)

    def count_call(self, site: SiteKey) -> int:
        """Count one attention call at `site` (attention module, self or cross) inside this module call. Return the
        number of such calls before.
        """
        count = self.call_counts.get(site, 0)
        self.call_counts[site] = count + 1
        return count

    def on_attention(self) -> None:
        """Record that attention inside this call was found, which accounts for what the module has projected so far."""
        self.projected.clear()
        self.unfollowed.clear()

    @property
    def named_arguments(self) -> Mapping[str, Any]:
        """Arguments by name, with the entries of arguments that are dicts."""
        return named_arguments(self.arguments) if self._has_mappings else self.arguments

    @property
    def may_read_ids(self) -> bool:
        """False if the arguments are images, sound or embeddings, although the model around the module reads ids."""
        given = self.named_arguments
        if given.get("inputs_embeds") is not None and given.get("encoder_hidden_states") is not None:
            return False
        return all(given.get(name) is None for name in NON_TOKEN_ARGUMENTS)

    @cached_property
    def _has_mappings(self) -> bool:
        """True if some arguments are dicts."""
        return any(
            isinstance(argument, Mapping)
            for argument in self.arguments.values()
            if argument is not None and type(argument) is not Tensor  # most arguments; other checks take longer
        )

    @property
    def is_attention(self) -> bool:
        """True if the module's class name or the end of its path contains "attention" or "attn"."""
        class_name = type(self.module).__name__.lower()
        return "attention" in class_name or "attn" in class_name or self.path.lower().endswith(("attention", "attn"))


def innermost_calls(module_calls: Iterable[ModuleCall]) -> Iterable[ModuleCall]:
    """Return the innermost running module call for each interceptor (object that observes or changes attention) that
    intercepts some of `module_calls`.
    """
    return {id(each.interceptor): each for each in module_calls}.values()


def report_unreadable(module_calls: Sequence[ModuleCall], reason: str) -> None:
    """Report to each interceptor (object that observes or changes attention) that the attention in its innermost
    running module cannot be read, with the reason. Later calls of the model are traced, too.
    """
    must_trace(module_calls)
    for module_call in module_calls:
        module_call.on_attention()
    for innermost in innermost_calls(module_calls):
        innermost.interceptor.on_unreadable(innermost.path, reason)


def report_empty(module_calls: Iterable[ModuleCall]) -> None:
    """Report to each interceptor (object that observes or changes attention) that attention in its innermost running
    module has no elements, as for an empty batch.
    """
    for innermost in innermost_calls(module_calls):
        innermost.interceptor.on_empty(innermost.path)


def must_trace(module_calls: Sequence[ModuleCall]) -> None:
    """Record that no plan (record of a run that later runs reuse, instead of being traced) can be made of the running
    call of the model.
    """
    if module_calls and module_calls[0].recording is not None:
        module_calls[0].recording.fail()


def tokens_and_padding(module_calls: Sequence[ModuleCall]) -> tuple[Tensor | None, Tensor | None]:
    """Return the token ids and the padding mask that apply to an attention call, each None if not found. They are the
    arguments `input_ids` and `attention_mask` (with 2 axes) of the running modules around the attention, searched from
    the innermost module outwards.

    The search ends at the first module that received token ids, or another kind of input such as images; a module
    around it that received the same ids may have the padding mask. Ids of several tokens at each position, as of audio,
    are not returned. The search also ends at a module that received the ids of sources and of targets, since its
    arguments do not state which of them the attention reads.

    Args:
        module_calls: nested calls of one model's modules, outermost first.
    """
    padding: Tensor | None = None
    ids: Tensor | None = None
    for module_call in reversed(module_calls):
        arguments = module_call.named_arguments
        tokens, mask = arguments.get("input_ids"), arguments.get("attention_mask")
        if ids is not None and tokens is not ids:
            break
        if ids is None and arguments.get("decoder_input_ids") is not None:
            break
        if padding is None and isinstance(mask, Tensor) and mask.ndim == 2:
            padding = mask
        ids = tokens if isinstance(tokens, Tensor) else None
        if ids is not None and padding is not None:
            break
        if ids is None and not module_call.may_read_ids:
            break
    return ids if ids is not None and ids.ndim == 2 else None, padding
