"""What the CUDA backend decides on the host: how decode work is cut, and what quantised weights hold."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill_engine.cuda.decode_plan import GOES_ON, WHOLE_ROW, most_items, plan_decode
from tidemill_engine.cuda.dispatch import dispatch
from tidemill_engine.cuda.item_plan import WHOLE_ROW as ONE_ITEM
from tidemill_engine.cuda.item_plan import most_items as most_latent_items
from tidemill_engine.cuda.item_plan import most_programs, plan_items
from tidemill_engine.cuda.paths import has_kernels, require_reference
from tidemill_engine.cuda.requirements import CudaUnavailable, require_hopper, require_latent_shape
from tidemill_engine.cuda.weight_formats import (
    FP8,
    Weight,
    fp8_by_block,
    fp8_by_channel,
    int8_by_channel,
    spread_blocks,
)
from tidemill_engine.loading.errors import CheckpointError
from tidemill_engine.loading.model import load_model
from tidemill_engine.models.config import read_config
from tidemill_engine.models.latent_config import parse_latent
from tidemill_engine.parallel.tp import TensorParallel
from tidemill_engine.runners import start_runner
from tidemill_engine.settings import EngineSettings


@given(
    lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=40),
    num_groups=st.integers(1, 80),
    tile=st.sampled_from([16, 32, 64]),
)
@settings(max_examples=60, deadline=None)
def test_every_group_reads_equally_much_and_every_token_once(lengths: list[int], num_groups: int, tile: int) -> None:
    pages = [-(-length // 16) for length in lengths]
    indptr = np.concatenate([[0], np.cumsum(pages)])
    plan = plan_decode(np.array(lengths), indptr, num_groups, tile, 16)
    item, seen = 0, [0] * len(lengths)
    for row, first_page, count, follows in plan.tiles.tolist():
        assert first_page == indptr[row] + seen[row] // 16
        seen[row] += count
        assert plan.item_firsts[row] <= item < plan.item_firsts[row + 1]
        if follows == WHOLE_ROW:
            assert plan.item_firsts[row + 1] - plan.item_firsts[row] == 1
        elif follows != GOES_ON:
            assert follows == item
        item += follows != GOES_ON
    assert seen == lengths
    assert item == plan.item_firsts[-1] <= most_items(len(lengths), num_groups)
    assert plan.group_firsts[0] == 0
    assert plan.group_firsts[-1] == len(plan.tiles)
    sizes = np.diff(plan.group_firsts)
    assert sizes.max() - sizes.min() <= 1
    ends = plan.group_firsts[1:][sizes > 0] - 1
    assert (plan.tiles[ends, 3] != GOES_ON).all()


def matrix(weight: Weight) -> torch.Tensor:
    assert weight.scale is not None
    scale = spread_blocks(weight.scale, weight.values.shape) if weight.is_by_block else weight.scale[:, None]
    return weight.values.float() * scale


@pytest.mark.parametrize(("make", "bound"), [(fp8_by_channel, 0.04), (fp8_by_block, 0.04), (int8_by_channel, 0.02)])
def test_quantised_weights_are_near_the_matrix(make: Callable[[torch.Tensor], Weight], bound: float) -> None:
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(1))
    weight[3] *= 1000
    made = make(weight)
    errors = (matrix(made) - weight).norm(dim=1) / weight.norm(dim=1)
    rows = errors if not made.is_by_block else errors[128:]
    assert float(rows.max()) < bound
    assert not make(torch.zeros(4, 8)).values.float().any()


def test_a_block_scaled_checkpoint_comes_back_as_it_was() -> None:
    values = (torch.rand(256, 384, generator=torch.Generator().manual_seed(2)) * 200).to(FP8)
    values[::128, ::128] = 448
    scale = torch.rand(2, 3, generator=torch.Generator().manual_seed(3)) + 0.1
    again = fp8_by_block(matrix(Weight(values, scale)))
    assert torch.equal(again.values.view(torch.uint8), values.view(torch.uint8))
    torch.testing.assert_close(again.scale, scale)


@pytest.mark.parametrize(("weights", "kv_dtype"), [("fp8", "float32"), ("int8", "float32"), ("auto", "float8_e4m3fn")])
def test_cpus_refuse_what_only_cuda_runs(tiny: Callable[..., Path], weights: str, kv_dtype: str) -> None:
    with pytest.raises(CheckpointError, match="runs on CUDA only"):
        load_model(tiny("llama"), weights, kv_dtype, TensorParallel())
    with pytest.raises(CheckpointError, match="index_dtype = 'float8_e4m3fn' runs on CUDA only"):
        load_model(tiny("llama"), "auto", "float32", TensorParallel(), index_dtype="float8_e4m3fn")


def test_kernels_of_another_generation_are_named() -> None:
    require_hopper((9, 0), "latents")
    with pytest.raises(CudaUnavailable, match=r"latents need .* capability 9\.0, this one has 8\.0"):
        require_hopper((8, 0), "latents")


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is missing here is there")
def test_a_machine_without_cuda_is_named(tiny: Callable[..., Path]) -> None:
    with pytest.raises(CudaUnavailable, match="device = 'cuda'"):
        start_runner(EngineSettings(model_dir=str(tiny("llama")), device="cuda"), TensorParallel())


@given(
    lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=40),
    num_programs=st.integers(1, 80),
    tile=st.sampled_from([16, 32, 64]),
)
@settings(max_examples=60, deadline=None)
def test_items_hold_every_token_once_and_each_has_one_program(lengths: list[int], num_programs: int, tile: int) -> None:
    indptr = np.arange(len(lengths) + 1) * 7
    plan = plan_items(np.array(lengths), indptr, num_programs, tile)
    assert len(plan.items) <= most_latent_items(len(lengths), num_programs)
    assert plan.item_firsts[-1] == len(plan.items) == plan.program_firsts[-1]
    assert plan.program_firsts[0] == 0
    assert (np.diff(plan.program_firsts) > 0).all()
    assert plan.program_firsts.size - 1 <= most_programs(len(lengths), num_programs)
    for row, length in enumerate(lengths):
        first, last = plan.item_firsts[row : row + 2]
        end = 0
        for number, (owner, index, begin, count, name) in enumerate(plan.items[first:last].tolist(), first):
            assert (owner, index, begin) == (row, row * 7, end)
            assert count > 0
            assert begin % tile == 0
            assert name == (ONE_ITEM if last - first == 1 else number)
            end += count
        assert end == length


def test_rows_of_one_length_are_cut_alike() -> None:
    plan = plan_items(np.full(64, 4096), np.zeros(65, int), 264, 32)
    assert len(plan.items) == 256
    assert set(plan.items[:, 3].tolist()) == {1024}
    assert (np.diff(plan.program_firsts) == 1).all()


def test_no_program_waits_long_for_rows_of_many_lengths() -> None:
    lengths = np.array([100_000, 64, 3000, 50_000, *[500] * 200])
    plan = plan_items(lengths, np.zeros(lengths.size + 1, int), 132, 64)
    loads = np.add.reduceat(-(-plan.items[:, 3] // 64), plan.program_firsts[:-1])
    assert loads.max() == -(-int((-(-lengths // 64)).sum()) // 132)


@given(
    tokens=st.integers(1, 60), num_experts=st.integers(3, 20), tile_rows=st.sampled_from([16, 64]), seed=st.integers(0)
)
@settings(max_examples=60, deadline=None)
def test_every_row_is_in_one_tile_of_its_expert(tokens: int, num_experts: int, tile_rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed % (1 << 62))
    likely = torch.rand(num_experts, generator=generator) ** 4 + 1e-9
    experts = torch.multinomial(likely.expand(tokens, -1), 3, generator=generator)
    sent = dispatch(experts, num_experts, tile_rows)
    chosen, order = experts.flatten(), sent.order.long()
    assert torch.equal(order, chosen.argsort(stable=True))
    seen: list[int] = []
    for expert, first, end in sent.tiles.tolist():
        if expert < 0:
            continue
        rows = range(first, min(first + tile_rows, end))
        assert len(rows) > 0
        assert all(int(chosen[order[row]]) == expert for row in rows)
        seen += rows
    assert sorted(seen) == list(range(tokens * 3))
    assert sent.ends.tolist() == [int((chosen <= expert).sum()) for expert in range(num_experts)]


def test_only_models_without_kernels_take_the_reference_path(tiny: Callable[..., Path]) -> None:
    assert has_kernels(read_config(tiny("llama")))
    config = read_config(tiny("toy"))
    assert not has_kernels(config)
    plain = EngineSettings(model_dir="", device="cuda")
    require_reference(config, plain, TensorParallel())
    for fields, reason in (
        ({"weights": "fp8_block"}, "weights = 'fp8_block'"),
        ({"kv_dtype": "float8_e4m3fn"}, "kv_dtype = 'float8_e4m3fn'"),
        ({"batch_invariant": True}, "batch-invariant"),
    ):
        with pytest.raises(CudaUnavailable, match=reason):
            require_reference(config, msgspec.structs.replace(plain, **fields), TensorParallel())


def test_latents_that_the_kernels_do_not_take_are_named() -> None:
    sizes = {"q_lora_rank": 32, "kv_lora_rank": 64, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 32}
    for key, size in (("qk_rope_head_dim", 16), ("qk_rope_head_dim", 8), ("kv_lora_rank", 48)):
        latent = parse_latent("DeepseekV3ForCausalLM", sizes | {key: size})
        assert latent is not None
        if size == 16:
            require_latent_shape(latent, None)
            continue
        with pytest.raises(CudaUnavailable, match=f"{key} {size}"):
            require_latent_shape(latent, None)
