"""Sentences of docs/reports/claims.md that do not depend on the results."""

INTRODUCTION = """\
Seven claims of teaching notes on multi-head attention (Vaswani et al. 2017), measured on small models. This report is
written by `research/claims/report.py` from the results of `make claims`. Every number and every verdict is computed
from these results, and the rules of the verdicts are stated. The models are trained for minutes. The conclusions hold
for these models on this data."""

METHOD = [
    """\
**Data.** The text is the language reference that comes with Python (`pydoc_data.topics`), read byte by byte. The other
data are generated: pairs of keys and values to look up, and random symbols of which several are asked for at once.""",
    "",
    """\
**Training.** In a setting, the models of all numbers of heads have the same number of parameters. They see the same
batches in the same order. For each, the best of a few learning rates is used.""",
    "",
    """\
**Statistics.** ± is a standard error over seeds, unless stated otherwise. Intervals have a confidence of 95 % by
Student's t. A difference between mean losses is significant by Tukey's range test at 95 %, with seeds as blocks. A
claim about many settings, layers or cases holds if it is true in more than two thirds of them. It does not hold if it
is true in fewer than one third.""",
]

TITLES = {
    "different": "Different heads see different things",
    "capacity": "More heads, more capacity",
    "parallel": "Heads run in parallel at no cost",
    "regularises": "Many heads regularise",
    "robust": "Many heads make a model robust",
    "more": "More is not always better",
    "eight": "8 is a good number",
}
"""Titles of the claims, in the order of the document."""

BACKGROUND = {
    "different": """\
The distance between two heads of a layer is the Jensen-Shannon distance of their attention weights, averaged over rows
and over all pairs of heads (`hw.redundancy`). It lies between 0 and sqrt(ln 2) = 0.83. Untrained heads have nearly
uniform attention, and heads with uniform attention cannot differ. So trained models are also compared with equally
sharp untrained ones: the queries of the untrained model are scaled, layer by layer, until the mean entropy of the
heads is that of the trained layer.""",
    "capacity": """\
Three measurements: the loss against the number of heads at equal parameters, a task in which several relations have to
be followed at once, and the rank of the scores as heads get narrower.""",
    "parallel": """\
One `hw.MultiHeadAttention` is compared with a list of heads that run one after the other, each with its own linear
maps. Both have the same weights (`hw.to_heads`) and the same output. Training is forward and backward without the
optimiser. All cases are timed in turns, in an order that changes with each round.""",
    "regularises": """\
The model sees little data many times, so that it overfits. The gap is the held-out loss minus the training loss, both
of the trained model in evaluation mode. The gap can also shrink because a model fits the training data less well, so
the held-out loss is judged too.""",
    "robust": """\
Trained models lose heads without further training: the output of these heads is multiplied by 0 (`hw.ablate`). Models
with many heads have more to lose, so shares of all heads are compared, not numbers. A model whose attention has little
effect loses little, so the effect of removing half of the heads is divided by the effect of removing all.""",
    "more": """\
The width of the model is fixed, so that more heads are narrower: head_dim is the width divided by the number of
heads.""",
    "eight": """\
For every setting of data, width, depth and task: is the loss of 8 heads as good as the best? The settings were chosen,
not drawn at random, so the share of settings estimates nothing beyond them.""",
}

RULES = {
    "different": """\
trained heads of a layer are farther apart if the interval of the difference to the untrained model is above 0. The
difference is taken seed by seed, and sequence by sequence in the real models. The claim is judged by the share of such
layers. The comparison with equally sharp heads is shown and does not decide.""",
    "capacity": """\
in a setting the claim is true if one head is significantly worse than the best number. It is judged by the share of
settings.""",
    "parallel": """\
a case is a device, batch and length, a pass (forward or training), and a number of heads above 1. More heads are free
if three quarters of the rounds take at most 1.1 times the time of one head. They are not free if three quarters take
more. The claim does not hold if more than one third of the cases are not free. It holds if more than two thirds are
free.""",
    "regularises": """\
a line is fitted, for each seed, to the gap against doublings of the heads. The claim does not hold in three cases: the
interval of the slope is within 1 % of the best held-out loss around 0, the gap grows, or the gap shrinks while the
held-out loss rises. Otherwise it holds if the interval is below 0, and is undecided if not.""",
    "robust": """\
a line is fitted, for each seed, to the effect of removing half of the heads, as a share of the effect of removing all,
against doublings of the heads. The claim holds if the interval of the slope is below 0 both for random halves and for
the least important half. It does not hold if the interval is above 0 for random halves. Otherwise it is undecided.""",
    "more": """\
the claim is that in some settings the largest number of heads is significantly worse than the best. It holds if there
are at least two such settings, since one may be chance. It does not hold if there is none.""",
    "eight": """\
8 is good in a setting if its mean loss is at most the best mean plus one standard error of that best mean. The claim
is judged by the share of settings. It is undecided if leaving out one seed would change the outcome.""",
}

ONE_HEAD = [
    """\
The data are sequences of random symbols. At every position the model names the symbols 1, 2, 3 and 4 positions before,
each in its own slot. The model is one attention layer without a residual path, followed by one linear map for each
slot. Rotary positions tell the heads where to attend; values carry the symbols.""",
    "",
    """\
H heads serve at most H slots, however wide they are, under two conditions: their weights do not depend on the symbols,
and the read-out is linear. Let a_h(k) be the weight of head h on the token k positions before. The logit of slot j for
symbol s is the sum over h and k of a_h(k) B_hj[s, x(k)], plus a constant c_j[s].""",
    "",
    """\
A slot that is always right is also right under every renaming of the symbols. The conditions are linear in B and c, so
they also hold for their means over all renamings: p_hj on the diagonal of B_hj, q_hj off the diagonal, and a c_j that
is the same for all symbols. What distinguishes the symbols is then W[j, k] = sum over h of (p_hj - q_hj) a_h(k),
summed over the positions k at which a symbol occurs.""",
    "",
    """\
Put the right symbol at j and wherever W[j, k] < 0, and another symbol everywhere else. The slot is right only if
W[j, j] > sum over all other k of |W[j, k]|. So W, restricted to the slots that are always right, is strictly diagonally
dominant and has full rank (Levy-Desplanques theorem). But W is the product of the factors and the weights of H heads,
so its rank is at most H. One head serves one slot, and four slots need four heads.""",
    "",
    """\
The kind "weights by place alone" is exactly this case: queries and keys are one learned vector, rotated by position.
In "ordinary attention" they are computed from the tokens. Rotary scores can then depend on position and token
together, so the argument does not apply. An MLP after the attention can distinguish
mixtures that no linear map can.""",
]

EXAMPLE = ((0.18, 0.52, 0.30, 0.0), (0.0, 0.30, 0.52, 0.18))
"""Weights of two heads on the four positions."""

MIXES = ((0.32, -0.52), (0.52, -0.30), (-0.30, 0.52), (-0.52, 0.32))
"""Factors with which each slot reads the first and the second head."""
