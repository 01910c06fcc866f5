"""The large architectures on a CUDA device against the CPU engine, which equals transformers: by this backend's kernels
in bfloat16, and by plain torch in float32."""

# The packages that these modules import are asked for first.
# ruff: noqa: E402

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")
pytest.importorskip("flashinfer")
pytest.importorskip("transformers")

from gpu.driver import Driver, all_logits, prompt
from harness.oracle_checkpoints import make_oracle

from tidemill_engine.cuda.kv_pool import CudaKVPool
from tidemill_engine.cuda.reference_runner import ReferenceRunner
from tidemill_engine.cuda.requirements import CudaUnavailable
from tidemill_engine.cuda.runner import CudaModelRunner
from tidemill_engine.kv_pool import KVPool
from tidemill_engine.loading.tiny import make_tiny
from tidemill_engine.model_runner import ModelRunner
from tidemill_engine.parallel.tp import TensorParallel
from tidemill_engine.runners import start_runner
from tidemill_engine.settings import EngineSettings
from tidemill_engine.step import SnapshotCopy

_GROUPED = {"hidden_size": 128, "head_dim": 128}
_LATENT = {
    "hidden_size": 128,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 48,
    "v_head_dim": 32,
}
_INDEXED = _LATENT | {"index_head_dim": 32}
_STREAMED = {"hidden_size": 128, "head_dim": 64, "partial_rotary_factor": 0.25, "index_head_dim": 32}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_moe": _GROUPED,
    "mixtral": _GROUPED,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _INDEXED,
    "glm_moe_dsa": _INDEXED,
    "deepseek_v4": _STREAMED,
}
"""Sizes that the kernels take."""
NUM_UNCHOSEN = {"deepseek_v32": 24, "glm_moe_dsa": 24, "deepseek_v4": 24}
"""Tokens that see no more rows than their indexers choose."""
LATENT = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")
MEDIAN_BOUND = 0.03
INDEXED_BOUND = 0.12
"""Median over the tokens of the relative error of bfloat16 logits: rounding sends few tokens to other experts, but has
an indexer over random keys choose other rows for many."""
FP8_SCORES_BOUND = 0.4
"""The same, where random indexers score keys of 32 values in FP8: nearly alike scores change places by far more than
those of a trained one."""
EXACT_BOUND = 3e-3
"""Largest error of float32 logits."""

MakeCheckpoint = Callable[..., Path]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    folder = tmp_path_factory.mktemp("oracle")

    def make(name: str, **overrides: Any) -> Path:
        shape = SHAPES.get(name, {}) | overrides
        path = folder / "-".join([name, *(f"{key}{value}" for key, value in overrides.items())])
        return path if path.is_dir() else make_oracle(name, path, **shape)

    return make


def settings(model_dir: Path, **fields: Any) -> EngineSettings:
    common: dict[str, Any] = {"block_size": 16, "num_blocks": 128, "max_num_seqs": 8, "num_snapshots": 8}
    return EngineSettings(model_dir=str(model_dir), torch_threads=4, **(common | fields))


def cpu_driver(model_dir: Path) -> Driver:
    return Driver(ModelRunner(settings(model_dir, weights="fp32"), TensorParallel()))


def cuda_driver(model_dir: Path, *, use_graphs: bool = True, **fields: Any) -> Driver:
    common = {"device": "cuda", "kv_dtype": "bfloat16"}
    runner = CudaModelRunner(settings(model_dir, **(common | fields)), TensorParallel(), use_graphs=use_graphs)
    for slab in runner.pool.slabs.values():
        slab.fill_(float("nan"))
    return Driver(runner, seed=1)


def reference_driver(model_dir: Path, **fields: Any) -> Driver:
    runner = ReferenceRunner(settings(model_dir, device="cuda", **fields), TensorParallel())
    for spec in runner.groups:
        if spec.kind == "paged":
            runner.pool.slabs[spec.name].fill_(float("nan"))
    return Driver(runner, seed=1)


