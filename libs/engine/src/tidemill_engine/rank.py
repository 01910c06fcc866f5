"""One rank process: `python -m tidemill_engine.rank --settings JSON --socket PATH`.

The engine loop runs on the main thread; the socket to the service and the transfer agent live on the I/O thread. The
leader (rank 0) of a domain schedules; followers run the steps it hands them. A rank ends when its service closes the
socket, when a peer of its domain is gone, or on Shutdown.
"""

import argparse
import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from tidemill_engine.engine import Engine
from tidemill_engine.garbage import settle_garbage
from tidemill_engine.host_pool import HostPool, pageable, pinned
from tidemill_engine.messages import RankFailed, RankReady, Shutdown
from tidemill_engine.rank_io import RankIO
from tidemill_engine.rank_steps import StepFollower, StepLeader
from tidemill_engine.settings import EngineSettings, decode_settings
from tidemill_engine.step import SchedulerOutput, StepResult

if TYPE_CHECKING:
    from tidemill_engine.model_runner import ModelRunner

log = structlog.get_logger("tidemill.rank")

EXIT_FAILED = 1
EXIT_SERVICE_GONE = 3

GPU_HASH_THREADS = 4
"""Of L2; together they hash about as fast as a GPU's link copies."""
_JOIN_S = 120.0
_LAST_WORDS_S = 0.5


class LeadingRunner:
    """The leader's runner: followers get the step first."""

    def __init__(self, runner: "ModelRunner", steps: StepLeader) -> None:
        self.groups = runner.groups
        self.num_blocks = runner.num_blocks
        self.num_snapshots = runner.num_snapshots
        self.context_tokens = runner.context_tokens
        self.vocab_size = runner.vocab_size
        self._runner = runner
        self._steps = steps

    def execute(self, out: SchedulerOutput) -> StepResult:
        """Runs a step on every rank."""
        self._steps.send_step(out)
        return self._runner.execute(out)


class LastWords:
    """Ends the process from any thread, once, with a report of why."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self.io: RankIO | None = None

    def service_gone(self, reason: str) -> None:
        """Nobody is left to tell."""
        log.warning("rank_ends", reason=reason)
        self._exit(EXIT_SERVICE_GONE)

    def fail(self, reason: str) -> None:
        """Tells the service and ends."""
        with self._lock:
            log.error("rank_failed", reason=reason)
            if self.io is not None:
                self.io.send([RankFailed(self._rank, reason)])
                time.sleep(_LAST_WORDS_S)
            self._exit(EXIT_FAILED)

    def _exit(self, code: int) -> None:
        # The main thread may be inside a kernel or a collective that never returns.
        sys.stderr.flush()
        os._exit(code)


def run_leader(settings: EngineSettings, io: RankIO, engine: Engine, heartbeat: Callable[[], None]) -> None:
    """The engine loop: steps while there is work, blocks on the inbox otherwise, reports at least each idle tick."""
    reported_s = time.monotonic()
    wait_s = 0.0
    while True:
        for command in io.inbox.take(wait_s):
            if isinstance(command, Shutdown):
                return
            engine.handle(command)
        worked, reports = engine.step(io.send)
        now_s = time.monotonic()
        if not reports and now_s - reported_s >= settings.idle_tick_s:
            reports = engine.tick()
            heartbeat()
        if reports:
            io.send(reports)
            reported_s = now_s
        wait_s = 0.0 if worked else min(reported_s + settings.idle_tick_s, engine.next_timer_s) - now_s


def run_follower(runner: "ModelRunner", steps: StepFollower) -> None:
    """Runs what the leader decides."""
    while (out := steps.receive_step()) is not None:
        runner.execute(out)


def serve(settings: EngineSettings, io: RankIO, last_words: LastWords) -> None:
    """Loads the model and runs until Shutdown or the leader's end."""
    # Torch takes seconds to import: the I/O thread is up by then and notices a service that is gone. A third to a half
    # of that time would go to garbage collections, which find nothing.
    gc.disable()
    from tidemill_engine.parallel.tp import TensorParallel
    from tidemill_engine.runners import start_runner

    started_s = time.monotonic()
    is_leader, num_followers = settings.rank == 0, settings.tp_size - 1
    leader = StepLeader(settings.step_socket, num_followers, last_words.fail) if is_leader and num_followers else None
    tp = TensorParallel(settings.rank, settings.tp_size, settings.tp_init_method)
    runner = start_runner(settings, tp)
    runner.warm_up()
    settle_garbage()
    host = _host_pool(settings, runner) if settings.l2_memory_bytes else None
    io.attach_pool(runner.pool, host)
    follower = None
    if leader is not None:
        leader.accept(_JOIN_S)
    elif not is_leader:
        follower = StepFollower(settings.step_socket, settings.rank, _JOIN_S, settings.watchdog_s)
    io.send([_ready(settings, runner, host, io.transfer_address, time.monotonic() - started_s)])
    log.info("rank_ready", backend=runner.backend, num_blocks=runner.num_blocks)
    if follower is not None:
        run_follower(runner, follower)
        follower.close()
    elif leader is not None:
        run_leader(settings, io, Engine(settings, LeadingRunner(runner, leader)), leader.send_heartbeat)
        leader.close()
    else:
        run_leader(settings, io, Engine(settings, runner), lambda: None)
    tp.close()


