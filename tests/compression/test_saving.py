"""Saved models: complete, or absent on a full disk."""

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import headwise as hw
import tiny

SRC = Path(hw.__file__).parents[1]


@pytest.fixture
def small_files():
    """Let no file of this process be larger than 20,000 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_saved_model_is_loaded_again(tmp_path):
    model, tokenizer = tiny.model("decoder", top="ForCausalLM"), tiny.tokenizer("decoder")
    hw.save_model(model, tokenizer, tmp_path / "m")
    assert {path.suffix for path in (tmp_path / "m").iterdir()} == {".json", ".safetensors"}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "m").vocab_size == tokenizer.vocab_size
    with pytest.raises(hw.InputError, match=r"^out: expected a new or empty folder, .* --force \(force=True\) replace"):
        hw.save_model(model, None, tmp_path / "m")
    hw.save_model(model, None, tmp_path / "m", force=True)
    assert not (tmp_path / "m" / "tokenizer.json").exists()


@pytest.mark.usefixtures("small_files")
def test_files_that_cannot_be_written_leave_nothing(tmp_path):
    model = tiny.model("decoder", top="ForCausalLM")
    with pytest.raises(hw.InputError, match=r"^out: expected a folder that can be written, got .*\(os error 27\)$"):
        hw.save_model(model, tiny.tokenizer("decoder"), tmp_path / "a" / "m")
    assert list(tmp_path.iterdir()) == []


FULL = """
import sys
sys.path[:0] = {path!r}
import tiny, headwise as hw
from pathlib import Path
try:
    hw.save_model(tiny.model("decoder", top="ForCausalLM", hidden_size=480), None, "{folder}/m")
except hw.InputError as error:
    print(error)
print([path.name for path in Path("{folder}").iterdir()])
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("unshare") is None or sys.platform != "linux", reason="needs a mounted file system")
def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path):
    code = FULL.format(folder=tmp_path, path=[str(SRC), str(Path(tiny.__file__).parent)])
    mount = f'mount -t tmpfs -o size=300k tmpfs {tmp_path} && exec {sys.executable} -c "$CODE"'
    environment = os.environ | {"CODE": code}
    process = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount], env=environment, capture_output=True, text=True, check=False
    )
    if "unshare" in process.stderr or "mount" in process.stderr:
        pytest.skip("this machine does not allow it")
    sentence = "out: expected a folder that can be written, got I/O error: No space left on device (os error 28)"
    assert process.stdout.splitlines() == [sentence, "[]"], process.stderr


@pytest.mark.usefixtures("as_user")
def test_models_without_save_pretrained_are_refused(tmp_path):
    for model, tokenizer, message in (
        (torch.nn.Linear(2, 2), None, "^model: expected a model of transformers, which has save_pretrained, got Linea"),
        (3, None, "^model: expected a torch module, got int"),
        (tiny.model("encoder"), 3, "^tokenizer: expected a tokenizer of transformers, which has save_pretrained, got"),
    ):
        with pytest.raises(hw.InputError, match=message):
            hw.save_model(model, tokenizer, tmp_path / "m")
    assert list(tmp_path.iterdir()) == []
