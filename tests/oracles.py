"""Independent implementations of attention, of the layer and of the statistics, with which tests compare headwise.

Nothing here imports headwise.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# -- attention ------------------------------------------------------------------------------------------------


@dataclass
class PlainResult:
    """Result of plain attention: the output of every head, the log-sum-exp of the scores, and the weights.

    Attributes:
        out: `(batch, heads, queries, value_dim)`.
        lse: logarithm of the sum of exponentiated scores, `(batch, heads, queries)`.
        weights: `(batch, heads, queries, keys)`.
        scores: scores as they enter the softmax, of the same shape; -inf at hidden keys.
        uncapped: the same before the softcap and without the bias.
    """

    out: Tensor
    lse: Tensor
    weights: Tensor
    scores: Tensor | None = None
    uncapped: Tensor | None = None


def plain_attention(
    q, k, v, allowed=None, bias=None, scale=None, softcap=None, sinks=None, talking=None, factors=None
) -> PlainResult:
    """Compute softmax attention directly from its formula, with all scores at once, in the dtype of its inputs.

    Key and value heads are repeated for the query heads that share them. A query without a visible key gets weights
    and output 0, and log-sum-exp -inf.

    Args:
        q: queries, `(batch, heads, queries, head_dim)`.
        k: keys, `(batch, kv_heads, keys, head_dim)`.
        v: values, `(batch, kv_heads, keys, value_dim)`.
        allowed: True where a query attends to a key, `(batch, heads, queries, keys)`.
        bias: numbers to add to the scores, of the same shape as `allowed`.
        scale: factor of the scores, one number or one for each head; by default 1 / sqrt(head_dim).
        softcap: limit of the scores, which are replaced by softcap * tanh(score / softcap).
        sinks: score of one additional key with value 0, one for each head.
        talking: two matrices `(heads, heads)`; the first mixes the scores of heads, the second their weights.
        factors: factors of the weights in the output alone, of the same shape as `allowed`: those of dropout.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    if isinstance(scale, Tensor):
        scale = scale.to(q.dtype)[:, None, None]
    uncapped = scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if talking is not None:
        scores = (scores.movedim(1, -1) @ talking[0].to(scores.dtype).T).movedim(-1, 1)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if allowed is not None:
        scores = torch.where(allowed, scores, -torch.inf)
    keys, of_keys = scores.shape[-1], scores
    uncapped = torch.where(scores == -torch.inf, -torch.inf, uncapped)
    if sinks is not None:  # one more key, with value 0
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    weights = torch.where(empty, 0.0, torch.softmax(torch.where(empty, 0.0, scores), -1))[..., :keys]
    if talking is not None:
        weights = (weights.movedim(1, -1) @ talking[1].to(scores.dtype).T).movedim(-1, 1)
    lse = torch.where(empty[..., 0], -torch.inf, torch.logsumexp(torch.where(empty, 0.0, scores), -1))
    out = (weights if factors is None else weights * factors.to(weights.dtype)) @ v
    return PlainResult(out, lse, weights, of_keys, uncapped)


def philox(counter, seed: int) -> list[Tensor]:
    """Return four random words of 32 bits by Philox 4x32-10 (Salmon et al. 2011), as int64 tensors.

    Args:
        counter: the four words of the counter, integers or int64 tensors that broadcast.
        seed: the key of 64 bits.
    """
    lower_word = 2**32 - 1
    words = [torch.as_tensor(word) for word in counter]
    for n in range(10):
        keys = (seed + n * 0x9E3779B9) & lower_word, ((seed >> 32) + n * 0xBB67AE85) & lower_word
        products = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]  # int64 keeps all 64 bits; the sign is cut off below
        upper, lower = [p >> 32 & lower_word for p in products], [p & lower_word for p in products]
        words = [upper[1] ^ words[1] ^ keys[0], lower[1], upper[0] ^ words[3] ^ keys[1], lower[0]]
    return words


