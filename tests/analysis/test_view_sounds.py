"""Views of models that read a sound or a time series. The oracle changes a short piece in a model whose attention has
zero weights, and observes which tokens change.
"""

import base64
import io
import wave

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import headwise as hw
import multimodal
import tiny
from headwise.analysis.view_sounds import sound_prompt

RATE = 16000
WINDOW = 200
"""Samples to both sides of the centre of a frame of Whisper's spectrogram that the frame depends on."""


@pytest.fixture(scope="module")
def whisper():
    """Return the tiny Whisper model with its processor, and two heads that its generation config names."""
    case = multimodal.case("Whisper")
    case.model.generation_config.alignment_heads = [[0, 1], [1, 4]]
    return case


@pytest.fixture(scope="module")
def seen(whisper):
    """Return a view of a sound of 9,000 samples with three generated words."""
    return hw.view(whisper.model, whisper.processor, audio=whisper.picture((9000,)), generate=3)


def without_attention(model):
    """Return the model with attention whose outputs are zero, because the weights of its output projections are."""
    for path, module in model.named_modules():
        if path.endswith("attn.out_proj"):
            torch.nn.init.zeros_(module.weight)
            torch.nn.init.zeros_(module.bias)
    return model


def tokens_at(model, path, inputs):
    """Return the tokens that an attention module receives."""
    received = []

    def read(module, arguments, named):
        received.append((arguments[0] if arguments else named["hidden_states"]).flatten(0, -2))

    with model.get_submodule(path).register_forward_pre_hook(read, with_kwargs=True), torch.no_grad():
        model(**inputs)
    return received[0]


def changed_tokens(model, path, before, after, least):
    """Return True for each token that differs between two inputs, by `least` of the largest feature."""
    before, after = (tokens_at(model, path, inputs) for inputs in (before, after))
    return ((after - before).abs().amax(-1) > least * before.abs().max()).tolist()


