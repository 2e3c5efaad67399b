"""Calls of torch's `varlen_attn` and `flex_attention` are observed and gated, against float64."""

import copy

import pytest
import torch
from engine_model import DIM, HEADS, KV_HEADS, WIDTH, EngineAttention, model_of, require_rows
from flash_attn_stand_in import flash_attn_varlen_func, one_sequence
from torch import nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

import headwise as hw
from headwise.intercept.adapters.engine import UnreadableCall
from headwise.intercept.adapters.torch_flex import over_block
from oracles import plain_attention, statistics_of

LENGTHS = (5, 1, 8)
CUMULATIVE = torch.tensor([0, 5, 6, 14], dtype=torch.int32)


@pytest.fixture
def varlen_on_cpu(monkeypatch):
    """Let torch's operator, which only runs on GPUs, compute on a CPU."""

    def operator(q, k, v, cu_q, cu_k, max_q, max_k, causal, scale, window, gqa, used=None, *_):
        out = flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, 0.0, scale, causal, tuple(window))
        return out, out.new_zeros(q.shape[1], len(q)), None

    monkeypatch.setattr(torch.ops.torch_attn, "_varlen_attn", operator)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0), (1, 2)])
@torch.no_grad()
def test_varlen_attn_is_observed(varlen_on_cpu, window):
    def attend(q, k, v):
        return varlen_attn(q, k, v, CUMULATIVE, CUMULATIVE, 8, 8, window_size=window, enable_gqa=True, scale=0.6)

    model, x = model_of(attend), torch.randn(14, WIDTH).double()
    plain = model(x)
    with hw.watch(model) as heads:
        assert torch.equal(model(x), plain)
    parts = zip(*(tensor.split(LENGTHS) for tensor in model[0].split(x)), strict=True)
    found = [one_sequence(*tensors, 0.0, 0.6, window == (-1, 0), window, 0.0) for tensors in parts]
    require_rows(heads, [each[1] for each in found], [each[0] for each in found])


