"""Sentences of docs/reports/claims.md that do not depend on the results."""

INTRODUCTION = """\
This report tests seven claims that teaching notes make about multi-head attention (Vaswani et al. 2017). The trained
models are small: the last section has their sizes and steps. The rules were written before the results, in
`research/claims/rules.md`. `research/claims/verdicts`, which imports nothing of headwise, computes every verdict (a
claim held, did not hold, or depends on the data or the position scheme) from the raw results, and
`research/claims/report.py` writes this page (`make claims`). The conclusions hold for the tested models and data
alone."""

OBJECTIONS = {
    "schemes": (
        "rotary frequencies: a head of two features has the fastest one alone",
        "one position scheme, rotary",
        "four position schemes; each claim is stated for each",
    ),
    "different": (
        "any attention sharper than uniform differs more than untrained attention",
        "the comparison with untrained heads decided",
        "the comparison with untrained heads of equal entropy decides",
    ),
    "robust": (
        "half of two heads: six draws found one of two sets; a line through a rise and a fall",
        "six draws, a fitted slope",
        "every half where there are at most 70, otherwise 70 different ones; numbers of heads are compared in pairs",
    ),
    "rates": (
        "learning rates",
        "three rates, one seed, bad ones stopped early; 19 of 52 best rates at an edge of the grid",
        "the grid grows until no best rate is at an edge; several seeds for each rate; none is stopped",
    ),
    "overlap": (
        "held-out text recurs in the training text",
        "41 % of its windows of 64 bytes",
        "documents are split in three, and passages with 48 bytes in common are removed; see the table below",
    ),
    "selection": (
        "rates were chosen on the text that judged them",
        "yes",
        "chosen on validation documents, judged on test documents",
    ),
    "tukey": (
        "Tukey's test assumes equal variances",
        "Tukey's range test",
        "Games-Howell over seeds, Holm over settings, and a bootstrap over seeds and documents",
    ),
    "votes": (
        "related settings count as votes; 30 of 54 layers are of one model",
        "9 settings, 54 layers",
        "a source of data counts once; the layers of a model are averaged",
    ),
    "rules": (
        "rules were written minutes before the results",
        "13 minutes",
        "rules and script first, then the runs",
    ),
    "parallel": (
        '"parallel at no cost" was measured on two CPU threads',
        "not said in the verdict",
        "the verdict says so",
    ),
}
"""Objection to the first version of this page, what was done before, and what is done now."""

SCHEMES = {
    "none": "no positions",
    "learned": "a learned vector for each position",
    "rotary": "rotary embeddings with the same frequencies in every head",
    "spread": "rotary embeddings whose frequencies are distributed over the heads of a layer",
}

