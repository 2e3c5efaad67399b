"""Entry point of `python -m headwise` and of the command `headwise`."""

import sys


def main() -> None:
    """Run the command line `headwise`, and exit the process with its status: 0 on success, 2 after a mistake of the
    user, 130 after Ctrl-C.
    """
    try:
        sys.exit(_run())
    except KeyboardInterrupt:
        sys.exit(130)


def _run() -> int:
    """Run the command line and return its exit status; if typer or rich is missing, print one sentence that says so and
    return 2.
    """
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
