"""Ablation effects, compared with gates that are set one by one; interrupted runs that resume."""

import copy
import sys

import pytest
import torch

import headwise as hw
import tiny
from headwise.cli import app as cli
from headwise.data.batches import NumberedBatches
from headwise.runs import checkpoint
from jackknife import jackknife

pytestmark = pytest.mark.usefixtures("as_user")

TEXTS = tiny.texts(11, 5, 11, 2)
"""Four sequences; in batches of at most 2 sequences of one length they make 3 batches."""


def texts(**options):
    return hw.Texts(TEXTS, tiny.tokenizer("decoder"), **{"batch": 2} | options)


def causal():
    return tiny.model("decoder", top="ForCausalLM").double()


@torch.no_grad()
def by_hand(model, loss, values):
    """Return the loss of each sequence of the data with gates; of the unchanged model without any."""
    found = []
    for batch in texts():
        if values:
            with hw.gate(model, values):
                found += loss(model, batch).tolist()
        else:
            found += loss(model, batch).tolist()
    return found


def same(measured, values):
    assert measured == pytest.approx(jackknife(values), abs=1e-12)


def test_costs_of_single_heads_are_those_of_gates():
    model = causal()
    found = hw.ablate(model, texts(), hw.next_token_loss)
    whole = by_hand(model, hw.next_token_loss, {})
    same(found.baseline, whole)
    assert [(row.layer, row.head, row.kv_head) for row in found.rows] == [
        (n, h, h // 3) for n in (0, 1) for h in range(6)
    ]
    assert {row.module for row in found.rows} == {"model.layers.0.self_attn", "model.layers.1.self_attn"}
    for row in found.rows:
        without = by_hand(model, hw.next_token_loss, {(row.layer, row.head): 0.0})
        same(row.statistics["loss"], without)
        same(row.statistics["cost"], [a - b for a, b in zip(without, whole, strict=True)])
    summaries, tests = ["cost_median", "cost_trimmed", "cost_outliers"], ["cost_p", "cost_q"]
    assert list(found.table()) == ["layer", "head", "kv_head", "module", "kind", "cost", "loss", *summaries, *tests]


REPLACEMENTS = {
    "a half": lambda: 0.5,
    "one": lambda: 1.0,
    "uniform": hw.replacements.uniform,
    "mean": lambda: hw.replacements.mean(texts()),
}


@pytest.mark.parametrize("replacement", REPLACEMENTS)
def test_replacements_of_ablated_heads(replacement):
    model = causal()
    heads = {"0.1": (0, 1), "1.4": (1, 4)}
    units = {name: [head] for name, head in heads.items()}
    found = hw.ablate(model, texts(), hw.next_token_loss, replacement=REPLACEMENTS[replacement](), units=units)
    whole = by_hand(model, hw.next_token_loss, {})
    for row, (name, head) in zip(found.rows, heads.items(), strict=True):
        assert row.name == name
        without = by_hand(model, hw.next_token_loss, {head: REPLACEMENTS[replacement]()})
        same(row.statistics["cost"], [a - b for a, b in zip(without, whole, strict=True)])
    if replacement == "one":
        assert all(row.statistics["cost"].value == 0.0 for row in found.rows)


def test_layers_groups_and_sets():
    model, whole = causal(), by_hand(causal(), hw.next_token_loss, {})

    def costs(values):
        return [a - b for a, b in zip(by_hand(model, hw.next_token_loss, values), whole, strict=True)]

    layers = hw.ablate(model, texts(), hw.next_token_loss, units="layers")
    assert [row.name for row in layers.rows] == ["layer 0", "layer 1"]
    same(layers.rows[1].statistics["cost"], costs({1: 0.0}))
    groups = hw.ablate(model, texts(), hw.next_token_loss, units="groups")
    assert [row.name for row in groups.rows] == ["group 0.0", "group 0.1", "group 1.0", "group 1.1"]
    assert groups.rows[1].heads == ["0.3", "0.4", "0.5"]
    same(groups.rows[2].statistics["cost"], costs({(1, 0): 0.0, (1, 1): 0.0, (1, 2): 0.0}))
    sets = hw.ablate(model, texts(), hw.next_token_loss, units={"a": [(1, 5)], "b": [(1, 0), (0, 3)]})
    same(sets.rows[1].statistics["cost"], costs({(0, 3): 0.0, (1, 0): 0.0}))


def test_a_loss_is_prepared_on_the_unchanged_model():
    model = tiny.model("encoder").double()
    data = hw.Texts(TEXTS, tiny.tokenizer("encoder"), batch=2)
    found = hw.ablate(model, data, hw.EmbeddingDistance())
    assert abs(found.baseline.value) < 1e-12
    loss, wanted = hw.EmbeddingDistance(), []
    with torch.no_grad():
        for batch in data:
            loss.prepare(model, batch)
            with hw.gate(model, {(1, 3): 0.0}):
                wanted += loss(model, batch).tolist()
    same(found.head(1, 3).statistics["cost"], wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_distance_of_embeddings_is_one_in_every_dtype_and_has_no_tests(dtype):
    model = tiny.model("encoder").to(dtype)
    data = hw.Texts(TEXTS, tiny.tokenizer("encoder"), batch=2)
    found = hw.ablate(model, data, hw.EmbeddingDistance())
    assert found.is_distance
    assert not found.tests()
    assert list(found.table())[-4:] == ["loss", "cost_median", "cost_trimmed", "cost_outliers"]

    def embeddings():
        hidden = [model(**batch).last_hidden_state.double().mean(1) for batch in data]
        return torch.nn.functional.normalize(torch.cat(hidden), dim=-1)

    with torch.no_grad():
        whole = embeddings()
        with hw.gate(model, {(1, 3): 0.0}):
            distances = 1 - (whole * embeddings()).sum(-1)
    assert found.head(1, 3).statistics["cost"].value == pytest.approx(float(distances.mean()), abs=1e-6)


def test_examples_without_a_loss_in_the_unchanged_model_count_in_no_mean():
    model, batch = tiny.model("decoder").double(), {"input_ids": torch.randint(5, 97, (5, 7))}

    def value(model, batch):
        return model(**batch).last_hidden_state.sin().mean((1, 2))

    with torch.no_grad():
        whole = value(model, batch)
        with hw.gate(model, {(1, 2): 0.0}):
            without = value(model, batch)

    def loss(model, batch):
        values = value(model, batch)
        return values.masked_fill((values == whole) & (torch.arange(5) == 3), torch.nan)

    found = hw.ablate(model, [batch], loss).head(1, 2).statistics
    is_counted = torch.arange(5) != 3
    same(found["loss"], without[is_counted].tolist())
    same(found["cost"], (without - whole)[is_counted].tolist())


def test_self_and_cross_attention_of_a_layer_are_separate_sites():
    import transformers

    sizes = {"d_model": 24, "d_kv": 4, "num_heads": 6, "num_layers": 2, "d_ff": 37, "vocab_size": 97}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).double().eval()
    batch = {"input_ids": torch.randint(5, 97, (3, 11)), "decoder_input_ids": torch.randint(5, 97, (3, 7))}

    def loss(model, batch):
        return model(**batch).logits.square().mean((1, 2))

    found = hw.ablate(model, [batch], loss)
    assert [row.kind for row in found.rows][::6] == ["self", "self", "self", "cross", "self", "cross"]
    with torch.no_grad():
        whole = loss(model, batch)
        for row in found.rows[::5]:
            with hw.gate(model, {(row.module, row.head): 0.0}):
                same(row.statistics["cost"], (loss(model, batch) - whole).tolist())


def test_layers_below_the_ablated_head_are_computed_once():
    model, ran = causal(), []
    for number, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, number=number: ran.append(number))
    hw.ablate(model, texts(limit=1), hw.next_token_loss)
    # The survey, the unchanged model and three runs of the check compute both layers. The other runs of the check, and
    # the ablations, compute both in layer 0, and in layer 1 that layer alone.
    assert (ran.count(0), ran.count(1)) == (5 + 1 + 6, 5 + 2 + 12)


