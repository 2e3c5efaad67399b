"""Tables of results: estimates from samples, DataFrames, files, and heatmaps."""

import json
import math
import statistics

import pytest
import torch

import headwise as hw
import tiny
from headwise.runs.rows import NO_ESTIMATE, MeanEstimate, moment_estimates
from headwise.statistics.moments import RunningMoments
from profile_runs import texts, values

pytestmark = pytest.mark.usefixtures("as_user")


@pytest.fixture(scope="module")
def profile():
    return hw.profile(tiny.model("decoder"), texts())


def test_an_estimate_is_the_mean_with_its_standard_error():
    samples = [0.5, -1.25, 3.0, 0.75, 2.5]
    expected = statistics.mean(samples), statistics.stdev(samples) / math.sqrt(5), 5, 4
    assert MeanEstimate.of([samples[0], math.nan, *samples[1:]]) == pytest.approx(expected, rel=1e-15)
    assert MeanEstimate.of([2.5, math.nan]) == pytest.approx((2.5, math.nan, 1, 0), nan_ok=True)
    assert MeanEstimate.of([math.nan]) is NO_ESTIMATE
    assert MeanEstimate.of([]) is NO_ESTIMATE


def test_running_moments_become_an_estimate_per_head():
    samples = torch.randn(7, 3, dtype=torch.float64)
    samples[2, 1] = math.nan
    samples[1:, 2] = math.nan
    for head, estimate in enumerate(moment_estimates(RunningMoments.from_values(samples))):
        expected = MeanEstimate.of(samples[:, head].tolist())
        assert estimate == pytest.approx(expected, rel=1e-12, nan_ok=True)


def test_tables_have_a_row_per_head(profile):
    table, errors = profile.table(), profile.sem()
    assert list(table.columns) == ["layer", "head", "kv_head", "module", "kind", "role", *profile.statistics]
    assert list(errors.columns) == list(table.columns)
    assert len(table) == len(errors) == 12
    for row, head in enumerate(profile.heads):
        assert table["entropy"][row] == head.statistics["entropy"].value
        assert errors["entropy"][row] == head.statistics["entropy"].sem
        assert table["role"][row] == head.role


def test_a_saved_table_is_loaded_unchanged(profile, tmp_path):
    from pyarrow import parquet

    folder = tmp_path / "new" / "folder"
    profile.save(folder)
    loaded = hw.load_profile(folder)
    assert values(loaded) == values(profile)
    assert [head.identifiers for head in loaded.heads] == [head.identifiers for head in profile.heads]
    assert loaded.metadata == profile.metadata
    assert [path.name for path in folder.iterdir()] == ["profile.parquet"]
    schema = parquet.read_schema(folder / "profile.parquet")
    assert schema.names[:6] == ["layer", "head", "kv_head", "module", "kind", "role"]
    assert schema.names[6:9] == ["entropy", "entropy_sem", "entropy_n"]
    metadata = json.loads(schema.metadata[b"headwise"])
    assert set(metadata) == {"format", "model", "data", "versions", "settings", "measured", "attention_weights"}
    assert metadata["versions"]["torch"] == torch.__version__
    with pytest.raises(hw.InputError, match="^out: expected a folder without profile.parquet, got .*; --force .force"):
        profile.save(folder)
    profile.save(folder, force=True)


def test_a_folder_without_a_table(tmp_path):
    with pytest.raises(hw.InputError, match="^profile: expected the path of a folder, got None$"):
        hw.load_profile(None)
    sentence = "^profile: expected a folder with a readable profile.parquet, got No such file or directory: '.*'$"
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(hw.InputError, match=sentence):
            hw.load_profile(folder)
    (tmp_path / "file").touch()
    with pytest.raises(hw.InputError, match="^profile: .* got Not a directory"):
        hw.load_profile(tmp_path / "file")


@pytest.fixture
def saved(profile, tmp_path):
    """The path of a saved profile, and its content as a pyarrow table."""
    from pyarrow import parquet

    profile.save(tmp_path)
    path = tmp_path / "profile.parquet"
    return path, parquet.read_table(path)


def test_a_file_without_metadata_is_of_an_older_version(saved):
    from pyarrow import parquet

    path, table = saved
    for metadata in (None, {b"headwise": b'{"format": 1}'}, {b"headwise": b"[]"}, {b"pandas": b"{}"}):
        parquet.write_table(table.replace_schema_metadata(metadata), path)
        sentence = "^profile: expected a file .* in the format of this version, got another format, as older versions"
        with pytest.raises(hw.InputError, match=sentence):
            hw.load_profile(path.parent)


def test_a_damaged_file_is_refused(saved, profile):
    from pyarrow import parquet

    path, table = saved
    data = path.read_bytes()
    damaged = [
        lambda: path.write_bytes(b""),
        lambda: path.write_bytes(b"not a table"),
        lambda: path.write_bytes(data[: len(data) // 2]),
        lambda: parquet.write_table(table.replace_schema_metadata({b"headwise": b"["}), path),
        lambda: parquet.write_table(table.drop_columns(["kv_head"]), path),
        lambda: parquet.write_table(table.drop_columns(["entropy_n"]), path),
    ]
    for write in damaged:
        write()
        with pytest.raises(hw.InputError, match="^profile: expected a profile.parquet as headwise writes it, got unr"):
            hw.load_profile(path.parent)
    path.write_bytes(data)
    assert values(hw.load_profile(path.parent)) == values(profile)


def test_heads_and_statistics_are_found_by_name(profile):
    image = profile.plot("first").images[0].get_array()
    assert image.shape == (2, 6)
    assert image[1, 3] == pytest.approx(profile.head(1, 3).statistics["first"].value)
    assert profile.head(1, 3).name == "1.3"
    with pytest.raises(hw.InputError, match="^statistic: expected one of entropy, .*, got 'attention'$"):
        profile.plot("attention")
    with pytest.raises(hw.InputError, match="^head: expected a .layer, head. of this profile, got .2, 0.$"):
        profile.head(2, 0)
