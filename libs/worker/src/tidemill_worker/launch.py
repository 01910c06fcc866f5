"""Command lines of rank processes."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tidemill_engine.settings import EngineSettings, check_settings, encode_settings
from tidemill_worker.settings import WorkerSettings

RANK_MODULE: tuple[str, ...] = (sys.executable, "-m", "tidemill_engine.rank")


@dataclass(frozen=True)
class RankLaunch:
    """How to start one rank."""

    name: str
    argv: list[str]
    env: dict[str, str]
    socket_path: Path
    log_path: Path | None


def plan_ranks(
    settings: WorkerSettings, domain: int, run: int, socket_dir: Path, rank_module: Sequence[str] = RANK_MODULE
) -> list[RankLaunch]:
    """The ranks of a domain; `run` counts its starts, so that no start meets files of an earlier one."""
    return [
        RankLaunch(
            name=f"domain {domain} rank {rank}",
            argv=[
                *rank_module,
                "--settings",
                encode_settings(engine_settings(settings, domain, rank, run, socket_dir)),
            ],
            env=rank_environment(settings, domain, rank),
            socket_path=socket_dir / f"d{domain}r{rank}n{run}",
            log_path=_log_path(settings, domain, rank),
        )
        for rank in range(settings.tp_size)
    ]


def engine_settings(settings: WorkerSettings, domain: int, rank: int, run: int, socket_dir: Path) -> EngineSettings:
    """What a rank is told; ValueError names a field that does not fit."""
    several = settings.tp_size > 1
    made = EngineSettings(
        model_dir=str(Path(settings.model).resolve()),
        device=settings.device,
        weights=settings.weights,  # type: ignore[arg-type]  # the loader has checked the choices
        kv_dtype=settings.kv_dtype,  # type: ignore[arg-type]
        index_dtype=settings.index_dtype,  # type: ignore[arg-type]
        batch_invariant=settings.batch_invariant,
        block_size=settings.block_size,
        num_blocks=settings.num_blocks,
        kv_memory_bytes=settings.kv_memory_bytes,
        num_snapshots=settings.num_snapshots,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_context_tokens=settings.max_context_tokens,
        torch_threads=settings.torch_threads,
        seed=settings.seed,
        tp_size=settings.tp_size,
        rank=rank,
        domain=domain,
        tp_init_method=f"file://{socket_dir / f'd{domain}n{run}.group'}" if several else "",
        step_socket=str(socket_dir / f"d{domain}n{run}.steps") if several else "",
        transport=settings.transport,  # type: ignore[arg-type]
        host=settings.advertise_host or settings.host,
        prefill_policy=settings.prefill_policy,  # type: ignore[arg-type]
        fair_stretch=settings.fair_stretch,
        fair_slack_s=settings.fair_slack_s,
        tenant_burst_s=settings.tenant_burst_s,
        kv_high_water=settings.kv_high_water,
        forecast_growth=settings.forecast_growth,
        most_tpot_load=settings.most_tpot_load,
        growth_wait_s=settings.growth_wait_s,
        small_chunk_load=settings.small_chunk_load,
        move_wait_s=settings.move_wait_s,
        credit_stall_s=settings.credit_stall_s,
        onboard_enabled=settings.l3_policy != "off" or settings.l2_memory_bytes > 0 or settings.peer_fetch,
        onboard_min_blocks=settings.onboard_min_blocks,
        onboard_deadline_s=settings.onboard_deadline_s,
        l2_memory_bytes=settings.l2_memory_bytes,
        report_hits=True,
        cooling_blocks=settings.cooling_blocks if copies_ahead(settings) else 0,
        watchdog_s=settings.rank_watchdog_s,
    )
    check_settings(made)
    return made


def copies_ahead(settings: WorkerSettings) -> bool:
    """Whether some tier is given blocks just before L1 evicts them."""
    to_l2 = settings.l2_memory_bytes > 0 and settings.l2_policy == "on_eviction"
    return to_l2 or settings.l3_policy == "on_eviction"


def rank_environment(settings: WorkerSettings, domain: int, rank: int) -> dict[str, str]:
    """This process's environment, with one visible GPU where there are any."""
    environment = dict(os.environ)
    if settings.device.startswith("cuda"):
        visible = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        index = domain * settings.tp_size + rank
        environment["CUDA_VISIBLE_DEVICES"] = visible[index] if index < len(visible) else str(index)
    return environment


def _log_path(settings: WorkerSettings, domain: int, rank: int) -> Path | None:
    if not settings.rank_log_dir:
        return None
    folder = Path(settings.rank_log_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{settings.instance or 'worker'}-d{domain}r{rank}.log"
