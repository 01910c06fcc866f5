"""What ranks report, turned into what gateways, peers and the mesh are told."""

import asyncio
from collections.abc import Callable

import structlog

from tidemill.mesh.v1 import worker_pb2
from tidemill.v1 import errors_pb2
from tidemill_engine import messages
from tidemill_mesh.errors import MeshError, code_from_name
from tidemill_worker import moves
from tidemill_worker.domain import Domain
from tidemill_worker.due import due_requests
from tidemill_worker.hand_over_dest import run_fetch
from tidemill_worker.observers import CacheObserver, LoadTracker, Onboarder
from tidemill_worker.requests import LiveRequest
from tidemill_worker.roll_calls import RollCalls
from tidemill_worker.sessions import GatewaySession
from tidemill_worker.translate import from_key, from_output
from tidemill_worker.worker import Worker

log = structlog.get_logger()

PROGRESS_PER_LIVENESS = 3


class ReportHandler:
    """The hooks of all domains."""

    def __init__(
        self,
        worker: Worker,
        observers: list[CacheObserver],
        onboarder: Onboarder,
        load: LoadTracker,
        roll_calls: RollCalls,
        first_ready: Callable[[Domain], None],
    ) -> None:
        self._worker = worker
        self._observers = observers
        self._onboarder = onboarder
        self._load = load
        self._roll_calls = roll_calls
        self._first_ready = first_ready
        self._tasks: set[asyncio.Task[None]] = set()
        self._told_at: dict[int, float] = {}
        self.changed = asyncio.Event()
        """Set when a domain came up or went down, for membership and health."""

    def domain_up(self, domain: Domain) -> None:
        """Announces the new epoch."""
        self._worker.counts.backend(domain.index, domain.ready[0].backend)
        if not self._worker.model.card_digest:
            self._first_ready(domain)
        for observer in self._observers:
            observer.domain_up(domain)
        self.changed.set()

    def domain_down(self, domain: Domain, reason: str) -> None:
        """Ends all that ran on the domain, by name."""
        worker = self._worker
        if not worker.draining:
            worker.counts.domain_failed(domain.index)
        worker.transfers.domain_down(domain.index)
        for live in worker.table.of_domain(domain.index):
            worker.fail(live, MeshError(errors_pb2.ERROR_CODE_WORKER_LOST, f"a rank was lost: {reason}"))
        for observer in self._observers:
            observer.domain_down(domain)
        self.changed.set()

    def domain_reports(self, domain: Domain, rank: int, reports: list[messages.Report]) -> None:
        """Handles one frame of a rank."""
        for report in reports:
            match report:
                case messages.StepReport():
                    self._step(domain, report)
                case messages.PrefillProgress():
                    self._progress(domain, report)
                case messages.TransferDone() | messages.TransferFailed():
                    self._worker.transfers.answered(report)
                case messages.KVWanted():
                    self._kv_wanted(domain, report)
                case messages.StateExported():
                    self._exported(report)
                case messages.OnboardWanted():
                    self._onboarder.wanted(domain, report)
                case messages.RollAnswer():
                    self._roll_calls.answered(domain, report)
                case messages.BlocksPinned():
                    self._onboarder.pinned(domain, report)
                case messages.BlocksHit():
                    self._onboarder.hit(domain, report)
                case messages.BlocksCooling():
                    self._onboarder.cooling(domain, report)
                case messages.MoveWanted():
                    moves.wanted(self._worker, report)
                case messages.Suspended():
                    moves.suspended(self._worker, report)
                case messages.Stays():
                    moves.refused(self._worker, report)
                case messages.RunawayFound():
                    self._worker.counts.runaway()
                    log.warning("runaway output", request_id=report.key.request_id, reason=report.reason)
                case messages.RankFailed():
                    log.error("rank failed", domain=domain.index, rank=rank, message=report.message)

    def _step(self, domain: Domain, report: messages.StepReport) -> None:
        for event in report.kv_events:
            self._cache_event(domain, event)
        if report.kv_events:
            for observer in self._observers:
                observer.step_done(domain)
        if report.load is not None:
            self._load.sampled(domain, report.load)
        by_session: dict[GatewaySession, list[worker_pb2.Output]] = {}
        for output in report.outputs:
            live = self._worker.table.get(output.key)
            if live is not None:
                by_session.setdefault(live.session, []).append(from_output(output))
                self._account(live, output)
        for live in self._due(domain):
            by_session.setdefault(live.session, []).append(due_output(live))
        for session in self._silent_sessions(domain):
            by_session.setdefault(session, [])
        for session, outputs in by_session.items():
            step = worker_pb2.StepOutputs(domain=domain.index, step=report.step, outputs=outputs)
            session.push(worker_pb2.ConnectResponse(step=step))

    def _silent_sessions(self, domain: Domain) -> set[GatewaySession]:
        """Gateways that wait for this domain hear a few times in each liveness_s that it goes on, outputs or not."""
        worker, now = self._worker, self._worker.clock()
        if now - self._told_at.get(domain.index, 0.0) < worker.settings.liveness_s / PROGRESS_PER_LIVENESS:
            return set()
        self._told_at[domain.index] = now
        return {live.session for live in worker.table.of_domain(domain.index)}

    def _cache_event(self, domain: Domain, event: messages.KvEvent) -> None:
        for observer in self._observers:
            match event:
                case messages.BlocksStored():
                    observer.stored(domain, event)
                case messages.BlocksRemoved():
                    observer.removed(domain, event)
                case messages.SnapshotsDropped():
                    observer.snapshots_dropped(domain, event)
                case messages.BlocksCleared():
                    observer.cleared(domain)

    def _account(self, live: LiveRequest, output: messages.Output) -> None:
        worker = self._worker
        worker.counts.tokens(len(output.token_ids))
        if output.cached_l1 >= 0 and live.stage != "decode":
            cached = {"l1": output.cached_l1, "l2": output.cached_l2, "l3": output.cached_l3}
            worker.counts.scheduled(live.progress.total_tokens, cached)
        if output.finish == "prefilled":
            worker.hold(live)
            if live.released:
                worker.finished(live, "released")
        elif output.finish is not None:
            worker.finished(live, outcome_of(output))

    def _progress(self, domain: Domain, report: messages.PrefillProgress) -> None:
        live = self._worker.table.get(report.key)
        if live is None:
            return
        live.progress.take(report)
        live.changed.set()
        for due in self._due(domain):
            due.session.push_output(due_output(due), domain.index)

    def _due(self, domain: Domain) -> list[LiveRequest]:
        """Marks and returns the requests whose hand-over is due now."""
        worker = self._worker
        due = due_requests(
            worker.table.prefilling(domain.index),
            chunk_tokens=worker.settings.max_num_batched_tokens,
            kv_bytes_per_token=worker.kv_bytes_per_token,
            transfer_bytes_per_s=worker.transfers.bytes_per_s,
        )
        for live in due:
            live.due_sent = True
        return due

    def submitted(self, domain: Domain) -> None:
        """A prompt of one chunk in an idle domain is due at once."""
        for live in self._due(domain):
            live.session.push_output(due_output(live), domain.index)

    def _exported(self, report: messages.StateExported) -> None:
        live = self._worker.table.get(report.key)
        if live is not None:
            live.progress.state = report.state
            live.changed.set()

    def _kv_wanted(self, domain: Domain, report: messages.KVWanted) -> None:
        live = self._worker.table.get(report.key)
        if live is None or live.fetch is not None:
            domain.send(_unwanted(report.key))
            return
        live.fetch = asyncio.create_task(
            run_fetch(self._worker, live, domain, report), name=f"fetch of {report.key.request_id}"
        )
        self._tasks.add(live.fetch)
        live.fetch.add_done_callback(self._fetched)

    def _fetched(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("fetching KV failed unexpectedly", exc_info=error)

    async def close(self) -> None:
        """Ends all fetches."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def due_output(live: LiveRequest) -> worker_pb2.Output:
    """Tells the gateway that it is time to place the decode stage."""
    return worker_pb2.Output(key=from_key(live.key), hand_over_due=True)


def outcome_of(output: messages.Output) -> str:
    """Label of an ended request: how it finished, or the code of its error."""
    if output.error is None:
        return str(output.finish)
    try:
        code_from_name(output.error.code)
    except ValueError:
        return "error"
    return output.error.code.lower()


def _unwanted(key: messages.RequestKey) -> messages.KVFailed:
    error = messages.EngineError("CANCELLED", "the request has ended here")
    return messages.KVFailed(key, recompute=False, error=error)
