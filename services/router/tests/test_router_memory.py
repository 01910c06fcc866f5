"""A router's memory levels off over rounds of placements, however their requests end."""

from harness.memory import LATE_ROUNDS, late_traced_growth
from placement_mesh import Mesh, prompt

from tidemill.mesh.v1.membership_pb2 import ROLE_DECODE, ROLE_PREFILL
from tidemill_kvcache.index import L1

REQUESTS = 50
BLOCKS = 32
KEPT_BYTES = 256
"""Of a placement on average, at most: half of its prompt's hashes."""


async def test_rounds_of_placements_leave_nothing_behind() -> None:
    mesh = Mesh()
    for name, role in (("p-0", ROLE_PREFILL), ("p-1", ROLE_PREFILL), ("d-0", ROLE_DECODE), ("d-1", ROLE_DECODE)):
        mesh.add(name, role)

    def serve(number: int) -> None:
        request_id, hashes = f"request-{number:09}", prompt(number * 1000, BLOCKS)
        placed = mesh.place(hashes, request_id=request_id)
        if number % 4 == 0:
            # Its gateway is gone, or says nothing: the deadline ends it.
            return
        holder = (placed.target.domain.instance, 0)
        mesh.reservations.prefilled(placed.reservation_id)
        mesh.index.stored(holder, b"", hashes, L1)
        decode = mesh.place_decode(hashes, request_id=request_id)
        for reservation_id in (placed.reservation_id, decode.reservation_id):
            mesh.reservations.end(reservation_id, "cancelled" if number % 4 == 1 else "finished")
        mesh.index.removed(holder, hashes, L1)

    async def run_round(number: int) -> None:
        for index in range(REQUESTS):
            mesh.clock.now += 0.05
            serve(number * REQUESTS + index)
        mesh.clock.now += 60.0
        mesh.reservations.expire()
        assert len(mesh.reservations) == 0

    grown = await late_traced_growth(run_round)
    assert grown / (LATE_ROUNDS * REQUESTS) < KEPT_BYTES