@functools.lru_cache(maxsize=8)  # a test uses one for many calls, and its 64-bit products take long
def kept_by_dropout(dropout: float, seed: int, batch: int, heads: int, queries: int, keys: int) -> Tensor:
    """Return True at the weights, `(batch, heads, queries, keys)`, that dropout of the native kernels keeps: those
    whose uniform number of 48 bits, of which the upper 16 are one of 8 in a counter, is not below the probability.
    """
    sizes = (batch, heads, queries, keys)
    shapes = torch.ones(4, 4, dtype=torch.int64).fill_diagonal_(-1).tolist()
    b, h, i, j = (torch.arange(size).reshape(shape) for size, shape in zip(sizes, shapes, strict=True))
    words = [word.expand(sizes) for word in philox((j // 8, h, i, b), seed)]
    halves = torch.stack([half for word in words for half in (word & 0xFFFF, word >> 16)])
    upper = halves.gather(0, (j % 8).expand(1, *sizes))[0]
    lower = philox((j, h, i, b + 2**31), seed)[0]
    return (upper << 32) + lower >= round(dropout * 2**48)


def plain_errors(q, k, v, exact: PlainResult, allowed=None, bias=None, **options) -> dict[str, float]:
    """Return the largest errors of plain attention in "out", "lse" and "weights" over eight orders of its sums.

    The errors are absolute differences from `exact`. In a single order, sums are sometimes exact by chance, which
    underestimates the cost of rounding. For the same reason, no error is below half a unit in the last place of the
    largest value, which is the error of storing it.
    """
    generator = torch.Generator().manual_seed(0)
    errors = {}
    for name in ("out", "lse", "weights"):
        values = getattr(exact, name)
        largest = values[values.isfinite()].abs().amax().item() if values.isfinite().any() else 0.0
        errors[name] = torch.finfo(q.dtype).eps / 2 * largest
    for order in range(8):
        keys = torch.randperm(k.shape[2], generator=generator) if order else torch.arange(k.shape[2])
        features = torch.randperm(k.shape[3], generator=generator) if order else torch.arange(k.shape[3])
        plain = plain_attention(
            q[..., features],
            k[:, :, keys][..., features],
            v[:, :, keys],
            None if allowed is None else allowed[..., keys],
            None if bias is None else bias[..., keys],
            **options,
        )
        plain.weights = plain.weights[..., keys.argsort()]
        for name, error in errors.items():
            errors[name] = max(error, distance(getattr(plain, name), getattr(exact, name)))
    return errors


def distance(got: Tensor, exact: Tensor) -> float:
    """Return the largest absolute difference; infinity if the two differ in which entries are finite or in infinities.

    A NaN in `exact` also makes the distance infinite.
    """
    finite = exact.isfinite()
    if not torch.equal(finite, got.isfinite()) or not torch.equal(exact[~finite], got[~finite].double()):
        return math.inf
    return (got[finite].double() - exact[finite]).abs().max().item() if finite.any() else 0.0


def within_budget(ours: Tensor, theirs: Tensor, exact: Tensor) -> None:
    """Check that `ours` is at most twice as far from `exact` as `theirs`, the result of another implementation.

    The error of `theirs` must itself be at most 32 roundings of the largest value: otherwise it computes something
    else. For the comparison, it counts as at least half a unit in the last place of the largest value.
    """
    eps, largest = torch.finfo(theirs.dtype).eps, exact.abs().max().item()
    error = distance(theirs, exact)
    assert error <= 32 * eps * largest, f"theirs computes something else: {error / eps / largest} roundings apart"
    budget = 2 * max(error, eps / 2 * largest)
    assert distance(ours, exact) <= budget, f"{distance(ours, exact)} beyond {budget}"


# -- the layer ------------------------------------------------------------------------------------------------


def rotated(x, positions, theta, width, interleaved):
    """Apply rotary embedding to the first `width` features of x, `(batch, heads, length, features)`.

    Each pair of features is a complex number, multiplied by e^(i position theta^(-2 pair / width)). Interleaved pairs
    are neighbours; otherwise feature i is paired with feature i + width / 2. `positions` is `(batch, length)`.
    """
    part, unrotated = x[..., :width], x[..., width:]
    angle = positions[:, None, :, None].double() * theta ** (-torch.arange(0, width, 2).double() / width)
    if interleaved:
        pairs = torch.complex(part[..., ::2], part[..., 1::2])
    else:
        pairs = torch.complex(part[..., : width // 2], part[..., width // 2 :])
    rotated_pairs = pairs * torch.polar(torch.ones_like(angle), angle)
    part = (
        torch.view_as_real(rotated_pairs).flatten(-2)
        if interleaved
        else torch.cat([rotated_pairs.real, rotated_pairs.imag], -1)
    )
    return torch.cat([part, unrotated], dim=-1)


def alibi(heads, at_q, at_k):
    """Return the ALiBi bias `(batch, heads, queries, keys)`: minus the slope of the head times the distance.

    `at_q` and `at_k` are the positions `(batch, queries)` and `(batch, keys)`. The number of heads may be any; slopes
    follow the authors' rule for numbers that are not powers of two.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    slopes += [2 ** (-4 * (2 * h + 1) / power) for h in range(heads - power)]
    distance = (at_q[:, :, None] - at_k[:, None, :]).abs().double()
    return -torch.tensor(slopes, dtype=torch.float64)[None, :, None, None] * distance[:, None]


def bucketed(table, at_q, at_k, max_distance):
    """Return T5's bidirectional position bias `(batch, heads, queries, keys)`, computed entry by entry.

    `table` holds one number for each bucket of distances and head, `(buckets, heads)`; `at_q` and `at_k` are the
    positions `(batch, queries)` and `(batch, keys)`. All distances from `max_distance` share the last bucket.
    """
    half = table.shape[0] // 2
    exact = half // 2
    rows = []
    for queries, keys in zip(*torch.broadcast_tensors(at_q[:, :, None], at_k[:, None, :]), strict=True):
        buckets = torch.zeros(queries.shape, dtype=torch.long)
        for i, j in torch.cartesian_prod(torch.arange(queries.shape[0]), torch.arange(queries.shape[1])).tolist():
            step = int(keys[i, j] - queries[i, j])
            bucket = abs(step)
            if bucket >= exact:
                bucket = exact + math.floor(
                    math.log(bucket / exact) / math.log(max_distance / exact) * (half - exact) + 1e-9
                )
            buckets[i, j] = min(bucket, half - 1) + (half if step > 0 else 0)
        rows.append(table[buckets].permute(2, 0, 1))
    return torch.stack(rows)


def normed(x, weight, bias, eps):
    """Return x normalized over its last axis, times the weight: RMSNorm if `bias` is None, otherwise LayerNorm."""
    if bias is None:
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight + bias


def plain_layer(parameters, x, context, values, at_q, at_k, *, heads, kv_heads, **options):
    """Return the output and weights of `MultiHeadAttention`, computed from its parameters, given by name.

    Output `(batch, queries, embed_dim)`, weights `(batch, heads, queries, keys)`. Keys are projected from `context`
    and values from `values`, except for a fused projection, which takes queries, keys and values from `x`. `at_q` and
    `at_k` are the positions `(batch, queries)` and `(batch, keys)`. Options: allowed, bias, scale, softcap, gate,
    rotary (theta, width, interleaved), alibi, max_distance, norm_over, eps, value_width.
    """

    def project(name, tensor):
        bias = parameters.get(f"{name}.bias")
        projected = torch.einsum("bli,oi->blo", tensor, parameters[f"{name}.weight"])
        return projected if bias is None else projected + bias

    def split(tensor, count):
        return torch.stack(tensor.chunk(count, dim=-1), dim=1)

    def norm(name, tensor):
        weight, bias = parameters[f"{name}.weight"], parameters.get(f"{name}.bias")
        return normed(tensor, weight, bias, options["eps"])

    if "qkv_proj.weight" in parameters:
        width = parameters["qkv_proj.weight"].shape[0] - options["value_width"]
        q, k, v = project("qkv_proj", x).split(
            [width * heads // (heads + kv_heads), width * kv_heads // (heads + kv_heads), options["value_width"]],
            dim=-1,
        )
    else:
        q, k, v = project("q_proj", x), project("k_proj", context), project("v_proj", values)
    if options.get("norm_over") == "heads":
        q, k = norm("q_norm", q), norm("k_norm", k)
    q, k, v = split(q, heads), split(k, kv_heads), split(v, kv_heads)
    if options.get("norm_over") == "head":
        q, k = norm("q_norm", q), norm("k_norm", k)
    if options.get("rotary"):
        q, k = rotated(q, at_q, *options["rotary"]), rotated(k, at_k, *options["rotary"])
    bias = options.get("bias")
    if options.get("alibi"):
        bias = alibi(heads, at_q, at_k) + (0 if bias is None else bias)
    if "position_bias.weight" in parameters:
        table = parameters["position_bias.weight"]
        bias = bucketed(table, at_q, at_k, options["max_distance"]) + (0 if bias is None else bias)
    scale = options.get("scale") or q.shape[-1] ** -0.5
    if "temperature" in parameters:
        scale = scale / parameters["temperature"]
    talking = (parameters["talking_before"], parameters["talking_after"]) if "talking_before" in parameters else None
    plain = plain_attention(
        q, k, v, options.get("allowed"), bias, scale, options.get("softcap"), parameters.get("sinks"), talking
    )
    out = plain.out if options.get("gate") is None else plain.out * options["gate"]
    if "gate_proj.weight" in parameters:
        out = out / (1 + torch.exp(-split(project("gate_proj", x), heads)))
    return project("out_proj", torch.cat(out.unbind(1), dim=-1)), plain.weights


def gradients(module, x, result):
    """Return the gradients of a randomly weighted sum of `result`: for the input x, and for every parameter by name.

    The random weights are the same in every call with equal shapes.
    """
    torch.manual_seed(1)
    upstream = torch.randn(result.shape, dtype=result.dtype)
    names, parameters = zip(*module.named_parameters(), strict=True)
    of_input, *of_parameters = torch.autograd.grad((result * upstream).sum(), [x, *parameters])
    return of_input, dict(zip(names, of_parameters, strict=True))


# -- four published ways of writing multi-head attention ----------------------------------------------------------


class SingleHead(nn.Module):
    """One attention head with its own query, key and value maps, for input without a batch axis, `(length, width)`."""

    def __init__(self, word_size: int, embed_dim: int, bias: bool):
        super().__init__()
        self.query = nn.Linear(word_size, embed_dim, bias=bias)
        self.key = nn.Linear(word_size, embed_dim, bias=bias)
        self.value = nn.Linear(word_size, embed_dim, bias=bias)

    def forward(self, x):
        q, k, v = self.query(x), self.key(x), self.value(x)
        return torch.softmax(q @ k.T / q.shape[-1] ** 0.5, -1) @ v


class ListOfHeads(nn.Module):
    """Design 1: a list of separate heads, whose concatenated outputs are multiplied by a matrix without bias."""

    def __init__(self, word_size: int, embed_dim: int, n_head: int, bias: bool):
        super().__init__()
        self.heads = nn.ModuleList(SingleHead(word_size, embed_dim, bias) for _ in range(n_head))
        self.projection = nn.Parameter(torch.randn(embed_dim * n_head, embed_dim))

    def forward(self, x):
        return torch.cat([head(x) for head in self.heads], dim=-1) @ self.projection


class FourLinearMaps(nn.Module):
    """Designs 2 and 3: four square linear maps, whose features are split among the heads.

    Returns the output and the weights of every head, `(batch, heads, queries, keys)`.
    """

    def __init__(self, embed_dim: int, num_heads: int):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.q_linear = nn.Linear(embed_dim, embed_dim)
        self.k_linear = nn.Linear(embed_dim, embed_dim)
        self.v_linear = nn.Linear(embed_dim, embed_dim)
        self.out_linear = nn.Linear(embed_dim, embed_dim)

    def forward(self, x, mask=None):
        batch, length, embed = x.shape

        def heads(projected):
            return projected.reshape(batch, length, self.num_heads, self.head_dim).permute(0, 2, 1, 3)

        q, k, v = heads(self.q_linear(x)), heads(self.k_linear(x)), heads(self.v_linear(x))
        scores = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(self.head_dim)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        joined = torch.einsum("bhij,bhjd->bihd", weights, v).reshape(batch, length, embed)
        return self.out_linear(joined), weights


class NarrowHead(nn.Module):
    """One attention head of design 4: its own query, key and value maps, for input `(batch, length, width)`."""

    def __init__(self, embedding_dim: int, head_size: int, bias: bool):
        super().__init__()
        self.query_map = nn.Linear(embedding_dim, head_size, bias=bias)
        self.key_map = nn.Linear(embedding_dim, head_size, bias=bias)
        self.value_map = nn.Linear(embedding_dim, head_size, bias=bias)

    def forward(self, x):
        scores = torch.bmm(self.query_map(x), self.key_map(x).transpose(1, 2))
        return torch.bmm((scores / self.query_map.out_features**0.5).softmax(2), self.value_map(x))


class NarrowHeads(nn.Module):
    """Design 4: separate heads that share `attention_dim` equally, and a linear map back to `embedding_dim`."""

    def __init__(self, embedding_dim: int, attention_dim: int, num_heads: int, bias: bool):
        super().__init__()
        size = attention_dim // num_heads
        self.heads = nn.ModuleList(NarrowHead(embedding_dim, size, bias) for _ in range(num_heads))
        self.output = nn.Linear(attention_dim, embedding_dim, bias=bias)

    def forward(self, x):
        return self.output(torch.cat([head(x) for head in self.heads], dim=2))


# -- statistics ---------------------------------------------------------------------------------------------------


def statistics_of(
    weights, tokens=None, special=None, out=None, projection=None, first=0, real=None, scores=None, uncapped=None
) -> dict[str, float]:
    """Return every statistic of one head of one sequence by name, computed entry by entry from its definition.

    Query i has the position of key i + (keys - queries). A query whose weights are all 0 does not count; a key with
    weight exactly 0 is not visible. Statistics whose argument is missing are left out.

    Args:
        weights: attention weights, `(queries, keys)`.
        tokens: token id of each key, for "duplicate" and "induction".
        special: True for each key that is a special token.
        out: output of the head for each query, `(queries, value_dim)`, for the norms.
        projection: matrix `(value_dim, width)` that maps the output to the width of the model.
        first: index of the first key that is not padding.
        real: True for each key that is not padding; by default all are.
        scores: scores as they enter the softmax, `(queries, keys)`, for "max_logit".
        uncapped: scores before the softcap and without the bias, for "max_logit_uncapped".
    """
    rows = [list(map(float, row)) for row in weights]
    queries, keys = len(rows), len(rows[0])
    values: dict[str, list[float]] = {}

    def record(name, value):
        values.setdefault(name, []).append(value)

    for i, row in enumerate(rows):
        if sum(row) == 0:
            continue
        position = i + keys - queries
        entropy = -sum(a * math.log(a) for a in row if a > 0)
        visible = sum(a > 0 for a in row)
        record("entropy", entropy)
        if visible > 1:
            record("evenness", entropy / math.log(visible))
        record("confidence", max(row))
        record("distance", sum(a * abs(position - j) for j, a in enumerate(row)))
        for name, j in (("self", position), ("previous", position - 1), ("next", position + 1)):
            if 0 <= j < keys and (real is None or real[j]):
                record(name, row[j])
        record("first", row[first])
        if special is not None:
            record("confidence_content", max((a for j, a in enumerate(row) if not special[j]), default=0.0))
            record("special", sum(a for j, a in enumerate(row) if special[j]))
        if tokens is not None and position >= 0:
            is_token = [True] * keys if real is None else real
            copies = [j for j in range(position) if tokens[j] == tokens[position] and is_token[j]]
            if copies:
                record("duplicate", sum(row[j] for j in copies))
            after = [j + 1 for j in copies]
            if after:
                record("induction", sum(row[j] for j in after))
        if out is not None:
            record("output_norm", math.sqrt(sum(float(x) ** 2 for x in out[i])))
        if projection is not None:
            record("written_norm", math.sqrt(sum(float(x) ** 2 for x in out[i] @ projection)))
    statistics = {name: sum(of_rows) / len(of_rows) for name, of_rows in values.items()}
    columns = [[row[j] for row in rows if row[j] > 0] for j in range(keys)]
    most = max(map(len, columns))
    if most:
        statistics["received"] = max(
            sum(column) / len(column) for column in columns if column and 2 * len(column) >= most
        )
    for name, matrix in (("max_logit", scores), ("max_logit_uncapped", uncapped)):
        if matrix is not None and most:
            statistics[name] = max(float(matrix[i].max()) for i, row in enumerate(rows) if sum(row) > 0)
    return statistics