@pytest.mark.parametrize("length", [9000, 12347, 16000])
def test_each_token_stands_for_the_strip_of_a_sound_whose_change_it_shows(length):
    case = multimodal.case("Whisper")
    sound = case.picture((length,))
    view = hw.view(case.model, case.processor, audio=sound)
    text = view.texts[0]
    assert (text.name, text.pictures[0].name, text.seconds) == ("sound", "sound", length / RATE)
    model, checked = without_attention(case.model), 0
    for start in np.random.default_rng(length).integers(0, length - 300, 12).tolist():
        changed = sound.copy()
        changed[start : start + 300] *= -0.3
        inputs = [dict(case.inputs(each)) for each in (sound, changed)]
        # A small change of the loudest frame changes the padding a little.
        has_changed = changed_tokens(model, "model.encoder.layers.1.self_attn", *inputs, 0.01)
        assert len(has_changed) == len(text.tokens) == 50
        for token, patch in enumerate(text.patches):
            if patch is None:
                assert not has_changed[token]
                assert text.words[token].text == "padding"
                assert text.words[token].special
                continue
            left, right = patch.left * length, (patch.left + patch.width) * length
            assert has_changed[token] or not left <= start + 150 <= right
            assert (left - WINDOW <= start + 300 and start <= right + WINDOW) or not has_changed[token]
            checked += has_changed[token]
    assert checked > 40
    # Token i reads the frames from 2 i - 2 to 2 i + 2, whose centres are 160 samples apart.
    is_sound = [patch is not None for patch in text.patches]
    assert is_sound == [320 * token - 320 <= length for token in range(50)]
    for token in range(2, length // 320 - 1):
        patch = text.patches[token]
        assert (patch.left + patch.width / 2) * length == pytest.approx(320 * token, abs=16)
        assert patch.width * length == pytest.approx(800, rel=0.02)
        assert float(text.words[token].text.removesuffix(" s")) == pytest.approx(0.02 * token, abs=0.011)


@pytest.mark.parametrize(("length", "patch", "stride"), [(35, 5, 5), (36, 6, 3), (53, 8, 5)])
@pytest.mark.parametrize("scaling", ["std", "mean", None])
def test_each_token_stands_for_the_strip_of_a_series_whose_change_it_shows(length, patch, stride, scaling):
    torch.manual_seed(0)
    config = transformers.PatchTSTConfig(
        num_input_channels=3, context_length=length, patch_length=patch, patch_stride=stride, scaling=scaling,
        num_hidden_layers=2, d_model=48, num_attention_heads=6, ffn_dim=37,
    )  # fmt: skip
    model = without_attention(tiny.with_distinct_heads(transformers.PatchTSTModel(config)))
    series = multimodal.series(length)
    text = hw.view(model, series=series).texts[0]
    checked = 0
    for start in range(length - 2):
        for channel in range(3):
            changed = series.clone()
            # The same values in another order have the same mean and standard deviation.
            changed[start : start + 3, channel] = series[start : start + 3, channel].flip(0)
            inputs = [{"past_values": each[None]} for each in (series, changed)]
            has_changed = changed_tokens(model, "encoder.layers.1.self_attn", *inputs, 1e-4)
            for token, box in enumerate(text.patches):
                steps = range(round(box.left * length), round((box.left + box.width) * length))
                is_inside = round(box.top * 3) == channel and (start in steps or start + 2 in steps)
                assert has_changed[token] <= is_inside
                is_large = abs(series[start, channel] - series[start + 2, channel]) > 0.5
                assert has_changed[token] or not (is_inside and is_large)
                checked += has_changed[token]
                assert len(steps) == patch
                assert box.height == pytest.approx(1 / 3)
                assert text.words[token].text == f"channel {round(box.top * 3)}, step {steps[0] + (patch - 1) / 2:g}"
    assert checked > 50


def test_a_series_with_one_channel_is_named_by_time_alone():
    config = transformers.PatchTSTConfig(
        num_input_channels=1, context_length=12, patch_length=4, patch_stride=4, d_model=12, num_attention_heads=3
    )
    seen = hw.view(transformers.PatchTSTModel(config).eval(), series=multimodal.series(12)[:, 0])
    assert [word.text for word in seen.words] == ["step 1.5", "step 5.5", "step 9.5"]
    assert (seen.texts[0].name, seen.texts[0].pictures[0].name) == ("series", "series")


def picture_of(view):
    """Return the picture of the first text of a view as numbers from 0 to 1."""
    source = view.texts[0].pictures[0].source
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(source.split(",")[1]))).convert("L")) / 255


