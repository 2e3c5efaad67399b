"""`watch`: statistics of every head of any model while it runs."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from headwise.checks import require_module, token_ids
from headwise.errors import InputError
from headwise.intercept.heads import Heads
from headwise.intercept.install import intercepted
from headwise.intercept.statistics_observer import StatisticsObserver
from headwise.statistics.tally import FurtherStatistics
from headwise.statistics.weight_capture import WeightCapture

FRAMES = 6
"""Number of calling frames from a warning to the caller of `watch`: two generators and their context managers."""


@contextmanager
def watch(
    model: Any, *, special: Collection[int] = (), detail: Any = None, sites: Iterable[Any] = (), padding: Any = None
) -> Iterator[Heads]:
    """Collect statistics of every attention head, from all attention calls of `model` within the context. Yield the
    `Heads` object that contains them. `special` contains the ids of special tokens, such as [CLS]; `detail` selects
    attention weights to store in addition. If the attention of a module, or the padding, cannot be derived from the
    model, state it with `sites` and `padding`.

    The model computes the same output, up to rounding.

    Args:
        model: any module: of torch, of `transformers`, or your own.
        special: ids of the tokens that count as special, such as `tokenizer.all_special_ids`.
        detail: a `WeightCapture` that says which weights to keep of the last call of each module, for `Heads.details`.
        sites: `Site` objects, which state what cannot be derived about the attention of a module.
        padding: a tensor `(batch, tokens)`, True or 1 at tokens that are not padding, as in an `attention_mask`; or a
            dict of such tensors by the path of a module, such as an encoder, for all attention in this module. By
            default, padding is derived.

    Yields:
        the `Heads`, which are complete when the context ends.

    Raises:
        InputError: the model is not a torch module, is compiled, or uses an attention implementation of
            `transformers` whose masks cannot be read; a statement in `sites` or `padding` is wrong. When the context
            ends: the model ran, and no attention was intercepted, or none in a module of `sites`, or `padding` fits no
            attention call.

    Warns:
        UserWarning: when the context ends, of modules that ran and are called attention, but whose attention was not
            intercepted; and of modules whose attention weights or head outputs are NaN or infinite.

    Example:
        with hw.watch(model) as heads:
            model(**inputs)
        heads.table()
    """
    require_module(model)
    special = token_ids("special", special)
    if detail is not None and not isinstance(detail, WeightCapture):
        raise InputError("detail", expected="a headwise.WeightCapture or None", got=type(detail).__name__)
    heads = Heads(model)
    with _observed(model, heads, StatisticsObserver(model, heads, special, detail, padding), sites, "hw.watch"):
        yield heads


@contextmanager
def watch_further(model: nn.Module, further: FurtherStatistics, special: Collection[int] = ()) -> Iterator[Heads]:
    """Collect the usual statistics of every attention head, and those that `further` defines, from all attention calls
    of `model` within the context. Yield the `Heads` object that contains them.

    Args:
        model: any module that `watch` supports.
        further: the further statistics, which state which of those of `watch` are computed.
        special: ids of special tokens.

    Raises:
        InputError: as for `watch`.
    """
    require_module(model)
    heads = Heads(model)
    observer = StatisticsObserver(model, heads, token_ids("special", special), None, further=further)
    with _observed(model, heads, observer):
        yield heads


@contextmanager
def _observed(
    model: nn.Module,
    heads: Heads,
    observer: StatisticsObserver,
    sites: Iterable[Any] = (),
    context: str = "an analysis of headwise",
) -> Iterator[None]:
    """Return a context in which `observer` adds statistics of the model's attention to `heads`. At its end, warn of
    modules whose attention was not observed.
    """
    sites = list(sites)
    with intercepted(model, observer, sites, context):
        yield
    observer.finish()
    if heads.ran:
        heads.require_attention()
        heads.require_stated(site.path for site in sites)
    heads.warn_of_unread(FRAMES)
    heads.warn_of_nonfinite(FRAMES)
