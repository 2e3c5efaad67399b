"""Time of encoders under `hw.accelerate`, against plain torch, torch.compile and other runtimes.

Regime: MiniLM (6 layers), and with random weights ModernBERT-base, ViT-B/16 and the encoder of Whisper-base; float32
and bfloat16; no gradients, cache or padding. Text encoders read (batch, tokens) = (1, 32), (1, 128), (8, 128), (1, 512)
and (8, 512), with an attention mask of ones. ViT reads 1 and 8 pictures, and Whisper 30 seconds of sound. The length of
a regime is the number of hidden states of a sequence. Pooling layers are left out. Batches of 8 x 512 tokens are timed
in as many rounds as `--long-rounds` states. A quick run has MiniLM in float32.

The other runtimes are ONNX Runtime and OpenVINO. All contestants use as many threads as torch. All peers except plain
torch are compiled for the one input shape of a regime, which favours them: an accelerated model accepts any shape. ONNX
Runtime reads ONNX of opset 24, which has an operator for attention. In bfloat16, OpenVINO reads the rounded weights in
float32, and computes in bfloat16.

Each output is first compared with that of the model in float64. The error of the accelerated model may be at most twice
that of the plain one. A peer that fails, or whose result is wrong, is left out and named. All contestants are timed in
the same rounds, while the accelerated copy of the model is active; each `nn.Linear` of plain torch then takes about a
microsecond longer. The row of the fastest peer compares it with the faster one of the accelerated copy and the same
copy under torch.compile.

    python -m benchmarks.models [--quick] [--rounds N] [--only "(1, 512"]
"""

import copy
import logging
import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

import headwise as hw
from benchmarks import oracle
from benchmarks.command_line import arguments
from benchmarks.contestants import Contestant
from benchmarks.measure import Call, compared, interleaved, report, show
from benchmarks.oracle import WrongError
from benchmarks.peers import FASTEST, Comparison
from benchmarks.regime import Regime
from benchmarks.watched_model import words
from headwise.data.models import load

OURS, OURS_COMPILED = "accelerated", "accelerated, compiled"
PEERS = PLAIN, COMPILED, ONNX, OPENVINO = "plain", "torch.compile", "ONNX Runtime", "OpenVINO"
TEXTS, LONG = [(1, 32), (1, 128), (8, 128), (1, 512), (8, 512)], 4096
SIZES = {"MiniLM": TEXTS, "ModernBert": TEXTS, "ViT": [(1, 197), (8, 197)], "Whisper": [(1, 1500)]}
"""Sizes (batch, length) of the regimes of each model. A round of `LONG` tokens takes many seconds."""
OPTIONS = {
    "Bert": {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 37},
    "Whisper": {"d_model": 512, "encoder_layers": 6, "encoder_attention_heads": 8, "encoder_ffn_dim": 2048}
    | {"decoder_attention_heads": 8},
}
"""Options in which the configuration of a model differs from the default of transformers."""


def model_of(name: str) -> nn.Module:
    """Return the model of this name, without a pooling layer."""
    import transformers

    torch.manual_seed(0)
    if name == "MiniLM":
        model = load("minilm").model
    else:
        config = getattr(transformers, f"{name}Config")(**OPTIONS.get(name, {}))
        model = transformers.AutoModel.from_config(config, attn_implementation="sdpa").eval()
    model = model.encoder if name == "Whisper" else model
    model.pooler = None
    return model


def inputs_of(config: Any, regime: Regime) -> dict[str, Tensor]:
    """Return the inputs of a model with this configuration, by the names of its arguments: random pictures, random
    sound, or words of the documentation.
    """
    if hasattr(config, "image_size"):
        pictures = torch.randn(regime.batch, config.num_channels, config.image_size, config.image_size)
        return {"pixel_values": pictures.to(regime.torch_dtype)}
    if hasattr(config, "num_mel_bins"):
        sound = torch.randn(regime.batch, config.num_mel_bins, 2 * regime.length)
        return {"input_features": sound.to(regime.torch_dtype)}
    tokens = words(regime.batch * regime.length, config.vocab_size).view(regime.batch, regime.length)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


class Encoder(nn.Module):
    """A model that is called with tensors by position; `names` are the names of the model's arguments in this order."""

    def __init__(self, model: nn.Module, names: Sequence[str]):
        super().__init__()
        self.model, self.names = model, list(names)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the last hidden states, `(batch, length, embed)`."""
        return self.model(**dict(zip(self.names, inputs, strict=True))).last_hidden_state


def converted(inputs: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return the inputs with floating-point tensors in this dtype."""
    return tuple(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in inputs)


