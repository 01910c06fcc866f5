"""When pieces count as arrived whole."""

import numpy as np

from tidemill_transfer.checksum import agree, checksum64


def test_checksums_agree_piece_by_piece() -> None:
    good, bad = checksum64(np.arange(9, dtype=np.uint8)), checksum64(np.arange(8, dtype=np.uint8))
    assert agree([good, bad], [good, bad])
    assert not agree([good, bad], [bad, good])
    assert not agree([good], [good, good])
    assert not agree([], [good])


def test_what_stayed_on_a_device_has_no_checksum() -> None:
    good, bad = checksum64(b"a"), checksum64(b"b")
    assert agree([0, good], [0, good])
    assert agree([0, good], [bad, 0])
    assert not agree([0, good], [0, bad])
