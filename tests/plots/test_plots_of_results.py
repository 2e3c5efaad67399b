"""Every result has a method `plot` with the same arguments, and a short `repr`."""

import dataclasses
import inspect
import math

import pytest
import torch

import headwise as hw
import tiny
from headwise.analysis.ablation_result import HeadSet, SetAblation
from headwise.analysis.compare import Comparison
from headwise.analysis.profile import ProfiledHead
from headwise.analysis.view_result import View
from headwise.intercept.heads import Heads
from headwise.intercept.model_name import model_name, short_name
from headwise.runs.rows import HeadRow, MeanEstimate, Row

METADATA = {"model": {"name": "hub/a-model"}, "measured": {"sequences": 7}}


def labels_of(layer: int, head: int) -> dict:
    """Return the fields that identify a head."""
    return {"layer": layer, "head": head, "kv_head": head, "module": f"layers.{layer}", "kind": "self"}


def profile_of(shift: float = 0.0) -> hw.Profile:
    """Return a profile of 2 layers of 3 heads."""
    rows = tuple(
        ProfiledHead(
            **labels_of(layer, head),
            role=("mixed", "induction", "broad")[head],
            statistics={
                "entropy": MeanEstimate(layer + head / 8 + shift, 0.25, 7, 6),
                "distance": MeanEstimate(4.0 * layer - head - shift, 0.5, 7, 6),
                "duplicate": MeanEstimate(math.nan, math.nan, 0, 0),
            },
        )
        for layer in range(2)
        for head in range(3)
    )
    return hw.Profile(rows, METADATA)


def table_of(table_type: type, values: dict[str, list[float]]):
    """Return a table of heads of one layer with these values of statistics, each with a standard error of 0.5."""
    rows = [
        HeadRow(
            **labels_of(0, head),
            statistics={name: MeanEstimate(numbers[head], 0.5, 7, 6) for name, numbers in values.items()},
        )
        for head in range(len(next(iter(values.values()))))
    ]
    return table_type(tuple(rows), METADATA)


@pytest.fixture(scope="module")
def heads() -> Heads:
    """Heads of a tiny decoder that read two sequences, the second of them with padding."""
    model = tiny.model("decoder", top="ForCausalLM")
    ids = tiny.TOKENS[:2]
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    with hw.watch(model, detail=hw.WeightCapture(rows=range(ids.shape[1]))) as watched:
        model(input_ids=ids, attention_mask=mask)
    return watched


def test_a_profile_draws_its_statistics():
    profile = profile_of()
    axes = profile.plot()
    assert axes.get_title() == "entropy, a-model"
    assert axes.images[0].get_array().tolist() == [[0.0, 0.125, 0.25], [1.0, 1.125, 1.25]]
    meaning = "Mean entropy of the attention weights of a\nquery"
    assert axes.figure.axes[1].get_ylabel() == f"entropy (nats)\n{meaning}"
    assert profile.plot("distance").images[0].get_cmap().name == "RdBu_r"  # it has negative numbers
    ranking = profile.plot("distance", kind="ranking", errors=1.0)
    assert ranking.containers[0].lines[0].get_ydata().tolist() == [4.0, 3.0, 2.0, 0.0, -1.0, -2.0]
    segments = [segment[:, 1].tolist() for segment in ranking.containers[0].lines[2][0].get_segments()]
    assert segments[0] == [3.5, 4.5]
    distance = "distance (tokens)\nMean distance between a query and the keys\nthat it attends to"
    assert ranking.get_ylabel() == f"{distance}\nbars: ±1 standard error"
    scatter = profile.plot(kind="scatter", top=1)
    assert (scatter.get_xlabel(), scatter.get_ylabel()) == (f"entropy (nats)\n{meaning}", distance)
    points = {tuple(point) for drawn in scatter.collections for point in drawn.get_offsets().tolist()}
    assert points == {(layer + head / 8, 4.0 * layer - head) for layer in range(2) for head in range(3)}
    assert [text.get_text() for text in scatter.texts] == ["1.0"]
    other = profile.plot("entropy", kind="scatter", against="distance")
    assert (other.get_xlabel(), other.get_ylabel()) == (distance, f"entropy (nats)\n{meaning}")
    for kind in ("roles", "role_counts"):
        legend = [text.get_text() for text in profile.plot(kind=kind).get_legend().get_texts()]
        assert sorted(legend) == ["broad (2)", "induction (2)", "mixed (2)"]


