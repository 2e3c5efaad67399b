"""Time and memory of watching every head of a model, against implementations that return the matrices of weights.

Regime: SmolLM2-135M-Instruct (30 layers with 9 query heads on 3 key/value heads, width 576), float32, one text of 2,048
and one of 8,192 tokens (the documentation of this project), no gradients and no cache; all statistics of `hw.watch`.
The time of the watched forward pass is compared with that of the plain one, which is fused. At 2,048 tokens it is also
compared with three other methods that give the same statistics. Each of them returns whole matrices and computes the
statistics from them, vectorised, one layer at a time:

- `output_attentions=True`: the model under "eager" attention, from the matrices it returns.
- BertViz: from the same matrices, stacked by its `format_attention`, as its views do before they draw.
- TransformerLens: from the patterns that `run_with_cache` of its bridge stores. It also computes the logits of the
  last token.

Memory: the peak of a watched forward pass minus that of the plain one, each measured once in its own interpreter after
a warm-up on a short text; and the peak of one causal attention call with statistics, 32,768 tokens and 8 heads of 64,
minus its inputs and output. With `--peers all`, the peaks of the other methods are also measured. All statistics are
first compared, on 256 tokens, with those of the eager matrices in float64. The methods that return matrices, and 8,192
tokens, have `--long-rounds` rounds. A quick run has 512 tokens in 2 rounds, one peer, and no memory. At 2,048 tokens
BertViz takes 10 GB.

    python -m benchmarks.watching [--quick] [--rounds N] [--only "8192"]
"""

import statistics
from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmarks.command_line import Options, arguments, require
from benchmarks.measure import Call, Ratio, Row, interleaved, report, show
from benchmarks.observed_call import check_statistics, observed_call
from benchmarks.peak_memory import IS_SUPPORTED, PAGE, UNSUPPORTED_REASON, measured
from benchmarks.peak_memory import peak as peak_of
from benchmarks.regime import Regime
from benchmarks.watched_model import SHORT, SMOLLM2, TINY, watched_model
from benchmarks.watching_methods import BERTVIZ, EAGER, LENS, METHODS, OURS, PLAIN, Method, checked_methods

LONG = 8192
CALL = Regime(1, 32768, 512, 8, "causal")
MODEL_EXTRA, CALL_EXTRA = "300 MB of extra memory", "1 GB of extra memory"
LIMITS = {MODEL_EXTRA: 300e6, CALL_EXTRA: 1e9}
PEAKS = {name: f"peak of {name}" for name in (EAGER, BERTVIZ, LENS)}
MEMORY = {*LIMITS, *PEAKS.values()}
"""Names in `Row.against` of rows that are in bytes."""


def _note(regime: Regime) -> str:
    """Return the note of a row: the model and "all statistics"."""
    return f"{'SmolLM2' if regime.embed == SMOLLM2.embed else 'a random model'}, all statistics"


# -- memory, in an interpreter of its own -----------------------------------------------------------------------------


def peak_in_this_process(name: str, regime: Regime) -> dict[str, int]:
    """Return the peak memory in bytes of the named method, or of one attention call without its output, measured in the
    current interpreter.
    """
    with torch.no_grad():
        if name == CALL_EXTRA:
            run, short = (observed_call(replace(regime, length=n)) for n in (regime.length, min(SHORT, regime.length)))
            peak = peak_of(run, short)
            return {"peak": max(peak - run()[0].nbytes, PAGE)}
        run = METHODS[name](watched_model(regime))
        return {"peak": peak_of(lambda: run(regime.length), lambda: run(min(SHORT, regime.length)))}


def memory_rows(regime: Regime, names: Sequence[str]) -> list[Row]:
    """Return the row for the extra memory of watching over its limit, and one for each peer's peak over that of
    headwise. Measured once: a peak hardly varies, and an interpreter takes up to a minute to load the model.
    """
    peaks = {name: measured("watching", name, regime)["peak"] for name in (PLAIN, OURS, *names)}
    rows = [_row_with_limit(regime, MODEL_EXTRA, max(peaks[OURS] - peaks[PLAIN], PAGE), _note(regime))]
    for name in names:
        ratio = Ratio.of([peaks[name]], [peaks[OURS]])
        rows.append(Row(regime, PEAKS[name], ratio, peaks[OURS], peaks[name], _note(regime)))
    return rows


def _row_with_limit(regime: Regime, limit: str, taken: int, note: str) -> Row:
    """Return the row for memory in bytes, divided by its limit."""
    return Row(regime, limit, Ratio.of([taken], [LIMITS[limit]]), taken, LIMITS[limit], note)


# -- time -------------------------------------------------------------------------------------------------------------


def time_rows(regime: Regime, methods: dict[str, Method], rounds: int) -> list[Row]:
    """Return the row for the watched forward pass over the plain one, and one for each other method over the watched
    one.
    """
    calls = {name: Call(lambda method=method: method(regime.length)) for name, method in methods.items()}
    samples = interleaved(calls, rounds)
    rows = []
    for name in methods:
        pair = (samples[OURS], samples[name]) if name == PLAIN else (samples[name], samples[OURS])
        if name != OURS:
            medians = (statistics.median(samples[method]) for method in (OURS, name))
            rows.append(Row(regime, name, Ratio.of(*pair), *medians, _note(regime)))
    return rows


def _method_names(options: Options) -> list[str]:
    """Return the names of the methods that the command line asks for."""
    if options.peers != "all" or options.quick:
        return [PLAIN, OURS, EAGER]
    require("bertviz", "transformer_lens")
    return list(METHODS)


def checked_time_rows(regime: Regime, options: Options, left_out: dict[str, str]) -> list[Row]:
    """Check and time all methods at one length, and return their rows. Reasons for missing methods are added to
    `left_out`.
    """
    names = _method_names(options) if regime.length < LONG else [PLAIN, OURS]
    watched = watched_model(regime)
    with torch.no_grad():
        methods, without = checked_methods(watched, names, min(SHORT, regime.length))
        left_out.update({f"{name}, {regime.name}": reason for name, reason in without.items()})
        if options.quick:
            return time_rows(regime, methods, min(options.rounds, 2))
        # The other methods are so slow that more rounds of them would dominate the run.
        few_rounds = options.long_rounds
        fused = {name: methods[name] for name in (PLAIN, OURS)}
        rows = time_rows(regime, fused, few_rounds if regime.length >= LONG else options.rounds)
        peers = {name: method for name, method in methods.items() if name != PLAIN}
        return rows + (time_rows(regime, peers, few_rounds) if len(peers) > 1 else [])


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
        keep(checked_time_rows(regime, options, left_out))
        if IS_SUPPORTED and not options.quick:
            names = _method_names(options)[2:] if options.peers == "all" else []
            peers = [name for name in names if f"{name}, {regime.name}" not in left_out]
            keep(memory_rows(regime, peers if regime.length < LONG else []))
    call = replace(CALL, length=300) if options.tiny else CALL
    if options.wants(call) and IS_SUPPORTED and not options.quick:
        check_statistics(call)
        peak = measured("watching", CALL_EXTRA, call)["peak"]
        keep([_row_with_limit(call, CALL_EXTRA, peak, "one call of attention")])
    return report("watching", all_rows, options, left_out)


if __name__ == "__main__":
    main()
