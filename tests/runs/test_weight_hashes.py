"""Every change of a weight changes the identity of a model."""

import warnings

import pytest
import torch
import transformers
from torch import nn

import headwise as hw
from headwise.data.batches import digest_of
from headwise.runs.fingerprint import BLOCK, attention_digest, hashed_state, identity_of, run_settings

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex128, torch.int64, torch.bool)


def digest(*values):
    module = nn.Module()
    for index, value in enumerate(values):
        module.register_buffer(f"value_{index}", value)
    return digest_of(hashed_state(module))


def bits_of(value):
    """The same memory as bytes."""
    return value.view(torch.uint8) if not value.is_complex() else torch.view_as_real(value).view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_changed_bit_changes_the_hash(dtype):
    value = torch.ones(2, 5).to(dtype)
    found = {digest(value)}
    bits = bits_of(value).flatten()
    for index in range(len(bits)):
        for bit in range(1 if dtype == torch.bool else 8):
            bits[index] ^= 1 << bit
            found.add(digest(value))
            bits[index] ^= 1 << bit
    assert len(found) == 1 + len(bits) * (1 if dtype == torch.bool else 8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(64, 48), (576, 576), (3, BLOCK + 1)])
def test_changes_of_many_weights_change_the_hash(rows, columns, dtype):
    value = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(dtype)
    others = [value * torch.where(torch.arange(columns) == column, -1, 1).to(dtype) for column in (0, 1, columns - 1)]
    others += [value.flip(0), value.flip(1), value.roll(1), -value, torch.cat([value[:, :1], 0 * value[:, 1:]], 1)]
    assert len({digest(each) for each in [value, *others]}) == 1 + len(others)
    assert digest(value) == digest(value.T.contiguous().T)


def test_names_shapes_and_types_count():
    value = torch.zeros(4, 6)
    others = [(value.T,), (value, value), (value.int(),), (torch.zeros(25),), (torch.zeros(0),), ()]
    assert len({digest(*each) for each in [(value,), *others]}) == 1 + len(others)


def test_a_changed_head_makes_another_model():
    torch.manual_seed(0)
    model = nn.Sequential(hw.MultiHeadAttention(64, num_heads=4))
    before = identity_of(model), run_settings(model, None, None), attention_digest(model, ["0"])
    with torch.no_grad():
        model[0].out_proj.weight[:, 16:32] = 0.0
    after = identity_of(model), run_settings(model, None, None), attention_digest(model, ["0"])
    assert before[0].is_other(after[0])
    assert before[1] != after[1]
    assert before[2] != after[2]


SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 8}
CONVOLUTIONS = {"conv_dim": (8, 8), "conv_kernel": (3, 3), "conv_stride": (2, 2)}
POSITIONS = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2}
CONFIGS = {
    "gpt2": transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=16),
    "bert": transformers.BertConfig(**SIZES, vocab_size=11),
    "vit": transformers.ViTConfig(**SIZES, image_size=8, patch_size=4),
    "t5": transformers.T5Config(num_layers=2, num_heads=2, d_model=8, d_kv=4, d_ff=8, vocab_size=11),
    "wav2vec2": transformers.Wav2Vec2Config(**SIZES, vocab_size=11, **CONVOLUTIONS, **POSITIONS),
    "llama": transformers.LlamaConfig(**SIZES, vocab_size=11),
}


@pytest.mark.parametrize("family", CONFIGS)
def test_each_weight_of_the_body_is_part_of_the_identity(family):
    model = transformers.AutoModel.from_config(CONFIGS[family])
    before = identity_of(model)
    for name, weight in model.named_parameters():
        value = weight.detach().clone()
        with torch.no_grad():
            weight.view(-1)[-1] += 1.0
            assert before.is_other(identity_of(model)) == (not name.startswith("pooler.")), name
            weight.copy_(value)
    assert not before.is_other(identity_of(model))


def test_input_embeddings_count_where_they_are_the_output_too():
    """FSMT returns its decoder's input embeddings as its output embeddings."""
    config = transformers.FSMTConfig(
        langs=["a", "b"], src_vocab_size=11, tgt_vocab_size=12, d_model=8, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8,
    )  # fmt: skip
    model = transformers.FSMTForConditionalGeneration(config)
    before = identity_of(model)
    with torch.no_grad():
        model.model.decoder.embed_tokens.weight[3] += 1.0
    assert before.is_other(identity_of(model))


def test_weights_without_a_shape_are_refused():
    with pytest.raises(hw.InputError, match="^model: expected weights in memory, got weight of the type Uninit"):
        digest_of(hashed_state(nn.LazyLinear(4)))


