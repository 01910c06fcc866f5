"""The loop around the decision: who may act, what is remembered, what gRPC shows."""

import json
from types import SimpleNamespace

import pytest

from tidemill.mesh.v1 import autoscaler_pb2, common_pb2
from tidemill.mesh.v1.events_pb2 import LoadReport
from tidemill.mesh.v1.membership_pb2 import DomainRecord, MembershipRecord, ModelRef, Role
from tidemill_autoscaler.actuator import ActuatorError, Managed
from tidemill_autoscaler.controller import Controller, Pool
from tidemill_autoscaler.decision import PoolPlanner
from tidemill_autoscaler.policy import Bounds, Policy
from tidemill_autoscaler.servicer import AutoscalerServicer
from tidemill_autoscaler.view import PoolView
from tidemill_mesh.errors import MeshError
from tidemill_mesh.metrics import Metrics

POLICY = Policy(settle_s=0, window_s=3, scale_in_after_s=6, cooldown_s=4, warmup_s=2)


class Instances:
    """Records as an InstanceView has them."""

    def __init__(self) -> None:
        self.records: dict[str, MembershipRecord] = {}

    def add(self, instance: str, role: int = Role.ROLE_DECODE, model: str = "m", domains: int = 1) -> None:
        self.records[instance] = MembershipRecord(
            instance=instance,
            role=role,
            models=[ModelRef(name=model)],
            domains=[DomainRecord(domain=i) for i in range(domains)],
        )


class Loads:
    """Reports as a LoadView has them, all fresh."""

    def __init__(self) -> None:
        self.reports: dict[tuple[str, int], LoadReport] = {}

    def latest(self, instance: str, domain: int) -> LoadReport | None:
        return self.reports.get((instance, domain))

    def age_s(self, instance: str, domain: int) -> float:
        return 0.1 if (instance, domain) in self.reports else float("inf")


class RecordingActuator:
    """Notes what it is asked for."""

    name = "recording"

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.refuses = False

    def start(self, role: str) -> str:
        return self._note("start", role)

    def stop(self, instance: str) -> None:
        self._note("stop", instance)

    def withdraw(self, instance: str) -> None:
        self._note("withdraw", instance)

    def managed(self, role: str) -> list[Managed]:
        return []

    def tick(self) -> None:
        return

    def _note(self, what: str, name: str) -> str:
        self.calls.append((what, name))
        if self.refuses:
            raise ActuatorError("no room")
        return f"{name}-new"


class Setting:
    """A controller of one decode pool with everything around it in reach."""

    def __init__(self, bounds: Bounds) -> None:
        self.now, self.leads = 0.0, True
        self.instances, self.loads, self.actuator = Instances(), Loads(), RecordingActuator()
        view = PoolView("decode", "m", self.instances, self.loads, clock=lambda: 1e6 * self.now)  # type: ignore[arg-type]
        pool = Pool("decode", view, PoolPlanner(bounds, POLICY))
        leadership = SimpleNamespace(is_leader=lambda: self.leads)
        metrics = Metrics("autoscaler", "a")
        self.controller = Controller([pool], self.actuator, leadership, metrics, clock=lambda: self.now)
        self.pool = pool

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1.0
            self.controller.step(source_healthy=True)


@pytest.fixture
def setting() -> Setting:
    return Setting(Bounds(1, 2))


def test_only_the_leader_acts(setting):
    setting.leads = False
    setting.run(30)
    assert setting.actuator.calls == []
    setting.leads = True
    setting.run(1)
    assert setting.actuator.calls == [("start", "decode")]


def test_leadership_is_asked_right_before_the_act(setting):
    answers = iter([True, False])
    setting.controller._leadership = SimpleNamespace(is_leader=lambda: next(answers))
    setting.controller.step(source_healthy=True)
    assert setting.actuator.calls == []


