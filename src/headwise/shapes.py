"""Shapes in signatures: `Float[Tensor, "batch heads length head_dim"]`.

The names follow jaxtyping, so its notation is all there is to learn: `#n` is n or 1, `*batch` is any number
of axes, `_` is anything. At run time they are `typing.Annotated` and cost nothing; the test-suite puts
jaxtyping itself in this module's place and checks every call.
"""

from typing import Annotated as Bool
from typing import Annotated as Float
from typing import Annotated as Int

__all__ = ["Bool", "Float", "Int"]
