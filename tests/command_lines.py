"""Command lines of tests, and their results."""

RECIPE = """
model = "decoder"
[data]
path = "data.jsonl"
[verify]
path = "held-out.jsonl"
[prune]
keep = 0.5
constraint = "groups"
"""


def replacing(options, more):
    """Return the list of options with their values, with those in `more` added or in place of earlier ones."""
    options, more = list(map(str, options)), list(map(str, more))
    for name in (part for part in more if part.startswith("--")):
        if name in options:
            index = options.index(name)
            has_value = index + 1 < len(options) and not options[index + 1].startswith("--")
            del options[index : index + 1 + has_value]
    return [*options, *more]


def printed_by(result):
    """Return what a command printed that succeeded; `result` is its status, output and errors."""
    status, out, err = result
    assert status == 0, err
    return out


def refusal(result):
    """Return the sentence with which a command refused its arguments, before it printed anything else."""
    status, out, err = result
    assert (status, out, err[:10], err[-1:], err.count("\n")) == (2, "", "headwise: ", "\n", 1), err
    return err[10:-1]


def files_in(*folders):
    """Return the contents of all files in folders."""
    return {path: path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()}
