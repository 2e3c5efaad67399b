"""The first module of a model whose output has NaN or infinite numbers."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
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
    """Run the model once more to find the first place where a number is NaN or infinite. Return an error that names
    this place: a module with such a parameter or output, or the model's inputs. Return None if all numbers are finite.
    Padding is not checked. Minus infinity in activations is allowed, since masks contain it.
    """
    places: list[str] = []  # where a number is not finite
    running: list[str] = []  # modules that run
    padding = batch.get("attention_mask")

    def has_nonfinite(values: Any) -> bool:
        """Return True if a tensor contains NaN or plus infinity outside of padding. `values` is a tensor or a nested
        structure of tensors. If the enclosing function has the argument `examples`, only examples at which it is True
        are checked.
        """
        for tensor in pytree.tree_leaves(values):
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.is_meta:
                continue
            bad = tensor.isnan() | tensor.isposinf()
            if isinstance(padding, Tensor) and padding.ndim == 2 and bad.shape[:2] == padding.shape:
                bad = bad & padding.bool().to(bad.device)[(..., *(None,) * (bad.ndim - 2))]
            if examples is not None and bad.ndim and len(bad) == len(examples):
                bad = bad[examples.to(bad.device)]
            if bool(bad.any()):
                return True
        return False

    def on_start(name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        if not places and has_nonfinite((args, kwargs)):
            places.append(running[-1] if running else "its inputs")
        running.append(name)

    def on_end(name: str, module: nn.Module, _: Any, output: Any) -> None:
        running.remove(name)
        if places:
            return
        parameters = module.named_parameters(recurse=False)
        if bad := [key for key, value in parameters if not bool(value.isfinite().all())]:
            places.append(f"the parameter {bad[0]} of {name}")
        elif has_nonfinite(output):
            places.append(f"the output of {name}")

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            name = path or "the model itself"
            hooks.enter_context(module.register_forward_pre_hook(partial(on_start, name), with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(partial(on_end, name)))
        run()
    if not places:
        return None
    got = f"NaN or infinity, first in {places[0]}"
    return InputError("model", expected="finite weights and activations", got=got)
