"""Calls of single modules while a model runs: their outputs may be replaced, or reused in later runs."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from headwise.intercept.layer_index import is_inside

KeyT = TypeVar("KeyT")


@contextmanager
def module_calls(
    modules: Mapping[KeyT, nn.Module], on_call: Callable[[KeyT, tuple[Any, ...], Any], Any]
) -> Iterator[None]:
    """Return a context in which `on_call` is called after each call of one of `modules`. It receives the module's key
    in the mapping `modules`, the positional arguments of the module's call, and the module's output. If `on_call`
    returns a value other than None, that value replaces the module's output.
    """

    def hook_of(key: KeyT) -> Callable[..., Any]:
        return lambda module, arguments, output: on_call(key, arguments, output)

    with ExitStack() as stack:
        for key, module in modules.items():
            stack.callback(module.register_forward_hook(hook_of(key)).remove)
        yield


@contextmanager
def swap_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Return a context in which `forward` replaces the method `forward` of one module object. At the end of the
    context, the previous method is restored, unless other code has replaced `forward` in the meantime.
    """
    attributes = vars(module)  # written directly, since modules may define what it means to set an attribute
    has_own, before = "forward" in attributes, attributes.get("forward")
    attributes["forward"] = forward
    try:
        yield
    finally:
        if attributes.get("forward") is forward:
            if has_own:
                attributes["forward"] = before
            else:
                del attributes["forward"]


@dataclass
class _RecordedCall:
    """Recorded output of one module call, and how many recorded module calls had ended by then. Stored version counters
    of the output's tensors show whether one of them was modified in place later.

    Attributes:
        output: what the module returned.
        end: number of recorded calls that had ended, this one included.
        versions: torch's version counter of each tensor in the output; None if a tensor has none.
    """

    output: Any
    end: int
    versions: list[int] | None

    @property
    def is_unmodified(self) -> bool:
        """True if it is known that no tensor in the recorded output of a module call was modified in place after the
        recording.
        """
        return self.versions is not None and self.versions == _versions(self.output)


class Replay:
    """Recorder of module outputs in one run of a model, for reuse in later runs on the same inputs. In a later run,
    heads of some attention modules are gated (scaled or replaced). Modules that end before attention begins in the
    first gated module return their recorded outputs without computing them.

    Module calls that return recorded outputs have no side effects: they write neither to a cache nor to an attribute
    that other modules read. `RepeatedRuns` in `analysis/repeated_runs.py` checks that a model does not need these.

    Args:
        model: a deterministic model, in evaluation mode.
        sites: paths of the modules that attend.
    """

    def __init__(self, model: nn.Module, sites: Collection[str]) -> None:
        self._modules = dict(model.named_modules())
        self._recorded_paths = _modules_to_record(self._modules, sites)
        self._sites = sites
        self._calls: dict[tuple[str, int], _RecordedCall] = {}
        self._attention_start: dict[str, int] = {}  # number of recorded calls that had ended before a site attended
        self._ended = 0

    @property
    def stacks(self) -> list[nn.Module]:
        """All modules of a model that contain several attention modules, such as a decoder, except the model itself."""
        return [
            module
            for path, module in self._modules.items()
            if path and sum(is_inside(site, path) for site in self._sites) > 1
        ]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Return a context in which the outputs of modules are recorded while the model runs once. The new recording
        replaces an earlier one. At the end, an output is kept for reuse in later runs only if its module call had ended
        before the last attention module began. Outputs that were later modified in place are discarded, too.
        """
        self._calls, self._attention_start, self._ended = {}, {}, 0
        counts: Counter[str] = Counter()

        def recording_forward(path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
            def record(*args: Any, **kwargs: Any) -> Any:
                index, counts[path] = counts[path], counts[path] + 1
                output = forward(*args, **kwargs)
                self._ended += 1
                self._calls[path, index] = _RecordedCall(output, self._ended, _versions(output))
                return output

            return record

        def start_hook(path: str) -> Callable[..., None]:
            def note_start(*_: Any) -> None:
                self._attention_start.setdefault(path, self._ended)

            return note_start

        hooks = [self._modules[path].register_forward_pre_hook(start_hook(path)) for path in self._sites]
        try:
            with ExitStack() as stack:
                for path in self._recorded_paths:
                    module = self._modules[path]
                    stack.enter_context(swap_forward(module, recording_forward(path, module.forward)))
                yield
        finally:
            for hook in hooks:
                hook.remove()
        last = max(self._attention_start.values(), default=0)
        self._calls = {key: call for key, call in self._calls.items() if call.end <= last and call.is_unmodified}

    @contextmanager
    def reused_until(self, gated: Collection[str]) -> Iterator[None]:
        """Return a context in which the model runs once, and modules return their recorded outputs instead of computing
        them. This applies only to module calls that, in the recorded run of the model, ended before attention began in
        any of the modules at the paths `gated`.
        """
        first = min(
            (self._attention_start[path] for path in gated if path in self._attention_start), default=self._ended
        )
        counts: Counter[str] = Counter()

        def reusing_forward(path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
            def reuse(*args: Any, **kwargs: Any) -> Any:
                index, counts[path] = counts[path], counts[path] + 1
                call = self._calls.get((path, index))
                return forward(*args, **kwargs) if call is None or call.end > first else call.output

            return reuse

        with ExitStack() as stack:
            for path in {path for (path, _), call in self._calls.items() if call.end <= first}:
                module = self._modules[path]
                stack.enter_context(swap_forward(module, reusing_forward(path, module.forward)))
            yield

    @property
    def sites_by_start(self) -> list[str]:
        """Paths of the attention modules that ran in the recorded run of the model, in the reverse order in which their
        attention began. If no recorded module call ended between the starts of several modules, only one of these
        modules is listed.
        """
        site_of_start = {start: path for path, start in self._attention_start.items()}
        return [site_of_start[start] for start in sorted(site_of_start, reverse=True)]


def _modules_to_record(modules: dict[str, nn.Module], sites: Collection[str]) -> list[str]:
    """Return the paths of the modules whose outputs are recorded for later runs of the model, such as its layers and
    its embeddings. Of the modules below the model itself, these are the outermost ones with at most one of the
    attention modules at the paths `sites`. `ModuleList` and `ModuleDict`, which are never called, are left out.
    """
    site_counts = {path: sum(path == site or is_inside(site, path) for site in sites) for path in modules}
    paths: list[str] = []
    for path, module in modules.items():
        if site_counts[path] > 1 or not path or any(is_inside(path, other) for other in paths):
            continue
        if not isinstance(module, nn.ModuleList | nn.ModuleDict):  # which are never called
            paths.append(path)
    return paths


def _versions(output: Any) -> list[int] | None:
    """Return torch's version counter (the number of in-place writes so far) of each tensor in a module's output. Return
    None if some tensor has no counter because it was made under `torch.inference_mode`.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    return None if any(tensor.is_inference() for tensor in tensors) else [tensor._version for tensor in tensors]
