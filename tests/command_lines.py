"""Command lines of tests."""


def replacing(options, more):
    """Return the list of options with their values, with those in `more` added or in place of earlier ones."""
    options, more = list(map(str, options)), list(map(str, more))
    for name in (part for part in more if part.startswith("--")):
        if name in options:
            index = options.index(name)
            has_value = index + 1 < len(options) and not options[index + 1].startswith("--")
            del options[index : index + 1 + has_value]
    return [*options, *more]
