"""kvstore's disk is full, or slow: what it cannot keep is computed, and no request notices more than that."""

import asyncio
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.seen import Watch, scrape, total
from faults.wave import run_whole, whole_again

# The first test's time includes the start of a cluster.
SMALL = "1m"
LARGE = "64m"
STOPPED_S = 0.4
RUNNING_S = 0.05
# More than a log has, less than the blocks of a wave and of the test before.
REFUSED_FROM_BYTES = 1 << 20
STUTTERS = 12


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of one MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SMALL}", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def metric(cluster, instance, name):
    """A counter's sum over its labels."""
    return total(scrape(cluster, instance), name) or 0.0


async def stores_blocks_again(pairs, wave):
    """Waits until kvstore-1 has written more blocks."""
    written = metric(pairs, "kvstore-1", "tidemill_kvstore_written_blocks_total")
    async with asyncio.timeout(180.0):
        while metric(pairs, "kvstore-1", "tidemill_kvstore_written_blocks_total") <= written:
            await run_whole(wave(streams=4, output_tokens=20))


async def test_a_disk_that_refuses_costs_hits_and_no_token_until_it_takes_blocks_again(pairs, wave):
    # While nothing runs, other than in the next test.
    await pairs.holds_are_zero()
    store, seen = pairs.cluster.record("kvstore-1").pid, Watch(pairs)
    soft, hard = resource.prlimit(store, resource.RLIMIT_FSIZE)
    resource.prlimit(store, resource.RLIMIT_FSIZE, (REFUSED_FROM_BYTES, hard))
    try:
        async with wave(streams=16) as disturbed:
            await seen.assert_seen("kvstore's disk full")
        disturbed.check_whole()
    finally:
        resource.prlimit(store, resource.RLIMIT_FSIZE, (soft, hard))
    await stores_blocks_again(pairs, wave)
    await pairs.holds_are_zero()


@pytest.mark.full
async def test_a_full_disk_costs_hits_and_no_token_until_there_is_room_again(pairs, wave, small_disk):
    plain = pairs.cluster.record("kvstore-1").argv
    small = [*plain, f"--data-dir={small_disk}", f"--segment-bytes={4 << 20}", f"--capacity-bytes={48 << 20}"]
    await asyncio.to_thread(pairs.replace, "kvstore-1", small)
    await whole_again(pairs, wave)
    seen = Watch(pairs)
    async with wave(streams=24) as disturbed:
        await seen.assert_seen("kvstore's disk full")
    disturbed.check_whole()
    await whole_again(pairs, wave)

    remount = ["mount", "-o", f"remount,size={LARGE}", str(small_disk)]
    await asyncio.to_thread(subprocess.run, remount, check=True)
    await stores_blocks_again(pairs, wave)
    await asyncio.to_thread(pairs.replace, "kvstore-1", plain)
    await whole_again(pairs, wave)


async def test_a_disk_that_stutters_costs_a_pause_and_no_token(pairs, wave):
    # Reads and writes of a store that is stopped most of the time take as long as on a disk that is overrun.
    async with wave(streams=16, output_tokens=200) as disturbed:
        for _ in range(STUTTERS):
            pairs.kill("kvstore-1", signal.SIGSTOP)
            await asyncio.sleep(STOPPED_S)
            pairs.kill("kvstore-1", signal.SIGCONT)
            await asyncio.sleep(RUNNING_S)
    disturbed.check_whole()
    await whole_again(pairs, wave)