def test_fields_of_generation_and_training_are_no_part_of_the_identity():
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"])
    before = identity_of(model)
    model.config.pad_token_id, model.config.eos_token_id, model.config.use_cache = 2, [1, 2], False
    model.config.attention_dropout, model.config.initializer_range = 0.3, 0.5
    assert not before.is_other(identity_of(model))
    model.config.rms_norm_eps = 0.1
    assert before.is_other(identity_of(model))


@pytest.mark.parametrize(
    ("family", "task"),
    [
        ("gpt2", transformers.AutoModelForCausalLM),
        ("llama", transformers.AutoModelForCausalLM),
        ("bert", transformers.AutoModelForMaskedLM),
        ("bert", transformers.AutoModelForSequenceClassification),
        ("vit", transformers.AutoModelForImageClassification),
        ("vit", transformers.AutoModelForMaskedImageModeling),
        ("t5", transformers.AutoModelForSeq2SeqLM),
        ("t5", transformers.AutoModelForQuestionAnswering),
        ("wav2vec2", transformers.AutoModelForCTC),
    ],
)
def test_a_model_has_one_identity_with_every_head_for_a_task(family, task):
    whole = task.from_config(CONFIGS[family])
    body = transformers.AutoModel.from_config(CONFIGS[family])
    assert identity_of(body).is_other(identity_of(whole))
    body.load_state_dict(
        {name.removeprefix(f"{whole.base_model_prefix}."): value for name, value in whole.state_dict().items()},
        strict=False,
    )
    assert not identity_of(body).is_other(identity_of(whole))


class Scaled(torch.Tensor):
    """A tensor without memory, made of integers and a scale, as quantised weights are."""

    @staticmethod
    def __new__(cls, integers, scale):
        return torch.Tensor._make_wrapper_subclass(cls, integers.shape, dtype=torch.float32)

    def __init__(self, integers, scale):
        self.integers, self.scale = integers, scale

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        if function is torch.ops.aten.detach.default:
            return arguments[0]
        raise NotImplementedError


class Flattened(Scaled):
    """One that names the tensors that it wraps."""

    def __tensor_flatten__(self):
        return ["integers"], self.scale

    @staticmethod
    def __tensor_unflatten__(tensors, context, size, stride):
        return Flattened(tensors["integers"], context)


def test_wrapped_tensors_are_hashed():
    integers = torch.arange(6, dtype=torch.int8)
    values = [Flattened(integers, 0.5), Flattened(integers, 0.25), Flattened(integers.flip(0), 0.5), integers]
    assert len({digest(value) for value in values}) == len(values)
    assert digest(values[0]) == digest(Flattened(integers.clone(), 0.5))
    with pytest.raises(hw.InputError, match="^model: expected weights in memory, got value_0 of the type Scaled"):
        digest(Scaled(integers, 0.5))


def test_weights_that_are_not_in_memory_are_refused():
    with pytest.raises(hw.InputError, match=r"expected weights in memory, got weight on the device meta"):
        digest_of(hashed_state(nn.Linear(2, 2, device="meta")))


def hash_of(module):
    return digest_of(hashed_state(module))


def quantized(sign=1.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
    with torch.no_grad():
        model[2].weight *= sign
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def test_packed_weights_of_quantized_layers_count():
    assert hash_of(quantized()) == hash_of(quantized())
    assert hash_of(quantized()) != hash_of(quantized(-1.0))


class WithState(nn.Module):
    """Module with values of its own in its state."""

    def __init__(self, state):
        super().__init__()
        self.state = state

    def get_extra_state(self):
        return self.state


def test_values_that_are_not_tensors_count():
    ones, zeros = torch.ones(3), torch.zeros(3)
    states = [{"s": zeros}, {"s": ones}, {"t": zeros}, [zeros], 1, 1.0, "x", {"s": 2}]
    assert len({hash_of(WithState(state)) for state in states}) == len(states)
    assert hash_of(WithState({"s": torch.ones(3)})) == hash_of(WithState({"s": torch.ones(3)}))
    with pytest.raises(hw.InputError, match=r"expected values in state_dict\(\) that can be pickled, got function in "):
        hash_of(WithState(lambda: None))


def test_special_tensors_count_by_their_numbers():
    value = torch.tensor([[0.0, 1.5], [2.0, 0.0]])
    scale = [torch.quantize_per_tensor(value, size, 0, torch.qint8) for size in (0.5, 0.25)]
    assert digest(scale[0]) != digest(torch.quantize_per_tensor(-value, 0.5, 0, torch.qint8))
    assert digest(value.to_sparse()) == digest(value.to_sparse_csr()) == digest(value)
    assert digest((value + 1j).conj()) == digest(value - 1j)
    with pytest.raises(hw.InputError, match="expected weights of one shape, got the nested tensor value_0"):
        digest(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
