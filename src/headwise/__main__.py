"""`python -m headwise` and the `headwise` command."""

import sys

from headwise.errors import MissingExtra


def main() -> None:
    """Run the command line, or say which extra it needs."""
    try:
        from headwise.cli import app
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in ("typer", "rich"):
            raise
        print(f"headwise: {MissingExtra(package, extra='cli', purpose='the command line')}", file=sys.stderr)
        sys.exit(2)
    app(prog_name="headwise")


if __name__ == "__main__":
    main()
