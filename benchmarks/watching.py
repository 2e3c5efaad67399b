"""Time and memory of watching every head of a model, against implementations that return the matrices of weights.

Regime: SmolLM2-135M-Instruct (30 layers with 9 query heads on 3 key/value heads, width 576), float32, one text of 2,048
and one of 8,192 tokens (the documentation of this project), no gradients and no cache; all statistics of `hw.watch`.
The time of the watched forward pass is compared with that of the plain one, which is fused. At 2,048 tokens it is also
compared with three other ways to the same statistics. Each of them returns whole matrices and computes the statistics
from them, vectorised, one layer at a time:

- `output_attentions=True`: the model under "eager" attention, from the matrices it returns.
- BertViz: from the same matrices, stacked by its `format_attention`, as its views do before they draw.
- TransformerLens: from the patterns that `run_with_cache` of its bridge stores. It also computes the logits of the
  last token.

Memory: the peak of a watched forward pass minus that of the plain one, each measured once in its own interpreter after
a warm-up on a short text; and the peak of one causal attention call with statistics, 32,768 tokens and 8 heads of 64,
minus its inputs and output. All statistics are first compared, on 256 tokens, with those of the eager matrices in
float64. The ways that return matrices, and 8,192 tokens, have at most 3 rounds. A quick run has 512 tokens in 2 rounds,
one peer, and no memory. At 2,048 tokens BertViz takes 10 GB.

    python -m benchmarks.watching [--quick] [--rounds N] [--only "8192"]
"""

import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import headwise as hw
from benchmarks import weight_statistics
from benchmarks.command_line import Options, arguments, require
from benchmarks.contestants import LeftOutError
from benchmarks.measure import Call, Ratio, Row, interleaved, report, show
from benchmarks.oracle import WrongError
from benchmarks.peak_memory import IS_SUPPORTED, UNSUPPORTED_REASON, measured
from benchmarks.peak_memory import peak as peak_of
from benchmarks.peers import FEW_ROUNDS
from benchmarks.regime import Regime
from benchmarks.weight_statistics import Statistics, Text
from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.problem import Problem
from headwise.data.models import load
from headwise.statistics.attend_observed import attend_observed
from headwise.statistics.tally import Tally

PLAIN, OURS = "plain forward", "ours"
EAGER, BERTVIZ, LENS = "`output_attentions=True`", "BertViz", "TransformerLens"
SMOLLM2 = Regime(1, 2048, 576, 9, "causal", kv_heads=3, bias=False, rotary=True)
TINY = Regime(1, 40, 48, 6, "causal", kv_heads=2, bias=False, rotary=True)
LONG = 8192
CALL = Regime(1, 32768, 512, 8, "causal")
SHORT = 256
"""Number of tokens for the comparison with the definition, and for the warm-up before a peak is measured."""
MODEL_EXTRA, CALL_EXTRA = "300 MB of extra memory", "1 GB of extra memory"
LIMITS = {MODEL_EXTRA: 300e6, CALL_EXTRA: 1e9}
PEAKS = {name: f"peak of {name}" for name in (EAGER, BERTVIZ, LENS)}
MEMORY = {*LIMITS, *PEAKS.values()}
"""Names in `Row.against` of rows that are in bytes."""

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("README.md", "docs/layer.md", "docs/watch.md", "docs/lab-notes.md", "CONTRIBUTING.md")


# -- the model and its text -------------------------------------------------------------------------------------------


def sections() -> list[str]:
    """Return the text that models read: the documentation, split at its headings."""
    return [part for name in DOCUMENTS for part in (ROOT / name).read_text(encoding="utf-8").split("\n## ")]


def words(length: int, kinds: int) -> Tensor:
    """Return the first `length` words of the documentation as token ids below `kinds`, `(length,)`, repeated as often
    as needed.
    """
    numbers: dict[str, int] = {}
    text = [numbers.setdefault(word, len(numbers)) % kinds for section in sections() for word in section.split()]
    return repeated(text, length)


