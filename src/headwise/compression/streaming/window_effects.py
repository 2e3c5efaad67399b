"""Estimated effects of restricting single key/value heads to a window: on their attention, and on the loss."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from headwise.analysis.losses import Loss, loss_per_example
from headwise.attention.masks.factories import causal
from headwise.compression.calibration.layer_runs import layer_of_site
from headwise.compression.calibration.weight_gradients import without_parameter_gradients
from headwise.compression.streaming.attention_calls import AttentionCall, answered
from headwise.compression.streaming.localized_module import LocalizedModule
from headwise.compression.streaming.streaming_attention import streaming_mask
from headwise.compression.streaming.token_positions import PositionReader
from headwise.errors import InputError
from headwise.intercept.swap_forward import swap_forward
from headwise.progress import progress_bar
from headwise.shapes import Float


class WindowEffects:
    """Handler of the attention calls of one module, which computes them as the model does, and measures each key/value
    head.

    With g_t the derivative of the loss with respect to the outputs of the query heads at token t, and e_t the change of
    these outputs if the head sees only its window, the score is the sum of `(g_t . e_t)^2` over all tokens. This is the
    change of the loss to second order with the empirical Fisher matrix, without its terms between tokens.

    Args:
        module: the module.
        width: number of tokens of the window.
        first: number of first tokens.
        reader: reader of the masks of all modules.

    Attributes:
        is_recomputed: True while a backward pass computes layers again, of which nothing is measured.
        outside: sum of the shares of attention outside of the window, for each key/value head.
        queries: number of queries and query heads in each sum.
        scores: score of each key/value head.
    """

    def __init__(self, module: LocalizedModule, width: int, first: int, reader: PositionReader) -> None:
        self._module, self._width, self._first, self._reader = module, width, first, reader
        self.outside = torch.zeros(module.num_kv_heads, dtype=torch.float64)
        self.scores = torch.zeros(module.num_kv_heads, dtype=torch.float64)
        self.queries = 0
        self.is_recomputed = False

    def __call__(self, call: AttentionCall) -> Tensor:
        """Compute a call as the model does, and let the gradient of its output add to the scores."""
        out = call.dense()
        if not out.requires_grad:
            out = out.detach().requires_grad_()
        if self.is_recomputed:
            return out
        change, share, counts = self._change(call, out)

        def add(gradient: Tensor) -> None:
            effects = (gradient.transpose(1, 2).double() * change.double()).sum(-1).where(counts[:, None], 0.0)
            self.scores += _by_kv_head(effects, self._module).square().sum((0, 2)).cpu()
            self.outside += share
            self.queries += int(counts.sum()) * self._module.num_heads // self._module.num_kv_heads

        out.register_hook(add)  # type: ignore[no-untyped-call]
        return out

    @torch.no_grad()
    def _change(self, call: AttentionCall, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the change of head outputs `(batch, heads, queries, value_dim)`, the sum of the shares of attention
        outside of the window for each key/value head, and a mask `(batch, queries)` of the queries with such keys.
        """
        batch, heads, queries, _ = call.q.shape
        positions = self._reader.read(call.path, call.mask, batch, queries, queries, call.is_causal).positions
        q, k, v = (tensor.detach() for tensor in (call.q, call.k, call.v))
        (dense, dense_lse), (streaming, lse) = (
            call.attend(q, k, v, list(range(heads)), mask=mask, positions=positions, return_lse=True)
            for mask in (causal(), streaming_mask(self._width, self._first))
        )
        own = torch.arange(queries, device=q.device).expand(batch, -1) if positions is None else positions
        _require_equal(call, dense, out.detach().transpose(1, 2), own >= 0)
        counts = own >= self._width + self._first
        shares = 1.0 - (lse.double() - dense_lse.double()).exp()
        share = _by_kv_head(shares.where(counts[:, None], 0.0), self._module).sum((0, 2)).cpu()
        return streaming - dense, share, counts


def _by_kv_head(values: Tensor, module: LocalizedModule) -> Float[Tensor, "batch kv_heads queries"]:
    """Return the sum of values `(batch, heads, queries)` over the query heads of each key/value head."""
    batch, _, queries = values.shape
    return values.reshape(batch, module.num_kv_heads, -1, queries).sum(2)


def _require_equal(call: AttentionCall, computed: Tensor, own: Tensor, is_real: Tensor) -> None:
    """Raise `InputError` if attention as headwise states it is not what the model computes."""
    error = (computed - own).abs().amax(-1).where(is_real[:, None], 0.0).max()
    precision = torch.finfo(own.dtype).eps
    if call.implementation == "eager":  # which computes the softmax in float32 in many models, whatever their dtype
        precision = max(precision, torch.finfo(torch.float32).eps)
    if not float(error) <= precision**0.5 * float(own.abs().max()):
        expected = f"softmax attention with the options of its call in {call.path}"
        raise InputError("model", expected=expected, got=f"another output, by {float(error):.2g}")


def measure_effects(
    model: nn.Module, modules: Sequence[LocalizedModule], width: int, first: int, batches: Sequence[dict[str, Any]],
    loss: Loss,
) -> dict[str, WindowEffects]:  # fmt: skip
    """Run a model forwards and backwards on batches, and return the effects in each module, by path."""
    reader = PositionReader()
    effects = {module.module: WindowEffects(module, width, first, reader) for module in modules}
    bar = progress_bar("window effects", len(batches), "batches")
    with without_parameter_gradients(model), torch.enable_grad(), answered(model, effects), bar as progress:
        for batch in progress.track(batches, step=1):
            with _checkpointed(model, list(effects)):
                losses = loss_per_example(loss, model, batch)
                if not losses.requires_grad:
                    expected = "a differentiable function of the model's output"
                    raise InputError("loss", expected=expected, got="a loss without a gradient")
                _set_recomputed(effects, True)
                losses.nansum().backward()  # type: ignore[no-untyped-call]
                _set_recomputed(effects, False)
    return effects


def _set_recomputed(effects: Mapping[str, WindowEffects], is_recomputed: bool) -> None:
    """Set `is_recomputed` of all handlers."""
    for each in effects.values():
        each.is_recomputed = is_recomputed


@contextmanager
def _checkpointed(model: nn.Module, sites: Sequence[str]) -> Iterator[None]:
    """Let the layers around attention modules store only their inputs for the backward pass, and compute the rest again
    (Chen et al. 2016, arXiv:1604.06174).
    """
    modules: Mapping[str, nn.Module] = dict(model.named_modules())
    with ExitStack() as stack:
        for path in dict.fromkeys(layer_of_site(modules, site, sites) for site in sites):
            layer = modules[path]

            def forward(*args: Any, _forward: Any = layer.forward, **kwargs: Any) -> Any:
                return checkpoint.checkpoint(_forward, *args, use_reentrant=False, **kwargs)

            stack.enter_context(swap_forward(layer, forward))
        yield