def test_effects_are_drawn_around_0():
    ablation = table_of(hw.Ablation, {"loss": [3.0, 4.0], "cost": [0.0, 1.0]})
    assert ablation.plot().get_title() == "cost, a-model"
    assert ablation.plot().images[0].get_clim() == (-1.0, 1.0)
    assert ablation.plot("loss").images[0].get_clim() == (3.0, 4.0)
    importance = table_of(hw.Importance, {"gradient": [1.0, 2.0], "first_order_per_layer": [1.0, 2.0]})
    assert importance.plot().images[0].get_cmap().name == "cividis"
    assert importance.plot("first_order_per_layer").images[0].get_clim() == (-2.0, 2.0)
    label = importance.plot("first_order_per_layer").figure.axes[1].get_ylabel().split("\n")
    assert (label[0], label[-1]) == ("first order per layer", "the l2 norm of its layer")
    for table_type, name in ((hw.Patching, "recovered"), (hw.Attribution, "logit")):
        assert table_of(table_type, {name: [0.5, 1.0]}).plot().images[0].get_clim() == (-1.0, 1.0)


def test_sets_of_heads_are_ranked():
    rows = tuple(
        HeadSet(name=f"layer {layer}", heads=["0.1"], statistics={"cost": MeanEstimate(layer / 4, 0.5, 7, 6)})
        for layer in range(3)
    )
    table = SetAblation(rows, METADATA)
    axes = table.plot()
    assert [label.get_text() for label in axes.get_xticklabels()] == ["layer 2", "layer 1", "layer 0"]
    assert axes.get_title() == "cost of 3 sets, a-model"
    assert repr(table) == "SetAblation(3 sets of a-model, 1 statistic over 7 examples)"
    assert repr(rows[2]) == "HeadSet('layer 2', 1 head, cost 0.5)"
    with pytest.raises(hw.InputError, match="^statistic: expected one of cost, got 'loss'$"):
        table.plot("loss")
    with pytest.raises(hw.InputError, match="^heads: expected at least one set of heads to plot, got none$"):
        SetAblation((), METADATA).plot()


def test_a_comparison_draws_differences():
    comparison = hw.compare(profile_of(), profile_of(0.5))
    axes = comparison.plot()
    assert axes.images[0].get_array().tolist() == [[0.5] * 3] * 2
    assert axes.images[0].get_clim() == (-0.5, 0.5)
    assert axes.figure.axes[1].get_ylabel() == "entropy, b minus a (nats)"
    ranking = comparison.plot("distance", kind="ranking", errors=2.0)
    segments = ranking.containers[0].lines[2][0].get_segments()
    expected = (-0.5 - 2 * math.hypot(0.5, 0.5), -0.5 + 2 * math.hypot(0.5, 0.5))
    assert segments[0][:, 1].tolist() == pytest.approx(expected)
    scatter = comparison.plot("distance", kind="scatter")
    points = {tuple(point) for drawn in scatter.collections for point in drawn.get_offsets().tolist()}
    assert points == {(4.0 * layer - head, 4.0 * layer - head - 0.5) for layer in range(2) for head in range(3)}
    assert (scatter.get_xlabel(), scatter.get_ylabel()) == ("distance (tokens) in a", "distance (tokens) in b")
    with pytest.raises(hw.InputError, match="^kind: expected one of heatmap, ranking, scatter, got 'roles'"):
        comparison.plot(kind="roles")