# -- interrupted runs -------------------------------------------------------------------------------------------------


class Stopped(Exception):
    pass


def stops_after(runs):
    calls = []

    def next_token_loss(model, batch):
        calls.append(None)
        if len(calls) > runs:
            raise Stopped
        return hw.next_token_loss(model, batch)

    return next_token_loss, calls


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The bytes of the table of an ablation that was not interrupted."""
    out = tmp_path_factory.mktemp("uninterrupted")
    hw.ablate(causal(), texts(), stops_after(1000)[0], out=out)
    return (out / "ablation.parquet").read_bytes()


@pytest.mark.parametrize(
    "runs", [0, 19, *(pytest.param(runs, marks=pytest.mark.slow) for runs in (1, 2, 6, 7, 12, 18, 20, 25, 44))]
)
def test_an_interrupted_run_resumes_to_the_same_bits(runs, uninterrupted, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr("os.fsync", lambda file: None)  # 39 checkpoints wait for the disk otherwise
    model, out = causal(), tmp_path / "out"
    with pytest.raises(Stopped):
        hw.ablate(model, texts(), stops_after(runs)[0], out=out)
    loss, calls = stops_after(1000)
    hw.ablate(model, texts(), loss, out=out)
    check = 5  # runs on the first batch that check if layer outputs can be reused
    # The survey, the unchanged model of the batch and the check run again.
    remaining = 3 * 13 - max(runs - 2 - check, 0)
    assert remaining <= len(calls) <= remaining + 3 + check
    assert (out / "ablation.parquet").read_bytes() == uninterrupted
    assert {path.name for path in out.iterdir()} == {"ablation.parquet"}


def test_a_run_resumes_only_with_the_same_arguments_and_data(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "CHECKPOINT_SECONDS", 0.0)
    model = causal()
    with pytest.raises(Stopped):
        hw.ablate(model, texts(), stops_after(25)[0], out=tmp_path)
    changed = {
        "settings.loss differs": {"loss": hw.MaskedTokenLoss(1)},
        "settings.replacement differs": {"replacement": hw.replacements.uniform()},
        "settings.units differs": {"units": "layers"},
        "data.limit differs": {"dataset": texts(limit=3)},
    }
    for differs, options in changed.items():
        given = {"model": model, "dataset": texts(), "loss": stops_after(99)[0], **options}
        with pytest.raises(hw.InputError, match=f"out: expected a folder of its own.*{differs}.*force=True"):
            hw.ablate(**given, out=tmp_path)
    other = hw.Texts([*TEXTS[::-1]], tiny.tokenizer("decoder"), batch=2)
    with pytest.raises(hw.InputError, match="data differs"):
        hw.ablate(model, other, stops_after(99)[0], out=tmp_path)
    hw.ablate(model, other, stops_after(99)[0], out=tmp_path, force=True)
    with pytest.raises(hw.InputError, match="data differs"):
        hw.ablate(model, texts(), stops_after(99)[0], out=tmp_path)


def test_the_data_of_a_replacement_the_options_of_a_loss_and_documents_distinguish_runs(tmp_path):
    model, loss = tiny.model("decoder", top="ForCausalLM"), hw.next_token_loss
    batches = [torch.randint(1, 40, (2, 6), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    pairs = {
        "replacement_data": [{"replacement": hw.replacements.mean(batches[:count])} for count in (1, 2)],
        "replacement_data.digest": [{"replacement": hw.replacements.resample(batches[index])} for index in (0, 1)],
        "loss_options.share": [{"loss": hw.MaskedTokenLoss(1, share=share)} for share in (0.2, 0.5)],
        "data": [{"dataset": NumberedBatches(tensors(batches), numbers)} for numbers in ([0] * 6, [*range(6)])],
    }
    for index, (differs, (one, other)) in enumerate(pairs.items()):
        given, out = {"dataset": batches, "loss": loss, "units": "layers"}, tmp_path / str(index)
        for _ in range(2):
            hw.ablate(model, **given | one, out=out)
        with pytest.raises(hw.InputError, match=f"settings.{differs}.* differs|{differs}.* differs"):
            hw.ablate(model, **given | other, out=out)


class SelfAndCross(torch.nn.Module):
    """Model whose self- and cross-attention have the same weights: in one module, or in two copies of it."""

    def __init__(self, copies: int, name: str):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.embedding, layer, self.top = (
                torch.nn.Embedding(40, 12),
                hw.MultiHeadAttention(12, 3),
                torch.nn.Linear(12, 7),
            )
        self.layers = torch.nn.ModuleDict({f"{name}[{i}]": copy.deepcopy(layer) for i in range(copies)})

    def forward(self, input_ids, context):
        first, *_, last = [*self.layers.values()] * 2
        x = self.embedding(input_ids)
        x = x + first(x)
        return self.top(x + last(x, self.embedding(context)))


@pytest.mark.parametrize("units", ["heads", {"a": [(0, 1)], "b": [(1, 1)], "both": [(0, 1), (1, 1)]}], ids=str)
def test_self_and_cross_attention_of_one_module_are_ablated_apart(units):
    batches = [{"input_ids": torch.randint(1, 40, (2, 7)), "context": torch.randint(1, 40, (2, 5))}]
    of_one, of_two = (
        hw.ablate(SelfAndCross(copies, "attention").eval(), batches, squares, units=units) for copies in (1, 2)
    )
    costs, expected = ([row.statistics["cost"].value for row in table.rows] for table in (of_one, of_two))
    assert costs == pytest.approx(expected, abs=1e-6)
    assert len(set(costs)) == len(costs)
    assert 0.0 not in costs


def squares(model, batch):
    """Return the mean square of a model's output, for each example."""
    return model(**batch).square().mean((1, 2))


