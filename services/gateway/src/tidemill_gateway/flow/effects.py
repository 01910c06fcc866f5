"""What a choice's run asks of the world; every call returns at once, answers come back through the run's methods."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tidemill.mesh.v1.common_pb2 import Target
from tidemill.mesh.v1.router_pb2 import Report
from tidemill.mesh.v1.worker_pb2 import Finish, Logprobs, Submit
from tidemill_gateway.flow.leg import Leg
from tidemill_gateway.flow.reservations import Reservation
from tidemill_mesh.errors import MeshError

if TYPE_CHECKING:
    from tidemill_gateway.flow.choice_run import ChoiceRun


class Effects(Protocol):
    """Carries out what a run decides."""

    def place_prefill(self, run: "ChoiceRun") -> None:
        """Ask where attempt `run.attempt` starts."""

    def place_decode(self, run: "ChoiceRun", prefill: Leg) -> None:
        """Ask where it goes on."""

    def place_move(self, run: "ChoiceRun", source: Leg) -> None:
        """Ask for an instance with room that takes a running stage over."""

    def stay(self, leg: Leg) -> None:
        """Tell a worker that the stage it offered, or that stands still there, goes on there."""

    def open(self, leg: Leg, submit: Submit) -> None:
        """Send a stage to its worker."""

    def hand_over(self, leg: Leg, target: Target) -> None:
        """Tell the prefill worker where the request goes on."""

    def credit(self, leg: Leg, tokens: int) -> None:
        """Let the worker emit more."""

    def close_leg(self, leg: Leg, *, abort: bool) -> None:
        """Forget a stage; with `abort` its worker is told."""

    def report(self, held: Reservation | None, kind: "Report.Kind.ValueType", *, instance_lost: bool = False,
               measured_s: float = 0.0, output_tokens: int = 0) -> None:  # fmt: skip
        """Tell the router."""

    def deliver(self, run: "ChoiceRun", token_ids: Sequence[int], logprobs: Sequence[Logprobs],
                finish: "Finish.ValueType | None") -> None:  # fmt: skip
        """Tokens in order, each exactly once; `finish` with the last."""

    def fail(self, run: "ChoiceRun", error: MeshError) -> None:
        """The choice ends without a result."""


@dataclass(slots=True)
class Bounds:
    """Seconds after which silence counts as a loss, and that attempts keep apart."""

    ticket_s: float
    stall_s: float
    attempt_delays_s: tuple[float, ...] = (0.0,)
    """Before the second attempt, the third, and later ones."""
