"""Configurations in the form of the published checkpoints: what is read from them, and the KV that it makes.

Bytes of KV are those that the models' makers and other engines publish, so they check schedules and groups at once.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tidemill_engine.kv_groups import KVGroupSpec, boundary_tokens, canonical_bytes, check_block_size
from tidemill_engine.loading.errors import CheckpointError
from tidemill_engine.models.config import ModelConfig, read_config
from tidemill_engine.models.latent import latent_groups
from tidemill_engine.models.streams import stream_groups

YARN = {"type": "yarn", "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": YARN | {"factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "vocab_size": 129280,
    "rms_norm_eps": 1e-6,
}
DEEPSEEK_V32 = DEEPSEEK_V3 | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
}
KIMI_K2 = DEEPSEEK_V3 | {
    "model_type": "kimi_k2",
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.827,
}
GLM_5_2: dict[str, Any] = DEEPSEEK_V32 | {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_group": 1,
    "topk_group": 1,
    "index_n_heads": 32,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "rope_scaling": None,
    "rope_parameters": {"rope_theta": 8e6, "rope_type": "default"},
    "rms_norm_eps": 1e-5,
    "vocab_size": 154880,
}
V4_FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "scoring_func": "sqrtsoftplus",
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "sliding_window": 128,
    "compress_ratios": [0, 0] + [4, 128] * 20 + [4] + [0],
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": YARN | {"factor": 16, "original_max_position_embeddings": 65536},
    "max_position_embeddings": 1048576,
    "vocab_size": 129280,
    "rms_norm_eps": 1e-6,
}
V4_PRO = V4_FLASH | {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "compress_ratios": [128] + [128, 4] * 30 + [0],
}


def read(tmp_path: Path, raw: dict[str, Any]) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return read_config(tmp_path)


def bytes_per_token(groups: tuple[KVGroupSpec, ...]) -> int:
    boundary = boundary_tokens(groups)
    total = canonical_bytes(groups, boundary, 1, 0, 1, "bfloat16")
    assert total % boundary == 0
    return total // boundary


@pytest.mark.parametrize(
    ("raw", "expected"),
    [(DEEPSEEK_V3, 70_272), (KIMI_K2, 70_272), (DEEPSEEK_V32, 85_888), (GLM_5_2, 78 * 576 * 2 + 21 * 128 * 2)],
    ids=["v3", "k2", "v3.2", "glm-5.2"],
)
def test_latents_take_the_bytes_that_are_published(tmp_path: Path, raw: dict[str, Any], expected: int) -> None:
    assert bytes_per_token(latent_groups(read(tmp_path, raw), "bfloat16")) == expected


@pytest.mark.parametrize(("raw", "expected"), [(V4_FLASH, 6_880), (V4_PRO, 9_848)], ids=["flash", "pro"])
def test_streams_take_the_bytes_that_are_published(tmp_path: Path, raw: dict[str, Any], expected: int) -> None:
    groups = stream_groups(read(tmp_path, raw), "bfloat16")
    assert bytes_per_token(groups) == expected
    check_block_size(groups, 128)
    check_block_size(groups, 256)
    with pytest.raises(ValueError, match="multiple of 128"):
        check_block_size(groups, 64)


def test_the_scores_of_deepseek_v3_are_scaled_by_yarn(tmp_path: Path) -> None:
    config = read(tmp_path, DEEPSEEK_V3)
    assert config.latent is not None
    # (0.1 ln 40 + 1)^2, while cos and sin keep their size.
    assert config.latent.score_factor == pytest.approx(1.3689**2, rel=1e-4)
    assert (config.rope.mscale, config.rope.mscale_all_dim) == (1.0, 1.0)


def test_layers_of_deepseek_v3_and_its_experts(tmp_path: Path) -> None:
    moe = read(tmp_path, DEEPSEEK_V3).moe
    assert moe is not None
    assert moe.kinds == ("dense",) * 3 + ("moe",) * 58
    assert (moe.num_groups, moe.kept_groups, moe.scale, moe.shared_size) == (8, 4, 2.5, 2048)


def test_glm_5_2_has_twenty_one_indexers_that_turn_pairs(tmp_path: Path) -> None:
    indexer = read(tmp_path, GLM_5_2).indexer
    assert indexer is not None
    owners = sorted(set(indexer.owner))
    assert owners == [0, 1, 2, *range(6, 75, 4)]
    assert len(owners) == 21
    assert indexer.owner[2:7] == (2, 2, 2, 2, 6)
    assert indexer.interleaved
    v32 = read(tmp_path, DEEPSEEK_V32).indexer
    assert v32 is not None
    assert not v32.interleaved
    assert v32.owner == tuple(range(61))


def test_deepseek_v4_flash_has_two_plain_layers_and_two_kinds_of_streams(tmp_path: Path) -> None:
    config = read(tmp_path, V4_FLASH)
    assert config.streams is not None
    assert [config.streams.kinds.count(kind) for kind in ("window", "sparse", "heavy")] == [2, 21, 20]
    assert config.streams.kinds[:5] == ("window", "window", "sparse", "heavy", "sparse")
    assert config.streams.stream_rope.attention_factor == 1.0
    assert (config.streams.stream_rope.kind, config.streams.stream_rope.theta) == ("yarn", 160000.0)
    assert (config.rope.kind, config.rope.theta) == ("default", 10000.0)
    assert config.streams.snapshot_interval_tokens == 512
    assert config.moe is not None
    assert config.moe.kinds[:4] == ("hash", "hash", "hash", "moe")


def test_a_layer_without_a_known_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="do not name every layer"):
        read(tmp_path, V4_FLASH | {"compress_ratios": [0, 8] + [4] * 41})
    with pytest.raises(CheckpointError, match="layer 0 shares"):
        read(tmp_path, GLM_5_2 | {"index_topk_pattern": "S" * 78})
