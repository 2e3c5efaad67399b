"""Results that are saved as JSON, in which `{"float": "nan"}` stands for NaN, and likewise for infinite numbers."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

from headwise.errors import InputError
from headwise.runs.files import write_atomically

Result = TypeVar("Result", bound="JsonResult")

FORMAT = 1
"""Version of the JSON format."""


@dataclass(frozen=True)
class JsonResult:
    """Base class of results that can be saved as JSON. Subclasses are frozen dataclasses. Their fields are numbers,
    texts, dataclasses or named tuples, or mappings or tuples of these.

    Attributes:
        ARGUMENT: name of the argument in errors.
        NOUN: what is saved, in errors, such as "a plan".
    """

    ARGUMENT: ClassVar[str]
    NOUN: ClassVar[str]

    def require_consistent(self) -> None:
        """Raise `InputError` if the fields of the result contradict each other; by default nothing is checked."""

    def to_json(self) -> str:
        """Return the result as a JSON text."""
        return json.dumps(_with_finite_numbers({"format": FORMAT, **asdict(self)}), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls: type[Result], text: str) -> Result:
        """Return the result that a JSON text written by `to_json` describes.

        Raises:
            InputError: the text is no such result: `to_json` would write another one.
        """
        if not isinstance(text, str):
            raise InputError(cls.ARGUMENT, expected=f"JSON of {cls.NOUN}", got=type(text).__name__)
        try:
            content = json.loads(text, object_pairs_hook=_object)
            if content.pop("format") != FORMAT:
                raise ValueError("another format")
            result: Result = _structured(cls, content)
            if json.loads(result.to_json()) != json.loads(text):
                raise ValueError("values that are missing, unknown, or not of their type")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise InputError(cls.ARGUMENT, expected=f"JSON of {cls.NOUN}", got=repr(text[:60])) from error
        result.require_consistent()
        return result

    def save(self, path: str | Path) -> None:
        """Write the result to a JSON file."""
        write_atomically(Path(path), self.to_json().encode())

    @classmethod
    def load(cls: type[Result], path: str | Path) -> Result:
        """Return the result that `save` wrote to a JSON file.

        Raises:
            InputError: the file cannot be read, or contains no such result.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # a ValueError stands for a null character, or bytes that are no UTF-8
            raise InputError(cls.ARGUMENT, expected=f"a file with {cls.NOUN}", got=repr(str(path))) from error
        return cls.from_json(text)


def require_each(argument: str, values: Iterable[tuple[Any, bool, str]]) -> None:
    """Raise `InputError` for the first wrong value. `values` has a triple for each value: the value, True if it is
    right, and a text that describes the expected value.
    """
    for value, is_right, expected in values:
        if not is_right:
            raise InputError(argument, expected=expected, got=repr(value))


def is_number(value: Any, least: float = -math.inf) -> bool:
    """Return True if `value` is an int or float that is at least `least` or NaN. Return False for a bool."""
    return type(value) in (int, float) and not value < least


def _structured(kind: Any, value: Any) -> Any:
    """Convert a parsed JSON value to the type annotation `kind`: JSON objects to dataclasses, lists to tuples and named
    tuples. Numbers and texts are not checked. Any exception means that the value does not fit the type.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if NoneType in arguments:
        return None if value is None else _structured(next(each for each in arguments if each is not NoneType), value)
    if origin is tuple:
        kinds = [arguments[0]] * len(value) if Ellipsis in arguments else arguments
        return tuple(_structured(*each) for each in zip(kinds, value, strict=True))
    if is_dataclass(kind):
        kinds_of = get_type_hints(kind)
        fields: Any = {name: _structured(kinds_of[name], each) for name, each in value.items()}
        return kind(**fields)  # type: ignore[operator]
    if isinstance(kind, type) and issubclass(kind, tuple):
        return kind(*value)
    return dict(value) if origin is Mapping else value


def _with_finite_numbers(value: Any) -> Any:
    """Return a value to be saved as JSON, in which each NaN and infinity is replaced by an object such as {"float":
    "nan"}, because JSON has no such numbers.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, Mapping):
        return {name: _with_finite_numbers(each) for name, each in value.items()}
    return [_with_finite_numbers(each) for each in value] if isinstance(value, list | tuple) else value


def _object(pairs: list[tuple[str, Any]]) -> Any:
    """Return a JSON object as a dictionary from its pairs of name and value. An object such as {"float": "nan"} becomes
    the number that it stands for. Raise `ValueError` if a name occurs twice.
    """
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a name that occurs twice")
    is_float = list(content) == ["float"] and isinstance(content["float"], str)
    return float(content["float"]) if is_float else content
