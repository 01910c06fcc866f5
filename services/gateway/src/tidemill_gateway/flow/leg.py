"""One stage of one attempt of a choice on one worker, and what a worker link tells it."""

from dataclasses import dataclass
from typing import Protocol

from tidemill.mesh.v1.common_pb2 import Target
from tidemill.mesh.v1.worker_pb2 import Output, RequestKey, Submit, Ticket
from tidemill_gateway.flow.reservations import Reservation
from tidemill_mesh.errors import MeshError

Key = tuple[str, int, int]


class LegOwner(Protocol):
    """Takes what happens to a leg; every method returns at once."""

    def on_output(self, leg: "Leg", output: Output) -> None:
        """A step gave this leg something."""

    def on_ticket(self, leg: "Leg", ticket: Ticket) -> None:
        """The prefill worker answers a hand-over."""

    def on_lost(self, leg: "Leg", error: MeshError) -> None:
        """The stream to the worker is gone."""

    def on_forgotten(self, leg: "Leg", error: MeshError) -> None:
        """The worker says that it will tell no more of this leg."""

    def on_fault(self, leg: "Leg", error: MeshError) -> None:
        """What the worker sent could not be handled here."""


@dataclass(slots=True, eq=False)
class Leg:
    """A stage that runs, or runs no more (`closed`)."""

    owner: LegOwner
    key: RequestKey
    stage: "Submit.Stage.ValueType"
    target: Target
    reservation: Reservation | None
    opened_at: float
    progress_at: float
    hand_over_at: float | None = None
    """Since when a ticket is awaited."""
    prefilled: bool = False
    """Its KV waits for the decode stage."""
    may_resume: bool = False
    """Its KV waits for another decode worker; if that does not fetch it, the stage goes on here."""
    closed: bool = False
    out_of_credit_at: int = 0
    """Position up to which the worker may emit."""

    @property
    def instance(self) -> str:
        """Id of the worker."""
        return self.target.domain.instance


def key_of(key: RequestKey) -> Key:
    """A key that dictionaries take."""
    return key.request_id, key.choice, key.attempt