def _host_pool(settings: EngineSettings, runner: "ModelRunner") -> HostPool:
    """L2, in pinned memory where the pool is on a GPU."""
    on_gpu = settings.device.startswith("cuda")
    return HostPool(
        runner.pool,
        runner.groups,
        runner.head_range,
        block_size=settings.block_size,
        dtype=settings.kv_dtype,
        memory_bytes=settings.l2_memory_bytes,
        allocate=pinned if on_gpu else pageable,
        threads=GPU_HASH_THREADS if on_gpu else 1,
    )


def _ready(
    settings: EngineSettings, runner: "ModelRunner", host: HostPool | None, transfer_address: str, load_s: float
) -> RankReady:
    head_start, head_end = runner.head_range
    return RankReady(
        rank=settings.rank,
        transfer_address=transfer_address,
        head_start=head_start,
        head_end=head_end,
        num_blocks=runner.num_blocks,
        num_snapshots=runner.num_snapshots,
        kv_dtype=settings.kv_dtype,
        kv_groups=list(runner.groups),
        kv_format=runner.kv_format,
        kv_bytes_per_token=runner.kv_bytes_per_token,
        load_seconds=load_s,
        backend=runner.backend,
        num_host_blocks=host.num_blocks if host else 0,
        num_host_snapshots=host.num_snapshots if host else 0,
    )


def main(argv: list[str] | None = None) -> int:
    """Wires one rank; returns its exit status."""
    parser = argparse.ArgumentParser(prog="tidemill_engine.rank", description="One rank process of a worker.")
    parser.add_argument("--settings", required=True, help="EngineSettings as JSON")
    parser.add_argument("--socket", required=True, help="unix socket on which the service listens for this rank")
    args = parser.parse_args(argv)
    settings = decode_settings(args.settings)
    _configure_log(f"domain{settings.domain}/rank{settings.rank}")
    _set_threads(settings.torch_threads)
    last_words = LastWords(settings.rank)
    io = RankIO(settings, args.socket, last_words.service_gone)
    try:
        io.start()
        last_words.io = io
        serve(settings, io, last_words)
    except Exception as error:
        log.exception("rank_error")
        last_words.fail(f"{type(error).__name__}: {error}")
    io.close()
    return 0


def _set_threads(torch_threads: int) -> None:
    """Read by OpenMP when torch is imported. Long spins at barriers cost more than they save on shared cores; some
    40 us reach to the next kernel of a step, where waking a thread takes longer."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    if torch_threads:
        os.environ["OMP_NUM_THREADS"] = str(torch_threads)


def _configure_log(rank_name: str) -> None:
    """JSON lines on stderr, each with the rank's name."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            lambda _, __, event: {"rank": rank_name, "pid": os.getpid(), **event},
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        # A line and its end in one write: the service writes to the same file.
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )


if __name__ == "__main__":
    sys.exit(main())
