"""The first module of a model whose output has NaN or infinite numbers."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from headwise.errors import InputError
from headwise.shapes import Bool


def nonfinite_error(
    model: nn.Module,
    run: Callable[[], Any],
    batch: Mapping[str, Any],
    examples: Bool[Tensor, " examples"] | None = None,
) -> InputError | None:
    """Run the model once more, and return the error that names the first place where a number is NaN or infinite: a
    module with such a parameter or output, in the order in which modules end; or the inputs. Return None if all numbers
    are finite. Minus infinity alone, which masks contain, and padding do not count.

    Args:
        model: the model.
        run: runs the model.
        batch: arguments of the model in that run, whose attention mask states the padding.
        examples: True at the examples that count; all by default.
    """
    search = _Search(batch, examples)
    with ExitStack() as stack:
        for path, module in model.named_modules():
            for hook in search.hooks(path, module):
                stack.callback(hook.remove)
        run()
    if search.place is None:
        return None
    got = f"NaN or infinity, first in {search.place}"
    return InputError("model", expected="finite weights and activations", got=got)


class _Search:
    """Search, while a model runs, for the first place where a number is NaN or infinite.

    Attributes:
        place: description of this place; None while all numbers are finite.
    """

    def __init__(self, batch: Mapping[str, Any], examples: Bool[Tensor, " examples"] | None) -> None:
        self.place: str | None = None
        self._running: list[str] = []
        self._examples, self._padding = examples, batch.get("attention_mask")

    def hooks(self, path: str, module: nn.Module) -> list[Any]:
        """Register hooks that search the parameters, inputs and outputs of a module's calls; return their handles."""
        name = path or "the model itself"

        def on_start(_: nn.Module, args: Any, kwargs: Any) -> None:
            if self.place is None and self._has_nonfinite((args, kwargs)):
                self.place = self._running[-1] if self._running else "its inputs"
            self._running.append(name)

        def on_end(module: nn.Module, _: Any, output: Any) -> None:
            self._running.remove(name)
            if self.place is None:
                bad = [key for key, value in module.named_parameters(recurse=False) if not bool(value.isfinite().all())]
                if bad:
                    self.place = f"the parameter {bad[0]} of {name}"
                elif self._has_nonfinite(output):
                    self.place = f"the output of {name}"

        return [
            module.register_forward_pre_hook(on_start, with_kwargs=True),
            module.register_forward_hook(on_end),
        ]

    def _has_nonfinite(self, values: Any) -> bool:
        """Return True if a tensor in `values`, which may be nested, contains NaN or plus infinity, in examples that
        count and not at padding.
        """
        leaves = pytree.tree_leaves(values)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        return any(bool(self._is_nonfinite(tensor).any()) for tensor in tensors if not tensor.is_meta)

    def _is_nonfinite(self, tensor: Tensor) -> Bool[Tensor, "..."]:
        """Return a mask that is True at numbers of a tensor that are NaN or plus infinity, except at padding and in
        examples that do not count.
        """
        bad = tensor.isnan() | tensor.isposinf()
        if isinstance(self._padding, Tensor) and self._padding.ndim == 2 and bad.shape[:2] == self._padding.shape:
            bad = bad & self._padding.bool().to(bad.device)[(..., *(None,) * (bad.ndim - 2))]
        if self._examples is not None and bad.ndim and len(bad) == len(self._examples):
            bad = bad[self._examples.to(bad.device)]
        return bad
