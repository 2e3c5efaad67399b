"""The report of the benchmarks, written from the results of all scripts."""

from benchmark_examples import ROOT, results, row

from benchmarks import report as make_benchmarks


def test_report_states_date_machine_versions_and_what_was_left_out():
    text = make_benchmarks.document([results(row(1.6), left_out={"a peer, a regime": "has no backward"})])
    assert "2026-01-02, a processor, 2 cores, AVX512, 2 threads, 7 rounds; torch 2.13.0." in text
    assert "- a peer, a regime: has no backward" in text
    few = make_benchmarks.document([results(row(1.6)) | {"rounds": 9, "long_rounds": 3, "peers": "fast"}])
    assert "9 rounds, 3 where a round takes seconds; torch 2.13.0. Only the peers of `--peers fast`." in few
    assert "[The page about GPUs](gpu.md)" in text


def test_report_in_docs_is_written_from_the_saved_results():
    saved_results = make_benchmarks.load(ROOT / "benchmarks" / "results")
    assert not any(result["quick"] for result in saved_results)
    assert (ROOT / "docs" / "reports" / "benchmarks.md").read_text(encoding="utf-8") == make_benchmarks.document(
        saved_results
    )