def test_watched_heads_are_drawn(heads):
    rows = heads.rows()
    image = heads.plot().images[0].get_array()
    assert {(row["layer"], row["head"]): row["entropy"] for row in rows} == {
        (row["layer"], row["head"]): image[row["layer"], row["head"]] for row in rows
    }
    scatter = heads.plot(kind="scatter")
    assert scatter.collections[0].get_offsets().tolist() == [[row["entropy"], row["distance"]] for row in rows]
    bars = heads.plot(kind="ranking").containers[0].lines[2][0].get_segments()
    moments = heads.records[0].statistics["entropy"]
    lengths = [segment[1, 1] - segment[0, 1] for segment in bars]
    assert any(length == pytest.approx(2 * 1.96 * moments.standard_error[0].item()) for length in lengths)


@pytest.mark.usefixtures("as_user")
def test_received_attention_is_the_mean_over_rows_that_see_the_key(heads):
    received, length = heads.received(), tiny.TOKENS.shape[1]
    records = heads.records
    for record, details in zip(records, heads.details.values(), strict=True):
        for head in range(record.heads):
            weights = details.rows[:, head].double()  # (sequences, queries, keys)
            of_sequences = []
            for sequence, real in enumerate((length, length - 2)):
                means = [weights[sequence, key:real, key].mean() if key < real else math.nan for key in range(length)]
                of_sequences.append(torch.tensor(means, dtype=torch.float64))
            expected = torch.stack(of_sequences).nanmean(0)
            actual = received[heads.layers[records.index(record)], head]
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)
    axes = heads.plot(kind="received", heads=[(1, 0), (0, 1)])
    assert [line.get_label() for line in axes.lines] == ["1.0", "0.1"]
    assert axes.lines[0].get_ydata().tolist() == received[1, 0].tolist()
    assert len(heads.plot(kind="received").lines) == len(received)
    for wrong, sentence in (
        ([(0, 99)], r"each a \(layer, head\) with received attention, got \(0, 99\)"),
        ("0.1", r"a collection of heads \(layer, head\), got '0.1'"),
        ([3], r"a collection of \(layer, head\), got 3"),
    ):
        with pytest.raises(hw.InputError, match=f"^heads: expected {sentence}$"):
            heads.plot(kind="received", heads=wrong)


def test_heads_without_received_attention_are_refused(heads):
    merged = Heads(tiny.model("decoder", top="ForCausalLM"))
    merged.on_module_call("")
    merged.merge(heads.records)
    assert merged.received() == {}
    with pytest.raises(hw.InputError, match="^kind: expected modules with the statistic received, got none$"):
        merged.plot(kind="received")


def test_a_view_draws_words(coffee):
    chosen = coffee.head(5, 11)
    pattern = coffee.plot(kind="pattern", heads=[(5, 11)])
    assert torch.equal(torch.from_numpy(pattern.images[0].get_array().data).float(), chosen.picture)
    assert pattern.get_title() == "5.11  mixed"
    words = [word.text for word in coffee.words]
    assert [label.get_text() for label in pattern.get_xticklabels()] == words
    axes = coffee.plot(kind="lines", heads=[(0, 2), (1, 8)])
    assert [text.get_text() for text in axes.texts if "." in text.get_text() and len(text.get_text()) > 2] == [
        "0.2  previous token",
        "1.8  next token",
    ]
    received = coffee.plot(kind="received", heads=[(0, 2)]).lines[0].get_ydata().tolist()
    # Each word is one token here, and attends to all words.
    assert received == pytest.approx(coffee.head(0, 2).picture.mean(0).tolist(), abs=1e-6)
    assert len(coffee.plot(kind="role_counts").containers) == len({head.role for head in coffee.heads})
    assert coffee.plot("confidence").images[0].get_array()[0, 2] == coffee.head(0, 2).means["confidence"]
    assert coffee.plot(kind="scatter").get_legend() is not None
    assert (
        coffee.plot(kind="ranking").get_ylabel().splitlines()[0] == "entropy (nats)"
    )  # one text has no standard errors


