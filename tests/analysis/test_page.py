"""Pages from several results: which heads, numbers, roles and texts they have."""

import dataclasses

import pytest
import torch

import headwise as hw
import tiny
from headwise.analysis.page import page_contents


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
            found = [part[row, index].item() for part in dataclasses.astuple(contents.models[0].estimates)]
            assert found == pytest.approx(tuple(table.head(head.layer, head.head).statistics[name]))
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
    another = tiny.model("encoder", seed=1)
    other = hw.view(another, tokenizer, texts, title="other")
    of_other = hw.profile(another, hw.Texts(texts, tokenizer), title="other")
    fewer = dataclasses.replace(profile, rows=profile.rows[1:])
    for results, options, message in (
        ([], {}, "^results: expected at least one view or table of heads, got none"),
        ([3], {}, "^results: expected views, profiles, .* got int"),
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
