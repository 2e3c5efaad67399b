"""`python -m headwise` and the `headwise` command."""

import sys


def main() -> None:
    """Run the command line; what cannot be read of it is told in one sentence, with status 2."""
    try:
        sys.exit(_run())
    except KeyboardInterrupt:
        sys.exit(130)


def _run() -> int:
    from headwise.errors import MissingExtra

    try:
        from headwise.cli.app import run
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in ("typer", "rich"):
            raise
        print(f"headwise: {MissingExtra(package, extra='cli', purpose='the command line')}", file=sys.stderr)
        return 2
    return run()


if __name__ == "__main__":
    main()
