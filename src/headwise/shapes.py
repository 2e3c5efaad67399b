"""Type annotations for tensors with shapes: `Float[Tensor, "batch heads length head_dim"]`.

The notation is that of jaxtyping: `#n` is n or 1, `*batch` is any number of axes, `_` is any size. At run time the
annotations are `typing.Annotated` and cost nothing. The test suite replaces this module by jaxtyping and checks the
shapes of every call.
"""

from typing import Annotated as Bool
from typing import Annotated as Float
from typing import Annotated as Int

__all__ = ["Bool", "Float", "Int"]