METHOD = [
    """\
**Settings.** A setting is a task with a position scheme. The schemes are: none (no positions), learned (a learned
vector for each position), rotary (the same rotary frequencies in every head; Su et al. 2021) and spread (rotary
frequencies distributed over the heads). Under "rotary", the frequencies of a head depend on its width: a head of two
features has only the fastest frequency. Under "spread", the heads of a layer together always have the same
frequencies, however many heads there are. The models of a setting differ only in the number of heads. They have equal
numbers of parameters and see the same batches in the same order.""",
    "",
    """\
**Learning rates.** In each setting (a task with a position scheme), the learning rate is chosen separately for each
number of heads, from the grid 0.001 times powers of 2. The grid is extended until both neighbours of the best rate,
that with the lowest validation loss, have been tried with the same seeds. The reported models are trained with other
seeds.""",
    "",
    """\
**Statistics.** ± is a standard error over seeds. A difference of losses is called significant if all of these
conditions are true: (1) it is at least 0.01 nats; (2) the Games-Howell test over seeds is significant at 5 %, after
Holm's correction over the settings of the claim; (3) on text, the 95 % interval of a bootstrap over seeds and test
documents excludes 0. The best number of heads of a setting is chosen by the validation loss; all reported losses are
on test documents.""",
    "",
    """\
**Verdicts.** For each position scheme, a claim has one of three verdicts. It "held" if it is true for every source of
data (the Python reference, the Bible, generated pairs, generated symbols). It "did not hold" if it is true for none of
them. Otherwise it "depends" on the data. If all position schemes have the same verdict, this is the verdict on the
claim; otherwise the claim depends on the scheme. If a result that could change a verdict has not been measured, no
verdict is stated.""",
    "",
    """\
**Limits.** The verdict "did not hold" means that the tests showed no difference. There may be one all the same, since
there are at most six seeds. Standard errors over seeds do not include the error of the choice of the learning rate:
all reported models with the same number of heads share one rate, which was chosen with two other seeds. Settings share
seeds and batches, so they are not independent. Each source of text is only one text. The interval of the claim "8 is a
good number" ignores that the best number was chosen by validation losses of the same models. The untrained control of
the claim "Different heads see different things" has the mean entropy of the layer, not that of each head. In models
with one head in each layer, removing half of the heads removes whole layers. Test passages that share 48 bytes with
training text are removed. Paraphrases remain, and so do the same words with other white space.""",
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
The distance between two heads is the Jensen-Shannon distance of their attention weights (`hw.redundancy`), averaged
over queries and over all pairs of heads of a layer. It is between 0 and sqrt(ln 2) = 0.83. Heads with uniform
attention cannot differ, and untrained attention is nearly uniform. So the trained model is compared with an untrained
one, the control. The queries of the control are scaled, layer by layer, until its heads have the mean entropy of the
trained layer. The claim "Different heads see different things" is true if trained heads are farther apart than the
heads of the control.""",
    "capacity": """\
At equal numbers of parameters, the test loss of models with one head is compared with that of models with the best
number of heads, the one with the lowest validation loss. In a setting (a task with a position scheme), the claim "More
heads, more capacity" is true if one head is significantly worse.""",
    "parallel": """\
The fused layer is one `hw.MultiHeadAttention`, which computes all heads together. The list of heads has one module for
each head; these modules run one after the other, with the same weights and the same output as the fused layer. A case
is a batch size, a length, a pass (forward or training) and a number of heads above 1. In each timing round, the time of
the fused layer with this number of heads is compared with its time with one head. In a case, several heads take no
extra time if their time is at most 1.1 times that of one head in at least three quarters of the rounds. They take extra
time if their time is more than 1.1 times that of one head in at least three quarters of the rounds. Otherwise the case
is undecided.""",
    "regularises": """\
Models train on 25 KB of text, which they see many times, so that they can overfit. The gap is the test loss minus the
training loss. The gap also shrinks when a model fits the training data less well. So the claim "Many heads regularise"
needs two conditions in a setting (a task with a position scheme). Some number of heads has a significantly smaller gap
than one head, and its test loss is not significantly larger.""",
    "robust": """\
Half of the heads of a trained model, chosen from all layers together, are removed without further training
(`hw.ablate`). If there are at most 70 different halves, each of them is removed in turn; otherwise 70 different halves
are drawn and removed. The share is the mean increase of the loss when half of the heads are removed, divided by the
increase when all heads are removed, on the first 8 test batches. In a setting (a task with a position scheme), the
claim "Many heads make a model robust" is true under two conditions. The share of the largest number of heads is
significantly below that of one head. No number of heads has a significantly larger share than one head.""",
    "more": """\
The width of the model is fixed while the number of heads grows, so heads get narrower. The claim "More is not always
better" is true in a setting (a task with a position scheme) if the largest number of heads is significantly worse than
the best number. The penalty is the mean test loss with the largest number of heads minus the mean test loss with the
best number.""",
    "eight": """\
The loss with 8 heads minus that with the best number of heads has a 95 % interval (Welch). In a setting (a task with
a position scheme), 8 heads are good if the whole interval lies below a limit, 1 % of the best loss (or 0.01 nats, if
that is more). They are bad if the whole interval lies above this limit. Otherwise, they are open. The table has
these grades for all numbers of heads in each setting.""",
}

ONE_HEAD = [
    """\
In the task "several relations" the data are sequences of random symbols (tokens from a small alphabet). At every
position the model must name four earlier symbols: those 1, 2, 3 and 4 positions before. Each of the four answers is
one output of the model, called a slot: slot j names the symbol j positions before. The model is one attention layer
without a residual path, followed by one linear map for each slot. Positions tell the heads where to attend; the value
vectors carry the symbols.""",
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
of t. The logit of s minus that of t is W[j, j] minus the sum over all other k of |W[j, k]|, so W[j, j] is larger than
this sum. Hence W, restricted to the slots that are right for every sequence, is strictly diagonally dominant and has
full rank (Levy-Desplanques theorem). But W is the product of two matrices, p_hj - q_hj with H columns and a_h(k) with
H rows, so its rank is at most H. So at most H slots are right for every sequence, and the four slots of the task need
four heads.""",
    "",
    """\
The theorem states that a layer of H heads has at most H outputs that name their symbol (token) correctly in every
sequence. It applies to one of the three kinds of models that were trained. In models called "weights by place alone",
all queries and keys are projections of one learned vector, rotated by position. Then attention weights depend on the
position alone, so the theorem applies. In models called "ordinary attention", queries and keys are computed from the
symbols. Attention weights can then depend on the symbols too, so the theorem does not apply. In models called "with an
MLP", ordinary attention is followed by an MLP, so the map from head outputs to logits is not linear, and the theorem
does not apply either. A head output is a weighted sum of the vectors of several symbols; the MLP can distinguish sums
that no linear map can.""",
]

EXAMPLE = ((0.18, 0.52, 0.30, 0.0), (0.0, 0.30, 0.52, 0.18))
"""Weights of two heads on the four positions."""

MIXES = ((0.32, -0.52), (0.52, -0.30), (-0.30, 0.52), (-0.52, 0.32))
"""Factors with which each slot reads the first and the second head."""