def test_the_spectrogram_shows_time_from_left_to_right_and_high_frequencies_above(whisper):
    samples = np.arange(9000)
    low, high = (0.5 * np.sin(2 * np.pi * pitch / RATE * samples).astype(np.float32) for pitch in (300, 6000))
    shown = picture_of(hw.view(whisper.model, whisper.processor, audio=np.where(samples < 4500, low, high)))
    rows, columns = shown.shape
    darkness = 1 - shown
    quarters = [
        darkness[top : top + rows // 3, left : left + columns // 3].mean()
        for top in (0, 2 * rows // 3)
        for left in (0, 2 * columns // 3)
    ]  # high and early, high and late, low and early, low and late
    assert min(quarters[1], quarters[2]) > max(quarters[0], quarters[3]) + 0.2


def test_a_curve_is_drawn_for_each_channel():
    case = multimodal.case("PatchTST")
    series = torch.stack([torch.arange(35.0), -torch.arange(35.0), torch.arange(35.0) % 2], 1)
    shown = picture_of(hw.view(case.model, series=series))
    heights = [band.argmin(0) / len(band) for band in np.split(shown, 3)]
    columns = shown.shape[1]
    early, late = ([band[place * columns // 10] for band in heights[:2]] for place in (1, 9))
    assert min(early[0], late[1]) > 0.8
    assert max(early[1], late[0]) < 0.2


def test_generated_words_attend_to_strips_of_the_sound(whisper, seen):
    sound, decoder = seen.texts
    assert [text.seconds for text in seen.texts] == [9000 / RATE, None]
    assert decoder.first_generated == 1
    assert len(decoder.words) == 4
    inputs = whisper.processor(whisper.picture((9000,)), sampling_rate=RATE, return_tensors="pt")
    expected = whisper.model.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert torch.equal(decoder.ids[:, 1:], expected)
    whisper.model.set_attn_implementation("eager")
    with torch.no_grad():
        output = whisper.model(**inputs, decoder_input_ids=decoder.ids, output_attentions=True)
    whisper.model.set_attn_implementation("sdpa")
    attentions = torch.cat(output.cross_attentions).flatten(0, 1)
    heads = [head for head in seen.heads if head.kind == "cross"]
    torch.testing.assert_close(
        torch.stack([head.attention.weights.weights for head in heads]), attentions, rtol=1e-4, atol=1e-6
    )
    # Quantiles of the weights of the positions that output the words, on strips whose centres are known.
    table = seen.word_times([(heads[0].layer, head) for head in range(6)])
    assert table.groupby("index").size().to_dict() == {1: 6, 2: 6, 3: 6}
    strips = [index for index, patch in enumerate(sound.patches) if patch is not None]
    for row in table.itertuples():
        weights = attentions[row.head, row.index - 1]
        assert row.word == decoder.words[row.index].text
        assert row.elsewhere == pytest.approx(1 - float(weights[strips].sum()), abs=1e-5)
        shares = (weights[strips] / weights[strips].sum()).cumsum(0).tolist()
        for time, share in ((row.lower_quartile, 0.25), (row.median, 0.5), (row.upper_quartile, 0.75)):
            first = next(strip for strip, sum_before in zip(strips, shares, strict=True) if sum_before > share - 1e-6)
            sides = (0.02 * first - 0.025, 0.02 * first + 0.025)  # cut off at the ends of the sound
            assert time == pytest.approx(np.clip(sides, 0, 9000 / RATE).mean(), abs=0.003)


def test_the_times_of_words_are_those_of_the_alignment_heads(whisper, seen):
    cross = sorted({head.layer for head in seen.heads if head.kind == "cross"})
    assert seen.alignment_heads == ((cross[0], 1), (cross[1], 4))
    table = seen.word_times()
    assert set(zip(table["layer"], table["head"], strict=True)) == set(seen.alignment_heads)
    assert set(seen.select(layers=[cross[0]]).word_times()["head"]) == {1}
    without = hw.View(seen.title, seen.texts, seen.heads, seen.head_count)
    assert len(without.word_times()) == 3 * 12
    assert table.equals(seen.word_times([f"{layer}.{head}" for layer, head in seen.alignment_heads]))
    with pytest.raises(hw.InputError, match=r"^heads: expected heads with attention of words on the sound .*, got 0.1"):
        seen.word_times([(0, 1)])
    of_target = hw.view(whisper.model, whisper.processor, audio=whisper.picture((9000,)), target="w5 w6", keep_all=10)
    with pytest.raises(hw.InputError, match="^view: expected a view whose weights were all kept, got 3 x 50 tokens; "):
        of_target.word_times()


def test_cross_attention_of_few_words_is_kept(whisper):
    view = hw.view(whisper.model, whisper.processor, audio=whisper.picture((9000,)), target="w5 w6", keep_all=13)
    assert "w5" in view.word_times()["word"].tolist()


def test_a_view_without_words_has_no_times():
    case = multimodal.case("PatchTST")
    with pytest.raises(hw.InputError, match="^view: expected one of words with attention on a sound, got none"):
        hw.view(case.model, series=case.picture((35,))).word_times()


def test_a_region_of_time_ranks_heads_by_the_attention_on_its_strips(seen):
    sound, decoder = seen.texts
    word = decoder.words[2].text
    focus = seen.find([hw.Region(0.0, 0.0, 0.5, 1.0)], queries=[word])
    inside = [
        index for index, patch in enumerate(sound.patches) if patch is not None and patch.left + patch.width / 2 < 0.5
    ]
    rows = [index for index, each in enumerate(decoder.words) if each.text == word]
    for each in focus.heads:
        weights = each.head.attention.weights.weights[rows][:, inside]
        assert each.share == pytest.approx(float(weights.sum(-1).mean()), rel=1e-5)
    by_name = seen.find(["0.10 s"], queries=[word])
    assert by_name.words == ((5,),)
    assert seen.find([hw.Region(0.0, 0.0, 0.5, 1.0, "sound")], queries=[word]).words == focus.words


def written(path, samples, *, width=2, channels=1, rate=RATE):
    """Write samples (samples, channels) from -1 to 1 to a WAV file, and return what is stored."""
    largest = 256**width // 2
    integers = (np.clip(samples, -1, 1 - 1 / largest) * largest).round().astype(np.int64)
    stored = integers if width > 1 else integers + 128
    parts = np.stack([stored >> 8 * place & 255 for place in range(width)], -1).astype(np.uint8)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(parts.tobytes())
    return integers / largest


@pytest.mark.parametrize(("width", "channels"), [(1, 1), (2, 2), (3, 1), (4, 1)])
def test_a_wav_file_is_read(tmp_path, whisper, width, channels):
    samples = np.stack([0.4 * multimodal.sound(5000, seed) for seed in range(channels)], 1)
    stored = written(tmp_path / "sound.wav", samples, width=width, channels=channels)
    expected = whisper.processor(stored.mean(1).astype(np.float32), sampling_rate=RATE, return_tensors="pt")
    read = sound_prompt(whisper.model, whisper.processor, None, tmp_path / "sound.wav")
    torch.testing.assert_close(read.inputs["input_features"], expected["input_features"], rtol=1e-5, atol=1e-5)
    assert read.length == 5000 / RATE


def test_a_file_of_another_rate_is_refused(tmp_path, whisper):
    written(tmp_path / "sound.wav", multimodal.sound(900), rate=8000)
    message = "^audio: expected a file with 16,000 samples per second, the rate of the processor, got 8,000 in "
    with pytest.raises(hw.InputError, match=message):
        hw.view(whisper.model, whisper.processor, audio=tmp_path / "sound.wav")


MISTAKES = [
    ({"audio": "no such file.wav"}, "^audio: expected a WAV file .*, got 'no such file.wav' .No such file"),
    ({"audio": __file__}, "^audio: expected a WAV file with integer samples, got .*file does not start with RIFF id"),
    ({"audio": []}, "^audio: expected at least one sample, got an empty sound"),
    ({"audio": np.zeros((2, 9000))}, r"^audio: expected floating-point samples \(samples,\), got \(2, 9000\)"),
    ({"audio": np.zeros(9000, np.int16)}, r"^audio: expected floating-point samples .*, got \(9000,\), torch.int16"),
    ({"audio": np.full(9000, np.nan)}, "^audio: expected finite samples, got values that are not finite"),
    ({"audio": 3}, "^audio: expected floating-point samples .*, got "),
    ({"audio": np.zeros(3)}, r"^audio: expected a sound .*, got "),
    ({"audio": multimodal.sound(17500)}, "^audio: expected a sound that the processor reads whole, got one whose end"),
    ({"audio": multimodal.sound(9000), "images": "a.png"}, "^audio: expected None with images, got ndarray"),
    ({"audio": multimodal.sound(9000), "text": "w5"}, "^text: expected None with a processor that reads sound alone"),
    ({"audio": multimodal.sound(9000), "truncate": True}, "^truncate: expected False with audio, got True"),
    ({"series": [1.0, 2.0]}, "^processor: expected None with a time series, got WhisperProcessor"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_mistakes_are_named(whisper, arguments, message):
    with pytest.raises(hw.InputError, match=message):
        hw.view(whisper.model, whisper.processor, **arguments)


def wav2vec():
    """Return a tiny Wav2Vec2 model."""
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 37}
    layers = {"conv_dim": [16, 16], "conv_stride": [10, 8], "conv_kernel": [10, 8], "num_feat_extract_layers": 2}
    return transformers.Wav2Vec2Model(transformers.Wav2Vec2Config(**sizes, **layers, num_conv_pos_embeddings=8)).eval()


def test_models_that_read_no_sound_are_refused(whisper):
    sound, case = multimodal.sound(9000), multimodal.case("ViT")
    with pytest.raises(hw.InputError, match="^processor: expected a processor or feature extractor of .* that reads s"):
        hw.view(case.model, case.processor, audio=sound)
    with pytest.raises(hw.InputError, match="^processor: expected a processor that returns pixel_values, which ViT"):
        hw.view(case.model, whisper.processor, audio=sound)
    with pytest.raises(
        hw.InputError, match="^model: expected a model that reads the output of WhisperProcessor, got L"
    ):
        hw.view(torch.nn.Linear(3, 3).eval(), whisper.processor, audio=sound)
    with pytest.raises(hw.InputError, match="^model: expected a model that reads a spectrogram, got Wav2Vec2Model, wh"):
        hw.view(wav2vec(), transformers.Wav2Vec2FeatureExtractor(), audio=sound)
    with pytest.raises(
        hw.InputError, match="^processor: expected one with a tokenizer, for the words that the model wr"
    ):
        hw.view(whisper.model, whisper.processor.feature_extractor, audio=sound)


def test_models_that_read_no_series_are_refused():
    config = transformers.TimeSeriesTransformerConfig(prediction_length=3)
    forecaster = transformers.TimeSeriesTransformerModel(config).eval()
    message = (
        "^model: expected a model that reads past_values alone, got TimeSeriesTransformerModel, which also needs past"
    )
    with pytest.raises(hw.InputError, match=message):
        hw.view(forecaster, series=torch.randn(30))
    case = multimodal.case("ViT")
    with pytest.raises(
        hw.InputError, match="^model: expected a model whose forward has the argument past_values, got V"
    ):
        hw.view(case.model, series=torch.randn(30))
    case = multimodal.case("PatchTST")
    for series, got in (
        (torch.zeros(2, 3, 4), r"\(2, 3, 4\)"),
        ([1.0, float("nan")], "values that are not finite"),
    ):
        with pytest.raises(
            hw.InputError, match=rf"^series: expected numbers \(time,\) or \(time, channels\), got {got}"
        ):
            hw.view(case.model, series=series)
    with pytest.raises(hw.InputError, match="^series: expected values that change over time, got a constant series"):
        hw.view(case.model, series=torch.ones(35, 3))
    with pytest.raises(hw.InputError, match="^model: expected a model that reads these inputs, got ValueError"):
        hw.view(case.model, series=torch.randn(30, 3))


def test_patches_of_a_spectrogram_with_rows_are_named_by_band_and_time():
    torch.manual_seed(0)
    config = transformers.ASTConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=6, intermediate_size=37, max_length=64,
        num_mel_bins=16, patch_size=8, frequency_stride=8, time_stride=8,
    )  # fmt: skip
    extractor = transformers.ASTFeatureExtractor(num_mel_bins=16, max_length=64)
    seen = hw.view(transformers.ASTModel(config).eval(), extractor, audio=multimodal.sound(9000))
    names = [word.text for word in seen.words]
    assert names[:2] == ["token 0", "token 1"]
    assert len(names) == 18
    # The first rows of patches are those of the lowest frequencies, which are displayed at the bottom.
    assert [name.split(",")[0] for name in names[2:9]] == ["band 1"] * 7
    assert seen.texts[0].patches[2].top == pytest.approx(0.5, abs=0.01)
    # Frames have 400 samples, begin 160 samples apart, and end before the last sample.
    assert float(names[2].split(", ")[1].removesuffix(" s")) == pytest.approx((3.5 * 160 + 200) / RATE, abs=0.011)


def test_a_token_of_two_parts_of_a_series_with_a_gap_is_special():
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 48,
        "intermediate_size": 37,
        "head_dim": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
    }
    config = transformers.TimesFmConfig(patch_length=4, context_length=32, horizon_length=4, **sizes)
    model = transformers.TimesFmModelForPrediction(config).eval()
    # All tokens depend on the first patch, whose mean and standard deviation scale the series.
    words = hw.view(model, series=torch.randn(32)).words
    assert [word.text for word in words] == ["step 1.5", "step 3.5", *(f"token {index}" for index in range(2, 8))]
    assert [word.special for word in words] == [False] * 2 + [True] * 6
