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
    return 2. The command `headwise kernels build` needs neither.
    """
    from headwise.errors import HeadwiseError, MissingExtra

    try:
        from headwise.cli.app import run

        return run()
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in ("typer", "rich"):
            raise
        if sys.argv[1:] == ["kernels", "build"]:
            from headwise.attention.backends.native import installed

            try:
                installed.compile_kernels()
                print(installed.state())
                return 0
            except HeadwiseError as mistake:
                print(f"headwise: {mistake}", file=sys.stderr)
                return 2
        print(f"headwise: {MissingExtra(package, extra='cli', purpose='the command line')}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    main()