def repeated(tokens: Sequence[int], length: int) -> Tensor:
    """Return the tokens, repeated up to this length, as a tensor `(length,)`."""
    return torch.tensor(tokens).repeat(-(-length // len(tokens)))[:length]


@dataclass(frozen=True, eq=False)
class Subject:
    """A model and the text that it reads.

    Attributes:
        model: the model.
        special: ids of its special tokens.
        tokens: the longest text, `(length,)`; shorter texts are its beginning.
        tokenizer: the tokenizer of a real model, None for a random one.
    """

    model: nn.Module
    special: Sequence[int]
    tokens: Tensor
    tokenizer: Any = None

    def text(self, length: int) -> Text:
        """Return the first `length` tokens, with a mask of special tokens, as input of `weight_statistics`."""
        tokens = self.tokens[:length]
        return Text(tokens, torch.isin(tokens, torch.tensor(self.special)))

    @cached_property
    def eager(self) -> nn.Module:
        """The model with eager attention, which returns its matrices. It shares the parameters of `model`."""
        model = copy.deepcopy(self.model, {id(parameter): parameter for parameter in self.model.parameters()})
        model.set_attn_implementation("eager")
        return model

    @property
    def written(self) -> list[Tensor]:
        """The output projection of each layer by heads, `(heads, head_dim, embed)`."""
        heads = self.model.config.num_attention_heads
        return [layer.self_attn.o_proj.weight.T.unflatten(0, (heads, -1)) for layer in self.model.layers]


def subject(regime: Regime) -> Subject:
    """Return the model and text of a regime: SmolLM2 if it has SmolLM2's width, otherwise a small random model."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    length = max(regime.length, SHORT)
    if regime.embed == SMOLLM2.embed:
        loaded = load("smollm2")
        end = loaded.tokenizer.eos_token_id
        ids = [token for section in sections() for token in (*loaded.tokenizer(section)["input_ids"], end)]
        return Subject(loaded.model, loaded.tokenizer.all_special_ids, repeated(ids, length), loaded.tokenizer)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=regime.embed,
        num_hidden_layers=2,
        num_attention_heads=regime.heads,
        num_key_value_heads=regime.kv_heads,
        intermediate_size=37,
        max_position_embeddings=length,
    )
    torch.manual_seed(0)
    return Subject(transformers.AutoModel.from_config(config).eval(), [0, 3], words(length, config.vocab_size))


def _note(regime: Regime) -> str:
    """Return the note of a row: the model and "all statistics"."""
    return f"{'SmolLM2' if regime.embed == SMOLLM2.embed else 'a random model'}, all statistics"


# -- ways to the numbers ----------------------------------------------------------------------------------------------

Way = Callable[[int], Statistics]
"""Function from a number of tokens to every statistic, `(layers, heads)`; for the plain forward pass an empty
dictionary.
"""


def plain(of: Subject) -> Way:
    """Return a function that runs a plain forward pass and computes no statistics."""

    def run(length: int) -> Statistics:
        of.model(input_ids=of.tokens[None, :length], use_cache=False)
        return {}

    return run


def ours(of: Subject) -> Way:
    """Return a function that computes the statistics with `hw.watch`."""

    def run(length: int) -> Statistics:
        with hw.watch(of.model, special=of.special) as heads:
            of.model(input_ids=of.tokens[None, :length], use_cache=False)
        return weight_statistics.of_layers(
            [{name: statistic.value for name, statistic in record.statistics.items()} for record in heads.records]
        )

    return run


def _matrices(of: Subject, length: int) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Return, for each layer of the eager model, the weights `(1, heads, length, length)` and the heads' concatenated
    output `(1, length, embed)`.
    """
    head_outputs: list[Tensor] = []
    handles = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, inputs: head_outputs.append(inputs[0]))
        for layer in of.eager.layers
    ]
    try:
        returned = of.eager(input_ids=of.tokens[None, :length], use_cache=False, output_attentions=True)
    finally:
        for handle in handles:
            handle.remove()
    return returned.attentions, head_outputs


def _of_matrices(of: Subject, length: int, weights: Sequence[Tensor], out: Sequence[Tensor]) -> Statistics:
    """Return the statistics of a model from the weights `(heads, length, length)` and the heads' output `(1, length,
    ...)` of each layer.
    """
    text = of.text(length)
    by_layer = []
    for layer, returned, written in zip(weights, out, of.written, strict=True):
        by_head = returned.reshape(length, layer.shape[0], -1).transpose(0, 1)
        by_layer.append(weight_statistics.statistics(layer, by_head, text, written))
    return weight_statistics.of_layers(by_layer)


def eager(of: Subject) -> Way:
    """Return a function that computes the statistics from the matrices of `output_attentions=True`."""

    def run(length: int) -> Statistics:
        weights, out = _matrices(of, length)
        return _of_matrices(of, length, [layer[0] for layer in weights], out)

    return run


def bertviz(of: Subject) -> Way:
    """Return a function that computes the statistics from the same matrices as `eager`, stacked by BertViz into one
    tensor.
    """
    from bertviz.util import format_attention

    def run(length: int) -> Statistics:
        weights, out = _matrices(of, length)
        return _of_matrices(of, length, format_attention(weights), out)

    return run


