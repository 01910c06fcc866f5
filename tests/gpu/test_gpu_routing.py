"""Routing and the tables of few tokens' products against the CPU engine's router and torch's sort.

`TRITON_INTERPRET=1 pytest tests/gpu/test_gpu_routing.py` runs the same on a CPU, slowly.
"""

# The packages that these modules import are asked for first.
# ruff: noqa: E402

import os

import pytest
import torch

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")

from tidemill_engine.cuda.dispatch import dispatch
from tidemill_engine.cuda.kernels.route import Routing, dispatch_few, route
from tidemill_engine.layers.moe import Router

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "groups", "kept"), [(256, 8, 8, 4), (8, 3, 1, 1), (24, 4, 3, 2), (384, 8, 1, 1)]
)
@pytest.mark.parametrize("biased", [True, False])
def test_routes_are_those_of_the_cpu_engine(
    scoring: str, num_experts: int, top_k: int, groups: int, kept: int, biased: bool
) -> None:
    tokens = 9
    logits = torch.randn(tokens, num_experts) * 6
    bias = torch.randn(num_experts) * 0.1 if biased else None
    for renormalise in (True, False):
        exact = Router(
            torch.eye(num_experts), top_k=top_k, scoring=scoring, bias=bias, renormalise=renormalise,
            weight_floor=1e-20, scale=2.5, num_groups=groups, kept_groups=kept,
        )  # fmt: skip
        routing = Routing(top_k, scoring, renormalise, 1e-20, 2.5, groups, kept)
        expected, chosen = exact(logits, torch.zeros(0))
        weights, experts = route(logits.to(DEVICE), routing, None if bias is None else bias.to(DEVICE))
        # The order of a token's experts matters to nobody, and of equal scores (saturated ones) either may win.
        ranked = exact.score(logits) + (0 if bias is None else bias)
        same = ranked.gather(1, experts.cpu()).sort(dim=1).values, ranked.gather(1, chosen).sort(dim=1).values
        assert torch.allclose(*same, rtol=1e-5)
        assert torch.allclose(weights.sort(dim=1).values.cpu(), expected.sort(dim=1).values, rtol=1e-4, atol=1e-7)
        own = exact.score(logits).gather(1, experts.cpu())
        own = own / (own.sum(dim=1, keepdim=True) + 1e-20) if renormalise else own
        assert torch.allclose(weights.cpu(), own * 2.5, rtol=1e-4, atol=1e-7)
        assert all(len(set(row)) == top_k for row in experts.tolist())


def test_a_table_of_token_ids_names_experts() -> None:
    num_experts, top_k, vocab = 12, 3, 50
    table = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(vocab)])
    ids, logits = torch.randint(vocab, (7,)), torch.randn(7, num_experts)
    exact = Router(
        torch.eye(num_experts), top_k=top_k, scoring="sqrtsoftplus", bias=None, renormalise=True, weight_floor=1e-20,
        scale=1.5, expert_of_token=table,
    )  # fmt: skip
    expected, chosen = exact(logits, ids)
    routing = Routing(top_k, "sqrtsoftplus", True, 1e-20, 1.5)
    weights, experts = route(logits.to(DEVICE), routing, None, table.to(DEVICE), ids.int().to(DEVICE))
    assert torch.equal(experts.cpu(), chosen)
    assert torch.allclose(weights.cpu(), expected, rtol=1e-5)


@pytest.mark.parametrize(("tokens", "top_k", "num_experts"), [(1, 8, 256), (16, 8, 256), (70, 3, 11), (64, 8, 256)])
@pytest.mark.parametrize("tile_rows", [16, 64])
def test_few_tokens_are_sent_as_torch_sends_them(tokens: int, top_k: int, num_experts: int, tile_rows: int) -> None:
    likely = torch.rand(num_experts) ** 3 + 1e-9
    experts = torch.multinomial(likely.expand(tokens, -1), top_k).to(DEVICE)
    expected, sent = dispatch(experts, num_experts, tile_rows), dispatch_few(experts, num_experts, tile_rows)
    assert torch.equal(sent.order, expected.order)
    assert torch.equal(sent.ends, expected.ends)
    named = expected.tiles[:, 0] >= 0
    assert torch.equal(sent.tiles[:, 0], expected.tiles[:, 0])
    assert torch.equal(sent.tiles[named], expected.tiles[named])
