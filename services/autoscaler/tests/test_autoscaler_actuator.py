"""Real processes, started and drained one by one, and known again after a restart of the autoscaler."""

import sys
import time
from pathlib import Path

import pytest

from tidemill_autoscaler.actuator import ActuatorError, LocalActuator, NoActuator, read_templates
from tidemill_local import processes

POLITE = [sys.executable, "-c", "import time, sys; print(sys.argv[1], flush=True); time.sleep(600)", "{instance}"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)",
]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def actuator(tmp_path: Path, clock: Clock):
    made = LocalActuator({"prefill": POLITE, "decode": STUBBORN}, tmp_path / "run", tmp_path, 10.0, clock=clock)
    yield made
    for record in processes.read_all(tmp_path / "run"):
        processes.kill(record)
        processes.wait_gone(record, 10)


def wait_for_output(tmp_path: Path, instance: str) -> None:
    while not (tmp_path / f"{instance}.log").read_text():
        time.sleep(0.01)


def until_forgotten(actuator: LocalActuator, role: str) -> None:
    while actuator.managed(role):
        actuator.tick()
        time.sleep(0.01)


def test_a_started_worker_gets_its_own_instance_id(actuator, tmp_path):
    instance = actuator.start("prefill")
    wait_for_output(tmp_path, instance)
    assert (tmp_path / f"{instance}.log").read_text().strip() == instance
    [managed] = actuator.managed("prefill")
    assert (managed.instance, managed.alive, managed.stopping) == (instance, True, False)
    assert actuator.managed("decode") == []


def test_a_stopped_worker_leaves_and_is_forgotten(actuator, tmp_path):
    instance = actuator.start("prefill")
    wait_for_output(tmp_path, instance)
    actuator.stop(instance)
    until_forgotten(actuator, "prefill")
    assert processes.read_all(tmp_path / "run") == []


def test_a_worker_that_does_not_drain_is_killed_only_at_the_limit(actuator, tmp_path, clock):
    instance = actuator.start("decode")
    wait_for_output(tmp_path, instance)
    actuator.stop(instance)
    clock.now = 9.9
    actuator.tick()
    [managed] = actuator.managed("decode")
    assert (managed.alive, managed.stopping) == (True, True)
    clock.now = 10.0
    until_forgotten(actuator, "decode")


def test_a_withdrawn_start_is_gone_at_once(actuator, tmp_path):
    instance = actuator.start("decode")
    wait_for_output(tmp_path, instance)
    actuator.withdraw(instance)
    until_forgotten(actuator, "decode")


def test_a_new_actuator_adopts_what_the_old_one_started(actuator, tmp_path):
    instance = actuator.start("prefill")
    wait_for_output(tmp_path, instance)
    successor = LocalActuator({"prefill": POLITE}, tmp_path / "run", tmp_path, 10.0)
    assert [managed.instance for managed in successor.managed("prefill")] == [instance]
    successor.stop(instance)
    until_forgotten(successor, "prefill")


def test_processes_that_no_autoscaler_started_are_left_alone(actuator, tmp_path):
    processes.start("prefill-1", ["sleep", "600"], run_dir=tmp_path / "run", log_dir=tmp_path)
    assert actuator.managed("prefill") == []
    with pytest.raises(ActuatorError, match="not started here"):
        actuator.stop("prefill-1")


def test_a_command_that_does_not_exist_is_an_error_by_name(tmp_path):
    actuator = LocalActuator({"prefill": ["/no/such/program"]}, tmp_path / "run", tmp_path, 1.0)
    with pytest.raises(ActuatorError, match="/no/such/program"):
        actuator.start("prefill")
    assert actuator.managed("prefill") == []


def test_without_an_actuator_decisions_are_advice():
    with pytest.raises(ActuatorError, match="advice only"):
        NoActuator().start("prefill")


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"prefill": 1, "decode": 2}'])
def test_templates_of_another_form_are_refused(tmp_path, text):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ActuatorError, match="templates: "):
        read_templates(tmp_path / "t.json", ("prefill", "decode"))