def lens(of: Subject) -> Way:
    """Return a function that computes the statistics from the patterns TransformerLens caches. Its bridge wraps the
    same model with an output layer, and shares its parameters.
    """
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import LlamaForCausalLM

    if of.tokenizer is None:
        raise LeftOutError("requires a model with a tokenizer")
    base_model = copy.deepcopy(of.eager, {id(parameter): parameter for parameter in of.eager.parameters()})
    with torch.device("meta"):
        with_output_layer = LlamaForCausalLM(base_model.config)
    with_output_layer.model, with_output_layer.lm_head.weight = base_model, base_model.embed_tokens.weight
    bridge = TransformerBridge.boot_transformers(
        "SmolLM2-135M-Instruct", hf_model=with_output_layer, tokenizer=of.tokenizer
    )

    def run(length: int) -> Statistics:
        _, cache = bridge.run_with_cache(
            of.tokens[None, :length],
            names_filter=lambda name: name.endswith(("attn.hook_pattern", "attn.hook_z")),
            use_cache=False,
            logits_to_keep=1,
        )
        weights, out = (
            [cache[f"blocks.{number}.attn.hook_{name}"] for number in range(len(base_model.layers))]
            for name in ("pattern", "z")
        )
        return _of_matrices(of, length, [layer[0] for layer in weights], out)

    return run


WAYS: dict[str, Callable[[Subject], Way]] = {PLAIN: plain, OURS: ours, EAGER: eager, BERTVIZ: bertviz, LENS: lens}


def exact(of: Subject, length: int) -> Statistics:
    """Return the statistics in float64, from the weights of eager attention."""
    weights, out = _matrices(of, length)
    text = of.text(length)
    by_layer = []
    for layer, returned, written in zip(weights, out, of.written, strict=True):
        by_head = returned[0].double().unflatten(-1, (layer.shape[1], -1)).transpose(0, 1)
        by_layer.append(weight_statistics.statistics(layer[0].double(), by_head, text, written.double()))
    return weight_statistics.of_layers(by_layer)


def checked(of: Subject, names: Sequence[str], length: int) -> tuple[dict[str, Way], dict[str, str]]:
    """Return the named ways whose statistics are correct, and the reasons why others are left out. Exit with a message
    if those of headwise are wrong.
    """
    ways, left_out, expected = {}, {}, exact(of, length)
    for name in names:
        try:
            way = WAYS[name](of)
            if name != PLAIN:
                weight_statistics.check(way(length), expected)
        except WrongError as reason:
            if name == OURS:
                raise SystemExit(f"watched, {length} tokens: {reason}") from reason
            left_out[name] = str(reason)
        except LeftOutError as reason:
            left_out[name] = str(reason)
        else:
            ways[name] = way
    for name, reason in left_out.items():
        print(f"LEFT OUT  {name}: {reason}", flush=True)
    return ways, left_out


# -- one call of attention --------------------------------------------------------------------------------------------


