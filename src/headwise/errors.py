"""The two mistakes a user can make, each told in one sentence."""


class HeadwiseError(Exception):
    """Base of everything headwise raises on purpose; the command line turns it into exit status 2."""


class InputError(HeadwiseError, ValueError):
    """An argument that cannot be used: says which, what was expected, what came, and what to do."""

    def __init__(self, argument: str, *, expected: str, got: object, remedy: str | None = None):
        self.argument = argument
        sentence = f"{argument}: expected {expected}, got {got}"
        super().__init__(f"{sentence}; {remedy}" if remedy else sentence)


class MissingExtra(HeadwiseError, ImportError):
    """An optional dependency that is not installed: names the `pip install` that mends it."""

    def __init__(self, package: str, *, extra: str, purpose: str):
        super().__init__(
            f'{purpose} needs the package {package}, which is not installed; pip install "headwise[{extra}]"'
        )
