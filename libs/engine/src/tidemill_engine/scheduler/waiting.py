"""Requests that wait for admission, in the order in which they are tried."""

import bisect
from collections.abc import Iterator

from tidemill_engine.request import Request


class WaitingQueue:
    """Ordered by `queue_rank`: priority minus age, which keeps its order as time passes, so aging costs nothing."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Request]] = []
        self._place: dict[Request, tuple[float, int]] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        """A stable copy, so that requests may leave meanwhile."""
        return iter([request for _, _, request in self._entries])

    def __contains__(self, request: Request) -> bool:
        return request in self._place

    def add(self, request: Request) -> None:
        """Puts a request at its place, behind equals."""
        assert request not in self._place, "the request waits already"
        self._count += 1
        place = (request.queue_rank, self._count)
        self._place[request] = place
        bisect.insort(self._entries, (*place, request), key=lambda entry: entry[:2])

    def remove(self, request: Request) -> None:
        """Takes a waiting request out."""
        place = self._place.pop(request)
        index = bisect.bisect_left(self._entries, place, key=lambda entry: entry[:2])
        del self._entries[index]
