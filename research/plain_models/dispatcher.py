"""Record and replace the results of operators below autograd, while a model runs.

A run of a deterministic model calls the same operators in the same order every time. Each operator call has a number in
that order, so a later run can replace its result or an argument.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
SOFTMAXES = {aten._softmax.default, aten._safe_softmax.default}
FACTORS = {
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.addmm.default: (1, 2),
    aten.baddbmm.default: (1, 2),
    aten.convolution.default: (0, 1),
}
"""Operators that multiply matrices, with the positions of their two factors."""
FUSED = aten._scaled_dot_product_flash_attention_for_cpu.default


@dataclass
class Operation:
    """One call of a softmax or of a product of matrices.

    Attributes:
        number: of the call, among all operator calls of the run.
        operator: the operator.
        path: path of the innermost running module.
        factors: the argument of a softmax, or the two factors of a product.
        result: the result.
        dim: the axis of a softmax.
        of_parameters: for each factor, whether it shares memory with a parameter of the model.
    """

    number: int
    operator: Any
    path: str
    factors: tuple[Tensor, ...]
    result: Tensor
    dim: int = -1
    of_parameters: tuple[bool, ...] = ()

    @property
    def is_softmax(self) -> bool:
        """True for a softmax."""
        return self.operator in SOFTMAXES


Replacement = Callable[[Tensor], Tensor]


@dataclass
class Run:
    """Operations of one run of a model, and the output of the model.

    Attributes:
        operations: softmaxes and products, by number.
        output: what the model returned.
    """

    operations: dict[int, Operation] = field(default_factory=dict)
    output: Any = None

    def after(self, number: int) -> Iterator[Operation]:
        """Yield the operations after the one with this number, in order."""
        return (operation for operation in self.operations.values() if operation.number > number)


class _Recorder(TorchDispatchMode):
    """Mode that records softmaxes and products into `run`, and replaces some results and first factors.

    Args:
        run: where to record.
        paths: paths of the running modules, innermost last.
        parameters: addresses of the model's parameters.
        results: functions from the result of an operator call to its replacement, by the call's number.
        inputs: the same for the first factor of a product.
        last: number of the last call of interest, after which the run stops; None for none.
    """

    def __init__(
        self,
        run: Run,
        paths: list[str],
        parameters: set[int],
        results: Mapping[int, Replacement],
        inputs: Mapping[int, Replacement],
        last: int | None,
    ) -> None:
        super().__init__()
        self.run, self.paths, self.number, self.last = run, paths, -1, last
        self.parameters, self.results, self.inputs = parameters, results, inputs

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Call an operator, record it, and return its result or the replacement."""
        self.number += 1
        if self.number in self.inputs:
            position = FACTORS[func][0]
            args = (*args[:position], self.inputs[self.number](args[position]), *args[position + 1 :])
        if func is FUSED:  # chosen by a model that selects its kernel itself
            with self:
                return _math_attention(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if self.number in self.results:
            result = self.results[self.number](result)
        if func in SOFTMAXES:
            self._record(func, (args[0],), result, args[1] % result.ndim)
        elif func in FACTORS:
            first, second = FACTORS[func]
            self._record(func, (args[first], args[second]), result)
        if self.last is not None and self.number >= self.last:
            raise _Stop
        return result

    def _record(self, func: Any, factors: tuple[Tensor, ...], result: Tensor, dim: int = -1) -> None:
        """Store copies of the tensors of an operator call: the model may change its own in place."""
        path = self.paths[-1] if self.paths else ""
        copies = tuple(factor.detach().clone() for factor in factors)
        of_parameters = tuple(factor.untyped_storage().data_ptr() in self.parameters for factor in factors)
        operation = Operation(self.number, func, path, copies, result.detach().clone(), dim, of_parameters)
        self.run.operations[self.number] = operation


def _math_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the results of the fused operator, computed by a softmax and products."""
    shape = (*query.shape[:-1], value.shape[-1])
    q, k, v = (tensor.reshape(-1, *tensor.shape[-2:]) for tensor in (query, key, value))
    scores = aten.bmm.default(q, k.mT) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~visible, -torch.inf)
    if attn_mask is not None:
        scores = scores + attn_mask.expand(*query.shape[:-1], key.shape[-2]).reshape(scores.shape)
    out = aten.bmm.default(aten._softmax.default(scores, -1, False), v)
    return out.view(shape), query.new_empty(shape[:-1])


class _Stop(BaseException):
    """Ends a run early. It is not an Exception, so that models do not catch it."""


@contextmanager
def _module_paths(model: nn.Module) -> Iterator[list[str]]:
    """Yield a list that contains the paths of the running modules of a model, innermost last."""
    paths: list[str] = []
    handles = []

    def on_end(*_: Any) -> None:
        """Forget the path of a module that ends."""
        paths.pop()

    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, path=path: paths.append(path)))
        handles.append(module.register_forward_hook(on_end, always_call=True))
    try:
        yield paths
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def plain_torch() -> Iterator[None]:
    """Context in which attention is decomposed into softmaxes and products: no fused kernel of torch is used."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def record(
    model: nn.Module,
    call: Callable[[nn.Module], Any],
    *,
    results: Mapping[int, Replacement] | None = None,
    inputs: Mapping[int, Replacement] | None = None,
    last: int | None = None,
) -> Run:
    """Run `call(model)` from a fixed seed and return its softmaxes and products.

    Args:
        model: the model.
        call: a function that calls the model.
        results: replacements of results, by the number of the operator call.
        inputs: replacements of the first factor of a product, by the number of the operator call.
        last: number of the operator call after which the run may stop.
    """
    run = Run()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    torch.manual_seed(0)
    with _module_paths(model) as paths, plain_torch():
        try:
            with _Recorder(run, paths, parameters, results or {}, inputs or {}, last):
                run.output = call(model)
        except _Stop:
            pass
    return run
