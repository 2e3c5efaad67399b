"""Layer numbers of modules that attend, and relations of module paths."""

from collections.abc import Collection, Hashable, Mapping

from torch import nn

from headwise.errors import InputError
from headwise.intercept.interceptor import SiteKey


def layer_numbers(modules: Mapping[str, nn.Module], own_numbers: Mapping[SiteKey, int | None]) -> list[int]:
    """Return one layer number for each site (attention module, self or cross). If the modules store distinct layer
    numbers, and none is missing, return these. Otherwise number all attention modules of the model from 0, including
    those that did not run. If that gives no distinct number for each site, number the sites from 0.

    Args:
        modules: all modules of the model by path.
        own_numbers: number that the model stores for each site, in the order of the model's modules; None for none.
    """
    known = [number for number in own_numbers.values() if number is not None]
    if len(set(known)) == len(own_numbers):
        return known
    counted = {path: index for index, path in enumerate(innermost_attention_modules(modules, modules))}
    numbers = [counted[site.path] for site in own_numbers if site.path in counted]
    return numbers if len(set(numbers)) == len(own_numbers) else list(range(len(own_numbers)))


def layer_number_of(module: nn.Module) -> int | None:
    """Return the layer number that an attention module stores as its attribute `layer_idx`. Return None if the
    attribute is missing or not a whole number.
    """
    number = getattr(module, "layer_idx", None)
    return number if isinstance(number, int) and not isinstance(number, bool) else None


def innermost_attention_modules(modules: Mapping[str, nn.Module], paths: Collection[str]) -> list[str]:
    """Return those of `paths` that lead to innermost attention modules. They are returned in the order of `modules`, a
    dict that contains all modules of a model by path. An attention module is one whose class name contains "attention"
    and does not end in "output". It is innermost if no other attention module at one of `paths` is inside of it.

    Args:
        modules: all modules of a model by path.
        paths: the paths to choose from.
    """
    class_names = {path: type(module).__name__.lower() for path, module in modules.items() if path in paths}
    # In BERT and others, what is called the output of attention only projects it.
    named = [path for path, name in class_names.items() if "attention" in name and not name.endswith("output")]
    return [path for path in named if not any(is_inside(other, path) for other in named)]


def module_path_of_layer(model: nn.Module, layer: int | str) -> str:
    """Return the path of the attention module of the layer with number `layer`, or the path itself if `layer` is a
    module path. If several modules fit, return the most probable one.

    Raises:
        InputError: the model has no such layer or module.
    """
    return module_paths_of_layer(model, layer)[0]


def module_paths_of_layer(model: nn.Module, layer: int | str) -> list[str]:
    """Return the paths of the modules that may be the attention module of a layer, the most probable one first. There
    are several if layer numbers depend on which modules run. An example is a model of images and text that receives
    text only.

    If `layer` is a string, it is already a module path, possibly with the number of one of the module's layers, such as
    `blocks[1]`. It is returned if the model has a module there. If `layer` is a number, it is one of the layer numbers
    stored in the attention modules. If some of these numbers are missing or equal, `layer` counts the attention modules
    from 0, or is the number that another module stores.

    Args:
        model: the model.
        layer: number of the layer, as `watch` shows it; or the path itself.

    Raises:
        InputError: the model has no such layer or module.
    """
    modules = dict(model.named_modules())
    if isinstance(layer, str):
        if SiteKey.path_of(layer) not in modules:
            raise InputError("layer", expected="the path of a module, as watch(model) shows it", got=repr(layer))
        return [layer]
    named = innermost_attention_modules(modules, modules)
    own_numbers = {SiteKey(path, False): layer_number_of(modules[path]) for path in named}
    path_of = dict(zip(layer_numbers(modules, own_numbers), named, strict=True))
    paths = [path_of[layer]] if isinstance(layer, Hashable) and layer in path_of else []
    if not named or list(own_numbers.values()) != list(path_of):
        paths += [path for path, module in modules.items() if layer_number_of(module) == layer and path not in paths]
    if not paths:
        none = "a model with modules called attention"
        expected = f"one of layers {min(path_of)} to {max(path_of)}" if path_of else none
        remedy = "name the module by its path, as watch(model) shows it"
        raise InputError("layer", expected=expected, got=layer, remedy=remedy)
    return paths


def is_inside(path: str, other: str) -> bool:
    """Return True if the module at `path` is a descendant of the module at `other`."""
    return path != other and (not other or path.startswith(f"{other}."))


def is_related(path: str, other: str) -> bool:
    """Return True if two paths name the same module, or one module is a descendant of the other."""
    return path == other or is_inside(path, other) or is_inside(other, path)
