"""Sentences of docs/reports/claims.md that do not depend on the results."""

INTRODUCTION = """\
What teaching notes say of multi-head attention (Vaswani et al. 2017), measured. Written by `research/claims/report.py`
from what `make claims` left in `research/claims/results/`; every number and every verdict is computed from there, the
verdicts by the rules that are stated. Models are small and trained for minutes: what is said is said of them, on
this data. The text is the reference of Python's language, which comes with Python (`pydoc_data.topics`), read byte
by byte; the other data are generated: pairs of keys and values to look up, and random symbols of which several are
asked for at once. All numbers of heads of a setting have the same parameters, see the same batches in the same
order, and get the best of a few learning rates, searched for each. ± is a standard error, over seeds unless
something else is said; an interval is one of 95 % by Student's t; what can be told of mean losses is what Tukey's
range test with seeds as blocks allows at 95 %. Where a claim is about many settings, layers or cases it holds if it
does in more than two thirds of them, and does not hold if it does in fewer than one third."""

TITLES = {
    "different": "Different heads see different things",
    "capacity": "More heads, more capacity",
    "parallel": "Heads run in parallel at no cost",
    "regularises": "Many heads regularise",
    "robust": "Many heads make a model robust",
    "more": "More is not always better",
    "eight": "8 is a good number",
}
"""In the order of the document."""

BEGINNING = {
    "different": """\
How far apart the weights of two heads of a layer are: the Jensen-Shannon distance, the mean over rows and over
every two heads (`hw.redundancy`), from 0 to sqrt(ln 2) = 0.83. Untrained heads attend nearly evenly, and heads that
attend evenly cannot differ; so beside the untrained model stands another: the same one with its queries scaled
layer by layer until the mean entropy of the heads is that of the trained layer.""",
    "capacity": """\
The loss against the number of heads where parameters are equal; a task in which several relations have to be
followed at once; and what a head loses as it gets narrower.""",
    "parallel": """\
One `hw.MultiHeadAttention` against a list of heads, each with maps of its own, one after the other: the same
weights (`hw.to_heads`) and the same output. Training is forward and backward, without the optimiser. All cases are
timed in turns, in an order that changes with each round.""",
    "regularises": """\
Little data, seen again and again, so that a model fits it better than it does the rest: the gap is the held-out
loss less the training loss, both of the trained model in evaluation mode. The gap alone can also close because a
model fits less; so the held-out loss is judged too.""",
    "robust": """\
Trained models lose heads without being trained again: their output is multiplied by 0 (`hw.ablate`). As models with
many heads have more to lose, shares of all heads are compared, not numbers; and as a model whose attention is worth
little loses little, the cost of half of the heads is held against that of all of them.""",
    "more": """\
The width of the model is fixed, so that more heads are narrower ones: head_dim is the width over the heads.""",
    "eight": """\
All settings of data, width, depth and task that were measured, and in how many of them 8 heads are as good as the
best. The settings are chosen, not drawn: a share of them is no estimate of anything beyond.""",
}

RULES = {
    "different": """\
in a layer the trained heads are farther apart if the interval of the difference to the untrained model, taken seed
by seed (sequence by sequence in the real models), is above 0; the claim is judged by the share of layers in which
that is so. The comparison with heads that are as sharp is told beside it and decides nothing.""",
    "capacity": """\
in a setting the claim holds if one head is worse than the best number by more than can be told; it is judged by the
share of settings.""",
    "parallel": """\
a case is a regime, forward or training, and a number of heads above 1. It is free if three quarters of the rounds
take at most 1.1 times the time of one head, and not free if three quarters take more. The claim does not hold if
more than one third of the cases are not free; it holds if more than two thirds are free.""",
    "regularises": """\
of the line through gap against doublings of the heads, fitted seed by seed: the claim does not hold if the interval
of its slope is nearer to 0 than 1 % of the best held-out loss, if the gap grows, or if it shrinks while the held-out
loss rises; it holds if the interval is below 0 otherwise; else it is undecided.""",
    "robust": """\
of the line through what half of the heads cost, as a part of what all of them do, against doublings of the heads,
fitted seed by seed: the claim holds if the interval of its slope is below 0 both for heads drawn at random and for
the least important; it does not hold if it is above 0 at random; else it is undecided.""",
    "more": """\
the claim is that there are settings in which the largest number of heads is worse than the best by more than can be
told: it holds if there are two at least, since one may be chance, and does not hold if there is none.""",
    "eight": """\
8 is good in a setting if its mean loss is at most the best mean and one standard error of that best mean. The claim
is judged by the share of settings; it is undecided if leaving out one seed would change the outcome.""",
}

ONE_HEAD = [
    """\
Sequences of random symbols; at every place the symbols 1, 2, 3 and 4 places before are to be named, each in a slot
with a linear map of its own, after one layer of attention without a residual path. Heads find places by rotary
positions; values carry the symbols.""",
    "",
    """\
H heads serve at most H slots, however wide they are, provided that their weights do not depend on the symbols and
that the read-out is linear. Let a_h(k) be the weight of head h on the token k places before. The logit of slot j for
symbol s is the sum over h and k of a_h(k) B_hj[s, x(k)], and a constant c_j[s]. A slot that is always right is so
under every renaming of the symbols; the conditions are linear in B and c, so they also hold for their means over
all renamings: p_hj on the diagonal of B_hj, q_hj off it, and a c_j that is the same for all symbols. What then tells
symbols apart is the sum of W[j, k] = sum over h of (p_hj - q_hj) a_h(k) over the places k where a symbol stands. Put
the symbol that is asked for at j and wherever W[j, k] < 0, and another one everywhere else: to be right is to have
W[j, j] > sum over all other k of |W[j, k]|. So among the slots that are always right W is strictly diagonally
dominant, and therefore of full rank (Levy-Desplanques theorem); but it is a product of the factors and the weights
of H heads, of rank H at most. One head serves one slot, and four slots need four heads.""",
    "",
    """\
"Weights by place alone" is exactly this case: queries and keys are made of one learned vector that positions turn.
In "ordinary attention" they are made of the tokens, and rotary scores may mix place and token, so that the argument
does not bind; and an MLP after the attention may tell unequal mixtures apart, which no linear map can.""",
]

EXAMPLE = ((0.18, 0.52, 0.30, 0.0), (0.0, 0.30, 0.52, 0.18))
"""Weights of two heads on the four places."""

MIXES = ((0.32, -0.52), (0.52, -0.30), (-0.30, 0.52), (-0.52, 0.32))
"""How each slot reads the two: its factors for the first and the second head."""
