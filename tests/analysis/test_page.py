"""Pages from several results: which heads, numbers, roles and texts they have."""

import dataclasses

import pytest
import torch

import headwise as hw
import tiny
from headwise.analysis.page import page_contents
from headwise.analysis.view_result import ViewSet


@pytest.fixture(scope="module")
def texts():
    """Sentences of a tiny vocabulary."""
    return tiny.texts(5, 9, 12, 7)


@pytest.fixture(scope="module")
def encoder(texts):
    """A tiny encoder with its view, profile and ablation."""
    model, tokenizer = tiny.model("encoder"), tiny.tokenizer("encoder")
    data = hw.Texts(texts, tokenizer)
    seen = hw.view(model, tokenizer, texts, title="tiny")
    return model, tokenizer, seen, hw.profile(model, data, title="tiny"), hw.ablate(model, data, hw.EmbeddingDistance())


def test_numbers_of_all_results_stand_side_by_side(encoder):
    _, _, seen, profile, ablation = encoder
    contents = page_contents([seen, profile, ablation])
    assert [head.name for head in contents.models[0].heads] == [f"{x}.{y}" for x in range(2) for y in range(6)]
    columns = {(each.source, each.name): row for row, each in enumerate(contents.statistics)}
    assert {source for source, _ in columns} == {"4 texts", "profile", "ablation"}
    for index, head in enumerate(profile.heads):
        for table, name in ((profile, "entropy"), (ablation, "cost")):
            row = columns[table.NAME, name]
            found = [part[row, index].item() for part in contents.models[0].estimates]
            assert found == pytest.approx(table.head(head.layer, head.head).statistics[name][:3])
        assert contents.models[0].heads[index].role == head.role  # the profile's
    assert contents.notes == ("Roles are those of the profile, not of the texts on this page.",)
    assert contents.statistics[columns["profile", "entropy"]].unit == "nats"
    assert all(each.meaning for each in contents.statistics)
    assert torch.isnan(contents.passages[0].means[0][columns["ablation", "cost"]]).all()


def test_heads_are_joined_by_layer_and_not_by_place(encoder):
    _, _, seen, profile, _ = encoder
    shuffled = dataclasses.replace(profile, rows=profile.rows[::-1])
    contents, expected = (page_contents([seen, each]) for each in (shuffled, profile))
    assert torch.equal(contents.models[0].estimates.means.nan_to_num(), expected.models[0].estimates.means.nan_to_num())


def test_a_model_with_a_language_model_head_has_the_heads_of_the_model_in_it(texts):
    model, tokenizer = tiny.model("decoder", top="ForCausalLM"), tiny.tokenizer("decoder")
    data = hw.Texts(texts, tokenizer)
    contents = page_contents([hw.view(model.model, tokenizer, texts[0]), hw.ablate(model, data, hw.next_token_loss)])
    assert {each.source for each in contents.statistics} == {"this text", "ablation"}


def test_two_models_are_compared(encoder, texts):
    _, tokenizer, seen, *_ = encoder
    other = hw.view(tiny.model("encoder", seed=1), tokenizer, texts, title="other")
    contents = page_contents([seen], against=[other])
    assert [model.name for model in contents.models] == ["tiny", "other"]
    assert contents.title == "tiny and other"
    assert [len(passage.heads) for passage in contents.passages] == [2] * 4
    row = [each.name for each in contents.statistics].index("entropy")
    for model, views in zip(contents.models, (seen, other), strict=True):
        expected = [views.estimate("entropy", index).value for index in range(12)]
        assert model.estimates.means[row].tolist() == pytest.approx(expected)
    same = page_contents([seen], against=[seen])
    assert [model.name for model in same.models] == ["tiny (A)", "tiny (B)"]


