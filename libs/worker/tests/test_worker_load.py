"""Load on one scale."""

from types import SimpleNamespace

import msgspec

from tidemill.mesh.v1 import common_pb2, membership_pb2
from tidemill_engine.messages import LoadSample
from tidemill_mesh.metrics import Metrics
from tidemill_worker.counts import WorkerCounts
from tidemill_worker.load_reports import LoadReporter, is_large_change, slo_load
from tidemill_worker.settings import WorkerSettings
from tidemill_worker.tickets import DomainId

SAMPLE = LoadSample(
    waiting_requests=0,
    running_requests=0,
    held_requests=0,
    waiting_prefill_tokens=0,
    total_blocks=80,
    free_blocks=80,
    available_blocks=80,
    cached_blocks=0,
    pinned_blocks=0,
    used_blocks=0,
    prefill_tokens_per_s=0.0,
    decode_step_s=0.0,
    predicted_ttft_s=0.5,
    measured_ttft_s=2.0,
    predicted_tpot_s=0.3,
    measured_tpot_s=0.1,
    prompt_tokens_total=0,
    cached_tokens_total=0,
    output_tokens_total=0,
    preemptions_total=0,
)


def test_prefill_is_loaded_by_its_first_tokens_and_decode_by_its_output_tokens() -> None:
    assert slo_load(membership_pb2.ROLE_PREFILL, SAMPLE, 4.0, 0.1) == 0.5
    assert slo_load(membership_pb2.ROLE_DECODE, SAMPLE, 4.0, 0.6) == 0.5


OWN = DomainId("d", "i", 0, "e")


def test_a_report_tells_both_sides_and_their_targets_whatever_the_role() -> None:
    settings = WorkerSettings(slo_ttft_s=4.0, slo_tpot_s=0.6)
    worker = SimpleNamespace(
        settings=settings,
        role=membership_pb2.ROLE_DECODE,
        model=SimpleNamespace(revision="m"),
        draining=False,
        transfers=SimpleNamespace(measured=False),
        quarantine=SimpleNamespace(sources=lambda: ["p-1"]),
        silent=SimpleNamespace(sources=lambda own: [DomainId("p-2", "i", 0, "e")] if own == OWN else []),
        domain_id=lambda domain: OWN,
        domain_ref=lambda domain: common_pb2.DomainRef(instance="d", domain=domain.index),
    )
    reporter = LoadReporter(worker, lambda *_: None)  # type: ignore[arg-type]
    sample = msgspec.structs.replace(SAMPLE, degraded=["small_chunks"], step_cost=[0.01, 0.0, 0.0, 0.0, 0.0])
    report = reporter.report(SimpleNamespace(index=0), sample)  # type: ignore[arg-type]
    assert (report.ttft_slo_load, report.tpot_slo_load, report.slo_load) == (0.5, 0.5, 0.5)
    assert (report.slo_ttft_s, report.slo_tpot_s, report.step_cost.base_s) == (4.0, 0.6, 0.01)
    assert list(report.degraded) == ["small_chunks"]
    assert list(report.quarantined) == ["p-1"]
    assert list(report.silent) == [common_pb2.DomainRef(instance="p-2", incarnation="i", epoch="e")]
    metrics = Metrics("decode", "d")
    WorkerCounts(metrics).loads([report])
    shown = metrics.exposition().decode()
    for line in ('side_slo_load{domain="0",side="ttft"} 0.5', 'side_slo_load{domain="0",side="tpot"} 0.5'):
        assert f"tidemill_decode_{line}" in shown
    assert 'tidemill_decode_degraded{domain="0",step="small_chunks"} 1.0' in shown


def test_a_jump_in_requests_or_blocks_is_a_large_change() -> None:
    assert not is_large_change(SAMPLE, SAMPLE, 32)
    assert not is_large_change(SAMPLE, msgspec.structs.replace(SAMPLE, waiting_requests=7), 32)
    assert is_large_change(SAMPLE, msgspec.structs.replace(SAMPLE, waiting_requests=8), 32)
    assert is_large_change(SAMPLE, msgspec.structs.replace(SAMPLE, available_blocks=70), 32)


def test_a_pause_of_admission_is_told_at_once() -> None:
    assert is_large_change(SAMPLE, msgspec.structs.replace(SAMPLE, admission_paused=True), 32)
    assert is_large_change(SAMPLE, msgspec.structs.replace(SAMPLE, degraded=["small_chunks"]), 32)


def test_what_a_domain_computes_by_is_a_metric() -> None:
    metrics = Metrics("decode", "d-1")
    WorkerCounts(metrics).backend(0, "cuda/torch-reference/fp32")
    assert b'tidemill_decode_backend_info{backend="cuda/torch-reference/fp32",domain="0"} 1.0' in metrics.exposition()