def tensors(batches):
    """Return batches as mappings of the model's arguments."""
    return [{"input_ids": batch} for batch in batches]


@pytest.mark.parametrize("runs", [9, 11, 16])
def test_sets_of_heads_resume_in_another_order(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "CHECKPOINT_SECONDS", 0.0)
    model, sets = causal(), {"a": [(0, 0)], "b": [(0, 1), (1, 0)], "c": [(1, 1)]}
    with pytest.raises(Stopped):
        hw.ablate(model, texts(), stops_after(runs)[0], units=sets, out=tmp_path)
    reversed_sets = dict(reversed(sets.items()))
    resumed = hw.ablate(model, texts(), stops_after(1000)[0], units=reversed_sets, out=tmp_path)
    at_once = hw.ablate(model, texts(), stops_after(1000)[0], units=sets)
    assert {row.name: row for row in resumed.rows} == {row.name: row for row in at_once.rows}


def test_it_joins_with_a_profile(tmp_path):
    import pandas

    model = causal()
    hw.ablate(model, texts(), hw.next_token_loss, out=tmp_path)
    hw.profile(model, texts(), out=tmp_path)
    found = [pandas.read_parquet(tmp_path / f"{name}.parquet") for name in ("profile", "ablation")]
    joined = found[0].merge(found[1], on=["layer", "head"], validate="one_to_one")
    assert len(joined) == 12
    assert (joined.module_x == joined.module_y).all()


