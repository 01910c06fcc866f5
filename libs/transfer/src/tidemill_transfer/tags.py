"""Message tags: 48 bits, one tag for one message."""

import itertools
import secrets

from tidemill_transfer.errors import TransferError

TAG_BITS = 48
MAX_TAG = (1 << TAG_BITS) - 1

_COUNTER_BITS = 32
_prefix = secrets.randbits(TAG_BITS - _COUNTER_BITS) << _COUNTER_BITS
_counter = itertools.count(secrets.randbits(_COUNTER_BITS))


def new_tag() -> int:
    """Returns a tag that this process has not used before; the random prefix keeps two processes' tags apart."""
    return _prefix | (next(_counter) & ((1 << _COUNTER_BITS) - 1))


def new_tags(count: int) -> int:
    """Returns the first of `count` consecutive fresh tags."""
    assert count >= 1, "a range of tags holds at least one"
    while True:
        tags = [new_tag() for _ in range(count)]
        if tags[-1] - tags[0] == count - 1:
            return tags[0]


def checked_tag(tag: int) -> int:
    """Returns the tag; TransferError "unavailable" when it is out of range."""
    if not 0 <= tag <= MAX_TAG:
        raise TransferError("unavailable", f"a tag has {TAG_BITS} bits, not the value {tag}")
    return tag
