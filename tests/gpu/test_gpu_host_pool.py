"""L2 in pinned memory: what the GPU's pool gives comes back bit for bit."""

import numpy as np
import pytest
import torch

from tidemill_engine.host_pool import HostPool, pinned
from tidemill_engine.kv_groups import KVGroupSpec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")]

KV = KVGroupSpec(name="kv", kind="paged", layers=(0, 1, 2), dtype="bfloat16", num_heads=4, head_values=128)
BLOCKS = 64


def test_saved_blocks_come_back_from_pinned_memory() -> None:
    from tidemill_engine.cuda.kv_pool import CudaKVPool

    pool = CudaKVPool((KV,), block_size=32, num_blocks=BLOCKS, num_slots=1, num_snapshots=0)
    for slab in pool.slabs.values():
        slab.copy_(torch.randn(slab.shape, device=slab.device))
    host = HostPool(pool, (KV,), (0, 4), block_size=32, dtype="bfloat16", memory_bytes=64 << 20, allocate=pinned)
    ids, slots, none = list(range(20, 52)), list(range(32)), [-1] * 32
    before = np.array(pool.gather(ids, 0, 4, -1, none, True))
    assert host.save(ids, slots, none, none) == before.nbytes
    for slab in pool.slabs.values():
        slab.zero_()
    assert host.load(slots, ids, none, none) == (32, before.nbytes)
    assert np.array_equal(pool.gather(ids, 0, 4, -1, none, True), before)
    assert torch.from_numpy(host._blocks).is_pinned()
