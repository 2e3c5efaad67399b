"""Independent implementations to compare with. Nothing here imports headwise."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# -- attention ------------------------------------------------------------------------------------------------


@dataclass
class Plain:
    """What plain attention gives."""

    out: Tensor
    lse: Tensor
    weights: Tensor


def plain_attention(q, k, v, allowed=None, bias=None, scale=None, softcap=None, sinks=None, talking=None) -> Plain:
    """Attention as people write it, in the dtype of its inputs, key/value heads repeated.

    `allowed` is boolean and `bias` float, both of the full `(batch, heads, queries, keys)`; `scale` and `sinks`
    may be one number for each head; `talking` is a pair of matrices that mix heads.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    if isinstance(scale, Tensor):
        scale = scale.to(q.dtype)[:, None, None]
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if talking is not None:
        scores = (scores.movedim(1, -1) @ talking[0].to(scores.dtype).T).movedim(-1, 1)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if allowed is not None:
        scores = torch.where(allowed, scores, -torch.inf)
    keys = scores.shape[-1]
    if sinks is not None:  # one more key, with value 0
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    weights = torch.where(empty, 0.0, torch.softmax(torch.where(empty, 0.0, scores), -1))[..., :keys]
    if talking is not None:
        weights = (weights.movedim(1, -1) @ talking[1].to(scores.dtype).T).movedim(-1, 1)
    lse = torch.where(empty[..., 0], -torch.inf, torch.logsumexp(torch.where(empty, 0.0, scores), -1))
    return Plain(weights @ v, lse, weights)


