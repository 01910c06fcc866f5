"""Who carries decisions out: an interface, real processes of this machine, and nobody."""

import json
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tidemill_local import processes
from tidemill_local.processes import ProcessRecord

# Part of the id of each instance that an autoscaler started; how the next one knows them again.
MARK = "auto"


class ActuatorError(Exception):
    """A start or stop could not even be asked for; the message says why."""


@dataclass(frozen=True)
class Managed:
    """An instance that some autoscaler started here."""

    instance: str
    age_s: float
    alive: bool
    stopping: bool


class Actuator(Protocol):
    """Starts and stops instances; none of its calls waits for one to be up or gone."""

    name: str

    def start(self, role: str) -> str:
        """Starts an instance and returns its id."""
        ...

    def stop(self, instance: str) -> None:
        """Lets an instance drain and leave; it is killed at the limit."""
        ...

    def withdraw(self, instance: str) -> None:
        """Ends a start at once."""
        ...

    def managed(self, role: str) -> list[Managed]:
        """What was started here and has not been forgotten."""
        ...

    def tick(self) -> None:
        """Kills what has drained for too long and forgets what is gone."""
        ...


class LocalActuator:
    """Worker processes of this machine. The pid files are the only memory, so that a restart adopts everything."""

    name = "local"

    def __init__(
        self,
        templates: dict[str, list[str]],
        run_dir: Path,
        log_dir: Path,
        stop_limit_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._templates = templates
        self._run_dir, self._log_dir = run_dir, log_dir
        self._stop_limit_s, self._clock = stop_limit_s, clock
        self._kill_at: dict[ProcessRecord, float] = {}

    def start(self, role: str) -> str:
        template = self._templates.get(role)
        if not template:
            raise ActuatorError(f"no command line for {role} in the templates")
        instance = f"{role}-{MARK}-{secrets.token_hex(3)}"
        argv = [argument.replace("{instance}", instance) for argument in template]
        try:
            processes.start(instance, argv, run_dir=self._run_dir, log_dir=self._log_dir)
        except OSError as error:
            raise ActuatorError(f"cannot start {argv[0]}: {error}") from error
        return instance

    def stop(self, instance: str) -> None:
        record = self._record(instance)
        processes.send(record, signal.SIGTERM)
        self._kill_at.setdefault(record, self._clock() + self._stop_limit_s)

    def withdraw(self, instance: str) -> None:
        record = self._record(instance)
        processes.kill(record)
        self._kill_at.setdefault(record, self._clock())

    def managed(self, role: str) -> list[Managed]:
        return [
            Managed(record.name, processes.age_s(record), processes.alive(record), self._stopping(record))
            for record in self._records()
            if record.name.startswith(f"{role}-{MARK}-")
        ]

    def tick(self) -> None:
        now = self._clock()
        for record in self._records():
            if record in self._kill_at and not processes.alive(record):
                processes.forget(record, self._run_dir)
                del self._kill_at[record]
            elif self._kill_at.get(record, now + 1.0) <= now:
                processes.kill(record)

    def _records(self) -> list[ProcessRecord]:
        return [record for record in processes.read_all(self._run_dir) if f"-{MARK}-" in record.name]

    def _record(self, instance: str) -> ProcessRecord:
        record = processes.read(self._run_dir, instance)
        if record is None or f"-{MARK}-" not in instance:
            raise ActuatorError(f"{instance} was not started here")
        return record

    def _stopping(self, record: ProcessRecord) -> bool:
        return record in self._kill_at


class NoActuator:
    """Carries nothing out; whoever runs the workers reads the decisions in the status."""

    name = "none"

    def start(self, role: str) -> str:
        raise ActuatorError(f"advice only: one more {role} should start")

    def stop(self, instance: str) -> None:
        raise ActuatorError(f"advice only: {instance} should stop")

    def withdraw(self, instance: str) -> None:
        raise ActuatorError(f"advice only: the start of {instance} should be withdrawn")

    def managed(self, role: str) -> list[Managed]:
        return []

    def tick(self) -> None:
        return


def read_templates(path: Path, roles: Sequence[str]) -> dict[str, list[str]]:
    """The command lines by role; ActuatorError if the file is not of that form."""
    try:
        said = json.loads(path.read_text())
        return {role: [str(argument) for argument in said[role]] for role in roles}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ActuatorError(f"templates: {path}: {type(error).__name__}: {error}") from error
