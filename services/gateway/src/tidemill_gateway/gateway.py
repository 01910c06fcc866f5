"""The gateway's core, below both APIs: admits, prepares and runs requests, and watches over the live ones."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import structlog

from tidemill.v1 import errors_pb2
from tidemill_gateway.admission import Admission
from tidemill_gateway.bodies import Bodies
from tidemill_gateway.flow.generation import Generation, Mesh, stalled_client_error
from tidemill_gateway.flow.plan import RequestPlan
from tidemill_gateway.grammar import grammar_field
from tidemill_gateway.intake import prepare, request_salt
from tidemill_gateway.live_request import LiveRequest
from tidemill_gateway.metrics import GatewayMetrics
from tidemill_gateway.models.catalog import Catalog
from tidemill_gateway.models.served_model import ServedModel
from tidemill_gateway.overload import Overload
from tidemill_gateway.settings import GatewaySettings
from tidemill_gateway.spec import GenerationSpec
from tidemill_gateway.tenants.budgets import Budgets
from tidemill_gateway.validation import Limits, ModelLimits, check_request
from tidemill_mesh.errors import MeshError, code_name

log = structlog.get_logger()


class Gateway:
    """Both APIs call this and nothing below it."""

    def __init__(
        self,
        settings: GatewaySettings,
        catalog: Catalog,
        admission: Admission,
        mesh: Mesh,
        metrics: GatewayMetrics,
        budgets: Budgets,
        overload: Overload,
        bodies: Bodies,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.catalog = catalog
        self.admission = admission
        self.mesh = mesh
        self.metrics = metrics
        self.budgets = budgets
        self.overload = overload
        self.bodies = bodies
        self.live: set[Generation] = set()
        self._clock = clock
        self._limits = Limits(settings.max_timeout_s, settings.max_prompts, settings.max_choices)
        self._secret = settings.cache_secret.encode()
        # Bound once: each use of the lazy one makes a logger anew.
        self._log = log.bind()

    @asynccontextmanager
    async def run(
        self, spec: GenerationSpec, tenant: str, *, streaming: bool, on_stalled_client: Callable[[], object]
    ) -> AsyncIterator[LiveRequest]:
        """A live request for the time of the block; it is ended, and all it holds given back, on every way out."""
        arrived_at = self._clock()
        outcome = "ok"
        request: LiveRequest | None = None
        request_id = spec.request_id or f"req-{secrets.token_hex(12)}"
        try:
            check_request(spec, self._limits)
            self.overload.check(spec.priority)
            with self.budgets.admitted(tenant) as charge:
                async with self.admission.admit(request_id, tenant):
                    request = await self._start(spec, request_id, tenant, arrived_at, streaming, on_stalled_client)
                    charge.tokens(request.prepared.prompt_tokens)
                    try:
                        yield request
                    finally:
                        self._end(request.generation)
                        charge.tokens(request.final[0].completion_tokens)
        except MeshError as error:
            outcome = code_name(error.code).lower()
            raise
        except (asyncio.CancelledError, GeneratorExit):
            outcome = "cancelled"
            raise
        except BaseException:
            outcome = "internal"
            raise
        finally:
            self.metrics.finished(outcome, request)
            self._log_end(request_id, spec.model, tenant, outcome, request)

    async def _start(
        self,
        spec: GenerationSpec,
        request_id: str,
        tenant: str,
        arrived_at: float,
        streaming: bool,
        on_stalled_client: Callable[[], object],
    ) -> LiveRequest:
        settings = self.settings
        model = await self.catalog.resolve_within(spec.model, settings.placement_wait_s)
        limits = self.model_limits(model)
        salt = request_salt(self._secret, tenant)
        prepared = await prepare(spec, model, limits, salt, settings.default_max_tokens)
        plan = RequestPlan(
            # A caller may use its id again while a worker still tells of the first use.
            request_id=f"{request_id}~{secrets.token_hex(6)}",
            tenant=tenant,
            tenant_weight=self.budgets.weight(tenant),
            model_revision=model.card.revision,
            choices=prepared.choices,
            deadline=arrived_at + (spec.timeout_s or settings.default_timeout_s),
            priority=spec.priority,
            slo_ttft_s=spec.slo_ttft_s,
            slo_tpot_s=spec.slo_tpot_s,
            program_id=spec.program_id,
            traceparent=spec.traceparent,
            credit_tokens=settings.credit_window_tokens if streaming else 0,
            max_attempts=settings.max_attempts,
            grammar_field=grammar_field(spec),
            sampling_prefix=spec.sampling_prefix,
        )
        generation = Generation(plan, self.mesh, on_stalled_client)
        self.live.add(generation)
        generation.start()
        return LiveRequest(request_id, prepared, generation, arrived_at, self._clock)

    def model_limits(self, model: ServedModel) -> ModelLimits:
        """What the model and its largest pool allow now."""
        card = model.card
        pool = self.catalog.largest_pool_tokens(model)
        return ModelLimits(card.name, card.context_tokens, card.vocab_size, pool)

    def _end(self, generation: Generation) -> None:
        self.live.discard(generation)
        generation.close()

    async def watch(self) -> None:
        """Looks after live requests until cancelled: silent workers, clients that do not read."""
        period_s = self.settings.liveness_s / 4
        while True:
            await asyncio.sleep(period_s)
            now = self._clock()
            for generation in list(self.live):
                for run in generation.runs:
                    run.check_progress(now, self.mesh.links.domain_progress_at)
                self._check_client(generation, now)

    def _check_client(self, generation: Generation, now: float) -> None:
        slow_s = self.settings.slow_client_s
        if generation.waits_for_client and now - generation.taken_at > slow_s:
            self.count_slow_client(generation.plan.request_id)
            generation.abort(stalled_client_error(slow_s))
            generation.on_stalled_client()

    def count_slow_client(self, request_id: str = "") -> None:
        """A client is cut off because it does not read; without a request when its answer was complete."""
        log.warning("a client does not read its stream", request_id=request_id)
        self.metrics.slow_clients.inc()

    def holds(self) -> dict[str, int]:
        """What is held now; all 0 after load."""
        links = self.mesh.links.all()
        return {
            "requests": len(self.admission.live_ids),
            "generations": len(self.live),
            "queued": self.admission.queued,
            "legs": sum(len(link.legs) for link in links),
            "reservations": len(self.mesh.reservations.live),
            "body_bytes": self.bodies.held_bytes,
        }

    def counters(self) -> dict[str, int]:
        """What may be seen beside the holds."""
        links = self.mesh.links.all()
        return {
            "worker_streams": sum(link.up for link in links),
            "stale_outputs": sum(link.stale_outputs for link in links),
            "forgotten_requests": sum(link.forgotten for link in links),
            "degraded_placements": self.mesh.placer.degraded_placements,
            "dropped_reports": self.mesh.reservations.dropped,
        }

    def _log_end(self, request_id: str, model: str, tenant: str, outcome: str, request: LiveRequest | None) -> None:
        if request is None:
            self._log.info("request refused", request_id=request_id, model=model, tenant=tenant, outcome=outcome)
            return
        (usage, times), placement = request.final, request.placement
        self._log.info(
            "request ended",
            request_id=request_id,
            model=request.model.display_name,
            tenant=tenant,
            outcome=outcome,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_l1 + usage.cached_l2 + usage.cached_l3,
            completion_tokens=usage.completion_tokens,
            ttft_s=round(times.ttft_s, 4),
            total_s=round(times.total_s, 4),
            attempts=request.generation.attempts,
            prefill=placement.prefill_instance,
            decode=placement.decode_instance,
            degraded=placement.degraded,
        )


def internal_error(error_id: str) -> MeshError:
    """The error for a fault of our own; the log names it."""
    return MeshError(errors_pb2.ERROR_CODE_INTERNAL, f"internal error; the gateway's log names it {error_id}")
