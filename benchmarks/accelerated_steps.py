"""Time of steps of training and of generation under `hw.accelerate`, against the same model without it.

A training step is a forward pass, a backward pass and a step of AdamW, without dropout: of MiniLM (6 layers), where the
loss is the mean square of the hidden states, and of a Llama of 9 million parameters (6 layers, random weights), where
it is the cross-entropy of the next word. Texts have (batch, tokens) = (1, 128), (8, 128) and (8, 512). Generation is
that of SmolLM2-135M-Instruct: the forward pass of a prompt of 512 and 2,048 tokens, and 4 single tokens after 512 and
4,096 cached ones. All in float32 and bfloat16; the text is the documentation. A quick run has MiniLM in float32.

Gradients of the training step, and outputs of generation, are first compared with those of the model in float64: the
error under `hw.accelerate` may be at most twice that of the plain model. Long texts are timed in `--long-rounds`
rounds.

    python -m benchmarks.accelerated_steps [--quick] [--rounds N] [--only "(8, 512"]
"""

import copy
from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import Tensor, nn

import headwise as hw
from benchmarks import oracle
from benchmarks.command_line import Options, arguments
from benchmarks.measure import Call, Row, compared, interleaved, report, show
from benchmarks.models import OURS, PLAIN, model_of
from benchmarks.regime import Regime
from benchmarks.watched_model import words
from headwise.data.models import load

TRAINED = {"MiniLM": (384, 12), "Llama": (320, 5)}
"""Width and number of heads of the trained models."""
TEXTS, PROMPTS, CACHED, LONG = [(1, 128), (8, 128), (8, 512)], [512, 2048], [512, 4096], 2048
STEPS = 4
"""Number of tokens that are generated in one sample."""


def trained_model(name: str) -> nn.Module:
    """Return the model of this name for training, without dropout."""
    import transformers

    if name == "Llama":
        torch.manual_seed(0)
        sizes = {"hidden_size": 320, "intermediate_size": 864, "num_attention_heads": 5, "num_key_value_heads": 5}
        config = transformers.LlamaConfig(vocab_size=4096, num_hidden_layers=6, tie_word_embeddings=True, **sizes)
        return transformers.LlamaForCausalLM(config)
    model = model_of(name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the loss of a model on a text: of the next word, or the mean square of its last hidden states."""
    if hasattr(model, "lm_head"):
        return model(input_ids=tokens, labels=tokens).loss
    return model(input_ids=tokens).last_hidden_state.square().mean()


def training(model: nn.Module, tokens: Tensor) -> tuple[Call, Callable[[], Tensor]]:
    """Return a training step to be timed, and the function that returns the gradients of all parameters,
    `(elements,)`.
    """
    optimizer = torch.optim.AdamW(model.parameters(), 1e-6)

    def step() -> None:
        optimizer.zero_grad()
        loss(model, tokens).backward()
        optimizer.step()

    def gradients() -> Tensor:
        parameters = [each for each in model.parameters() if each.requires_grad]
        return torch.cat([each.flatten() for each in torch.autograd.grad(loss(model, tokens), parameters)])

    return Call(step), gradients


@torch.no_grad()
def generation(model: nn.Module, tokens: Tensor, *, is_prompt: bool) -> tuple[Call, Callable[[], Tensor]]:
    """Return the forward pass of a prompt, or `STEPS` tokens after it, to be timed, and the function that returns the
    output of the model for the last token: its hidden state or logits, `(1, 1, width)`.
    """
    after = words(STEPS, model.config.vocab_size)[None]

    def prompt() -> tuple[Tensor, object]:
        out = model(input_ids=tokens, use_cache=True)
        return out[0][:, -1:], out.past_key_values

    def steps(cache: object) -> Tensor:
        for token in after.split(1, dim=1):
            out = model(input_ids=token, past_key_values=cache, use_cache=True)
        return out[0]

    if is_prompt:
        return Call(torch.no_grad()(prompt)), torch.no_grad()(lambda: prompt()[0])
    cache = prompt()[1]
    call = Call(torch.no_grad()(steps), lambda: copy.deepcopy(cache))
    return call, torch.no_grad()(lambda: steps(copy.deepcopy(cache)))


def row_of(name: str, model: nn.Module, regime: Regime, options: Options, make: Callable, note: str) -> Row:
    """Check what `make` returns for the accelerated model against the same for the plain one and for that in float64,
    time both interleaved, and return the row.
    """
    twin = copy.deepcopy(model)
    with hw.accelerate(twin):
        calls, results = zip(*(make(each) for each in (twin, model)), strict=True)
        exact = {"results": make(copy.deepcopy(model).double())[1]()}
        ours, plain = (oracle.errors({"results": result()}, exact, regime)["results"] for result in results)
        if not ours <= 2 * plain:
            raise SystemExit(f"{name}, {regime.name}, {note}: an error of {ours:.1e}, and of {plain:.1e} without")
        is_long = regime.batch * regime.length >= LONG
        samples = interleaved(
            dict(zip((OURS, PLAIN), calls, strict=True)), options.long_rounds if is_long else options.rounds
        )
    row = compared(regime, samples, OURS, PLAIN, f"{name}, {note}")
    show(row)
    return row


def main(command_line: Sequence[str] | None = None) -> dict:
    """Measure every model, size and dtype, and print a line of JSON last."""
    options, rows = arguments(__doc__, command_line), []
    dtypes = ("float32",) if options.quick else ("float32", "bfloat16")  # in this order, since a model is converted
    texts = [(2, 24)] if options.tiny else TEXTS
    names = ["Llama"] if options.tiny else ["MiniLM"] if options.quick else list(TRAINED)
    for name in names:
        model, (embed, heads) = trained_model(name), TRAINED[name]
        for dtype, size in product(dtypes, texts):
            regime = Regime(*size, embed, heads, dtype=dtype, training=True)
            if options.wants(regime):
                tokens = words(size[0] * size[1], model.config.vocab_size).view(size)
                converted = model.to(regime.torch_dtype)
                rows.append(
                    row_of(name, converted, regime, options, lambda m, t=tokens: training(m, t), "training step")
                )
    if options.tiny or options.quick:
        return report("accelerated_steps", rows, options)
    model = load("smollm2").model
    for dtype, (is_prompt, lengths) in product(dtypes, ((True, PROMPTS), (False, CACHED))):
        for length in lengths:
            regime = Regime(1, length, 576, 9, "causal", kv_heads=3, dtype=dtype)
            if options.wants(regime):
                tokens = words(length, model.config.vocab_size)[None]
                note = "prompt" if is_prompt else f"{STEPS} tokens after it"
                make = lambda m, t=tokens, p=is_prompt: generation(m, t, is_prompt=p)  # noqa: E731
                rows.append(row_of("SmolLM2", model.to(regime.torch_dtype), regime, options, make, note))
    return report("accelerated_steps", rows, options)


if __name__ == "__main__":
    main()
