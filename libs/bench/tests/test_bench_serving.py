"""Rows of the serving benchmark: figures of all rounds, and a workload that says what each side was asked for."""

from tidemill_bench.benchmarks.serving import HF_REQUESTS, REQUESTS, rows_of
from tidemill_bench.openai_load import Run, Timing


def made(requests: int, total_s: float) -> Run:
    timing = Timing(ttft_s=0.5, total_s=total_s, output_tokens=128, cached_tokens=0, longest_gap_s=0.0)
    return Run(timings=[timing] * requests, wall_s=total_s)


def test_rows_say_how_many_requests_each_side_ran_and_take_medians_of_rounds():
    runs = {}
    for concurrency, requests in REQUESTS.items():
        runs["ours", concurrency] = [made(requests, 1.0), made(requests, 2.0), made(requests, 4.0)]
        runs["vLLM", concurrency] = [made(requests, 2.0)] * 3
        runs["HF", concurrency] = [made(HF_REQUESTS[concurrency], 8.0)] * 3
    rows = rows_of(runs, "ours", ["vLLM", "HF"], list(REQUESTS))
    assert len(rows) == 3 * 3 * 2
    for row in rows:
        concurrency = int(row.metric.rpartition(" ")[2])
        assert f"{REQUESTS[concurrency]} requests, median of 3 rounds" in row.workload
        told = f"the baseline: {HF_REQUESTS[concurrency]} requests in batches of {concurrency}"
        assert (told in row.workload) == (row.baseline == "HF")
        assert (row.goal is None) == (row.baseline == "HF" or "TPOT" in row.metric)
    output = next(row for row in rows if row.metric == "output, concurrency 4" and row.baseline == "HF")
    assert (output.value, output.baseline_value) == (16 * 128 / 2.0, 4 * 128 / 8.0)


def test_without_peers_rows_stand_alone():
    runs = {("ours", 1): [made(8, 1.0)]}
    rows = rows_of(runs, "ours", [], [1])
    assert {row.baseline for row in rows} == {None}
    assert all(row.workload.endswith("8 requests, median of 1 rounds") for row in rows)
