"""Results that are computed once for the same inputs, such as facts about a mask that several layers receive."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch import Tensor

from headwise.attention.masks.grid import Grid

Result = TypeVar("Result")


class SharedResults:
    """Results by their inputs. Tensors are the same input if they are the same memory and have not been changed since.
    The inputs are stored with the results, so that their identities stay theirs.
    """

    def __init__(self) -> None:
        self._results: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}

    def of(self, compute: Callable[[], Result], *inputs: Any) -> Result:
        """Return the result of `compute`, which is called once for the same `inputs`."""
        key = tuple(map(_identity, inputs))
        if key not in self._results:
            self._results[key] = compute(), inputs
        result: Result = self._results[key][0]
        return result


def _identity(value: Any) -> Hashable:
    """Return a dictionary key that is equal for the same tensor, also as another view of the same memory, as long as
    the tensor is not changed; for another object, its identity or, if it is a number, string or grid, its value.
    """
    if isinstance(value, Tensor):
        version = 0 if value.is_inference() else value._version
        return (value.data_ptr(), value.dtype, tuple(value.shape), value.stride(), version)
    return value if isinstance(value, str | int | Grid) or value is None else id(value)
