"""An instance past its high-water mark is passed over while there is another."""

import random

from tidemill.mesh.v1.common_pb2 import DomainRef
from tidemill.mesh.v1.events_pb2 import LoadReport
from tidemill_router.candidate import Candidate, Costs, ModelFacts
from tidemill_router.decode_placement import DecodeNeed, place_decode, place_whole, with_room

FACTS = ModelFacts(block_size=32, kv_bytes_per_token=10_000)
NEED = DecodeNeed(context_tokens=8, max_tokens=10)


def target(name: str, *, paused: bool, step_s: float = 0.02) -> Candidate:
    load = LoadReport(total_blocks=1000, available_blocks=1000, decode_step_s=step_s, admission_paused=paused)
    return Candidate((name, 0), DomainRef(instance=name), f"{name}:1", 1000, load, 0.1)


def test_a_paused_instance_gets_nothing_while_a_slower_one_takes_work() -> None:
    both = [target("fast", paused=True), target("slow", paused=False, step_s=0.2)]
    for seed in range(20):
        assert place_decode(both, NEED, FACTS, {}, Costs(), random.Random(seed)).candidate.key[0] == "slow"
    placed = place_whole(both, NEED, FACTS, {}, Costs(), random.Random(0))
    assert placed is not None
    assert placed.candidate.key[0] == "slow"


def test_where_all_are_paused_one_is_chosen_all_the_same() -> None:
    only = [target("only", paused=True)]
    assert place_decode(only, NEED, FACTS, {}, Costs(), random.Random(0)).candidate.key[0] == "only"
    assert place_whole(only, NEED, FACTS, {}, Costs(), random.Random(0)) is None


def test_a_running_request_moves_only_to_where_there_is_room() -> None:
    full = Candidate(("full", 0), DomainRef(), "f:1", 1000, LoadReport(total_blocks=1000, available_blocks=60), 0.1)
    load = LoadReport(total_blocks=1000, available_blocks=900, running_requests=8, max_num_seqs=8)
    seated = Candidate(("seated", 0), DomainRef(), "s:1", 1000, load, 0.1)
    targets = [target("paused", paused=True), target("roomy", paused=False), full, seated]
    assert [c.key[0] for c in with_room(targets, NEED, FACTS, {}, Costs())] == ["roomy"]
    assert with_room([targets[0], full, seated], NEED, FACTS, {}, Costs()) == []
