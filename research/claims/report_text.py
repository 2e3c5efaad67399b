"""Sentences of docs/reports/claims.md that do not depend on the results."""

INTRODUCTION = """\
This report tests seven claims of teaching notes on multi-head attention (Vaswani et al. 2017) on small models.
`research/claims/report.py` writes it from the results of `make claims`. Every number and every verdict is computed
from these results, and every section states the rule of its verdict. The models are trained for minutes. The
conclusions hold for these models on this data."""

METHOD = [
    """\
**Data.** The models train on two kinds of data. The text is the language reference that comes with Python
(`pydoc_data.topics`), read byte by byte. The generated data are pairs of keys and values to look up, and sequences
of random symbols in which the model must name the four previous symbols at once.""",
    "",
    """\
**Training.** A setting is one combination of data, task, width and number of layers. Within a setting, models that
differ in the number of heads have the same number of parameters. They see the same batches in the same order. Each
number of heads is trained with the best of a few learning rates.""",
    "",
    """\
**Statistics.** In this report, ± is a standard error over seeds (repeated trainings), unless stated otherwise.
Intervals have a confidence of 95 % by Student's t. A difference between mean losses is significant by Tukey's range
test at 95 %, with seeds as blocks.""",
    "",
    """\
**Verdicts.** A claim about many settings, layers or cases holds if it is true in more than two thirds of them. It
does not hold if it is true in fewer than one third. Between one third and two thirds it is undecided.""",
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
The measure is one distance for each layer: the Jensen-Shannon distance between the attention weights of two heads.
It is averaged over query rows and then over all pairs of heads of the layer (`hw.redundancy`). The distance is
between 0 and sqrt(ln 2) = 0.83. Untrained heads have nearly uniform attention, and heads with uniform attention
cannot differ. So trained models are also compared with untrained models of equal sharpness, which means equal
entropy. For this, the queries of the untrained model are scaled, layer by layer, until its heads have the mean
entropy of the trained layer.""",
    "capacity": """\
Three measurements show whether more heads give a model more capacity. The first is the held-out loss against the
number of heads, at equal numbers of parameters. The second is a task in which the model names four earlier symbols
at once. The third is the rank of the matrix of attention scores as heads get narrower.""",
    "parallel": """\
Two implementations of attention are timed. The fused layer is one `hw.MultiHeadAttention`, which computes all heads
together. The list of heads is a module per head, with linear maps of its own; these modules run one after the other.
Layer and list have the same weights (`hw.to_heads`) and the same output. A training pass is forward and backward,
without the optimiser. In each round every implementation, number of heads and pass is timed once, in a new order.""",
    "regularises": """\
To test whether many heads regularise, a model sees little data many times and overfits. The generalisation gap is
the held-out loss minus the training loss, both of the trained model in evaluation mode. The gap also shrinks when a
model fits the training data less well. So the held-out loss is judged in addition to the gap.""",
    "robust": """\
To test whether many heads make a model robust, trained models lose heads without further training. The outputs of
the removed heads are multiplied by 0 (`hw.ablate`). A model with many heads has more heads to lose, so equal shares
of the heads are removed, not equal numbers. A model whose attention has little effect loses little. So the effect of
removing half of the heads is divided by the effect of removing all heads.""",
    "more": """\
To test whether more heads are always better, the width of the model is fixed while the number of heads grows. Heads
then get narrower: `head_dim`, the number of features of a head, is the width divided by the number of heads.""",
    "eight": """\
This section asks whether 8 heads have as low a held-out loss as the best number of heads. It asks this for every
setting, a combination of data, width, number of layers and task. The settings were chosen, not drawn at random. So
the share of settings in which 8 heads are good estimates nothing beyond these settings.""",
}

RULES = {
    "different": """\
the heads of a trained layer are farther apart if their distance minus that of the untrained model is above 0, by its
95 % interval. The difference is computed for each seed, or for each sequence in the real models. The claim is judged
by the share of layers whose heads are farther apart. The comparison with untrained heads of equal sharpness
(entropy) is shown, but does not decide.""",
    "capacity": """\
in a setting (data, task, width and layers), the claim is true if the loss of one head is significantly above that of
the best number of heads. The claim is judged by the share of settings in which it is true.""",
    "parallel": """\
a case is a device, batch and length, a pass (forward or training), and a number of heads above 1. In a case, more
heads are free if at least three quarters of the timing rounds take at most 1.1 times the time of one head. They are
not free if at least three quarters take longer. All other cases are open. The claim does not hold if more than one
third of the cases are not free. It holds if more than two thirds are free.""",
    "regularises": """\
for each seed, a line is fitted to the generalisation gap against doublings of the number of heads. The claim does
not hold if the gap grows, or if the gap shrinks while the held-out loss rises. It also does not hold if the slope is
negligible: its 95 % interval is within 1 % of the best held-out loss around 0. Otherwise the claim holds if the
interval of the slope is below 0, and is undecided if not.""",
    "robust": """\
the measured share is the effect of removing half of the heads, divided by the effect of removing all. For each seed,
a line is fitted to this share against doublings of the number of heads. The claim holds if the 95 % interval of the
slope is below 0 for random halves and for the least important half. It does not hold if the interval is above 0 for
random halves. Otherwise it is undecided.""",
    "more": """\
the claim is that in some settings (data, task, width and layers) the largest number of heads has a significantly
higher loss than the best number. It holds if there are at least two such settings, since one may be chance. It does
not hold if there is none.""",
    "eight": """\
8 heads are good in a setting if their mean loss is at most the lowest mean loss plus one standard error of that
lowest mean. The claim is judged by the share of settings in which 8 heads are good. It is undecided if leaving out
one seed would change the outcome.""",
}

ONE_HEAD = [
    """\
In the task "several relations" the data are sequences of random symbols. At every position the model must name four
earlier symbols: those 1, 2, 3 and 4 positions before. Each of the four answers is one output, called a slot: slot j
names the symbol j positions before. The model is one attention layer without a residual path, followed by one linear
map for each slot. Rotary position embeddings tell the heads where to attend; the value vectors carry the symbols.""",
    "",
    """\
Theorem: a layer of H attention heads can have at most H slots whose answers are always right, however wide the heads
are. A slot is the output that names the symbol j positions before. There are two conditions. Attention weights must
not depend on the symbols, and the map from head outputs to logits must be linear. Then the logit of slot j for
symbol s is the sum over h and k of a_h(k) B_hj[s, x(k)], plus c_j[s]. Here x(k) is the symbol k positions before,
and a_h(k) is the attention weight of head h on it. B_hj is the matrix, symbols by symbols, through which slot j
reads head h. The constant c_j[s] is the bias of symbol s in slot j.""",
    "",
    """\
Step 1 of the proof: a slot (output) that is always right is also right under every renaming of the symbols. "Always
right" is a set of inequalities that are linear in the matrices B_hj and the biases c_j. So the slot stays right if
B_hj and c_j are replaced by their means over all renamings. The mean of B_hj has one value p_hj on the diagonal and
another value q_hj everywhere else; the mean of c_j is equal for all symbols. Define W[j, k] as the sum over heads h
of (p_hj - q_hj) a_h(k), where a_h(k) is the attention weight of head h on position k. Up to a constant, the logit of
a symbol in slot j is then the sum of W[j, k] over the positions k at which this symbol occurs.""",
    "",
    """\
Step 2 of the proof: W[j, k] is the amount that the symbol k positions before adds to its own logit in slot j. Put
the right symbol of slot j at position j and wherever W[j, k] < 0, and another symbol everywhere else. The slot is
right only if W[j, j] > sum over all other k of |W[j, k]|. So W, restricted to the slots that are always right, is
strictly diagonally dominant and has full rank (Levy-Desplanques theorem). But W is the product of a matrix with H
columns and the attention weights of H heads, so its rank is at most H. One head serves one slot, and four slots need
four heads.""",
    "",
    """\
The theorem, at most one always right answer per head, applies to one of three kinds of models. In "weights by place
alone", queries and keys are one learned vector, rotated by position, so attention weights ignore the symbols. In
"ordinary attention", queries and keys are computed from the symbols. Attention weights can then depend on position
and symbol together, so the theorem does not apply. In "with an MLP", an MLP follows ordinary attention. It can
distinguish mixtures of symbols that no linear map can.""",
]

EXAMPLE = ((0.18, 0.52, 0.30, 0.0), (0.0, 0.30, 0.52, 0.18))
"""Weights of two heads on the four positions."""

MIXES = ((0.32, -0.52), (0.52, -0.30), (-0.30, 0.52), (-0.52, 0.32))
"""Factors with which each slot reads the first and the second head."""
