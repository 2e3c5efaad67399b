"""Meaning and unit of each number that results have for a head, in words for display."""

from headwise.page.contents import PageStatistic
from headwise.statistics.registry import unit_of

RANDOM_SUFFIX = "_random"
"""Suffix of a statistic's name where it was measured on random tokens that repeat."""

MEANINGS = {
    "entropy": "Mean entropy of the attention weights of a query.",
    "evenness": "Mean entropy of the weights of a query, divided by the logarithm of its number of visible keys.",
    "confidence": "Mean of the largest attention weight of each query.",
    "confidence_content": "Mean of the largest attention weight of each query on a token that is not special.",
    "distance": "Mean distance between a query and the keys that it attends to.",
    "self": "Mean attention on the query's own token.",
    "previous": "Mean attention on the token before.",
    "next": "Mean attention on the token after.",
    "first": "Mean attention on the first token.",
    "special": "Mean attention on special tokens.",
    "duplicate": "Mean attention on earlier copies of the query's token.",
    "induction": "Mean attention on the tokens after earlier copies of the query's token.",
    "received": "Largest mean attention that one token receives.",
    "max_logit": "Largest attention score of any query and visible key, as it enters the softmax.",
    "max_logit_uncapped": "Largest attention score of any query and visible key, before the softcap and the bias.",
    "output_norm": "Mean norm of the head's output, before the output projection.",
    "written_norm": "Mean norm of the head's output after its slice of the output projection.",
    "loss": "Mean loss of the model without the head.",
    "cost": "Mean loss without the head, minus the mean loss with it.",
    "gradient": "Mean absolute derivative of the loss with respect to the head's gate.",
    "first_order": "Effect of removing the head, if the loss were linear in the head's gate.",
    "square": "Mean squared derivative of the loss with respect to the head's gate.",
    "integrated": "Derivative of the loss with respect to the head's gate, integrated over the value of all gates.",
    "ablation": "Mean loss without the head, minus the mean loss with it.",
    "open": "Probability that the head's learned gate is open.",
    "copying": "Share of positive eigenvalues of the effect of tokens on logits through the head's OV matrix, -1 to 1.",
    "matching": "Share of positive eigenvalues of the scores of tokens by the head's QK matrix, -1 to 1.",
    "ov_norm": "Frobenius norm of the head's OV matrix.",
    "ov_largest": "Largest singular value of the head's OV matrix.",
    "qk_norm": "Frobenius norm of the head's QK matrix.",
    "qk_largest": "Largest singular value of the head's QK matrix.",
    "change_zero": "Change of the in-context learning score if zeros replace the head's output.",
    "change_mean": "Change of the in-context learning score if its mean replaces the head's output.",
    "gate": "Value of the head's learned gate, without noise.",
    "moved": "Mean share of attention that is on other keys by norm than by weight.",
    "norm_preference": "Mean logarithm of the norm of attended vectors, relative to that of all visible keys.",
}
"""Meaning of each number in one sentence, by its name."""


def page_statistic(name: str, source: str) -> PageStatistic:
    """Return the description of the number called `name`, which was measured on `source`."""
    statistic = name.removesuffix(RANDOM_SUFFIX)
    meaning = MEANINGS.get(statistic, "")
    if statistic != name:
        meaning = f"{meaning.removesuffix('.')}, measured on random tokens that repeat."
    if name.endswith("_slope"):
        meaning = "Mean slope of the statistic on the logarithm of the position of the query."
    if name.startswith("distance_"):
        suffix = ", where attention on the first tokens counts at any distance" if name.endswith("_first") else ""
        meaning = f"Smallest distance within which the head puts this percentage of its attention{suffix}."
    of_weights, kind = _derived(statistic)
    if kind and of_weights in MEANINGS and statistic not in MEANINGS:
        statistic, meaning = of_weights, f"{MEANINGS[of_weights].removesuffix('.')}, {kind}."
    return PageStatistic(name, unit_of(statistic), meaning, source)


def _derived(name: str) -> tuple[str, str]:
    """Return the statistic of weights from which a number called `name` is derived, and how; the same name and an empty
    text for other numbers.
    """
    for prefix, kind in (("norm_", "by norm"), ("rolled_", "rolled out over the layers below")):
        if name.startswith(prefix):
            return name.removeprefix(prefix), kind
    if name.endswith("_change"):
        return name.removesuffix("_change"), "as a change from the attention weights"
    return name, ""
