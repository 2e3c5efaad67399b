"""The command `headwise merge`."""

from typing import Annotated, Any, get_args

import typer

import headwise as hw
from headwise.cli.loading import find_inputs
from headwise.cli.options import Data, DecoderFlags, Force, ModelFolder, TextFlags
from headwise.cli.output import OutputFlags
from headwise.cli.quantities import choice
from headwise.settings import MergeGrouping, MergeMethod

EXAMPLES = """
headwise merge --model smollm2 --data corpus.txt --documents cut --context 128 --kv-heads 1 --out merged
headwise merge --model smollm2 --data corpus.txt --documents cut --kv-heads 1 --out merged --force
headwise merge --model smaller --data sentences.jsonl --kv-heads 2 --out merged --json
"""


def merge(
    *,
    data: Data,
    out: ModelFolder,
    kv_heads: Annotated[int, typer.Option(min=1, help="Key/value heads of each layer that remain.")],
    model: DecoderFlags,
    method: Annotated[
        str, typer.Option(help="How heads are merged; see hw.merge_kv.", **choice(get_args(MergeMethod)))
    ] = "procrustes",
    grouping: Annotated[
        str, typer.Option(help="Which heads become one; see hw.merge_kv.", **choice(get_args(MergeGrouping)))
    ] = "adjacent",
    texts: TextFlags,
    force: Force = False,
    output: OutputFlags,
) -> None:
    """Merge the key/value heads of each layer to fewer, which makes the cache smaller. Fits them to the data, and saves
    the smaller model in --out.
    """
    from headwise.compression.parameter_counts import parameters_before_and_after
    from headwise.compression.recipe.inputs import load_whole_model
    from headwise.runs.files import require_new_folder, require_outside_data
    from headwise.show.smaller_models import merge_records, print_merge

    require_outside_data(out, data)
    require_new_folder(out, force=force)
    device = model.torch_device
    source, dataset = find_inputs(model, data, texts, out, shown=not output.quiet)
    dense = load_whole_model(source, model.torch_dtype).to(device)
    names: Any = {"method": method, "grouping": grouping}
    merged = hw.merge_kv(dense, num_kv_heads=kv_heads, calibration=dataset.within(dense), **names)
    hw.save_model(merged, dataset.tokenizer, out, force=force)
    sizes = parameters_before_and_after(dense, merged)
    metadata = {"model": {"name": source.title}, "data": {"source": dataset.name}}
    output.show(
        lambda: merge_records(kv_heads, sizes, metadata),
        lambda console: print_merge(kv_heads, sizes, console),
        written=out,
    )
