"""Blocks between a GPU's pool and L2 in pinned memory, hashed on their way in and checked on their way out."""

import time
from statistics import median

import numpy as np
import torch

from tidemill_bench.report import Row
from tidemill_engine.cuda.kv_pool import CudaKVPool
from tidemill_engine.host_pool import HostPool, pinned
from tidemill_engine.kv_groups import KVGroupSpec
from tidemill_engine.rank import GPU_HASH_THREADS

_BLOCKS = 512
_ROUNDS = 5


def l2_rows(machine: str) -> list[Row]:
    """1 GiB in 512 shuffled blocks of Llama-3-8B's shape."""
    spec = KVGroupSpec(name="kv", kind="paged", layers=tuple(range(32)), dtype="bfloat16", num_heads=8, head_values=256)
    pool = CudaKVPool((spec,), block_size=16, num_blocks=2 * _BLOCKS, num_slots=1, num_snapshots=0)
    pool.slabs["kv"].normal_()
    host = HostPool(
        pool,
        (spec,),
        (0, 8),
        block_size=16,
        dtype="bfloat16",
        memory_bytes=1 << 30,
        allocate=pinned,
        threads=GPU_HASH_THREADS,
    )
    ids, none = np.random.default_rng(0).permutation(2 * _BLOCKS)[:_BLOCKS].tolist(), [-1] * _BLOCKS
    slots, before = list(range(_BLOCKS)), np.array(pool.gather(ids, 0, 8))
    saves, loads = [], []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        size_bytes = host.save(ids, slots, none, none)
        saves.append(size_bytes / (time.perf_counter() - started) / 1e9)
        pool.slabs["kv"].zero_()
        torch.cuda.synchronize()
        started = time.perf_counter()
        good, size_bytes = host.load(slots, ids, none, none)
        loads.append(size_bytes / (time.perf_counter() - started) / 1e9)
        if good < _BLOCKS or not np.array_equal(pool.gather(ids, 0, 8), before):
            raise RuntimeError("L2 gave other bytes back than it got")
    workload = f"1 GiB in {_BLOCKS} shuffled blocks of 2 MiB, {GPU_HASH_THREADS} hashing threads, median of {_ROUNDS}"
    return [
        Row(metric=f"L2, {name}", unit="GB/s", value=median(rates), higher_is_better=True, workload=workload,
            machine=machine)
        for name, rates in (("pool to pinned memory", saves), ("pinned memory to pool", loads))
    ]  # fmt: skip