def one_call(regime: Regime) -> tuple[Callable[[], Tally], Problem, Tensor]:
    """Return a function that runs one causal attention call with statistics, the attention problem it solves, and the
    token ids.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (regime.batch, regime.heads, regime.length, regime.head_dim)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    problem, tokens = Problem.checked(q, k, v, mask=hw.causal()), words(regime.length, 2**31)

    def run() -> Tally:
        tally = Tally()
        attend_observed(problem, tally.add, CallContext(tokens[None]))
        return tally

    return run, problem, tokens


def check_call(regime: Regime) -> None:
    """Exit with a message unless the statistics of one attention call equal those of the whole matrix in float64."""
    run, problem, tokens = one_call(regime)
    q, k, v = (tensor[0].double() for tensor in (problem.q, problem.k, problem.v))
    hidden = torch.ones(regime.length, regime.length, dtype=torch.bool).triu(1)
    weights = (q @ k.mT / regime.head_dim**0.5).masked_fill(hidden, -torch.inf).softmax(-1)
    measured = {name: values[0] for name, values in run().means().items()}
    try:
        weight_statistics.check(measured, weight_statistics.statistics(weights, weights @ v, Text(tokens)))
    except WrongError as reason:
        raise SystemExit(f"{regime.name}, one call: {reason}") from reason


# -- memory, in an interpreter of its own -----------------------------------------------------------------------------


def child(name: str, regime: Regime) -> dict[str, int]:
    """Return the peak memory in bytes of the named way, or of one attention call without its output, measured in the
    current interpreter.
    """
    with torch.no_grad():
        if name == CALL_EXTRA:
            short = one_call(replace(regime, length=min(SHORT, regime.length)))[0]
            run, problem, _ = one_call(regime)
            # The output is as large as the values. One page is the smallest amount that shows.
            return {"peak": max(peak_of(run, short) - problem.v.nbytes, 4096)}
        run = WAYS[name](subject(regime))
        return {"peak": peak_of(lambda: run(regime.length), lambda: run(min(SHORT, regime.length)))}


def of_memory(regime: Regime, names: Sequence[str]) -> list[Row]:
    """Return the row for the extra memory of watching over its limit, and one for each peer's peak over that of
    headwise. Measured once: a peak hardly varies, and an interpreter takes up to a minute to load the model.
    """
    peaks = {name: measured("watching", name, regime)["peak"] for name in (PLAIN, OURS, *names)}
    rows = [_limited(regime, MODEL_EXTRA, max(peaks[OURS] - peaks[PLAIN], 4096), _note(regime))]
    for name in names:
        ratio = Ratio.of([peaks[name]], [peaks[OURS]])
        rows.append(Row(regime, PEAKS[name], ratio, peaks[OURS], peaks[name], _note(regime)))
    return rows


def _limited(regime: Regime, limit: str, taken: int, note: str) -> Row:
    """Return the row for memory in bytes, divided by its limit."""
    return Row(regime, limit, Ratio.of([taken], [LIMITS[limit]]), taken, LIMITS[limit], note)


# -- time -------------------------------------------------------------------------------------------------------------


def of_time(regime: Regime, ways: dict[str, Way], rounds: int) -> list[Row]:
    """Return the row for the watched forward pass over the plain one, and one for each other way over the watched
    one.
    """
    samples = interleaved({name: Call(lambda way=way: way(regime.length)) for name, way in ways.items()}, rounds)
    rows = []
    for name in ways:
        pair = (samples[OURS], samples[name]) if name == PLAIN else (samples[name], samples[OURS])
        if name != OURS:
            of_both = (statistics.median(samples[way]) for way in (OURS, name))
            rows.append(Row(regime, name, Ratio.of(*pair), *of_both, _note(regime)))
    return rows


def _names(options: Options) -> list[str]:
    """Return the names of the ways that the command line asks for."""
    if options.peers == "torch" or options.quick:
        return [PLAIN, OURS, EAGER]
    require("bertviz", "transformer_lens")
    return list(WAYS)


def timed(regime: Regime, options: Options, left_out: dict[str, str]) -> list[Row]:
    """Check and time all ways at one length, and return their rows. Reasons for missing ways are added to
    `left_out`.
    """
    names = _names(options) if regime.length < LONG else [PLAIN, OURS]
    of = subject(regime)
    with torch.no_grad():
        ways, without = checked(of, names, min(SHORT, regime.length))
        left_out.update({f"{name}, {regime.name}": reason for name, reason in without.items()})
        if options.quick:
            return of_time(regime, ways, min(options.rounds, 2))
        # The other ways are so slow that more rounds of them would dominate the run.
        few = min(options.rounds, FEW_ROUNDS)
        fused = {name: ways[name] for name in (PLAIN, OURS)}
        rows = of_time(regime, fused, few if regime.length >= LONG else options.rounds)
        peers = {name: way for name, way in ways.items() if name != PLAIN}
        return rows + (of_time(regime, peers, few) if len(peers) > 1 else [])


def main(command_line: Sequence[str] | None = None) -> dict:
    """Measure every length, and print a line of JSON last."""
    options = arguments(__doc__, command_line)
    all_rows: list[Row] = []
    left_out: dict[str, str] = {} if IS_SUPPORTED else {"memory": UNSUPPORTED_REASON}

    def keep(rows: Sequence[Row]) -> None:
        for row in rows:
            show(row)
        all_rows.extend(rows)

    base = TINY if options.tiny else SMOLLM2
    lengths = [base.length] if options.tiny else [512] if options.quick else [base.length, LONG]
    for regime in (replace(base, length=length) for length in lengths):
        if not options.wants(regime):
            continue
        keep(timed(regime, options, left_out))
        if IS_SUPPORTED and not options.quick:
            peers = [name for name in _names(options)[2:] if f"{name}, {regime.name}" not in left_out]
            keep(of_memory(regime, peers if regime.length < LONG else []))
    call = replace(CALL, length=300) if options.tiny else CALL
    if options.wants(call) and IS_SUPPORTED and not options.quick:
        check_call(replace(call, length=SHORT))
        keep([_limited(call, CALL_EXTRA, measured("watching", CALL_EXTRA, call)["peak"], "one call of attention")])
    return report("watching", all_rows, options, left_out)


if __name__ == "__main__":
    main()