def test_an_actuator_that_refuses_is_asked_again_only_after_the_backoff(setting):
    setting.actuator.refuses = True
    setting.run(10)
    assert setting.actuator.calls == [("start", "decode")]
    assert setting.controller.counters["start_refused_total"] == 1
    assert setting.controller.counters["decode_failed_starts"] == 1


def test_high_load_of_one_domain_starts_one_more(setting):
    setting.instances.add("d1", domains=2)
    setting.loads.reports["d1", 0] = LoadReport(slo_load=0.1, running_requests=1)
    setting.loads.reports["d1", 1] = LoadReport(slo_load=1.7, running_requests=1)
    setting.run(6)
    assert setting.actuator.calls == [("start", "decode")]


def test_workers_of_other_models_and_roles_do_not_count(setting):
    setting.instances.add("p1", role=Role.ROLE_PREFILL)
    setting.instances.add("other", model="another")
    setting.run(1)
    assert setting.pool.seen.workers == ()


async def test_status_tells_replicas_bounds_load_and_reason(setting):
    setting.instances.add("d1")
    setting.loads.reports["d1", 0] = LoadReport(slo_load=0.7, running_requests=2)
    setting.run(2)
    servicer = AutoscalerServicer(setting.controller, common_pb2.InstanceRef, "", clock=lambda: setting.now)
    answer = await servicer.GetAutoscalerStatus(autoscaler_pb2.GetAutoscalerStatusRequest(), None)
    [pool] = answer.pools
    assert (answer.leader, answer.actuator, pool.role, pool.replicas) == (True, "recording", "decode", 1)
    assert (pool.min_replicas, pool.max_replicas, round(pool.slo_load, 2)) == (1, 2, 0.7)
    assert "within bounds" in pool.last_decision


async def test_bounds_set_at_run_time_outlive_a_restart(setting, tmp_path):
    file = str(tmp_path / "bounds.json")
    servicer = AutoscalerServicer(setting.controller, common_pb2.InstanceRef, file)
    request = autoscaler_pb2.SetBoundsRequest(role="decode", min_replicas=2, max_replicas=5)
    await servicer.SetBounds(request, None)
    restarted = Setting(Bounds(1, 2))
    AutoscalerServicer(restarted.controller, common_pb2.InstanceRef, file)
    assert restarted.pool.planner.bounds == Bounds(2, 5)


@pytest.mark.parametrize(
    ("role", "low", "high", "field"),
    [("gateway", 1, 1, "role"), ("decode", 3, 2, "max_replicas"), ("decode", -1, 2, "min_replicas")],
)
async def test_wrong_bounds_are_refused_by_field(setting, role, low, high, field):
    servicer = AutoscalerServicer(setting.controller, common_pb2.InstanceRef, "")
    with pytest.raises(MeshError) as refused:
        await servicer.SetBounds(autoscaler_pb2.SetBoundsRequest(role=role, min_replicas=low, max_replicas=high), None)
    assert refused.value.field == field


@pytest.mark.parametrize("text", ["", "[]", '{"decode": 1}', json.dumps({"decode": ["a", "b"]})])
def test_a_damaged_bounds_file_leaves_the_settings_in_force(setting, tmp_path, text):
    (tmp_path / "bounds.json").write_text(text)
    AutoscalerServicer(setting.controller, common_pb2.InstanceRef, str(tmp_path / "bounds.json"))
    assert setting.pool.planner.bounds == Bounds(1, 2)


def test_a_worker_is_as_old_as_it_has_been_seen_whatever_its_own_clock_says(setting):
    setting.instances.add("w")
    setting.instances.records["w"].started_unix_ms = 1 << 50
    moments = iter([100.0, 100.0, 130.0, 130.0])
    view = PoolView("decode", "m", setting.instances, setting.loads, clock=lambda: next(moments))  # type: ignore[arg-type]
    ages = [view.observe([], source_healthy=True).workers[0].age_s for _ in range(2)]
    assert ages == [0.0, 30.0]
    setting.instances.records.clear()
    view.observe([], source_healthy=True)
    assert view.first_seen == {}
