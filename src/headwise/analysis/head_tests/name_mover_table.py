"""Table of the name-mover test."""

from collections.abc import Sequence

from headwise.plots.kinds import require_name
from headwise.runs.head_table import HeadTable
from headwise.runs.rows import HeadRow
from headwise.runs.significance import (
    FALSE_DISCOVERY_RATE,
    false_discovery_rates,
    one_sided_p_values,
    zero_tests,
)


class NameMovers(HeadTable[HeadRow]):
    """Table of the name-mover test (Wang et al. 2022, sections 3.1 and 3.3), one row per head. All columns are means
    over prompts, with standard errors clustered by template; `n` counts templates.

        attention_indirect  weight from the last token to the name of the indirect object, which follows the prompt
        attention_subject   sum of the weights from the last token to both occurrences of the subject's name
        preference          attention_indirect - attention_subject
        logit               what the head adds directly to the logit of the indirect object minus that of the subject,
                            by the definition of `hw.logit_attribution`
        copying             share of names whose logit is among the 5 highest that the head's OV matrix produces for
                            the residual stream at the name, before the second attention module
        negative_copying    the same among the 5 lowest

    The copying columns are NaN for heads of the first attention module, which do not read that state, and for models
    without a linear residual stream. `metadata["measured"]["no_copying"]` is the reason.

    `tests()` has p-values (two-sided t-tests against zero over templates) of `preference` and `logit`. A name mover
    must have both effects: `name_mover_p` is the larger of the one-sided p-values of preference > 0 and logit > 0 (the
    intersection-union test, Berger 1982). `negative_p` is that of preference > 0 and logit < 0. The columns with `_q`
    are adjusted for the number of heads (Benjamini and Hochberg 1995).
    """

    NAME = "name_movers"
    ROW_TYPE = HeadRow
    SIGNED = ("preference", "logit")
    SAMPLES = "prompt"
    PLOTTED = "logit"

    def tests(self) -> dict[str, list[float]]:
        """Return the columns of tests, each with one number per head.

        Raises:
            MissingExtra: scipy is not installed.
        """
        columns = [[row.statistics[name] for row in self.rows] for name in ("preference", "logit")]
        tests = zero_tests("preference", columns[0]) | zero_tests("logit", columns[1])
        prefers, raises, lowers = (
            one_sided_p_values(measured, sign)
            for measured, sign in zip((*columns, columns[1]), (1, 1, -1), strict=True)
        )
        for name, p in (("name_mover", _largest(prefers, raises)), ("negative", _largest(prefers, lowers))):
            tests |= {f"{name}_p": p, f"{name}_q": false_discovery_rates(p)}
        return tests

    def found(self, kind: str = "name_mover", rate: float = FALSE_DISCOVERY_RATE) -> list[HeadRow]:
        """Return the heads that pass the test at a false discovery rate, those with the largest effect on the logits
        first.

        Args:
            kind: "name_mover" or "negative".
            rate: largest adjusted p-value.

        Raises:
            InputError: the kind is another one.
            MissingExtra: scipy is not installed.
        """
        require_name("kind", kind, dict.fromkeys(("name_mover", "negative")))
        q = self.tests()[f"{kind}_q"]
        rows = [row for row, adjusted in zip(self.rows, q, strict=True) if adjusted <= rate]
        return sorted(rows, key=lambda row: -abs(row.statistics["logit"].value))


def _largest(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Return the larger of two p-values of each head; NaN if one is NaN."""
    return [max(pair) if pair[0] == pair[0] else pair[0] for pair in zip(first, second, strict=True)]
