"""Results that are saved as JSON."""

import json
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from headwise.errors import InputError
from headwise.runs.files import write_atomically

Result = TypeVar("Result", bound="JsonResult")

FORMAT = 1
"""Version of the JSON format."""


class JsonResult:
    """Base of results that are saved as JSON. A subclass states its content.

    Attributes:
        ARGUMENT: name of the argument in errors.
        NOUN: what is saved, in errors, such as "a plan".
    """

    ARGUMENT: ClassVar[str]
    NOUN: ClassVar[str]

    def content(self) -> dict[str, Any]:
        """Return the content as values that JSON can express."""
        raise NotImplementedError

    @classmethod
    def of_content(cls: type[Result], content: dict[str, Any]) -> Result:
        """Return the result that has this content. Each error is taken as a sign of another content."""
        raise NotImplementedError

    def require_consistent(self) -> None:
        """Raise `InputError` unless the parts of the result fit each other."""

    def to_json(self) -> str:
        """Return the result as JSON."""
        return json.dumps({"format": FORMAT, **self.content()}, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls: type[Result], text: str) -> Result:
        """Return the result that `to_json` wrote.

        Raises:
            InputError: the text is no such result.
        """
        try:
            content = json.loads(text)
            if content.pop("format") != FORMAT:
                raise ValueError("another format")
            result = cls.of_content(content)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise InputError(cls.ARGUMENT, expected=f"JSON of {cls.NOUN}", got=repr(text[:60])) from error
        result.require_consistent()
        return result

    def save(self, path: str | Path) -> None:
        """Write the result to a JSON file."""
        write_atomically(Path(path), self.to_json().encode())

    @classmethod
    def load(cls: type[Result], path: str | Path) -> Result:
        """Return the result in a JSON file.

        Raises:
            InputError: the file cannot be read, or contains no such result.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # a ValueError stands for a null character, or bytes that are no UTF-8
            raise InputError(cls.ARGUMENT, expected=f"a file with {cls.NOUN}", got=repr(str(path))) from error
        return cls.from_json(text)