@pytest.mark.usefixtures("as_user")
def test_results_that_do_not_fit_are_named(encoder, texts, tmp_path):
    _, tokenizer, seen, profile, ablation = encoder
    decoder = hw.view(tiny.model("decoder"), tiny.tokenizer("decoder"), texts[0], title="decoder")
    decoder = dataclasses.replace(decoder, identity=None)  # as of a result of an earlier version
    another = tiny.model("encoder", seed=1)
    other = hw.view(another, tokenizer, texts, title="other")
    of_other = hw.profile(another, hw.Texts(texts, tokenizer), title="other")
    fewer = dataclasses.replace(profile, rows=profile.rows[1:])
    for results, options, message in (
        ([], {}, "^results: expected at least one view or table of heads, got none"),
        ([3], {}, "^results: expected views, profiles, .* got int"),
        ([[decoder]], {}, "^results: expected views, .* got list; unpack it"),
        ([profile, profile], {}, "^results: expected one table of each kind, got profile, profile"),
        (
            [seen, fewer],
            {},
            r"^results: expected numbers of head 0.0 \(self attention .*, got none in the profile of",
        ),
        ([decoder, profile], {}, "^results: expected numbers of head 0.0 .* got none in the profile of tiny"),
        (
            [seen],
            {"against": [seen.select(layers=[0])]},
            "^against: expected the same heads as the 12 heads of tiny",
        ),
        (
            [seen[0]],
            {"against": [seen[1]]},
            "^against: expected views of the same tokens, got other tokens; view",
        ),
        ([profile], {"against": [ablation]}, "^against: expected results with some of the same statistics, got none"),
        (
            [seen],
            {"foci": [seen[0].find([1])]},
            "^foci: expected foci of the texts of the page, got a focus of other texts",
        ),
        (
            [seen[0].select([0])],
            {"foci": [seen[0].find([1])]},
            "^foci: expected foci of the heads of the page, got a foc",
        ),
        ([seen], {"foci": ["w5"]}, "^foci: expected results of find, got str"),
        ([seen], {"against": seen[0]}, "^against: expected "),
        (
            [seen[0], other[1]],
            {},
            "^results: expected results of one model, as the view of tiny, got the view of other;",
        ),
        (
            [seen, of_other],
            {},
            "^results: expected results of one model, as the view of tiny, got the profile of other;",
        ),
    ):
        with pytest.raises(hw.InputError, match=message):
            hw.write_page(tmp_path / "page.html", *results, **options)
    assert not list(tmp_path.iterdir())


def test_a_focus_of_selected_heads_keeps_its_head(encoder):
    _, _, seen, *_ = encoder
    focus = seen[0].select([1], [3]).find([1, 2])
    (shown,) = page_contents([seen[0]], foci=[focus]).foci
    assert [page_contents([seen[0]]).models[0].heads[score.head].name for score in shown.scores] == ["1.3"]


def test_a_page_that_cannot_be_written_is_refused(encoder, tmp_path):
    with pytest.raises(hw.InputError, match="^path: expected a file in an existing, writable folder, got "):
        hw.write_page(tmp_path / "no" / "page.html", encoder[2])


def test_views_of_the_same_kind_become_the_texts_of_a_page(encoder):
    _, _, seen, *_ = encoder
    contents = page_contents([seen[0], seen[1]])
    assert [passage.title for passage in contents.passages] == [seen[0].text, seen[1].text]
    assert contents.statistics[0].source == "2 texts"


def test_a_table_alone_and_watched_heads_are_pages(encoder, texts):
    model, tokenizer, _, profile, _ = encoder
    with hw.watch(model) as heads:
        model(**tokenizer(texts, return_tensors="pt", padding=True))
    contents = page_contents([heads, profile])
    assert contents.passages == ()
    row = [(each.source, each.name) for each in contents.statistics].index(("watched calls", "entropy"))
    means = contents.models[0].estimates
    assert means.means[row].tolist() == pytest.approx([row["entropy"] for row in heads.rows()])
    assert means.counts[row].tolist() == [4] * 12


def test_results_show_themselves_in_notebooks(encoder, coffee):
    model, tokenizer, seen, profile, ablation = encoder
    with hw.watch(model) as heads:
        model(**tokenizer("w5 w6", return_tensors="pt"))
    for result in (heads, profile, ablation, seen, seen[0], hw.compare(profile, profile), coffee):
        html = result._repr_html_()
        assert html.startswith("<table>")
        assert html.count("<iframe") == 1
        assert 'sandbox="allow-scripts allow-downloads"' in html
        assert "<script" not in html  # the page is an escaped attribute
        assert len(html) < 700_000
    assert "58 more rows" not in html
    assert "60 more rows" in html
    with hw.watch(model) as never_run:
        pass
    assert never_run._repr_html_().startswith("<p>The model did not run")


def test_a_focus_of_another_model_is_refused(encoder, texts, tmp_path):
    _, tokenizer, seen, *_ = encoder
    other = hw.view(tiny.model("encoder", seed=1), tokenizer, texts, title="other")
    for against in ((), (other,)):
        with pytest.raises(hw.InputError, match="^foci: expected foci of tiny, got a focus of another model: "):
            hw.write_page(tmp_path / "page.html", seen, against=against, foci=[other.find([1])])


