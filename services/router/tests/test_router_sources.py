"""A placement names who else holds more of the prompt."""

from collections.abc import Callable, Mapping

import pytest

from tidemill.mesh.v1.common_pb2 import DomainRef
from tidemill_kvcache.domain_track import Holder
from tidemill_kvcache.index import TierDepth
from tidemill_router.candidate import Candidate
from tidemill_router.sources import Sources


def candidate(name: str, kv_format: str = "") -> Candidate:
    return Candidate((name, 0), DomainRef(instance=name), f"{name}:1", 100, kv_format=kv_format)


def below(depths: Mapping[Holder, TierDepth]) -> Callable[[Candidate], int]:
    """All that lies in L1 is in L2, too, where a prompt goes on there."""
    return lambda instance: depths[instance.key].l1 + depths[instance.key].l2


def test_the_best_holders_in_memory_are_named_and_never_the_chosen_one() -> None:
    all_of_them = [candidate(name) for name in ("p-1", "p-2", "p-3", "d-1", "d-2")]
    depths = {
        ("p-1", 0): TierDepth(l1=3),
        ("p-2", 0): TierDepth(l1=2, l2=4),
        ("p-3", 0): TierDepth(l1=3, l3=90),
        ("d-1", 0): TierDepth(l1=9),
        ("d-2", 0): TierDepth(l2=5),
    }
    sources = Sources(all_of_them, depths, below(depths))
    named = sources.better_than(all_of_them[0])
    assert [(source.holder.domain.instance, source.num_blocks) for source in named] == [("d-1", 9), ("p-2", 6)]
    assert named[0].holder.endpoint == "d-1:1"
    assert sources.better_than(all_of_them[3]) == []
    assert Sources(all_of_them, {}, below({})).better_than(all_of_them[0]) == []


def test_what_another_instance_could_send_is_its_memory_and_not_ones_own() -> None:
    holder, second, cold = (candidate(name) for name in ("p-1", "d-1", "p-2"))
    depths = {("p-1", 0): TierDepth(2, 7), ("d-1", 0): TierDepth(4, 0, 90)}
    sources = Sources([holder, second, cold], depths, below(depths))
    assert [sources.beside(c) for c in (holder, second, cold)] == [4, 9, 9]
    assert Sources([holder], {}, below({})).beside(holder) == 0


@pytest.mark.parametrize(("in_l2", "sent"), [(0, 4), (3, 4), (9, 9)])
def test_an_instance_sends_from_one_tier_and_uses_both(in_l2: int, sent: int) -> None:
    split, other, cold = (candidate(name) for name in ("p-1", "p-2", "p-3"))
    depths = {split.key: TierDepth(l1=4, l2=5), other.key: TierDepth(l1=8)}
    sources = Sources([split, other, cold], depths, lambda instance: in_l2)
    assert sources.beside(other) == sent
    assert sources.better_than(split) == []
    assert [source.num_blocks for source in sources.better_than(cold)] == sorted([8, sent], reverse=True)


def test_an_instance_is_not_credited_with_memory_of_less_precision_than_its_own() -> None:
    names = ["float32", "bfloat16", "float8_e4m3fn", "of a later release", ""]
    exact, half, small, later, silent = (
        candidate(name or "silent", name and f"v1/b16/kv:paged:{name}:2x2x8") for name in names
    )
    depths = {
        ("float32", 0): TierDepth(3),
        ("bfloat16", 0): TierDepth(5),
        ("float8_e4m3fn", 0): TierDepth(7),
        ("of a later release", 0): TierDepth(9),
    }
    sources = Sources([exact, half, small, later, silent], depths, below(depths))
    assert [sources.beside(c) for c in (exact, half, small, later, silent)] == [0, 3, 5, 0, 9]
    assert [s.holder.domain.instance for s in sources.better_than(candidate("cold", half.kv_format))] == [
        "bfloat16",
        "float32",
    ]