@pytest.mark.parametrize("name", ["minilm", pytest.param("smollm2", marks=pytest.mark.slow)])
def test_received_attention_of_words_is_that_of_their_tokens(name, request):
    text, loaded = "Unbelievable antidisestablishmentarianism happened", request.getfixturevalue(name)
    seen = hw.view(loaded.model, loaded.tokenizer, text)
    assert len(seen.words) < seen.tokens
    with hw.watch(loaded.model) as watched:
        loaded.model(**loaded.tokenizer(text, return_tensors="pt"))
    for place, of_tokens in watched.received().items():
        of_words = seen.head(*place).received
        torch.testing.assert_close(of_words.sum(), of_tokens.sum(), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(of_words[-1], of_tokens[-1], rtol=1e-4, atol=1e-6)  # a word of one token


def test_a_view_refuses_heads_by_name(coffee):
    for options, sentence in (
        ({"kind": "pattern"}, r"heads: expected a collection of (layer, head), got none; such as heads=[(0, 2)]"),
        (
            {"kind": "pattern", "heads": [(0, 2), (0, 3)]},
            "heads: expected one head for the kind 'pattern', got 2; ax= draws each on axes of its own",
        ),
        ({"kind": "lines", "heads": [(9, 2)]}, "heads: expected each a (layer, head) of this view, got (9, 2)"),
        ({"heads": [(0, 2)]}, "heads: expected None for the kind 'heatmap', got [(0, 2)]; the kinds pattern, lines, "),
        ({"statistic": "entropy", "kind": "roles"}, "statistic: expected None for the kind 'roles', got 'entropy'; "),
    ):
        with pytest.raises(hw.InputError) as caught:
            coffee.plot(**options)
        assert str(caught.value).startswith(sentence)


KINDS = "kind: expected one of heatmap, ranking, scatter, roles, role_counts"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"statistic": "cost"}, "statistic: expected one of entropy, distance, duplicate, got 'cost'"),
        ({"statistic": 3}, "statistic: expected one of entropy, distance, duplicate, got 3"),
        ({"kind": "pie"}, f"{KINDS}, got 'pie'"),
        ({"kind": None}, f"{KINDS}, got None"),
        ({"kind": "received"}, f"{KINDS}, got 'received'; hw.watch(...) and hw.view(...) have received attention"),
        (
            {"against": "entropy"},
            "against: expected None for the kind 'heatmap', got 'entropy'; the kinds scatter have it",
        ),
        (
            {"kind": "scatter", "against": "volume"},
            "against: expected one of entropy, distance, duplicate, got 'volume'",
        ),
        ({"kind": "ranking", "top": -1}, "top: expected a whole number of 0 or more, got -1"),
        ({"kind": "ranking", "errors": -1.0}, "errors: expected a number of standard errors, 0 or more, got -1.0"),
        ({"kind": "ranking", "errors": "1"}, "errors: expected a finite number, got '1'"),
        (
            {"statistic": "duplicate"},
            "statistic: expected a statistic with a finite number for at least one head, "
            "got 'duplicate', NaN or infinite for all 6; "
            "a mean over no row is NaN, such as one over repeated words of a text without any",
        ),
        ({"ax": 5}, "ax: expected matplotlib axes, got int; figure.subplots() returns axes"),
    ],
)
@pytest.mark.usefixtures("as_user")
def test_wrong_arguments_are_refused_by_name(options, sentence):
    with pytest.raises(hw.InputError) as caught:
        profile_of().plot(**options)
    assert str(caught.value) == sentence


def test_tables_without_heads_and_without_roles_are_refused():
    with pytest.raises(hw.InputError, match="^heads: expected at least one head to plot, got none$"):
        hw.Ablation((), METADATA).plot()
    for kind in ("roles", "role_counts"):
        with pytest.raises(hw.InputError, match=r"have roles$"):
            table_of(hw.Ablation, {"cost": [1.0]}).plot(kind=kind)


