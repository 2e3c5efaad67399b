"""Which number a layer has: that which the model gives it, and otherwise its place."""

from collections.abc import Collection, Mapping, Sequence

from torch import nn

from headwise.errors import InputError


def layer_numbers(own: Sequence[int | None]) -> list[int]:
    """Of places where attention is computed: their own numbers where no two are alike, otherwise their order."""
    known = [number for number in own if number is not None]
    return known if len(set(known)) == len(own) else list(range(len(own)))


def layer_number_of(module: nn.Module) -> int | None:
    """What the model calls a module, as `transformers` does."""
    number = getattr(module, "layer_idx", None)
    return number if isinstance(number, int) else None


def innermost_attention_modules(modules: Mapping[str, nn.Module], among: Collection[str]) -> list[str]:
    """The paths of modules whose class is called attention and that hold none which is, in the model's order."""
    kinds = {path: type(module).__name__.lower() for path, module in modules.items() if path in among}
    # What is called the output of attention, in BERT and others, only projects it.
    named = [path for path, kind in kinds.items() if "attention" in kind and not kind.endswith("output")]
    return [path for path in named if not any(is_inside(other, path) for other in named)]


def module_path_of_layer(model: nn.Module, layer: int | str) -> str:
    """The path of the module that attends in a layer, by its number as far as the model's modules tell, or itself.

    Raises:
        InputError: no such layer, or no such module.
    """
    modules = dict(model.named_modules())
    if isinstance(layer, str):
        if layer not in modules:
            raise InputError("layer", expected="the path of a module, as watch(model) tells", got=repr(layer))
        return layer
    paths = innermost_attention_modules(modules, modules)
    known = dict(zip(layer_numbers([layer_number_of(modules[path]) for path in paths]), paths, strict=True))
    if layer not in known:
        there = f"one of layers {min(known)} to {max(known)}" if known else "a model with modules called attention"
        remedy = "name the module by its path, as watch(model) tells"
        raise InputError("layer", expected=there, got=layer, remedy=remedy)
    return known[layer]


def is_inside(path: str, other: str) -> bool:
    """Whether a module is inside of another."""
    return path != other and (not other or path.startswith(f"{other}."))


def is_related(path: str, other: str) -> bool:
    """Whether one module is the other, or inside of it."""
    return path == other or is_inside(path, other) or is_inside(other, path)