def by_torch(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Contestant:
    """Return the contestant that calls `function`, a module or a compiled module, with the inputs."""
    return Contestant(lambda: function(*inputs), lambda out: {"out": out})


def by_onnx_runtime(encoder: Encoder, inputs: Sequence[Tensor], dtype: str) -> Contestant:
    """Return the contestant for ONNX Runtime on the CPU, which computes in the dtype of the encoder."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "encoder.onnx"
        names = {"input_names": encoder.names}
        torch.onnx.export(encoder, tuple(inputs), path, opset_version=24, dynamo=True, verbose=False, **names)
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    arrays = {name: tensor.numpy() for name, tensor in zip(encoder.names, inputs, strict=True)}
    return Contestant(lambda: session.run(None, arrays), lambda outputs: {"out": torch.from_numpy(outputs[0])})


def by_openvino(encoder: Encoder, inputs: Sequence[Tensor], dtype: str) -> Contestant:
    """Return the contestant for OpenVINO on the CPU, which computes in `dtype`."""
    import openvino

    inputs = converted(inputs, torch.float32)
    shapes = [tuple(tensor.shape) for tensor in inputs]
    model = openvino.convert_model(copy.deepcopy(encoder).float(), example_input=inputs, input=shapes)
    options = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "INFERENCE_PRECISION_HINT": {"float32": "f32", "bfloat16": "bf16"}[dtype],
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
    }
    compiled, arrays = openvino.compile_model(model, "CPU", options), [tensor.numpy() for tensor in inputs]
    return Contestant(lambda: compiled(arrays), lambda outputs: {"out": torch.from_numpy(outputs[0])})


def compare(comparison: Comparison, name: str, model: nn.Module, regime: Regime) -> None:
    """Check the model under `hw.accelerate` and all peers, time them interleaved, and add the rows to the comparison:
    one for each peer, and one for the fastest.
    """
    torch.compiler.reset()  # above its limit of compilations it would silently not compile
    options, named = comparison.options, inputs_of(model.config, regime)
    encoder, inputs = Encoder(model, list(named)).eval(), tuple(named.values())
    twin = copy.deepcopy(encoder)
    compiler = {"dynamic": False, "backend": "eager" if options.tiny else "inductor"}  # "eager" compiles nothing
    exact = {"out": copy.deepcopy(encoder).double()(*converted(inputs, torch.float64))}
    builds = {
        PLAIN: lambda *_: by_torch(encoder, inputs),
        COMPILED: lambda *_: by_torch(torch.compile(encoder, **compiler), inputs),
        ONNX: lambda *_: by_onnx_runtime(encoder, inputs, regime.dtype),
        OPENVINO: lambda *_: by_openvino(encoder, inputs, regime.dtype),
    }
    timed = {}
    with hw.accelerate(twin):
        plain = {"out": encoder(*inputs)}
        for ours, function in {OURS: twin, OURS_COMPILED: torch.compile(twin, **compiler)}.items():
            contestant = by_torch(function, inputs)
            try:
                oracle.check(contestant.results(contestant.run()), plain, exact, regime)
            except WrongError as reason:
                raise SystemExit(f"{name}, {regime.name}, {ours}: {reason}") from reason
            timed[ours] = Call(contestant.run)
        for peer in (PLAIN, COMPILED) if options.peers == "torch" else PEERS:
            contestant = comparison.sane(f"{name}, {peer}", builds[peer], regime, exact)
            if contestant is not None:
                timed[peer] = Call(contestant.run)
        rounds = options.long_rounds if regime.batch * regime.length >= LONG else options.rounds
        samples = interleaved(timed, rounds)
    peers = [each for each in timed if each in PEERS]
    ours, fastest = (
        min(names, key=lambda each: statistics.median(samples[each])) for names in ((OURS, OURS_COMPILED), peers)
    )
    rows = [compared(regime, samples, OURS, peer, name) for peer in peers]
    best = compared(regime, samples, ours, fastest, f"({fastest}), {name}, {ours}")
    for row in (*rows, replace(best, against=FASTEST)):
        comparison.rows.append(row)
        show(row)


def main(command_line: Sequence[str] | None = None) -> dict:
    """Measure every model, size and dtype, and print a line of JSON last."""
    options = arguments(__doc__, command_line)
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.WARNING)  # of the exporters
    comparison = Comparison(options)
    sizes = {"Bert": [(3, 40)]} if options.tiny else {"MiniLM": TEXTS} if options.quick else SIZES
    dtypes = ("float32",) if options.quick else ("float32", "bfloat16")  # in this order, since a model is converted
    with torch.no_grad(), torch._dynamo.config.patch(fail_on_recompile_limit_hit=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in sizes:
            model = model_of(name)
            embed, heads = model.config.hidden_size, model.config.num_attention_heads
            for dtype, size in product(dtypes, sizes[name]):
                regime = Regime(*size, embed, heads, dtype=dtype)
                if options.wants(regime):
                    compare(comparison, name, model.to(regime.torch_dtype), regime)
    return report("models", comparison.rows, options, comparison.left_out)


if __name__ == "__main__":
    main()
