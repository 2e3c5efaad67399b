"""A monitored training has the bits of the same training without a monitor, and the statistics of the oracle."""

import copy
import math

import pytest
import torch
from trained_models import BATCH, decoder, token_batches, train

import headwise as hw
import tiny
from headwise.intercept.session import Session
from headwise.monitoring.alarms import AlarmLimits
from headwise.monitoring.monitor import monitor
from oracles import plain_attention, statistics_of

KINDS = {
    "plain": {},
    "accumulation": {"micro": 3},
    "checkpointing": {},
    "reentrant checkpointing": {},
    "bfloat16 autocast": {"autocast": True},
    "dropout": {},
}


@pytest.mark.parametrize(
    ("implementation", "steps", "every"),
    [
        ("sdpa", 5, 3),
        ("eager", 5, 1),
        pytest.param("sdpa", 50, 7, marks=pytest.mark.slow),
        pytest.param("eager", 50, 7, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_have_the_bits_of_those_without_a_monitor(kind, implementation, steps, every):
    model = decoder(implementation, **({"attention_dropout": 0.2} if kind == "dropout" else {}))
    if "checkpointing" in kind:
        model.gradient_checkpointing_enable({"use_reentrant": kind.startswith("reentrant")})
        model.enable_input_require_grads()
    other, results = copy.deepcopy(model), []
    for trained, options in ((model, {}), (other, {"every": every})):
        torch.manual_seed(5)
        results.append(train(trained, token_batches(steps), **KINDS[kind], **options))
    assert all(torch.equal(one, two) for one, two in zip(results[0][0], results[1][0], strict=True))
    history = results[1][1].history
    assert history.steps == list(range(0, steps, every))
    assert {row["sequences"] for row in history.rows()} == {BATCH}
    assert len(history.rows(0)) == 12


def test_a_compiled_model_runs_without_compilation_in_observed_steps():
    model = decoder()
    other = copy.deepcopy(model)
    plain, _ = train(model, token_batches(4))
    observed, run = train(other, token_batches(4), call=torch.compile(other, backend="aot_eager"), every=2)
    for one, two in zip(plain, observed, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-5)
    assert run.history.steps == [0, 2]
    assert run.history.rows(2)[0]["sequences"] == BATCH


def test_no_hook_or_patch_is_there_between_observed_steps():
    model, functions = decoder(), (torch.nn.functional.scaled_dot_product_attention, torch.softmax)
    hooked = []

    def look(number):
        hooks = sum(len(each._forward_pre_hooks) + len(each._forward_hooks) for each in model.modules())
        patched = (torch.nn.functional.scaled_dot_product_attention, torch.softmax) != functions
        hooked.append((hooks > 0, patched, bool(Session.interceptions)))

    train(model, token_batches(5), after_step=look, every=3)
    before_step_3 = (True, True, True)
    assert hooked == [(False, False, False)] * 2 + [before_step_3] + [(False, False, False)] * 2


def test_statistics_equal_those_of_the_oracle():
    """A model in float64, whose weights and outputs are computed from their formula."""
    model, (ids,) = decoder().double(), token_batches(1)
    of_weights = ("entropy", "evenness", "confidence", "distance", "first", "previous", "received")
    names = ("max_logit", "output_norm", *of_weights)
    _, run = train(copy.deepcopy(model), [ids], every=1, statistics=names)
    expected = _expected(model, ids)
    for row in run.history.rows():
        of_sequences = expected[row["layer"]][row["head"]]
        for name in names:
            values = [each[name] for each in of_sequences]
            value = max(values) if name == "max_logit" else sum(values) / len(values)
            assert row[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


def _expected(model, ids):
    """Return the oracle's statistics of each sequence, by layer and head."""
    calls = []

    def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
        visible = torch.ones(q.shape[2], k.shape[2]).tril().bool() if is_causal else attn_mask
        calls.append(plain_attention(q, k, v, visible, scale=scale))
        return calls[-1].out

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
        model(ids)
    return [
        [
            [statistics_of(call.weights[b, h], out=call.out[b, h], scores=call.scores[b, h]) for b in range(len(ids))]
            for h in range(call.weights.shape[1])
        ]
        for call in calls
    ]


def test_evaluation_between_steps_does_not_count():
    model, (first, second) = decoder(), token_batches(2)
    run = monitor(model, every=1)
    with run:
        model(input_ids=first, labels=first).loss.backward()
        model.eval()
        with torch.no_grad():
            model(input_ids=second)
        model.train()
        run.step()
    assert {row["sequences"] for row in run.history.rows()} == {BATCH}


def test_modules_in_evaluation_mode_are_left_out_without_a_warning():
    """As the frozen part of a model: its attention is seen and does not count."""
    model, (ids,) = decoder(), token_batches(1)
    model.model.layers[0].eval()
    with monitor(model, every=1) as run:
        model(input_ids=ids)
        run.step()
        model.eval()(input_ids=ids)
        with pytest.raises(
            hw.InputError, match="got none, since the model did not run in this mode; call monitor.step"
        ):
            run.step()
    assert {row["layer"] for row in run.history.rows()} == {1}


def test_modules_whose_attention_is_not_seen_are_named():
    class UnseenAttention(torch.nn.Linear):
        pass

    model = torch.nn.Sequential(UnseenAttention(3, 3))
    refused = pytest.raises(hw.InputError, match=r"in a way that can be seen, got none in 0$")
    with monitor(model, every=1) as run:
        model(torch.ones(3))
        with pytest.warns(UserWarning, match="of these modules was not seen: 0$"), refused:
            run.step()


def test_further_passes_are_not_observed_after_enough_sequences():
    _, run = train(decoder(), token_batches(1, batch=8), micro=4, every=1, sequences=3)
    assert {row["sequences"] for row in run.history.rows()} == {4}


class _InChunks(torch.nn.Module):
    """Attention module that attends with a few queries at a time."""

    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(12, 36)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        attend = torch.nn.functional.scaled_dot_product_attention
        return torch.cat([attend(part, k, v) for part in q.split(3, 2)], 2).transpose(1, 2).flatten(2)


@pytest.mark.filterwarnings("ignore:positions of queries")
@pytest.mark.parametrize("sequences", [1, 2, 3])
def test_a_pass_that_began_is_observed_to_its_end(sequences):
    torch.manual_seed(0)
    model, x = _InChunks().double().train(), torch.randn(2, 7, 12, dtype=torch.float64)
    q, k, _ = model.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
    weights = (q @ k.mT / 2).softmax(-1)
    expected = -(weights * weights.log()).sum(-1).mean((0, 2))
    with monitor(model, every=1, sequences=sequences, statistics=["entropy"]) as run:
        for _ in range(3):
            model(x)
        run.step()
    assert {row["sequences"] for row in run.history.rows()} == {4 if sequences == 3 else 2}
    assert [row["entropy"] for row in run.history.rows()] == pytest.approx(expected.tolist(), rel=1e-12)


def test_only_the_chosen_layers_are_recorded():
    _, run = train(decoder(), token_batches(1), every=1, layers=[1])
    assert {row["layer"] for row in run.history.rows()} == {1}
    with pytest.raises(hw.InputError, match=r"^layers: expected some of \[0, 1\], got \[7\]$"):
        train(decoder(), token_batches(1), every=1, layers=[7])


def test_several_models_are_monitored_at_once():
    one, two = decoder(), decoder(num_hidden_layers=3)
    with monitor(one, every=1) as of_one, monitor(two, every=2) as of_two:
        for ids in token_batches(3):
            (one(input_ids=ids, labels=ids).loss + two(input_ids=ids, labels=ids).loss).backward()
            of_one.step()
            of_two.step()
    assert (of_one.history.steps, of_two.history.steps) == ([0, 1, 2], [0, 2])
    assert (len(of_one.history.rows(0)), len(of_two.history.rows(0))) == (12, 18)


def test_observed_steps_of_several_models_overlap_in_any_order():
    """The stance of the compiler is shared by all models: it is restored by the last of the monitors."""
    one, two = decoder(), decoder()
    calls = []
    compiled = torch.compile(torch.nn.Linear(2, 2), backend=lambda graph, _: calls.append(1) or graph.forward)
    with monitor(one, every=2) as of_one, monitor(two, every=1) as of_two:
        for ids in token_batches(2):
            one(input_ids=ids)
            two(input_ids=ids)
            of_one.step()
            compiled(torch.ones(2))
            of_two.step()
    assert not calls
    compiled(torch.ones(2))
    assert calls == [1]


def test_a_monitor_that_is_not_entered_is_refused():
    run = monitor(decoder(), every=1)
    with pytest.raises(hw.InputError, match=r"^monitor: expected one that is entered as a context manager"):
        run.step()
    with run, pytest.raises(hw.InputError, match=r"^monitor: expected one that is not entered yet, got one that is in"):
        run.__enter__()
    with pytest.raises(hw.InputError, match=r"call monitor.step\(\) within `with hw.monitor\(...\) as monitor:`$"):
        run.step()
    assert not Session.interceptions


def test_steps_are_counted_after_an_error():
    model, (ids,) = decoder(), token_batches(1)
    with monitor(model, every=1) as run:
        with pytest.raises(hw.InputError, match="since the model did not run"):
            run.step()
        model(input_ids=ids)
        run.step()
    assert run.history.steps == [1]


def test_nothing_stays_after_an_error():
    model = decoder()
    with pytest.raises(ZeroDivisionError), monitor(model, every=1):
        raise ZeroDivisionError
    assert not any(each._forward_pre_hooks or each._forward_hooks for each in model.modules())
    assert torch.compiler.is_compiling() is False
    compiled = torch.compile(torch.nn.Linear(2, 2), backend="eager", fullgraph=True)
    compiled(torch.ones(2))


REFUSED = {
    "every": ({"every": 0}, r"^every: expected a whole number of 1 or more, got 0"),
    "statistics": ({"statistics": ["heat"]}, r"^statistics: expected names among .*, got 'heat'$"),
    "no statistics": ({"statistics": []}, r"^statistics: expected at least one name, got none$"),
    "sequences": ({"sequences": 0}, r"^sequences: expected a whole number of 1 or more, got 0"),
    "alarms": ({"alarms": 3}, r"^alarms: expected headwise.AlarmLimits or None, got int$"),
    "start": ({"start": -1}, r"^start: expected a whole number of 0 or more, got -1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_arguments_are_refused(case):
    options, message = REFUSED[case]
    with pytest.raises(hw.InputError, match=message):
        monitor(decoder(), **options)


def test_a_model_without_visible_attention_is_refused():
    model = torch.nn.Linear(3, 3)
    with monitor(model, every=1) as run:
        model(torch.ones(3))
        with pytest.raises(hw.InputError, match=r"in a way that can be seen, got none in Linear$"):
            run.step()
    with monitor(model, every=1) as run, pytest.raises(hw.InputError, match="since the model did not run"):
        run.step()


# -- alarms -----------------------------------------------------------------------------------------------------------


def test_heads_outside_of_the_limits_cause_alarms():
    model = decoder()
    attention = model.model.layers[1].self_attn
    with torch.no_grad():
        attention.q_proj.weight[20:30] *= 1e4  # head 2
        attention.o_proj.weight.zero_()
        model.model.layers[0].self_attn.v_proj.weight[:10] = 0.0  # the first group of three heads
    received = []
    run = monitor(model, every=1, alarms=AlarmLimits(max_logit=50.0, entropy=0.2), on_alarm=received.append)
    train(model, token_batches(1), run=run)
    kinds = {(alarm.kind, alarm.layer, alarm.head) for alarm in run.alarms}
    assert {("high logit", 1, 2), ("dead head", 0, 0), ("dead head", 0, 1), ("dead head", 0, 2)} <= kinds
    assert {alarm.head for alarm in run.alarms if alarm.kind == "high logit"} == {2}
    assert received == run.alarms
    high = next(alarm for alarm in run.alarms if alarm.kind == "high logit")
    assert (high.statistic, high.limit, high.module) == ("max_logit", 50.0, "model.layers.1.self_attn")
    assert high.value == next(r["max_logit"] for r in run.history.rows() if (r["layer"], r["head"]) == (1, 2))


def test_non_finite_attention_causes_an_alarm():
    model = decoder()
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0] = math.nan
    _, run = train(model, token_batches(1), every=1)
    assert {(alarm.kind, alarm.layer) for alarm in run.alarms} == {("non-finite", 1)}


def test_norms_are_compared_with_those_of_the_same_kind_of_attention():
    of_self = {"step": 0, "layer": 0, "module": "", "kind": "self", "nonfinite_rows": 0, "output_norm": 1e6}
    of_cross = {**of_self, "kind": "cross", "output_norm": 1.0}
    rows = [{**row, "head": head} for row in (of_self, of_cross) for head in range(3)]
    assert not list(AlarmLimits().alarms(rows))
    rows[-1]["output_norm"] = 1.1e-3
    assert not list(AlarmLimits().alarms(rows))
    rows[-1]["output_norm"] = 0.9e-3
    assert [(alarm.kind, alarm.head) for alarm in AlarmLimits().alarms(rows)] == [("dead head", 2)]


def test_the_limits_of_alarms_are_positive():
    with pytest.raises(hw.InputError, match=r"^max_logit: expected a finite number above 0"):
        AlarmLimits(max_logit=-1.0)
    assert not list(
        AlarmLimits(None, None, None).alarms([{"step": 0, "layer": 0, "head": 0, "module": "", "nonfinite_rows": 0}])
    )


def test_a_softcap_has_two_largest_logits():
    model = tiny.family("gemma2, softcap", "eager").train()
    ids = torch.randint(5, 90, (2, 9))
    with monitor(model, every=1) as run:
        model(input_ids=ids)
        run.step()
    cap = model.config.attn_logit_softcapping
    for row in run.history.rows():
        assert row["max_logit"] == pytest.approx(cap * math.tanh(row["max_logit_uncapped"] / cap), rel=1e-5)