def token_errors(out: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Relative error of each token's logits."""
    return (out.float().cpu() - expected).norm(dim=-1) / expected.norm(dim=-1)


def check_near(out: torch.Tensor, expected: torch.Tensor, num_unchosen: int) -> None:
    """The first `num_unchosen` tokens see all rows."""
    errors = token_errors(out, expected)
    assert bool(errors.isfinite().all())
    assert float(errors[:num_unchosen].median()) < MEDIAN_BOUND, errors.sort().values[::10]
    assert float(errors.median()) < INDEXED_BOUND, errors.sort().values[::10]
    assert float((errors < 5 * INDEXED_BOUND).float().mean()) > 0.8, errors.sort().values[::10]


def fresh(driver: Driver) -> Driver:
    driver.free_blocks = list(range(driver.runner.num_blocks))
    return driver


@pytest.mark.parametrize("name", SHAPES)
def test_plain_torch_on_the_device_gives_the_cpus_logits(checkpoint: MakeCheckpoint, name: str) -> None:
    tokens = prompt(100, seed=3, vocab=256)
    expected = all_logits(cpu_driver(checkpoint(name)), tokens)
    driver = reference_driver(checkpoint(name))
    for chunk in (1000, 33, 16):
        out = all_logits(driver, tokens, chunk).cpu()
        assert float((out - expected).abs().max()) < EXACT_BOUND, chunk
        fresh(driver)


def test_windows_of_several_heads_take_plain_torch_and_say_so(tmp_path: Path) -> None:
    runner = start_runner(settings(make_tiny("toy", tmp_path / "toy"), device="cuda"), TensorParallel())
    assert runner.backend == "cuda/torch-reference/fp32"
    runner.warm_up()


def test_plain_torch_decodes_the_cpus_tokens(checkpoint: MakeCheckpoint) -> None:
    runner = ReferenceRunner(settings(checkpoint("deepseek_v4"), device="cuda"), TensorParallel())
    drivers = [Driver(runner), cpu_driver(checkpoint("deepseek_v4"))]
    for driver in drivers:
        for row, length in ((0, 9), (1, 40), (2, 75)):
            driver.add(row, prompt(length, seed=row, vocab=256))
        for parts in [{0: 9}, {0: 1, 1: 25}, {0: 1, 1: 15, 2: 30}, {0: 1, 1: 1, 2: 45}] + [{0: 1, 1: 1, 2: 1}] * 20:
            driver.step(parts)
    assert drivers[0].tokens == drivers[1].tokens


@pytest.mark.parametrize("name", SHAPES)
def test_kernels_give_the_cpus_logits_within_bf16_however_the_prompt_is_cut(
    checkpoint: MakeCheckpoint, name: str
) -> None:
    tokens = prompt(160, seed=3, vocab=256)
    expected = all_logits(cpu_driver(checkpoint(name)), tokens)
    driver = cuda_driver(checkpoint(name))
    num_unchosen = NUM_UNCHOSEN.get(name, len(tokens))
    for chunk in (1000, 37, 16):
        check_near(all_logits(driver, tokens, chunk), expected, num_unchosen)
        fresh(driver)


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_scores_by_fp8_keys_move_logits_little(checkpoint: MakeCheckpoint, name: str) -> None:
    tokens = prompt(160, seed=3, vocab=256)
    expected = all_logits(cpu_driver(checkpoint(name)), tokens)
    drivers = [cuda_driver(checkpoint(name), index_dtype=kind) for kind in ("auto", "float8_e4m3fn")]
    for chunk in (1000, 37, 16):
        by_keys, by_copies = (all_logits(driver, tokens, chunk) for driver in drivers)
        assert float(token_errors(by_copies, expected).median()) < FP8_SCORES_BOUND
        # Who sees no more rows than are chosen is not scored.
        assert torch.equal(by_keys[: NUM_UNCHOSEN[name]], by_copies[: NUM_UNCHOSEN[name]])
        assert not torch.equal(by_keys, by_copies)
        for driver in drivers:
            fresh(driver)


LENGTHS = [1, 5, 23, 24, 25, 70, 100]
NUM_TOKENS = 20


def decoded(driver: Driver) -> list[list[int]]:
    """Prompts of these lengths one after another, then decoded together."""
    for row, length in enumerate(LENGTHS):
        driver.add(row, prompt(length, seed=row, vocab=256))
        driver.prefill(row)
    return driver.generate(range(len(LENGTHS)), NUM_TOKENS)


@pytest.mark.parametrize("name", SHAPES)
def test_decoded_tokens_are_the_cpus_choice_up_to_bf16(checkpoint: MakeCheckpoint, name: str) -> None:
    driver = cuda_driver(checkpoint(name))
    graphs = decoded(driver)
    eager = decoded(cuda_driver(checkpoint(name), use_graphs=False))
    assert sum(a == b for a, b in zip(graphs, eager, strict=True)) >= len(LENGTHS) - 1
    cpu = cpu_driver(checkpoint(name))
    behind = []
    for row, length in enumerate(LENGTHS):
        logits = all_logits(fresh(cpu), driver.tokens[row])[length - 1 : length - 1 + NUM_TOKENS]
        chosen = torch.tensor(driver.tokens[row][length : length + NUM_TOKENS])
        spread = logits.std(dim=-1)
        behind.append((logits.amax(-1) - logits.gather(1, chosen[:, None])[:, 0]) / spread)
    # In units of the logits' spread: rounding moves few tokens, and those not far.
    parted = torch.cat(behind)
    least = 0.8 if name in NUM_UNCHOSEN else 0.9
    assert float((parted < 0.1).float().mean()) > least, parted.sort().values[-20:]


@pytest.mark.parametrize("name", LATENT)
def test_prefix_hits_and_mixed_steps_stay_near_the_cpu(checkpoint: MakeCheckpoint, name: str) -> None:
    tokens = prompt(90, seed=9, vocab=256)
    driver = cuda_driver(checkpoint(name))
    driver.add(0, tokens)
    driver.prefill(0)
    whole = driver.generate([0], 12)[0]
    driver.add(1, tokens, blocks=driver.blocks[0][:4], computed=64)
    driver.prefill(1)
    hit = driver.generate([1], 12)[0]
    driver.add(2, tokens)
    for _ in range(3):
        driver.step({0: 1, 1: 1, 2: 30})
    mixed = driver.generate([2], 12)[0]
    expected = all_logits(cpu_driver(checkpoint(name)), [*tokens, *whole])
    for made in (whole, hit, mixed):
        same = next((i for i, (a, b) in enumerate(zip(made, whole, strict=True)) if a != b), len(whole))
        # Up to where they part all saw the same tokens, and there the two are near each other.
        rows = expected[len(tokens) - 1 : len(tokens) + min(same, 11)]
        chosen = rows.gather(1, torch.tensor(made[: rows.shape[0]])[:, None])[:, 0]
        assert float(((rows.amax(-1) - chosen) / rows.std(-1)).median()) < 0.1
    assert hit[0] == mixed[0] == whole[0]


@pytest.mark.parametrize(
    ("name", "index_dtype"), [*((name, "auto") for name in LATENT), ("glm_moe_dsa", "float8_e4m3fn")]
)
def test_transferred_blocks_go_on_with_the_same_tokens(checkpoint: MakeCheckpoint, name: str, index_dtype: str) -> None:
    source, target = (cuda_driver(checkpoint(name), index_dtype=index_dtype) for _ in range(2))
    target.free_blocks.reverse()
    tokens = prompt(80, seed=4, vocab=256)
    for driver in (source, target):
        driver.add(0, [*tokens, 17])
    source.step({0: 80})
    blocks = source.blocks[0][:5]
    data = np.array(source.runner.pool.gather(blocks, 0, 1))
    target.runner.pool.scatter(data, target.blocks[0][:5], 0, 1, "bfloat16")
    assert np.array_equal(target.runner.pool.gather(target.blocks[0][:5], 0, 1), data)
    target.computed[0] = 80
    assert source.generate([0], 10) == target.generate([0], 10)


def near(logits: torch.Tensor, made: list[list[int]], first: int) -> float:
    """Median distance, in spreads of the logits, of tokens from the choice of those who saw the same."""
    behind = []
    for tokens in made:
        same = next((i for i, (a, b) in enumerate(zip(tokens, made[0], strict=True)) if a != b), len(tokens) - 1)
        rows = logits[first : first + same + 1]
        chosen = rows.gather(1, torch.tensor(tokens[: rows.shape[0]])[:, None])[:, 0]
        behind.append((rows.amax(-1) - chosen) / rows.std(-1))
    return max(float(distances.median()) for distances in behind)


def test_snapshots_moves_and_preemption_leave_streams_as_they_were(checkpoint: MakeCheckpoint) -> None:
    """A prefix whose blocks and snapshot are there, a request moved with its slot, one recomputed, and a mixed step all
    go on with the tokens of the request that was computed at once."""
    tokens = prompt(90, seed=9, vocab=256)
    driver, other = cuda_driver(checkpoint("deepseek_v4")), cuda_driver(checkpoint("deepseek_v4"))
    driver.add(0, tokens)
    # At a boundary that snapshots are taken at.
    driver.step({0: 64}, [SnapshotCopy(0, 3, False)])
    driver.prefill(0)
    whole = driver.generate([0], 12)[0]
    driver.add(1, tokens, blocks=driver.blocks[0][:4], computed=64)
    driver.step({1: 26}, [SnapshotCopy(1, 3, True)])
    hit = driver.generate([1], 12)[0]
    driver.add(2, tokens)
    for _ in range(3):
        driver.step({0: 1, 1: 1, 2: 30})
    mixed = driver.generate([2], 12)[0]
    # Preempted: computed anew with what it had, in another slot and other blocks.
    driver.add(3, [*tokens, *mixed[:5]])
    driver.prefill(3, chunk=33)
    recomputed = [*mixed[:5], *driver.generate([3], 7)[0]]
    # Moved to another pool with its sequence slot.
    source = cuda_driver(checkpoint("deepseek_v4"))
    for moving in (source, other):
        moving.add(0, tokens)
    other.free_blocks.reverse()
    source.step({0: 87})
    data = np.array(source.runner.pool.gather(source.blocks[0], 0, 1, sequence_slot=0))
    other.enter()
    other.runner.pool.scatter(data, other.blocks[0], 0, 1, "bfloat16", sequence_slot=0)
    assert np.array_equal(other.runner.pool.gather(other.blocks[0], 0, 1, sequence_slot=0), data)
    other.computed[0] = 87
    moved = []
    for moving in (source, other):
        moving.prefill(0)
        moved.append(moving.generate([0], 12)[0])
    assert moved[0] == moved[1]
    expected = all_logits(cpu_driver(checkpoint("deepseek_v4")), [*tokens, *whole])
    assert near(expected, [whole, hit, mixed, recomputed, *moved], len(tokens) - 1) < 0.1
    assert hit[0] == mixed[0] == whole[0] == moved[0][0]


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v4"])
def test_expert_formats_stay_near_bfloat16(checkpoint: MakeCheckpoint, name: str) -> None:
    tokens = prompt(120, seed=5, vocab=256)
    plain = all_logits(cuda_driver(checkpoint(name)), tokens).float().cpu()
    out = all_logits(cuda_driver(checkpoint(name), weights="fp8_block"), tokens)
    assert float(token_errors(out, plain).median()) < 0.2


def test_canonical_bytes_of_all_kinds_of_groups_are_the_cpu_pools(checkpoint: MakeCheckpoint) -> None:
    runner = ReferenceRunner(settings(checkpoint("deepseek_v4"), device="cuda"), TensorParallel())
    shape: dict[str, Any] = {"block_size": 16, "num_blocks": 9, "num_slots": 3, "num_snapshots": 4}
    cpu, gpu, back = (
        KVPool(runner.groups, **shape),
        CudaKVPool(runner.groups, **shape),
        CudaKVPool(runner.groups, **shape),
    )
    for kept, held in ((cpu.slabs, gpu.slabs), (cpu.snapshots, gpu.snapshots)):
        for name, slab in kept.items():
            slab.normal_()
            held[name].copy_(slab)
    for arguments in (
        {"sequence_slot": 1, "snapshot_ids": [3, 0]},
        {"snapshot_ids": [2, -1, 1], "per_block_snapshots": True},
        {},
    ):
        data = cpu.gather([7, 2, 5], 0, 1, **arguments)
        assert np.array_equal(gpu.gather([7, 2, 5], 0, 1, **arguments), data)
        back.scatter(data, [7, 2, 5], 0, 1, "float32", **arguments)
        assert np.array_equal(back.gather([7, 2, 5], 0, 1, **arguments), data)
        with pytest.raises(ValueError, match="do not fit"):
            back.scatter(data[:-4], [7, 2, 5], 0, 1, "float32", **arguments)


def test_what_the_kernels_do_not_take_is_refused_by_name(checkpoint: MakeCheckpoint) -> None:
    latent = checkpoint("deepseek_v3")
    for fields, reason in (
        ({"kv_dtype": "float8_e4m3fn"}, "kv_dtype = 'float8_e4m3fn'"),
        ({"kv_dtype": "bfloat16", "weights": "int8"}, "weights = 'int8'"),
        ({"kv_dtype": "bfloat16", "batch_invariant": True}, "batch_invariant"),
        ({"kv_dtype": "bfloat16", "index_dtype": "float8_e4m3fn"}, "has no such indexer"),
    ):
        with pytest.raises(CudaUnavailable, match=reason):
            start_runner(settings(latent, device="cuda", **fields), TensorParallel())
    with pytest.raises(CudaUnavailable, match="qk_rope_head_dim 8"):
        start_runner(
            settings(checkpoint("deepseek_v3", qk_rope_head_dim=8), device="cuda", kv_dtype="bfloat16"),
            TensorParallel(),
        )