def test_a_missing_matplotlib_is_one_sentence(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    sentence = r'^a plot needs the package matplotlib, which is not installed; pip install "headwise\[plot\]"$'
    with pytest.raises(hw.MissingExtra, match=sentence):
        profile_of().plot()


RESULTS = (
    *(hw.Profile, hw.Ablation, hw.Importance, hw.Patching, hw.Attribution, SetAblation, Comparison, Heads, View),
    *(hw.Study, hw.Redundancy, hw.Composition, hw.CircuitScores),
)


@pytest.mark.parametrize("result", RESULTS)
def test_every_plot_takes_a_statistic_and_keywords(result):
    parameters = list(inspect.signature(inspect.unwrap(result.plot)).parameters.values())[1:]
    assert parameters[0].name == "statistic"
    assert {parameter.kind for parameter in parameters[1:]} == {inspect.Parameter.KEYWORD_ONLY}
    assert parameters[-1].name == "ax"


def test_results_have_short_names(heads, coffee):
    profile = profile_of()
    assert repr(profile) == "Profile(6 heads of a-model, 3 statistics over 7 sequences)"
    assert repr(profile.head(1, 1)) == "ProfiledHead(1.1, induction, entropy 1.125, distance 3, duplicate \N{EN DASH})"
    many = dataclasses.replace(profile.rows[0], statistics=dict.fromkeys("abcde", MeanEstimate(0.0, 0.0, 1, 0)))
    assert repr(many) == "ProfiledHead(0.0, mixed, 5 statistics)"
    assert repr(table_of(hw.Ablation, {"cost": [1.0]}).rows[0]) == "HeadRow(0.0, cost 1)"
    assert repr(hw.Ablation((), {})) == "Ablation(0 heads, 0 statistics over 0 examples)"
    comparison = hw.compare(profile, profile_of(0.5))
    assert repr(comparison) == "Comparison(6 heads of a-model, 3 statistics, 0 changed roles)"
    assert repr(comparison.differences[0]) == "Difference(0.0, entropy +0.5, +1.41 standard errors)"
    records = heads.records
    number = sum(record.heads for record in records)
    names = {name for record in records for name in record.statistics}
    assert repr(heads) == f"Heads({number} heads of LlamaForCausalLM, {len(names)} statistics over 2 sequences)"
    assert repr(Heads(torch.nn.Linear(2, 3))) == "Heads(no attention of Linear was observed yet)"
    text = "'Which do you like better, coffee or tea?'"
    assert repr(coffee) == f"View(72 heads of all-MiniLM-L6-v2, 12 words: {text})"
    assert repr(coffee.head(0, 2)) == "HeadView(0.2, previous token, entropy 0.00084)"
    long_text = dataclasses.replace(coffee.texts[0], text="a\nb" * 100)
    shortened = repr(dataclasses.replace(coffee, texts=(long_text,)))
    assert len(shortened) < 120
    assert shortened.endswith("…')")
    agreement = hw.agreement(
        table_of(hw.Importance, {"gradient": [1.0, 2.0]}), table_of(hw.Ablation, {"cost": [1.0, 3.0]})
    )
    assert repr(agreement) == "Agreement(2 heads, gradient predicts cost, Pearson 1.000)"


def test_a_row_of_another_unit_has_its_fields():
    @dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
    class Pair(Row):
        a: int
        b: str

    assert repr(Pair(a=3, b="x", statistics={"cka": MeanEstimate(0.5, 0.0, 1, 0)})) == "Pair(a=3, b='x', cka 0.5)"


@pytest.mark.parametrize(
    ("name", "short"),
    [("org/model", "model"), ("/a/folder/", "folder"), ("C:\\models\\one", "one"), ("model", "model"), ("", "")],
)
def test_short_names_of_models_have_no_folders(name, short):
    assert short_name(name) == short


def test_a_model_is_named_by_its_hub_id_folder_or_class(minilm, tmp_path):
    assert model_name(minilm.model) == "all-MiniLM-L6-v2"  # it comes from a package
    model = tiny.model("encoder")
    model.config.name_or_path = "org/model"
    assert model_name(model) == "model"
    assert model_name(torch.nn.Linear(2, 3)) == "Linear"
    (tmp_path / "checkpoint-500").mkdir()
    model.config.name_or_path = str(tmp_path / "checkpoint-500")
    assert model_name(model) == "checkpoint-500"
    model.config.name_or_path = ""
    assert model_name(model) == type(model).__name__
