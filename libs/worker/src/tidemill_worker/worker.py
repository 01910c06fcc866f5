"""The state of a worker and what ends a request in it; everything else of the body acts through this."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from tidemill.mesh.v1 import common_pb2, membership_pb2, worker_pb2
from tidemill.v1 import errors_pb2
from tidemill_engine import messages
from tidemill_mesh.channels import Channels
from tidemill_mesh.errors import MeshError
from tidemill_worker.counts import WorkerCounts
from tidemill_worker.domain import Domain
from tidemill_worker.quarantine import Quarantine
from tidemill_worker.requests import LiveRequest, RequestTable
from tidemill_worker.sessions import GatewaySession
from tidemill_worker.settings import WorkerSettings
from tidemill_worker.silent_sources import Attempt, SilentSources
from tidemill_worker.source_plan import Rates
from tidemill_worker.tickets import DomainId, TicketBook
from tidemill_worker.transfers import RankTransfers
from tidemill_worker.translate import failed_output, from_key

log = structlog.get_logger()


@dataclass
class Worker:
    """One prefill or decode instance."""

    settings: WorkerSettings
    role: "membership_pb2.Role.ValueType"
    instance: str
    channels: Channels
    counts: WorkerCounts
    tickets: TicketBook
    transfers: RankTransfers
    clock: Callable[[], float] = time.monotonic
    incarnation: str = ""
    draining: bool = False
    model: membership_pb2.ModelRef = field(default_factory=membership_pb2.ModelRef)
    hash_root: bytes = b""
    kv_bytes_per_token: int = 0
    rates: Rates = field(default_factory=Rates)
    """Of the sources that blocks come from."""
    admitted: Callable[[Domain, messages.Submit], None] = lambda *_: None
    """Told of each request before its domain is."""
    domains: list[Domain] = field(default_factory=list)
    num_moves: int = 0
    """Offered since the start; names each."""
    sessions: set[GatewaySession] = field(default_factory=set)
    table: RequestTable = field(default_factory=RequestTable)
    quarantine: Quarantine = field(init=False)
    silent: SilentSources = field(init=False)

    def __post_init__(self) -> None:
        settings = self.settings
        self.quarantine = Quarantine(
            settings.quarantine_hits, settings.quarantine_window_s, settings.quarantine_s, self.clock
        )
        self.silent = SilentSources(settings.silent_misses, settings.silent_s, settings.quarantine_window_s, self.clock)

    def arrived_damaged(self, source: str) -> MeshError:
        """Counts a transfer whose bytes are not the ones that an instance sent; the error of whoever asked for it."""
        self.counts.damaged_transfer()
        begins = self.quarantine.damaged(source)
        log.error("a transfer arrived damaged", source=source, quarantine_begins=begins)
        return MeshError(errors_pb2.ERROR_CODE_WORKER_LOST, "the bytes received are not the bytes sent")

    def did_not_arrive(self, attempt: Attempt) -> None:
        """Counts a transfer whose bytes did not come, though both ends could say so."""
        self.counts.undelivered_transfer()
        begins = self.silent.missed(attempt)
        own, source = attempt.own, attempt.source
        log.warning(
            "a transfer did not arrive",
            domain=own.domain,
            source=source.instance,
            source_domain=source.domain,
            silence_begins=begins,
        )

    def domain_id(self, domain: Domain) -> DomainId:
        """The domain's present run."""
        return DomainId(self.instance, self.incarnation, domain.index, domain.epoch)

    def domain_ref(self, domain: Domain) -> common_pb2.DomainRef:
        """The same as it travels."""
        return common_pb2.DomainRef(
            instance=self.instance, incarnation=self.incarnation, domain=domain.index, epoch=domain.epoch
        )

    def domain_records(self) -> list[membership_pb2.DomainRecord]:
        """The domains that are up, as membership tells them."""
        return [
            membership_pb2.DomainRecord(
                domain=domain.index,
                epoch=domain.epoch,
                tp_size=len(domain.ready),
                num_blocks=min(item.num_blocks for item in domain.ready),
                ranks=[
                    membership_pb2.RankRecord(rank=item.rank, transfer_address=item.transfer_address)
                    for item in domain.ready
                ],
            )
            for domain in self.domains
            if domain.up
        ]

    def domain_of(self, live: LiveRequest) -> Domain:
        """The domain that a request runs on."""
        return self.domains[live.domain]

    def fail(self, live: LiveRequest, error: MeshError) -> None:
        """Ends a request with an error that its gateway is told, unless its last output is out already."""
        told = live.is_told
        if not self._end(live, error):
            return
        self.domain_of(live).send(messages.Abort(live.key))
        if not told:
            live.session.push_output(failed_output(live.key, error), live.domain)
        self.counts.finished(live.stage, "error")
        log.warning("request failed", request_id=live.key.request_id, attempt=live.key.attempt, error=str(error))

    def abort(self, live: LiveRequest, why: str, *, tell: bool) -> None:
        """Ends a request that nobody wants any more, in whatever state it is."""
        told = live.is_told
        if not self._end(live, MeshError(errors_pb2.ERROR_CODE_CANCELLED, why)):
            return
        self.domain_of(live).send(messages.Abort(live.key))
        if tell and not told:
            output = worker_pb2.Output(key=from_key(live.key), finish=worker_pb2.FINISH_ABORTED)
            live.session.push_output(output, live.domain)
        self.counts.finished(live.stage, "aborted")

    def finished(self, live: LiveRequest, outcome: str) -> None:
        """The engine has ended the request and its gateway has been told."""
        if self._end(live, MeshError(errors_pb2.ERROR_CODE_NOT_FOUND, "the request has ended here")):
            self.counts.finished(live.stage, outcome)

    def hold(self, live: LiveRequest) -> None:
        """The prompt is computed; its KV now waits for a decode worker."""
        live.held_until = self.clock() + self.settings.hold_s
        live.changed.set()

    def release(self, live: LiveRequest) -> None:
        """Nobody needs the request's KV any more; a request that still computes its prompt goes on without a hold."""
        self.domain_of(live).send(messages.Release(live.key))
        live.released = True
        if live.held_until is not None:
            self.finished(live, "handed_over" if live.move is None else "moved")

    def _end(self, live: LiveRequest, failure: MeshError) -> bool:
        if not self.table.remove(live, failure):
            return False
        self.tickets.revoke(live.key)
        if live.fetch is not None:
            live.fetch.cancel()
        return True
