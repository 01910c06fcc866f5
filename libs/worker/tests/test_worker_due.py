"""When prefill asks for its decode placement."""

from typing import Any, cast

from tidemill_engine.messages import RequestKey
from tidemill_worker.due import due_requests
from tidemill_worker.requests import LiveRequest, SourceProgress


def request(total: int, computed: int = 0, remaining_s: float = 0.0, **more: Any) -> LiveRequest:
    """A request that prefills."""
    progress = SourceProgress(total_tokens=total, computed_tokens=computed, remaining_s=remaining_s)
    return LiveRequest(
        key=RequestKey("r"),
        session=cast("Any", None),
        domain=0,
        stage="prefill",
        deadline_at=0.0,
        progress=progress,
        **more,
    )


def due(*requests: LiveRequest, transfer_bytes_per_s: float = 1e6) -> list[LiveRequest]:
    """Due ones with chunks of 100 tokens and 1000 bytes of KV for each token."""
    return due_requests(requests, chunk_tokens=100, kv_bytes_per_token=1000, transfer_bytes_per_s=transfer_bytes_per_s)


def test_a_prompt_of_one_chunk_is_due_at_once_when_nothing_is_ahead() -> None:
    short = request(80)
    assert due(short) == [short]
    assert due(request(200, computed=1, remaining_s=9), short) == []


def test_a_long_prompt_is_due_when_its_last_chunk_starts() -> None:
    long = request(1000, computed=899, remaining_s=9)
    assert due(long) == []
    long.progress.computed_tokens = 900
    assert due(long) == [long]


def test_a_slow_transfer_makes_it_due_earlier() -> None:
    long = request(1000, computed=500, remaining_s=5.0)
    assert due(long, transfer_bytes_per_s=1e6) == []
    assert due(long, transfer_bytes_per_s=1e5) == [long]


def test_a_prompt_that_waits_is_not_due_however_slow_the_transfer() -> None:
    assert due(request(1000, remaining_s=0.0), transfer_bytes_per_s=1.0) == []


def test_it_is_said_once_and_not_of_requests_that_end_with_their_first_token() -> None:
    assert due(request(80, due_sent=True), request(80, goes_on=False)) == []


def test_a_computed_prompt_is_due_whatever_waits_ahead() -> None:
    done = request(500, computed=500)
    done.progress.final = True
    assert due(request(400, computed=1, remaining_s=9), done) == [done]
