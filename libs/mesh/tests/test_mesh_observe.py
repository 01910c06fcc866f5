"""Logs and metrics: their form, their names and their limits."""

import io
import json
import logging
import sys

import pytest
import structlog

from tidemill_mesh import log
from tidemill_mesh.metrics import Metrics
from tidemill_mesh.plain_log import PlainRenderer

pytestmark = pytest.mark.usefixtures("restored_logging")


def test_json_lines_carry_who_when_and_the_request(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("json", "info", "gateway", "gateway-1")
    with structlog.contextvars.bound_contextvars(request_id="r-1"):
        structlog.get_logger().info("served", tokens=3)
    structlog.get_logger().debug("too detailed")
    [line] = capsys.readouterr().err.splitlines()
    entry = json.loads(line)
    expected = {"event": "served", "level": "info", "service": "gateway", "instance": "gateway-1", "tokens": 3}
    assert expected.items() <= entry.items()
    assert entry["request_id"] == "r-1"
    assert entry["timestamp"].endswith("Z")


class Writes(io.StringIO):
    """Keeps each write."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def write(self, text: str, /) -> int:
        self.made.append(text)
        return len(text)


@pytest.mark.parametrize("form", ["json", "console"])
def test_a_line_is_one_write_so_that_processes_may_share_a_file(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written = Writes()
    monkeypatch.setattr(sys, "stderr", written)
    log.configure(form, "info", "prefill", "prefill-1")
    structlog.get_logger().info("model loaded", name="x")
    structlog.get_logger().warning("slow")
    assert [text.count("\n") for text in written.made] == [1, 1]
    assert all(text.endswith("\n") for text in written.made)


def test_console_lines_are_readable(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("console", "debug", "router", "router-1")
    structlog.get_logger().warning("slow", seconds=1.5)
    shown = capsys.readouterr().err
    assert "slow" in shown
    assert "seconds=1.5" in shown


def test_what_libraries_log_arrives_in_the_same_form(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("json", "info", "gateway", "gateway-1")
    logging.getLogger("asyncio").error("Task exception was never retrieved: %s", "x")
    logging.getLogger("asyncio").info("chatter")
    [line] = capsys.readouterr().err.splitlines()
    entry = json.loads(line)
    assert entry["event"] == "Task exception was never retrieved: x"
    assert (entry["logger"], entry["level"]) == ("asyncio", "error")


def test_an_exception_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("json", "info", "gateway", "gateway-1")
    try:
        raise ValueError("broken")
    except ValueError:
        structlog.get_logger().exception("failed")
    assert "ValueError" in capsys.readouterr().err


@pytest.mark.parametrize(("form", "terminal"), [("json", False), ("console", False), ("console", True)])
def test_a_traceback_shows_what_failed_and_none_of_the_values_at_hand(
    form: str, terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def handle(headers: dict[str, str], prompt: str) -> None:
        raise RuntimeError(f"odd, with {len(headers)} headers and {len(prompt)} letters")

    # Made at run time: a traceback does show the lines of the source.
    key, prompt = "-".join(("sk", "secret")), " ".join(("my", "private", "prompt"))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    log.configure(form, "info", "gateway", "gateway-1")
    for method in (structlog.get_logger().exception, logging.getLogger("asyncio").exception):
        try:
            handle({"authorization": f"Bearer {key}"}, prompt)
        except RuntimeError:
            method("failed")
        written = capsys.readouterr().err
        for shown in ("failed", "RuntimeError", "odd, with 1 headers", "handle"):
            assert shown in written
        for secret in (key, prompt):
            assert secret not in written


def test_a_rate_limit_passes_one_each_interval_and_counts_the_rest() -> None:
    now = 0.0
    limit = log.RateLimit(10.0, lambda: now)
    assert limit.passes() == 0
    assert limit.passes() is None
    assert limit.passes() is None
    now = 10.0
    assert limit.passes() == 2
    now = 20.0
    assert limit.passes() == 0


def test_names_follow_one_rule_and_asking_again_gives_the_same_metric() -> None:
    metrics = Metrics("kvstore", "kvstore-1", "0.1.0")
    metrics.counter("reads_total", "Reads.", ("tier",)).labels(tier="l3").inc(2)
    assert metrics.counter("reads_total", "Reads.", ("tier",)) is metrics.counter("reads_total", "Reads.", ("tier",))
    metrics.gauge("used_bytes", "Bytes.").set(7)
    metrics.histogram("read_seconds", "Seconds.").observe(0.003)
    text = metrics.exposition().decode()
    assert 'tidemill_kvstore_reads_total{tier="l3"} 2.0' in text
    assert "tidemill_kvstore_used_bytes 7.0" in text
    assert 'tidemill_kvstore_read_seconds_bucket{le="0.005"} 1.0' in text
    assert 'tidemill_kvstore_info{instance="kvstore-1",version="0.1.0"} 1.0' in text
    assert "process_resident_memory_bytes" in text


def test_a_name_cannot_be_two_kinds() -> None:
    metrics = Metrics("kvstore", "kvstore-1")
    metrics.counter("reads_total", "Reads.")
    with pytest.raises(AssertionError, match="another kind"):
        metrics.gauge("reads_total", "Reads.")


def test_plain_lines_are_what_structlogs_console_renderer_writes() -> None:
    plain, console = PlainRenderer(), structlog.dev.ConsoleRenderer(colors=False)
    several: tuple[dict[str, object], ...] = (
        {},
        {"b": "two words", "a": 1.5, "c": None, "d": "x=y", "e": "plain", "f": [1], "g": "it's"},
    )
    for fields in several:
        event = {"timestamp": "2026-01-01T00:00:00Z", "level": "info", "event": "request ended", **fields}
        assert plain(None, "info", dict(event)).split() == console(None, "info", dict(event)).split()


def test_plain_lines_carry_tracebacks() -> None:
    line = PlainRenderer()(None, "error", {"event": "failed", "level": "error", "exc_info": ValueError("odd")})
    assert "failed" in line
    assert "ValueError: odd" in line
