"""What the engine is told of a request that was admitted."""

from types import SimpleNamespace

from tidemill.mesh.v1 import common_pb2, membership_pb2, worker_pb2
from tidemill_mesh.metrics import Metrics
from tidemill_worker.counts import WorkerCounts
from tidemill_worker.moves import VERDICT_S
from tidemill_worker.sessions import GatewaySession
from tidemill_worker.settings import WorkerSettings
from tidemill_worker.submits import admit
from tidemill_worker.tickets import TicketBook
from tidemill_worker.translate import from_tokens
from tidemill_worker.worker import Worker


def test_the_engine_holds_a_prompt_for_longer_than_its_worker_lets_it_be_fetched() -> None:
    now_s = 100.0
    session = GatewaySession(common_pb2.InstanceRef(instance="g-1"), 1000)
    worker = Worker(
        settings=WorkerSettings(hold_s=10.0),
        role=membership_pb2.ROLE_PREFILL,
        instance="p-1",
        channels=None,  # type: ignore[arg-type]
        counts=WorkerCounts(Metrics("prefill", "p-1")),
        tickets=TicketBook(lambda: now_s),
        transfers=None,  # type: ignore[arg-type]
        clock=lambda: now_s,
        domains=[SimpleNamespace(up=True)],  # type: ignore[list-item]
        sessions={session},
    )
    submit = worker_pb2.Submit(
        key=worker_pb2.RequestKey(request_id="r", attempt=1),
        stage=worker_pb2.Submit.STAGE_PREFILL,
        token_ids=from_tokens([1, 2, 3]),
        prompt_tokens=3,
        credit_tokens=1,
        deadline_s=60.0,
    )
    command = admit(worker, session, submit)
    live = worker.table.get(command.key)
    assert live is not None
    # The worker hears of the prompt's end later than the engine knows of it.
    now_s += VERDICT_S
    worker.hold(live)
    assert live.held_until is not None
    assert 100.0 + command.hold_s >= live.held_until
