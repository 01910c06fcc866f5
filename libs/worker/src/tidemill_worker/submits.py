"""Admission: what a gateway submits becomes a live request, or an error output."""

import structlog

from tidemill.mesh.v1 import worker_pb2
from tidemill.v1 import errors_pb2
from tidemill_engine import messages
from tidemill_kvcache.hashing import chain_root, tenant_salt
from tidemill_mesh.errors import MeshError, code_name
from tidemill_worker.moves import VERDICT_S
from tidemill_worker.requests import LiveRequest, SourceProgress
from tidemill_worker.sessions import GatewaySession
from tidemill_worker.translate import failed_output, invalid, to_key, to_submit
from tidemill_worker.worker import Worker

log = structlog.get_logger()

DEFAULT_TENANT = "default"


def take_submits(worker: Worker, session: GatewaySession, submits: list[worker_pb2.Submit]) -> None:
    """Starts requests; each that cannot start is answered with an error output."""
    for submit in submits:
        try:
            command = admit(worker, session, submit)
        except MeshError as error:
            worker.counts.refused(code_name(error.code))
            log.info("submit refused", request_id=submit.key.request_id, error=str(error), field=error.field)
            session.push_output(failed_output(to_key(submit.key), error), submit.domain)
        else:
            worker.admitted(worker.domains[submit.domain], command)
            worker.domains[submit.domain].send(command)
            log.debug("submitted", request_id=submit.key.request_id, stage=command.stage, domain=submit.domain)


def admit(worker: Worker, session: GatewaySession, submit: worker_pb2.Submit) -> messages.Submit:
    """Adds the live request and returns the engine's command; raises MeshError."""
    _check_place(worker, submit)
    command = to_submit(
        submit,
        hash_salt=request_root(worker, submit.tenant, submit.adapter),
        # The engine must not free blocks that a fetch may still read here: this worker ends the hold.
        hold_s=worker.settings.hold_s + VERDICT_S,
        default_slo_ttft_s=worker.settings.slo_ttft_s,
        default_slo_tpot_s=worker.settings.slo_tpot_s,
    )
    if command.key in worker.table:
        raise MeshError(errors_pb2.ERROR_CODE_ALREADY_EXISTS, "this attempt is live here already", field="key")
    if command.stage == "decode":
        _check_source(worker, submit)
    _end_older_attempts(worker, session, command.key)
    emitted = len(command.token_ids) - command.prompt_tokens
    live = LiveRequest(
        key=command.key,
        session=session,
        domain=submit.domain,
        stage=command.stage,
        deadline_at=worker.clock() + submit.deadline_s,
        progress=SourceProgress(total_tokens=len(command.token_ids)),
        source=submit.source if command.stage == "decode" else None,
        block_sources=submit.block_sources,
        stores=submit.stores,
        goes_on=command.sampling.max_tokens > emitted + 1,
    )
    worker.table.add(live)
    return command


def request_root(worker: Worker, tenant: str, adapter: str) -> bytes:
    """Root of the request's block-hash chain; only tenants of the same deployment secret can meet in it."""
    salt = tenant_salt(worker.settings.cache_secret, tenant or DEFAULT_TENANT)
    return chain_root(worker.hash_root, salt, adapter)


def _check_place(worker: Worker, submit: worker_pb2.Submit) -> None:
    if worker.draining:
        raise MeshError(errors_pb2.ERROR_CODE_UNAVAILABLE, "the worker is draining")
    if submit.model_revision != worker.model.revision:
        raise MeshError(
            errors_pb2.ERROR_CODE_MODEL_NOT_FOUND,
            f"revision {submit.model_revision!r} is not served here, {worker.model.revision!r} is",
            field="model_revision",
        )
    if submit.adapter:
        raise MeshError(errors_pb2.ERROR_CODE_UNSUPPORTED, "adapters are not served here", field="adapter")
    if not 0 <= submit.domain < len(worker.domains):
        raise invalid(f"there is no domain {submit.domain}", "domain")
    domain = worker.domains[submit.domain]
    if not domain.up:
        raise MeshError(errors_pb2.ERROR_CODE_UNAVAILABLE, f"domain {submit.domain} is down: {domain.last_failure}")


def _check_source(worker: Worker, submit: worker_pb2.Submit) -> None:
    """A ticket that is bound to an earlier run of this domain cannot be redeemed by this one."""
    if not submit.source.prefill.endpoint or not submit.source.ticket.secret:
        raise invalid("a decode stage names prefill's endpoint and ticket", "source")
    if submit.source.ticket.decode != worker.domain_ref(worker.domains[submit.domain]):
        raise MeshError(
            errors_pb2.ERROR_CODE_STALE, "the ticket is bound to another run of this domain", field="source.ticket"
        )


def _end_older_attempts(worker: Worker, session: GatewaySession, key: messages.RequestKey) -> None:
    """The gateway has moved on; what an older attempt still does here is waste."""
    for live in worker.table.of_session(session):
        other = live.key
        if (other.request_id, other.choice) == (key.request_id, key.choice) and other.attempt < key.attempt:
            worker.abort(live, "a newer attempt has begun", tell=False)