class PackedLanguageModel(nn.Module):
    """One layer over packed sequences of token ids `(1, tokens)`."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, WIDTH)
        self.attention = EngineAttention(
            lambda q, k, v: varlen_attn(q, k, v, CUMULATIVE, CUMULATIVE, 8, 8, window_size=(-1, 0), enable_gqa=True)
        )

    def forward(self, input_ids):
        return self.attention(self.embed(input_ids)[0])


@torch.no_grad()
def test_packed_sequences_have_their_own_tokens(varlen_on_cpu):
    torch.manual_seed(4)
    model, ids = PackedLanguageModel().double(), torch.randint(7, (1, 14))
    with hw.watch(model, special={3}) as heads:
        model(ids)
    parts = zip(*(t.split(LENGTHS) for t in (*model.attention.split(model.embed(ids)[0]), ids[0])), strict=True)
    found = [(one_sequence(*tensors, 0.0, None, True, (-1, -1), 0.0)[1], tokens) for *tensors, tokens in parts]
    for head, row in enumerate(heads.rows()):
        values = [statistics_of(weights[head], tokens, tokens == 3) for weights, tokens in found]
        for name in set().union(*values):
            numbers = [each[name] for each in values if name in each]
            assert row[name] == pytest.approx(sum(numbers) / len(numbers), rel=1e-9), name
    assert {"duplicate", "induction", "special"} <= heads.rows()[0].keys()


# -- operators -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_overload", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"scale": 0.6}, {"attn_mask": torch.randn(9, 9).double()}]
)
@torch.no_grad()
def test_operators_are_observed_and_gated(options, has_overload):
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    operator = operator.default if has_overload else operator

    def attend(*tensors):
        return operator(*(tensor.transpose(1, 2) for tensor in tensors), **options)[0].transpose(1, 2)

    model, x = model_of(attend, kv_heads=HEADS), torch.randn(2, 9, WIDTH).double()
    other = copy.deepcopy(model)
    other[0].out_proj.weight[:, DIM : 2 * DIM] *= 0.3
    with hw.watch(model) as heads, hw.gate(model, {("0", 1): 0.3}):
        out = model(x)
    torch.testing.assert_close(out, other(x))
    q, k, v = (tensor.transpose(1, 2) for tensor in model[0].split(x))
    allowed = torch.ones(9, 9).tril().bool() if options.get("is_causal") else None
    plain = plain_attention(q, k, v, allowed, options.get("attn_mask"), options.get("scale"))
    require_rows(heads, list(plain.weights), list(plain.out.transpose(1, 2)))


@torch.no_grad()
def test_a_causal_operator_with_other_numbers_of_keys_is_named():
    def attend(*tensors):
        q, k, v = (tensor.transpose(1, 2) for tensor in tensors)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q[:, :, :4], k, v, is_causal=True)[
            0
        ].transpose(1, 2)

    model = model_of(attend, kv_heads=HEADS)
    with (
        pytest.raises(hw.errors.InputError, match="with is_causal and other numbers of queries than of keys"),
        hw.watch(model),
    ):
        model(torch.randn(2, 9, WIDTH).double())


# -- flex_attention --------------------------------------------------------------------------------------------------

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.9]).double()
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0, 0, 0, 0, 0, 0, 1, 1, 1]])


def causal(b, h, q, k):
    return q >= k


def causal_documents(b, h, q, k):
    return (q >= k) & (DOCUMENTS[b, q] == DOCUMENTS[b, k])


def other_window_in_each_head(b, h, q, k):
    return (q - k).abs() <= h


def alibi(score, b, h, q, k):
    return score - SLOPES[h] * (q - k).abs()


def softcap_then_causal(score, b, h, q, k):
    return torch.where(q >= k, 1.5 * torch.tanh(score / 1.5), -float("inf"))


def quadratic(score, b, h, q, k):
    return score * score.abs() * (h + 1)


def in_flex_layout(function, **options):
    def attend(q, k, v):
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        out = function(q, k, v, enable_gqa=True, **options)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return attend


def expected(model, x, mask_mod, score_mod, scale=None):
    """Return weights and outputs of each sequence, computed entry by entry."""
    q, k, v = (tensor.transpose(1, 2) for tensor in model[0].split(x))
    k, v = (tensor.repeat_interleave(HEADS // KV_HEADS, 1) for tensor in (k, v))
    scores = q @ k.mT * (DIM**-0.5 if scale is None else scale)
    for b, h, i, j in torch.cartesian_prod(*map(torch.arange, scores.shape)).tolist():
        at = [torch.tensor(index) for index in (b, h, i, j)]
        if score_mod is not None:
            scores[b, h, i, j] = score_mod(scores[b, h, i, j].clone(), *at)
        if mask_mod is not None and not mask_mod(*at):
            scores[b, h, i, j] = -torch.inf
    weights = scores.softmax(-1)
    return list(weights), list((weights @ v).transpose(1, 2))


FLEX = {
    "plain": (None, None),
    "causal": (causal, None),
    "documents": (causal_documents, None),
    "heads": (other_window_in_each_head, None),
    "alibi": (None, alibi),
    "alibi, causal": (causal, alibi),
    "softcap": (None, softcap_then_causal),
    "quadratic": (causal, quadratic),
}


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("name", FLEX)
@torch.no_grad()
def test_flex_attention_is_observed(name, is_compiled):
    mask_mod, score_mod = FLEX[name]
    function = torch.compile(flex_attention, backend="eager") if is_compiled else flex_attention
    block_mask = None if mask_mod is None else create_block_mask(mask_mod, 2, HEADS, 9, 9, device="cpu")
    model = model_of(in_flex_layout(function, score_mod=score_mod, block_mask=block_mask, scale=0.6))
    x = torch.randn(2, 9, WIDTH).double()
    plain = model(x)
    with hw.watch(model) as heads:
        assert torch.equal(model(x), plain)
    weights, outs = expected(model, x, mask_mod, score_mod, scale=0.6)
    if name == "documents":  # each query's document has its own first key
        for row in heads.rows():
            entropies = [torch.special.entr(each[row["head"]]).sum(-1).mean() for each in weights]
            assert row["entropy"] == pytest.approx(float(torch.stack(entropies).mean()), rel=1e-9)
        return
    require_rows(heads, weights, outs)
    assert {row["kind"] for row in heads.rows()} == {"self"}


@torch.no_grad()
def test_flex_attention_is_gated_and_keeps_its_further_results():
    model, x = model_of(in_flex_layout(flex_attention, score_mod=alibi)), torch.randn(2, 9, WIDTH).double()
    other = copy.deepcopy(model)
    other[0].out_proj.weight[:, DIM : 2 * DIM] *= 0.3
    with hw.gate(model, {("0", 1): 0.3}):
        out = model(x)
    torch.testing.assert_close(out, other(x))

    class WithLse(nn.Module):
        def forward(self, q):
            return flex_attention(q, q, q, return_lse=True)

    q = torch.randn(2, HEADS, 9, DIM).double()
    module = WithLse()
    with pytest.warns(FutureWarning, match="return_lse"):
        plain = module(q)
    with hw.gate(nn.Sequential(module), {("0", 1): 0.0}):
        out, lse = module(q)
    assert torch.equal(lse, plain[1])
    assert torch.equal(out[:, 0], plain[0][:, 0])
    assert not out[:, 1].any()


def with_log_sums(use):
    """Return attention in which `use` is a function of the output and of the log-sum-exp of the scores."""

    def attend(q, k, v):
        tensors = (tensor.transpose(1, 2) for tensor in (q, k, v))
        out, aux = flex_attention(*tensors, enable_gqa=True, return_aux=AuxRequest(lse=True))
        return use(out, aux.lse.unsqueeze(-1)).transpose(1, 2)

    return attend


def merged(out, log_sums):
    """Merge the output with a second one, of which the log-sum-exp is 0."""
    total = torch.logaddexp(log_sums, torch.zeros_like(log_sums))
    return out * (log_sums - total).exp() + 0.5 * (-total).exp()


@pytest.mark.parametrize("use", [lambda out, log_sums: out * (log_sums - 0.3).sigmoid(), merged])
@torch.no_grad()
def test_outputs_that_are_scaled_by_the_log_sum_exp_are_named(use):
    model, x = model_of(with_log_sums(use)), torch.randn(2, 9, WIDTH).double()
    sentence = "multiplies its outputs with a function of the log-sum-exp"
    with pytest.raises(hw.errors.InputError, match=sentence), hw.watch(model):
        model(x)
    with pytest.raises(hw.errors.InputError, match=sentence), hw.gate(model, {("0", 1): 0.0}):
        model(x)


@torch.no_grad()
def test_a_log_sum_exp_that_scales_no_output_changes_no_statistic():
    plain, losses = model_of(in_flex_layout(flex_attention)), []
    model, x = copy.deepcopy(plain), torch.randn(2, 9, WIDTH).double()
    model[0].attend = with_log_sums(lambda out, log_sums: (losses.append(log_sums.square().mean()), out)[1])
    rows = []
    for each in (plain, model):
        with hw.watch(each) as heads:
            each(x)
        rows.append(heads.rows())
    assert rows[0] == rows[1]
    assert len(losses) == 1


@torch.no_grad()
def test_a_larger_compiled_function_is_named_in_every_context():
    @torch.compile(backend="eager", fullgraph=True)
    def larger(q, k, v):
        return flex_attention(q * 1.5, k, v, enable_gqa=True)

    model, x = model_of(None), torch.randn(2, 9, WIDTH).double()
    model[0].attend = lambda *tensors: larger(*(each.transpose(1, 2) for each in tensors)).transpose(1, 2)
    plain = model(x)
    for _ in range(2):
        sentence = "by flex_attention inside of a function that torch.compile compiles cannot be read"
        with pytest.raises(hw.errors.InputError, match=sentence), hw.watch(model):
            assert torch.equal(model(x), plain)
    assert torch.equal(model(x), plain)


def branching(score, b, h, q, k):
    return score if bool(q > k) else score * 2


def test_flex_functions_that_cannot_be_evaluated_are_named():
    indices = [torch.arange(size) for size in (1, 1, 2, 2)]
    with pytest.raises(UnreadableCall, match="with branching, which cannot be evaluated for a block"):
        over_block(branching, *indices, scores=torch.zeros(1, 1, 2, 2))


@torch.no_grad()
def test_a_block_mask_that_leaves_out_blocks_is_named():
    listed = torch.ones(1, 1, 3, dtype=torch.int32), torch.zeros(1, 1, 3, 3, dtype=torch.int32)
    pruned = BlockMask.from_kv_blocks(*listed, BLOCK_SIZE=(3, 3), mask_mod=causal)
    model, x = model_of(in_flex_layout(flex_attention, block_mask=pruned)), torch.randn(2, 9, WIDTH).double()
    sentence = "by flex_attention with a block_mask that leaves out blocks which its mask_mod allows"
    with pytest.raises(hw.errors.InputError, match=sentence), hw.watch(model):
        model(x)


LISTED = torch.tensor([[[1, 2, 3]]]).int(), torch.arange(3).int().expand(1, 1, 3, 3)
"""Blocks of 3 tokens that a causal mask allows."""


def of_sequence(b, h, q, k):
    return (q >= k) | (b == 1)


def of_head(b, h, q, k):
    return (q >= k) | (h > 2)


@pytest.mark.parametrize("rule", [of_sequence, of_head])
@torch.no_grad()
def test_a_block_mask_for_the_first_sequence_or_head_alone_is_named(rule):
    pruned = BlockMask.from_kv_blocks(*LISTED, BLOCK_SIZE=(3, 3), mask_mod=rule)
    model, x = model_of(in_flex_layout(flex_attention, block_mask=pruned)), torch.randn(2, 9, WIDTH).double()
    sentence = "by flex_attention with a block_mask that leaves out blocks which its mask_mod allows"
    with pytest.raises(hw.errors.InputError, match=sentence), hw.watch(model):
        model(x)


@torch.no_grad()
def test_full_blocks_in_which_the_rule_hides_keys_are_named():
    """A kernel does not mask keys of full blocks."""
    none = torch.zeros_like(LISTED[0]), LISTED[1]
    full = BlockMask.from_kv_blocks(*none, *LISTED, BLOCK_SIZE=(3, 3), mask_mod=causal)
    model, x = model_of(in_flex_layout(flex_attention, block_mask=full)), torch.randn(2, 9, WIDTH).double()
    sentence = "by flex_attention with a block_mask that lists blocks as full in which its mask_mod hides keys"
    with pytest.raises(hw.errors.InputError, match=sentence), hw.watch(model):
        model(x)


@torch.no_grad()
def test_full_blocks_in_which_the_rule_hides_nothing_are_read():
    diagonal = torch.ones(1, 1, 3).int(), torch.tensor([[[[0, 1, 2], [1, 0, 2], [2, 0, 1]]]]).int()
    before = torch.tensor([[[0, 1, 2]]]).int(), torch.arange(3).int().expand(1, 1, 3, 3)
    blocks = BlockMask.from_kv_blocks(*diagonal, *before, BLOCK_SIZE=(3, 3), mask_mod=causal)
    model, x = model_of(in_flex_layout(flex_attention, block_mask=blocks)), torch.randn(2, 9, WIDTH).double()
    with hw.watch(model) as heads:
        model(x)
    assert [row["next"] for row in heads.rows()] == [0.0] * HEADS


def test_the_reference_agrees_with_the_plain_attention_of_other_tests():
    q, k, v = (torch.randn(7, heads, DIM).double() for heads in (HEADS, KV_HEADS, KV_HEADS))
    out, weights = one_sequence(q, k, v, 0.0, None, False, (-1, -1), 0.0)
    plain = plain_attention(*(tensor.transpose(0, 1)[None] for tensor in (q, k, v)))
    torch.testing.assert_close(weights, plain.weights[0])
    torch.testing.assert_close(out.transpose(0, 1), plain.out[0])
