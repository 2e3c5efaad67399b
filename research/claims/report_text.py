"""Sentences of docs/reports/claims.md that do not depend on the results."""

INTRODUCTION = """\
This report tests seven claims that teaching notes make about multi-head attention (Vaswani et al. 2017). Most of the
tested models are small and were trained for minutes; two are published models. `research/claims/report.py` writes it
from the results of `make claims`. Every number and every verdict is computed from these results, and every section
states the rule of its verdict. The conclusions hold for the tested models and data alone."""

METHOD = [
    """\
**Data.** The models train on two kinds of data: text and generated sequences. The text is the language reference that
comes with Python (`pydoc_data.topics`), read byte by byte. The generated sequences belong to two tasks. In one, a
sequence is a list of key-value pairs of symbols, which is then repeated in another order; the model must name the
value of each repeated key. In the other, a sequence consists of random symbols; at every position the model must name
the four previous symbols.""",
    "",
    """\
**Training.** A setting is one combination of data, task, width and number of layers. Within a setting, models that
differ in the number of heads have the same number of parameters. With the same seed, these models see the same
batches in the same order. Each number of heads is trained with the best of a few learning rates.""",
    "",
    """\
**Statistics.** In this report, ± is a standard error over seeds (repeated trainings), unless stated otherwise.
Intervals have a confidence of 95 % by Student's t. A difference between the mean losses of two numbers of heads is
significant by Tukey's range test at 95 %, with seeds as blocks.""",
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
To test whether different heads see different things, one distance is computed for each layer: the Jensen-Shannon
distance between the attention weights of two heads. This distance is averaged over query rows and then over all
pairs of heads of the layer (`hw.redundancy`). The distance is between 0 and sqrt(ln 2) = 0.83. Untrained heads have
nearly uniform attention, and heads with uniform attention cannot differ. So trained models are also compared with
untrained models of equal sharpness, which means equal entropy. For this, the queries of the untrained model are
scaled, layer by layer, until its heads have the mean entropy of the trained layer.""",
    "capacity": """\
Three measurements show whether more heads give a model more capacity. The first is the held-out loss against the
number of heads, in models with equal numbers of parameters. The second is the accuracy in a task in which the model
names four earlier symbols at once. The third is the rank of the matrix of attention scores as heads get narrower.""",
    "parallel": """\
To test whether more heads cost time, two implementations of attention are timed. The fused layer is one
`hw.MultiHeadAttention`, which computes all heads together. The list of heads has one module for each head, with
linear maps of its own; these modules run one after the other. Layer and list have the same weights (`hw.to_heads`)
and the same output. A training pass is a forward and a backward pass, without the optimiser. Each round of the timing
times every combination of implementation, number of heads and pass once, in random order.""",
    "regularises": """\
To test whether many heads regularise, a model sees little data many times and overfits. The generalisation gap is
the held-out loss minus the training loss, both of the trained model in evaluation mode. A regularised model has a
smaller gap. But the gap also shrinks when a model fits the training data less well. So the held-out loss is judged
in addition to the gap.""",
    "robust": """\
To test whether many heads make a model robust, trained models lose heads without further training. The outputs of the
removed heads are multiplied by 0 (`hw.ablate`). A model with many heads has more heads to lose, so equal shares of
the heads are removed, not equal numbers. A model whose attention has little effect loses little. So the increase of
the held-out loss when half of the heads are removed is divided by the increase when all heads are removed. This
quotient is compared between numbers of heads.""",
    "more": """\
To test whether more heads are always better, the width of the model is fixed while the number of heads grows. Heads
then get narrower: `head_dim`, the number of features of a head, is the width divided by the number of heads.""",
    "eight": """\
To test whether 8 is a good number of heads, the held-out loss with 8 heads is compared with the lowest held-out loss
of any number of heads. This is done in every setting, a combination of data, task, width and number of layers. The
settings were chosen, not drawn at random. So the share of settings in which 8 heads are good estimates nothing beyond
these settings.""",
}

RULES = {
    "different": """\
the distance of a layer is the mean Jensen-Shannon distance between the attention weights of two of its heads. The
heads of a trained layer count as farther apart if the distance in the trained model minus the distance in the
untrained model is above 0, by its 95 % interval. This difference is computed for each seed, or for each sequence in
the published models. The claim is judged by the share of layers whose heads are farther apart. It holds if the share
is more than two thirds, does not hold if the share is less than one third, and is undecided otherwise. The
comparison with untrained heads of equal sharpness (entropy) is shown, but does not decide.""",
    "capacity": """\
in a setting (data, task, width and layers), the claim is true if the held-out loss of models with one head is
significantly above that of models with the best number of heads. The claim is judged by the share of settings in
which it is true. It holds if the share is more than two thirds, does not hold if the share is less than one third,
and is undecided otherwise.""",
    "parallel": """\
a case is one combination of device, batch size, sequence length, pass (forward or training) and number of heads above
1. In every timing round of a case, the time of the fused layer with this number of heads is divided by its time with
one head. The additional heads are free if this ratio is at most 1.1 in at least three quarters of the rounds. They
are not free if the ratio is above 1.1 in at least three quarters of the rounds. All other cases are open. The claim
does not hold if the heads are not free in more than one third of the cases. Otherwise it holds if the heads are free
in more than two thirds of the cases, and is undecided if they are not.""",
    "regularises": """\
for each seed, a line is fitted to the generalisation gap (held-out loss minus training loss) against doublings of the
number of heads. The gap grows with the number of heads if the 95 % interval of the mean slope is above 0, and shrinks
if it is below 0. The claim does not hold if the gap grows, or if the gap shrinks while the held-out loss rises. It
also does not hold if the slope of the gap is negligible, which means that its 95 % interval lies between -1 % and +1
% of the lowest mean held-out loss. Otherwise the claim holds if the gap shrinks, and is undecided if not.""",
    "robust": """\
the measured share is the increase of the held-out loss when half of the heads are removed, divided by the increase
when all heads are removed. For each seed, a line is fitted to this share against doublings of the number of heads.
The claim holds if the 95 % interval of the slope is below 0 both for random halves and for the least important half.
It does not hold if the interval for random halves is above 0. Otherwise it is undecided.""",
    "more": """\
the claim is that in some settings (data, task, width and layers) the largest number of heads has a significantly
higher held-out loss than the best number of heads. The claim holds if there are at least two such settings. It is
undecided if there is one, which may be chance, and does not hold if there is none.""",
    "eight": """\
8 heads are good in a setting (data, task, width and layers) if their mean held-out loss is at most the lowest mean
loss of any number of heads plus one standard error of that lowest mean. The claim is judged by the share of settings
in which 8 heads are good. It holds if the share is more than two thirds, does not hold if the share is less than one
third, and is undecided otherwise. It is also undecided if leaving out one seed would change the outcome.""",
}

ONE_HEAD = [
    """\
In the task "several relations" the data are sequences of random symbols (tokens from a small alphabet). At every
position the model must name four earlier symbols: those 1, 2, 3 and 4 positions before. Each of the four answers is
one output, called a slot: slot j names the symbol j positions before. The model is one attention layer without a
residual path, followed by one linear map for each slot. Rotary position embeddings tell the heads where to attend;
the value vectors carry the symbols.""",
    "",
    """\
Theorem: an attention layer with H heads can have at most H slots whose answers are right for every sequence of
symbols (tokens), however wide the heads are. A slot is one output of the model: slot j must name the symbol j
positions before the current one. The theorem has two conditions. Attention weights must not depend on the symbols,
and the map from head outputs to logits must be linear. Then the logit of slot j for symbol s is the sum over heads h
and distances k of a_h(k) B_hj[s, x(k)], plus c_j[s]. Here x(k) is the symbol k positions before, and a_h(k) is the
attention weight of head h on it. B_hj is a matrix with a row and a column for each symbol; through it, slot j reads
the output of head h. The constant c_j[s] is the bias of symbol s in slot j.""",
    "",
    """\
Step 1 of the proof that H heads have at most H slots that are right for every sequence: slot j is the output that
must name the symbol j positions before. It reads head h through the matrix B_hj, with a row and a column for each
symbol, and adds a bias c_j. A slot that is right for every sequence of symbols is also right under every renaming of
the symbols. That it is right for every sequence is a set of inequalities that are linear in B_hj and c_j. So the slot
stays right if B_hj and c_j are replaced by their means over all renamings. The mean of B_hj has one value p_hj on the
diagonal and another value q_hj everywhere else; the mean of c_j is equal for all symbols. Define W[j, k] as the sum
over heads h of (p_hj - q_hj) a_h(k), where a_h(k) is the attention weight of head h on the symbol k positions before.
Up to a constant, the logit of a symbol in slot j is then the sum of W[j, k] over all k for which this symbol occurs k
positions before.""",
    "",
    """\
Step 2 of the proof that H heads have at most H slots that are right for every sequence: slot j is the output that
must name the symbol j positions before, and W[j, k] is the amount that the symbol k positions before adds to its own
logit in slot j. Take two symbols s and t. Consider the sequence that has s at distance j, and also at every distance
k where W[j, k] < 0, and has t at all other distances. Here slot j must name s, so the logit of s must be above that
of t. This means that W[j, j] > sum over all other k of |W[j, k]|. So W, restricted to the slots that are right for
every sequence, is strictly diagonally dominant and has full rank (Levy-Desplanques theorem). But W is the product of
a matrix with H columns and the attention weights of H heads, so its rank is at most H. So at most H slots are right
for every sequence, and four slots need four heads.""",
    "",
    """\
The theorem states that a layer of H heads has at most H outputs that name their symbol (token) correctly in every
sequence. It applies to one of the three kinds of models that were trained. In models called "weights by place alone",
all queries and keys are projections of one learned vector, rotated by position. Attention weights then depend on the
position alone, so the theorem applies. In models called "ordinary attention", queries and keys are computed from the
symbols. Attention weights can then depend on the symbols too, so the theorem does not apply. In models called "with
an MLP", ordinary attention is followed by an MLP, so the map from head outputs to logits is not linear, and the
theorem does not apply either. A head output is a weighted sum of the vectors of several symbols; the MLP can
distinguish sums that no linear map can.""",
]

EXAMPLE = ((0.18, 0.52, 0.30, 0.0), (0.0, 0.30, 0.52, 0.18))
"""Weights of two heads on the four positions."""

MIXES = ((0.32, -0.52), (0.52, -0.30), (-0.30, 0.52), (-0.52, 0.32))
"""Factors with which each slot reads the first and the second head."""
