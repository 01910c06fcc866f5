"""Load on one scale."""

import msgspec

from tidemill.mesh.v1 import membership_pb2
from tidemill_engine.messages import LoadSample
from tidemill_worker.load_reports import is_large_change, slo_load

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


def test_a_jump_in_requests_or_blocks_is_a_large_change() -> None:
    assert not is_large_change(SAMPLE, SAMPLE, 32)
    assert not is_large_change(SAMPLE, msgspec.structs.replace(SAMPLE, waiting_requests=7), 32)
    assert is_large_change(SAMPLE, msgspec.structs.replace(SAMPLE, waiting_requests=8), 32)
    assert is_large_change(SAMPLE, msgspec.structs.replace(SAMPLE, available_blocks=70), 32)
