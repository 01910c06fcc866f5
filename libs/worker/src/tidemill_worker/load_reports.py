"""Load reports: one for each domain and interval, from the leader's latest sample."""

import time
from collections.abc import Callable

from tidemill.mesh.v1 import events_pb2, membership_pb2
from tidemill_engine.messages import LoadSample
from tidemill_kvcache.step_cost import StepCost
from tidemill_kvcache.step_cost_message import to_message
from tidemill_mesh.load import load_subject
from tidemill_worker.domain import Domain
from tidemill_worker.ticket_offers import from_domain_id
from tidemill_worker.worker import Worker

UNCHANGED_INTERVALS = 3
"""Of load_interval_s (0.25 s): an idle domain's report is never as old as routers call stale (1 s)."""


class LoadReporter:
    """Keeps the latest samples and publishes them; large changes are published at once."""

    def __init__(self, worker: Worker, publish: Callable[[str, bytes], None]) -> None:
        self._worker = worker
        self._publish = publish
        self._samples: dict[int, tuple[str, LoadSample]] = {}
        self._published: dict[int, LoadSample] = {}
        self._repeats: dict[int, int] = {}
        self._was_draining = False
        self._had_shut_out: list[object] = []
        self._sequence = 0

    def sampled(self, domain: Domain, sample: LoadSample) -> None:
        """Takes a domain's load after a step."""
        self._samples[domain.index] = (domain.epoch, sample)
        before = self._published.get(domain.index)
        if before is not None and is_large_change(before, sample, self._worker.settings.max_num_seqs):
            self._publish_domain(domain, sample)

    def publish_all(self) -> None:
        """Publishes the latest sample of each domain that is up; one that says nothing new only now and then."""
        shut_out: list[object] = [*self._worker.quarantine.sources(), *self._worker.silent.pairs()]
        news = self._worker.draining != self._was_draining or shut_out != self._had_shut_out
        self._was_draining, self._had_shut_out = self._worker.draining, shut_out
        for domain, sample in self.samples():
            repeats = self._repeats.get(domain.index, 0) + 1
            if news or sample is not self._published.get(domain.index) or repeats >= UNCHANGED_INTERVALS:
                self._publish_domain(domain, sample)
            else:
                self._repeats[domain.index] = repeats

    def reports(self) -> list[events_pb2.LoadReport]:
        """The reports of all domains that are up."""
        return [self.report(domain, sample) for domain, sample in self.samples()]

    def samples(self) -> list[tuple[Domain, LoadSample]]:
        """The latest sample of each domain that is up."""
        latest = [(domain, self.latest(domain)) for domain in self._worker.domains]
        return [(domain, sample) for domain, sample in latest if sample is not None]

    def latest(self, domain: Domain) -> LoadSample | None:
        """The latest sample of the domain's present epoch."""
        epoch, sample = self._samples.get(domain.index, ("", None))
        return sample if domain.up and epoch == domain.epoch else None

    def report(self, domain: Domain, sample: LoadSample) -> events_pb2.LoadReport:
        """The report of a sample."""
        worker = self._worker
        return events_pb2.LoadReport(
            domain=worker.domain_ref(domain),
            sent_unix_ms=int(time.time() * 1000),
            sequence=self._sequence,
            model_revision=worker.model.revision,
            role=role_name(worker.role),
            waiting_requests=sample.waiting_requests,
            running_requests=sample.running_requests,
            held_requests=sample.held_requests,
            waiting_prefill_tokens=sample.waiting_prefill_tokens,
            total_blocks=sample.total_blocks,
            free_blocks=sample.free_blocks,
            available_blocks=sample.available_blocks,
            cached_blocks=sample.cached_blocks,
            prefill_tokens_per_s=sample.prefill_tokens_per_s,
            decode_step_s=sample.decode_step_s,
            transfer_bytes_per_s=worker.transfers.bytes_per_s if worker.transfers.measured else 0.0,
            slo_load=slo_load(worker.role, sample, worker.settings.slo_ttft_s, worker.settings.slo_tpot_s),
            predicted_ttft_s=sample.predicted_ttft_s,
            measured_ttft_s=sample.measured_ttft_s,
            predicted_tpot_s=sample.predicted_tpot_s,
            measured_tpot_s=sample.measured_tpot_s,
            draining=worker.draining,
            prompt_tokens_total=sample.prompt_tokens_total,
            cached_tokens_total=sample.cached_tokens_total,
            output_tokens_total=sample.output_tokens_total,
            preemptions_total=sample.preemptions_total,
            max_num_seqs=worker.settings.max_num_seqs,
            max_num_batched_tokens=worker.settings.max_num_batched_tokens,
            admission_paused=sample.admission_paused,
            runaways_total=sample.runaways_total,
            ttft_slo_load=max(sample.predicted_ttft_s, sample.measured_ttft_s) / worker.settings.slo_ttft_s,
            tpot_slo_load=max(sample.predicted_tpot_s, sample.measured_tpot_s) / worker.settings.slo_tpot_s,
            degraded=sample.degraded,
            slo_ttft_s=worker.settings.slo_ttft_s,
            slo_tpot_s=worker.settings.slo_tpot_s,
            context_tokens=sample.context_tokens,
            quarantined=worker.quarantine.sources(),
            silent=[from_domain_id(source) for source in worker.silent.sources(worker.domain_id(domain))],
            step_cost=to_message(StepCost(*sample.step_cost)) if sample.step_cost else None,
        )

    def _publish_domain(self, domain: Domain, sample: LoadSample) -> None:
        self._sequence += 1
        self._published[domain.index] = sample
        self._repeats[domain.index] = 0
        subject = load_subject(self._worker.settings.mesh, self._worker.instance)
        self._publish(subject, self.report(domain, sample).SerializeToString())


def slo_load(role: "membership_pb2.Role.ValueType", sample: LoadSample, slo_ttft_s: float, slo_tpot_s: float) -> float:
    """The worse of predicted and measured time over the role's target; 1 = at the target."""
    if role == membership_pb2.ROLE_DECODE:
        return max(sample.predicted_tpot_s, sample.measured_tpot_s) / slo_tpot_s
    return max(sample.predicted_ttft_s, sample.measured_ttft_s) / slo_ttft_s


def is_large_change(before: LoadSample, now: LoadSample, max_num_seqs: int) -> bool:
    """Whether routers should hear of it before the interval is over."""
    requests = now.waiting_requests + now.running_requests - before.waiting_requests - before.running_requests
    blocks = now.available_blocks - before.available_blocks
    if (now.admission_paused, now.degraded) != (before.admission_paused, before.degraded):
        return True
    return abs(requests) * 4 >= max(4, max_num_seqs) or abs(blocks) * 8 >= max(8, now.total_blocks)


def role_name(role: "membership_pb2.Role.ValueType") -> str:
    """ "prefill" or "decode"."""
    return membership_pb2.Role.Name(role).removeprefix("ROLE_").lower()
