"""Reasons for which the attention of a module is left out, as the start of a sentence that ends with module paths."""

NOT_SEEN = "attention of these modules was not seen"

WEIGHTS_NOT_FOLLOWED = f"{NOT_SEEN}, since they use the weights of a softmax in a way that is not followed"

HEADS_UNKNOWN = "attention of these modules is left out, since it is not established which axis is the heads"

HEADS_NOT_FOLLOWED = f"{HEADS_UNKNOWN}; if you know the axes of the weights, state their layout in hw.Site"

HEADS_CONTRADICT = "attention of these modules is left out, since it has not the number of heads that the module stores"

NOT_OVER_KEYS = (
    "these modules compute a softmax that is not over keys, or not of products of queries and keys, which is not read "
    "as attention"
)

NO_QUERIES = (
    "attention of these modules is left out, since its output has no axis of queries, as for one query, or for queries "
    "that have keys of their own"
)

NORMALISED = (
    "these modules multiply weights that are normalised over an axis with another tensor and sum over this axis, in a "
    "way that is not read as attention"
)

NOT_NORMALISED = (
    "these modules multiply products of queries and keys with values without a softmax that is followed, which is not "
    "read as attention"
)

NOT_FOLLOWED = (
    "attention of these modules was not seen, but they call a function that is not followed and may compute attention, "
    "such as a scripted one or one of another library"
)

NOT_AVERAGES = (
    "these modules change attention weights after the softmax so that they are no averages of keys, which are left out"
)

HEADS_SEPARATE = (
    "attention of these modules is left out, since they compute it in several calls, each of which may be one head; "
    "state heads=1 in hw.Site if they have one (see docs/watch.md)"
)

MULTIPLIED = (
    "attention of these modules is left out, since its outputs are multiplied with other activations over their "
    "queries or values, as in products of several matrices of weights"
)

NOT_LINEAR = (
    "outputs of the heads of these modules cannot be changed, since a function that is not linear, such as a norm or a "
    "sum with another tensor, is between them and the output projection"
)

ADDED = (
    "attention of these modules is left out, since outputs of several softmaxes are added before the output "
    "projection, as in differential attention, so that no head has weights of its own"
)

ADDED_TENSOR = (
    "attention of these modules is left out, since one function multiplies the weights with the values and adds "
    "another tensor, so that the outputs of the heads are not known alone"
)

RESCALED = (
    "attention of these modules is left out, since the model multiplies its outputs with a function of the log-sum-exp "
    "of the scores, as for sinks, so that the weights of the heads are others"
)

COMPLEX = "attention of these modules is left out, since its outputs are complex numbers"

WEIGHTS_IN_PARTS = (
    "attention of these modules is left out, since they multiply parts of the weights of one softmax with values one "
    "after the other, or use some of the weights in a way that is not followed"
)

KEYS_MOVED = (
    "attention of these modules is left out, since each query has its keys in another order, as after a sort of scores"
)

NEVER_CHANGED = (
    "outputs of the heads of these modules cannot be changed, since the model used them in a way that is not seen, as "
    "in torch.vmap or a scripted function"
)

CHANGED_IN_PLACE = (
    "attention of these modules is left out, since the model changed its queries, keys, values, weights or output in "
    "place before the output projection"
)

REASONS_BESIDE_ATTENTION = frozenset(
    (
        *(NOT_SEEN, WEIGHTS_NOT_FOLLOWED, NOT_OVER_KEYS, NORMALISED, NOT_NORMALISED, NOT_FOLLOWED),
        *(NOT_LINEAR, NEVER_CHANGED),
    )
)
"""Reasons for which a module's statistics are reported nevertheless. Either they say of no attention that it is left
out, or they only prevent that heads are changed.
"""
