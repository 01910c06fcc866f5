"""What may be sent and received: contiguous bytes, on the host or (ucx) on a CUDA device."""

import numpy as np

from tidemill_transfer.agent import Bytes


def byte_view(data: memoryview | Bytes) -> memoryview:
    """The buffer as flat bytes, without a copy; strided and empty ones are refused, as transports mistake them."""
    view = data.data if isinstance(data, np.ndarray) else data
    assert view.contiguous, "a message's buffer must be contiguous"
    assert view.nbytes > 0, "a message holds at least one byte"
    return view.cast("B")
