"""What does not change between two runs of a model is computed once: the layers below the first head that is gated.

A run is kept, module by module. Another run on the same inputs takes from it what every module gave that had ended
before attention began in the first module that is gated: until there both runs are the same. What is kept are the
outputs of modules that hold one place of attention or none, inside of modules that hold several: the layers, embeddings
and norms of a transformer. The rest of the model, its Python included, runs as ever.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from headwise.intercept.layer_index import is_inside
from headwise.intercept.swap_forward import swap_forward


@dataclass
class _Ended:
    """A call of a module: what it gave, when it had ended, and the versions of the tensors it gave."""

    output: Any
    time: int
    versions: list[int]

    @property
    def is_as_it_was(self) -> bool:
        """Whether nobody has written into what it gave."""
        return self.versions == _versions(self.output)


class Replay:
    """A run of a model that is kept, and what is taken from it.

    Args:
        model: which must do the same when it is given the same: in evaluation mode, and without a cache in its inputs.
        sites: the paths of the modules that attend.
    """

    def __init__(self, model: nn.Module, sites: Collection[str]) -> None:
        self._modules = dict(model.named_modules())
        self._kept = _between(self._modules, sites)
        self._sites = sites
        self._ended: dict[tuple[str, int], _Ended] = {}
        self._began: dict[str, int] = {}
        self._time = 0

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Within the context the model runs once, on new inputs, and is kept."""
        self._ended, self._began, self._time = {}, {}, 0
        calls: Counter[str] = Counter()

        def keeper(path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
            def kept(*args: Any, **kwargs: Any) -> Any:
                number, calls[path] = calls[path], calls[path] + 1
                output = forward(*args, **kwargs)
                self._time += 1
                self._ended[path, number] = _Ended(output, self._time, _versions(output))
                return output

            return kept

        def noter(path: str) -> Callable[..., None]:
            def begins(*_: Any) -> None:
                self._began.setdefault(path, self._time)

            return begins

        hooks = [self._modules[path].register_forward_pre_hook(noter(path)) for path in self._sites]
        try:
            with ExitStack() as stack:
                for path in self._kept:
                    stack.enter_context(swap_forward(self._modules[path], keeper(path, self._modules[path].forward)))
                yield
        finally:
            for hook in hooks:
                hook.remove()
        last = max(self._began.values(), default=0)
        self._ended = {call: ended for call, ended in self._ended.items() if ended.time <= last and ended.is_as_it_was}

    @contextmanager
    def until(self, gated: Collection[str]) -> Iterator[None]:
        """Within the context a run takes what was kept, until attention begins in one of these modules."""
        first = min((self._began[path] for path in gated if path in self._began), default=self._time)
        calls: Counter[str] = Counter()

        def taker(path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
            def taken(*args: Any, **kwargs: Any) -> Any:
                number, calls[path] = calls[path], calls[path] + 1
                ended = self._ended.get((path, number))
                return forward(*args, **kwargs) if ended is None or ended.time > first else ended.output

            return taken

        with ExitStack() as stack:
            for path in {path for (path, _), ended in self._ended.items() if ended.time <= first}:
                stack.enter_context(swap_forward(self._modules[path], taker(path, self._modules[path].forward)))
            yield


def _between(modules: dict[str, nn.Module], sites: Collection[str]) -> list[str]:
    """The outermost modules that hold one site at most, inside of modules that hold several."""
    number = {path: sum(path == site or is_inside(site, path) for site in sites) for path in modules}
    found: list[str] = []
    for path, module in modules.items():
        if number[path] > 1 or not path or any(is_inside(path, other) for other in found):
            continue
        if not isinstance(module, nn.ModuleList | nn.ModuleDict):  # which are never called
            found.append(path)
    return found


def _versions(output: Any) -> list[int]:
    """How often each tensor was written into."""
    return [each._version for each in pytree.tree_leaves(output) if isinstance(each, Tensor)]