def changed(model, path, value):
    """Return the model with one parameter or one field of its configuration changed."""
    if path in dict(model.named_parameters()):
        with torch.no_grad():
            model.get_parameter(path).mul_(value)
    else:
        setattr(model.config, path, value)
    return model


@pytest.mark.parametrize(
    "path",
    ["encoder.layer.1.intermediate.dense.weight", "embeddings.word_embeddings.weight", "layer_norm_eps"],
)
def test_models_that_differ_outside_of_attention_are_other_models(encoder, texts, path):
    _, tokenizer, seen, *_ = encoder
    other = changed(tiny.model("encoder"), path, 0.5)
    with pytest.raises(hw.InputError, match="^results: expected results of one model, as the view of tiny, got the pr"):
        page_contents([seen, hw.profile(other, hw.Texts(texts, tokenizer), title="other")])
    with pytest.raises(hw.InputError, match="^views: expected the same model for all texts, got another model for "):
        ViewSet((seen[0], hw.view(other, tokenizer, texts[1])))


def test_views_of_a_model_with_and_without_its_language_model_head_are_of_one_model(texts):
    model, tokenizer = tiny.model("decoder", top="ForCausalLM"), tiny.tokenizer("decoder")
    seen = [hw.view(each, tokenizer, text) for each, text in zip((model, model.model), texts, strict=False)]
    contents = page_contents(seen)
    assert len(contents.passages) == 2
    assert len(contents.models[0].heads) == 12


def test_tables_of_different_texts_are_noted(encoder, texts):
    model, tokenizer, _, profile, _ = encoder
    other = hw.profile(model, hw.Texts(texts[1:], tokenizer))
    assert page_contents([profile], against=[other]).notes == ("The two models have a profile of different texts.",)
    assert page_contents([profile], against=[profile]).notes == ()


def test_models_of_the_same_name_are_named_by_what_differs(encoder, texts):
    model, tokenizer, seen, profile, _ = encoder
    fewer = hw.profile(model, hw.Texts(texts[1:], tokenizer), title="tiny")
    contents = page_contents([profile], against=[fewer])
    assert [each.name for each in contents.models] == ["tiny, on 4 sequences", "tiny, on 3 sequences"]
    other = hw.view(tiny.model("encoder", seed=1), tokenizer, texts, title="tiny")
    names = [each.name for each in page_contents([seen], against=[other]).models]
    assert names == [f"tiny, weights {each[0].identity.digest[:8]}" for each in (seen, other)]
    assert len(set(names)) == 2


def test_a_page_opens_on_its_result(encoder):
    _, _, seen, profile, ablation = encoder
    for results, options, shown in (
        ([ablation], {}, ("ablation", "cost")),
        ([seen, ablation], {}, ("ablation", "cost")),
        ([profile], {}, None),
        ([seen], {}, None),
        ([seen, profile], {"statistic": "entropy"}, ("profile", "entropy")),
        ([profile], {"statistic": "first"}, ("profile", "first")),
        ([seen], {"statistic": "special"}, ("4 texts", "special")),
    ):
        contents = page_contents(results, **options)
        index = [(each.source, each.name) for each in contents.statistics].index(shown) if shown else None
        expected = {} if shown is None else {"colour": str(index), "sort": str(index), "group": "none"}
        assert contents.opening == expected, (results, options)
    assert page_contents([profile], against=[profile]).opening == {"model": "difference"}
    assert ablation.contents().opening["sort"] == str(ablation.statistics.index("cost"))
    with pytest.raises(hw.InputError, match=r"^statistic: expected one of entropy, .*, got 'cost'$"):
        page_contents([seen], statistic="cost")


def test_the_first_word_names_a_role_only_if_the_roles_are_of_its_text():
    model, tokenizer = tiny.model("decoder"), tiny.tokenizer("decoder")
    for parameter in (model.layers[0].self_attn.q_proj.weight, model.layers[1].self_attn.q_proj.weight):
        parameter.data.zero_()
    seen = hw.view(model, tokenizer, "w5")  # one token attends to itself, which is the first one
    profile = hw.profile(model, hw.Texts(["w5", "w6"], tokenizer))
    titles = {role.name: role.title for role in page_contents([seen]).roles}
    of_both = {role.name: role.title for role in page_contents([seen, profile]).roles}
    assert titles.get("sink on the first token", "sink on “w5”") == "sink on “w5”"
    assert all("w5" not in title for title in of_both.values())
