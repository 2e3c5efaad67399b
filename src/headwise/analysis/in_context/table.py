"""Table of in-context learning scores: how the score of a model changes without each of its heads."""

from headwise.runs.head_table import HeadTable
from headwise.runs.rows import HeadRow, MeanEstimate
from headwise.runs.significance import zero_tests

CHANGE = "change_"
"""Start of the name of a change of the score; the rest is the name of the replacement."""


class InContextScores(HeadTable[HeadRow]):
    """Table of the effect of each head on the in-context learning score of a model, one row per head.

    With S the score of a sequence, the loss late in the context minus the loss early in it, the columns are

        change_zero       mean of S(head output replaced by zeros) - S(unchanged)
        change_mean       mean of S(head output replaced by its mean) - S(unchanged)
        induction_random  attention to the tokens after earlier copies, on random tokens that repeat

    over sequences, in nats, paired by sequence. A positive change means that the model makes less use of its context
    without the head. Each change has a p-value (`_p`) and an adjusted one (`_q`).
    """

    NAME = "in_context"
    ROW_TYPE = HeadRow

    SIGNED = ("change_zero", "change_mean")

    @property
    def score(self) -> MeanEstimate:
        """Score of the unchanged model: the loss late in the context minus the loss early in it."""
        return MeanEstimate(**self.metadata["score"])

    @property
    def early_loss(self) -> MeanEstimate:
        """Loss of the unchanged model early in the context."""
        return MeanEstimate(**self.metadata["early_loss"])

    @property
    def late_loss(self) -> MeanEstimate:
        """Loss of the unchanged model late in the context."""
        return MeanEstimate(**self.metadata["late_loss"])

    def tests(self) -> dict[str, list[float]]:
        """Return, for each change, the p-value of Student's t-test against zero and the p-value adjusted for the number
        of heads (Benjamini and Hochberg 1995), with the suffixes `_p` and `_q`.

        Raises:
            MissingExtra: scipy is not installed.
        """
        changes = [name for name in self.statistics if name.startswith(CHANGE)]
        columns: dict[str, list[float]] = {}
        for name in changes:
            columns |= zero_tests(name, [row.statistics[name] for row in self.rows])
        return columns