# -- what is refused --------------------------------------------------------------------------------------------------


def test_arguments_that_are_refused(as_user):
    model, loss = causal(), hw.next_token_loss
    refused = {
        "model: expected a torch module, got str": lambda: hw.ablate("m", texts(), loss),
        "out: expected the path of a folder, got 5": lambda: hw.ablate(model, texts(), loss, out=5),
        "replacement: expected a number, or one of .*, got 'x'": lambda: hw.ablate(
            model, texts(), loss, replacement="x"
        ),
        "loss: expected a function of model and batch, .*, got 5": lambda: hw.ablate(model, texts(), 5),
        r"units: expected a collection of heads \(layer, head\), got 5": lambda: hw.ablate(
            model, texts(), loss, units={"a": 5}
        ),
        r"units: expected heads \(layer, head\), got 5": lambda: hw.ablate(model, texts(), loss, units={"a": [5]}),
        r"units: expected heads \(layer, head\), got \(0, \[1\]\)": lambda: hw.ablate(
            model, texts(), loss, units={"a": [(0, [1])]}
        ),
        "dataset: expected at least one batch, got none": lambda: hw.ablate(model, [], loss),
        "dataset: expected batches: tensors": lambda: hw.ablate(model, ["a text"], loss),
        "units: expected one of heads, layers, groups, or sets of heads by name, got 'all'": lambda: hw.ablate(
            model, texts(), loss, units="all"
        ),
        r"units: expected heads \(layer, head\) of this model in 'a', got \(0, 6\)": lambda: hw.ablate(
            model, texts(), loss, units={"a": [(0, 6)]}
        ),
        "units: expected heads in 'a', got none": lambda: hw.ablate(model, texts(), loss, units={"a": []}),
        r"loss: expected one number per example, .* of shape \(2,\), got torch.float64 of shape": lambda: hw.ablate(
            model, texts(), lambda model, batch: loss(model, batch).mean()
        ),
        r"loss: expected one number per example, a float tensor of shape \(2,\), got NoneType": lambda: hw.ablate(
            model, texts(), lambda model, batch: model(**batch) and None
        ),
        "model: expected attention in a way that can be seen, got none in Linear": lambda: hw.ablate(
            torch.nn.Linear(3, 1), [torch.randn(2, 3)], lambda model, batch: model(batch[""])[:, 0]
        ),
    }
    for sentence, call in refused.items():
        with pytest.raises(hw.InputError, match=sentence):
            call()


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def headwise(monkeypatch, capsys, tmp_path):
    """Return a function that runs the command line in this process on a tiny causal model: status, output, errors."""
    causal().float().save_pretrained(tmp_path / "model")
    tiny.tokenizer("decoder").save_pretrained(tmp_path / "model")
    (tmp_path / "data.txt").write_text("\n".join(TEXTS))

    def run(*arguments):
        common = ("--data", tmp_path / "data.txt", "--model", tmp_path / "model", "--out", tmp_path / "out")
        monkeypatch.setattr(sys, "argv", ["headwise", *map(str, (*arguments, *common))])
        status = cli.run()
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def test_the_command(headwise, tmp_path):
    status, printed, _ = headwise("ablate", "--top", "5")
    assert status == 0
    found = hw.Ablation.load(tmp_path / "out")
    assert len(found.rows) == 12
    lines = printed.splitlines()
    assert lines[1].startswith(f"loss: next_token_loss, {found.baseline.value:.4f}")
    first = max(found.rows, key=lambda row: row.statistics["cost"].value)
    assert lines[4].split()[:2] == [first.name, f"{first.statistics['cost'].value:.4f}"]
    assert "and 7 more" in printed
    assert "of 12, removed one at a time," in printed


def test_the_command_for_importance(headwise, tmp_path):
    status, printed, _ = headwise("importance", "--top", "5", "--normalise")
    assert status == 0
    found = hw.Importance.load(tmp_path / "out")
    assert found.statistics == ("gradient_per_layer", "first_order_per_layer")
    lines = printed.splitlines()
    assert lines[1] == "importance by gradient of next_token_loss, normalised in each layer"
    layer, head = found.ranking()[0]
    assert lines[4].split()[:2] == [
        f"{layer}.{head}",
        f"{found.head(layer, head).statistics['gradient_per_layer'].value:.4f}",
    ]