def plain_errors(q, k, v, exact: Plain, allowed=None, bias=None, **options) -> dict[str, float]:
    """How far the plain implementation is from `exact`, the largest over eight orders of its sums.

    One order alone is sometimes right by luck, which says nothing about what rounding costs. For the same reason
    it is never credited with less than the half unit in the last place that storing the largest value may cost.
    """
    generator = torch.Generator().manual_seed(0)
    errors = {}
    for name in ("out", "lse", "weights"):
        values = getattr(exact, name)
        largest = values[values.isfinite()].abs().amax().item() if values.isfinite().any() else 0.0
        errors[name] = torch.finfo(q.dtype).eps / 2 * largest
    for order in range(8):
        keys = torch.randperm(k.shape[2], generator=generator) if order else torch.arange(k.shape[2])
        width = torch.randperm(k.shape[3], generator=generator) if order else torch.arange(k.shape[3])
        plain = plain_attention(
            q[..., width],
            k[:, :, keys][..., width],
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
    """The largest absolute difference; infinite where the infinities or NaNs differ."""
    finite = exact.isfinite()
    if not torch.equal(finite, got.isfinite()) or not torch.equal(exact[~finite], got[~finite].double()):
        return math.inf
    return (got[finite].double() - exact[finite]).abs().max().item() if finite.any() else 0.0


def within_budget(ours: Tensor, theirs: Tensor, exact: Tensor) -> None:
    """Another implementation computes the same, to a few roundings; and we are at most twice as far from exact as it.

    It is never credited with less than half a unit in the last place of its largest result.
    """
    eps, largest = torch.finfo(theirs.dtype).eps, exact.abs().max().item()
    error = distance(theirs, exact)
    assert error <= 32 * eps * largest, f"it computes something else: {error / eps / largest} roundings apart"
    budget = 2 * max(error, eps / 2 * largest)
    assert distance(ours, exact) <= budget, f"{distance(ours, exact)} beyond {budget}"


# -- the layer ------------------------------------------------------------------------------------------------


def rotated(x, positions, theta, width, interleaved):
    """Pairs of features as complex numbers, multiplied by e^(i position theta^(-2 pair / width))."""
    part, rest = x[..., :width], x[..., width:]
    angle = positions[:, None, :, None].double() * theta ** (-torch.arange(0, width, 2).double() / width)
    if interleaved:
        pairs = torch.complex(part[..., ::2], part[..., 1::2])
    else:
        pairs = torch.complex(part[..., : width // 2], part[..., width // 2 :])
    turned = pairs * torch.polar(torch.ones_like(angle), angle)
    part = torch.view_as_real(turned).flatten(-2) if interleaved else torch.cat([turned.real, turned.imag], dim=-1)
    return torch.cat([part, rest], dim=-1)


def alibi(heads, at_q, at_k):
    """Minus slope times distance, for a number of heads that is a power of two or not."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    slopes += [2 ** (-4 * (2 * h + 1) / power) for h in range(heads - power)]
    distance = (at_q[:, :, None] - at_k[:, None, :]).abs().double()
    return -torch.tensor(slopes, dtype=torch.float64)[None, :, None, None] * distance[:, None]


def bucketed(table, at_q, at_k, max_distance):
    """T5's bias, bucket by bucket, both directions."""
    half = table.shape[0] // 2
    exact = half // 2
    rows = []
    for queries, keys in zip(*torch.broadcast_tensors(at_q[:, :, None], at_k[:, None, :]), strict=True):
        buckets = torch.zeros(queries.shape, dtype=torch.long)
        for i, j in torch.cartesian_prod(torch.arange(queries.shape[0]), torch.arange(queries.shape[1])).tolist():
            step = int(keys[i, j] - queries[i, j])
            far = abs(step)
            if far >= exact:
                far = exact + math.floor(math.log(far / exact) / math.log(max_distance / exact) * (half - exact) + 1e-9)
            buckets[i, j] = min(far, half - 1) + (half if step > 0 else 0)
        rows.append(table[buckets].permute(2, 0, 1))
    return torch.stack(rows)


def normed(x, weight, bias, eps):
    """Root mean square where there is no bias, otherwise mean and variance."""
    if bias is None:
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight + bias


def plain_layer(parameters, x, context, values, at_q, at_k, *, heads, kv_heads, **options):
    """What `MultiHeadAttention` computes, from its parameters by name; returns the output and the weights.

    `at_q`, `at_k`: positions `(batch, length)`. Options: allowed, bias, scale, softcap, gate, rotary (theta, width,
    interleaved), alibi, max_distance, norm_over, eps.
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
    """The gradients of a random sum of `result`: of the input, and of every parameter by name."""
    torch.manual_seed(1)
    upstream = torch.randn(result.shape, dtype=result.dtype)
    names, parameters = zip(*module.named_parameters(), strict=True)
    first, *rest = torch.autograd.grad((result * upstream).sum(), [x, *parameters])
    return first, dict(zip(names, rest, strict=True))


# -- four published ways of writing multi-head attention ----------------------------------------------------------


class SingleHead(nn.Module):
    """One head with maps of its own on unbatched input."""

    def __init__(self, word_size: int, embed_dim: int, bias: bool):
        super().__init__()
        self.query = nn.Linear(word_size, embed_dim, bias=bias)
        self.key = nn.Linear(word_size, embed_dim, bias=bias)
        self.value = nn.Linear(word_size, embed_dim, bias=bias)

    def forward(self, x):
        q, k, v = self.query(x), self.key(x), self.value(x)
        return torch.softmax(q @ k.T / q.shape[-1] ** 0.5, -1) @ v


class ListOfHeads(nn.Module):
    """Design 1: a list of heads, outputs concatenated and multiplied by a bare matrix."""

    def __init__(self, word_size: int, embed_dim: int, n_head: int, bias: bool):
        super().__init__()
        self.heads = nn.ModuleList(SingleHead(word_size, embed_dim, bias) for _ in range(n_head))
        self.projection = nn.Parameter(torch.randn(embed_dim * n_head, embed_dim))

    def forward(self, x):
        return torch.cat([head(x) for head in self.heads], dim=-1) @ self.projection


class FourLinearMaps(nn.Module):
    """Designs 2 and 3: four square maps, reshaped to heads; the weights of every head are returned."""

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
    """One head of design 4, batch first."""

    def __init__(self, embedding_dim: int, head_size: int, bias: bool):
        super().__init__()
        self.query_map = nn.Linear(embedding_dim, head_size, bias=bias)
        self.key_map = nn.Linear(embedding_dim, head_size, bias=bias)
        self.value_map = nn.Linear(embedding_dim, head_size, bias=bias)

    def forward(self, x):
        scores = torch.bmm(self.query_map(x), self.key_map(x).transpose(1, 2))
        return torch.bmm((scores / self.query_map.out_features**0.5).softmax(2), self.value_map(x))


class NarrowHeads(nn.Module):
    """Design 4: heads that together are `attention_dim` wide, and a map back to `embedding_dim`."""

    def __init__(self, embedding_dim: int, attention_dim: int, num_heads: int, bias: bool):
        super().__init__()
        size = attention_dim // num_heads
        self.heads = nn.ModuleList(NarrowHead(embedding_dim, size, bias) for _ in range(num_heads))
        self.output = nn.Linear(attention_dim, embedding_dim, bias=bias)

    def forward(self, x):
        return self.output(torch.cat([head(x) for head in self.heads], dim=2))


# -- statistics ---------------------------------------------------------------------------------------------------


def statistics_of(
    weights, tokens=None, special=None, out=None, projection=None, first=0, real=None
) -> dict[str, float]:
    """Every statistic of one head by its definition, entry by entry, from a list of rows of weights.

    Query i stands at key i + (keys - queries). A row whose weights are all 0 does not count; a key with
    weight exactly 0 is out of sight. `real` are the keys that are no padding; all, unless given. `out` are the rows
    of its output, `projection` maps them to the model's width.
    """
    rows = [list(map(float, row)) for row in weights]
    queries, keys = len(rows), len(rows[0])
    values: dict[str, list[float]] = {}

    def note(name, value):
        values.setdefault(name, []).append(value)

    for i, row in enumerate(rows):
        if sum(row) == 0:
            continue
        p = i + keys - queries
        entropy = -sum(a * math.log(a) for a in row if a > 0)
        seen = sum(a > 0 for a in row)
        note("entropy", entropy)
        if seen > 1:
            note("evenness", entropy / math.log(seen))
        note("confidence", max(row))
        note("distance", sum(a * abs(p - j) for j, a in enumerate(row)))
        for name, j in (("self", p), ("previous", p - 1), ("next", p + 1)):
            if 0 <= j < keys and (real is None or real[j]):
                note(name, row[j])
        note("first", row[first])
        if special is not None:
            note("special", sum(a for j, a in enumerate(row) if special[j]))
        if tokens is not None and p >= 0:
            copies = [j for j in range(p) if tokens[j] == tokens[p]]
            if copies:
                note("duplicate", sum(row[j] for j in copies))
            after = [j for j in range(1, p + 1) if tokens[j - 1] == tokens[p]]
            if after:
                note("induction", sum(row[j] for j in after))
        if out is not None:
            note("output_norm", math.sqrt(sum(float(x) ** 2 for x in out[i])))
        if projection is not None:
            note("written_norm", math.sqrt(sum(float(x) ** 2 for x in out[i] @ projection)))
    found = {name: sum(of_rows) / len(of_rows) for name, of_rows in values.items()}
    columns = [[row[j] for row in rows if row[j] > 0] for j in range(keys)]
    most = max(map(len, columns))
    if most:
        found["received"] = max(sum(column) / len(column) for column in columns if column and 2 * len(column) >= most)
    return found
