"""The layer under torch.compile, torch.export and onnxruntime: the checks of tests/traced.py, without shape checks."""

import pytest

OPTIONS = [
    "plain",
    "decoder",
    "window",
    "window per head",
    "chunked",
    "mask rule",
    "dynamic angles",
    "relative",
    "scores",
    "softcap",
    "sinks",
]


@pytest.fixture
def run(tracing_server):
    """Run calls of functions of tests/traced.py one after another in a new process, and check that none raises."""

    def run_calls(*calls: str) -> None:
        code = "import torch, traced\n" + "\n".join(
            # Graphs of one check must not count as recompilations in the next.
            f"torch._dynamo.reset(); torch._dynamo.config.error_on_recompile = False; traced.{call}"
            for call in calls
        )
        tracing_server.run(code)

    return run_calls


# The decoder's options are compiled by default; `test_all_options` traces all options in every way.


def test_one_compiled_graph_serves_every_length(run):
    run("compiles_for_every_length('decoder')")


def test_compiled_decoding_with_growing_caches(run):
    run("decodes_with_growing_caches()")


@pytest.mark.slow
def test_nan_does_not_survive_a_reset_of_a_static_cache(run):
    run("nan_does_not_survive_a_reset_of_the_cache()")


def test_masks_can_be_created_inside_a_compiled_function(run):
    run("masks_made_inside_compile()", "masks_padding_while_compiling()")


def test_a_compiled_decoder_writes_the_same_tokens_from_one_graph(run):
    run("decodes_the_same_tokens_in_one_graph(backend='aot_eager')")


@pytest.mark.slow
def test_a_decoder_compiled_for_cuda_graphs_writes_the_same_tokens(run):
    run("decodes_the_same_tokens_in_one_graph(mode='reduce-overhead')")


def test_packed_sequences_compile_with_a_tensor_of_offsets(run):
    run("packs_sequences_while_compiling()")


@pytest.mark.slow
def test_code_generated_by_inductor_computes_the_same(run):
    run(
        "compiles_for_every_length_with_inductor()",
        "decodes_without_recompiling_with_inductor()",
        "a_full_static_cache_raises()",
    )


def test_one_exported_program_serves_every_batch_size_and_length(run):
    # `first_calls_export_without_headwise` compares layers without these options at two sizes.
    run(*(f"exports({name!r})" for name in ("mask rule", "scores")))


def test_the_first_exported_call_contains_no_operator_of_headwise(run):
    run("first_calls_export_without_headwise()", "the_first_call_in_a_mode_is_not_recorded()")


def test_onnxruntime_computes_the_same_biases_and_rotations_for_many_lengths(run):
    run("positions_in_onnxruntime()")


@pytest.mark.slow
@pytest.mark.parametrize("names", [OPTIONS[:5], OPTIONS[5:]], ids=["first five", "last five"])
@pytest.mark.parametrize(
    "check", ["compiles_for_every_length", "decodes_without_recompiling", "exports", "runs_in_onnxruntime"]
)
def test_all_options(check, names, run):
    run(*(f"{check}({name!r})" for name in names))
