"""What a caller asks for reaches the router and both workers, whole, by each API."""

from dataclasses import dataclass, field

import httpx2
import pytest
import pytest_asyncio
from gateway_emulated import EOS

from tidemill.client import Client
from tidemill.mesh.v1 import worker_pb2
from tidemill.mesh.v1.router_pb2 import PlaceDecodeRequest, PlacePrefillRequest
from tidemill_gateway.flow.placement import Placer

pytestmark = pytest.mark.asyncio(loop_scope="module")

SAMPLING = {
    "max_tokens": 20,
    "min_tokens": 2,
    "temperature": 0.5,
    "top_p": 0.75,
    "top_k": 7,
    "min_p": 0.125,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.25,
    "frequency_penalty": -0.5,
    "seed": 11,
}
"""Each apart from its default, and exact in 32 bits."""
BIAS = {3: 2.0, 9: -1.5}
STOP_IDS = [9, 5]
TIMEOUT_S = 120.0
TOP = 4
WANTED = worker_pb2.Sampling(
    **SAMPLING, logit_bias=BIAS, stop_token_ids=[*sorted(STOP_IDS), EOS], logprobs=True, top_logprobs=TOP
)
SLO = {"slo_ttft_s": 0.25, "slo_tpot_s": 0.0625}
BODY = SAMPLING | SLO | {"logit_bias": {str(token): bias for token, bias in BIAS.items()}, "stop_token_ids": STOP_IDS}
BODY |= {"priority": -7, "program_id": "session-5", "timeout_s": TIMEOUT_S, "model": "tiny"}


@dataclass
class Asked:
    """What the router would have been asked."""

    prefill: list[PlacePrefillRequest] = field(default_factory=list)
    decode: list[PlaceDecodeRequest] = field(default_factory=list)


@pytest.fixture
def asked(monkeypatch):
    """Listens to placements, which go on as always."""
    heard = Asked()
    place_prefill, place_decode = Placer.prefill, Placer.decode

    async def prefill(self, request, *rest):
        heard.prefill.append(request)
        return await place_prefill(self, request, *rest)

    async def decode(self, request, *rest):
        heard.decode.append(request)
        return await place_decode(self, request, *rest)

    monkeypatch.setattr(Placer, "prefill", prefill)
    monkeypatch.setattr(Placer, "decode", decode)
    return heard


async def by_chat(mesh):
    body = BODY | {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": TOP}
    await post(mesh, "chat/completions", body)


async def by_completions(mesh):
    await post(mesh, "completions", BODY | {"prompt": "hi", "logprobs": TOP})


async def post(mesh, path, body):
    async with httpx2.AsyncClient(timeout=120) as http:
        assert (await http.post(f"{mesh.http}/v1/{path}", json=body)).status_code == 200


async def by_grpc(mesh):
    async with Client(mesh.grpc_endpoint) as client:
        await client.complete(
            model="tiny",
            text="hi",
            **SAMPLING,
            logit_bias=BIAS,
            stop_token_ids=STOP_IDS,
            logprobs=True,
            top_logprobs=TOP,
            priority=-7,
            program_id="session-5",
            timeout_s=TIMEOUT_S,
            ttft_s=SLO["slo_ttft_s"],
            tpot_s=SLO["slo_tpot_s"],
        )


@pytest_asyncio.fixture(loop_scope="module")
async def mesh(shared_mesh):
    for worker in shared_mesh.fleet.values():
        worker.submits.clear()
    return shared_mesh


@pytest.mark.parametrize("ask", [by_chat, by_completions, by_grpc])
async def test_every_option_of_a_request_reaches_the_router_and_both_stages(mesh, asked, ask):
    await ask(mesh)
    submits = [submit for worker in mesh.fleet.values() for submit in worker.submits]
    assert {submit.stage for submit in submits} == {worker_pb2.Submit.STAGE_PREFILL, worker_pb2.Submit.STAGE_DECODE}
    for submit in submits:
        assert submit.sampling == WANTED
        assert (submit.priority, submit.program_id) == (-7, "session-5")
        assert (submit.slo_ttft_s, submit.slo_tpot_s) == (SLO["slo_ttft_s"], SLO["slo_tpot_s"])
    [first], [second] = asked.prefill, asked.decode
    assert (first.slo_ttft_s, first.slo_tpot_s) == (SLO["slo_ttft_s"], SLO["slo_tpot_s"])
    assert (first.program_id, first.priority) == ("session-5", -7)
    assert (second.slo_tpot_s, second.priority) == (SLO["slo_tpot_s"], -7)
    assert first.max_tokens == SAMPLING["max_tokens"]
    for message in (*submits, first, second):
        assert 0 < message.deadline_s <= TIMEOUT_S


async def test_what_is_not_asked_for_has_the_defaults_of_the_contract(mesh):
    await post(mesh, "completions", {"model": "tiny", "prompt": "hi", "max_tokens": 3, "seed": 1, "ignore_eos": True})
    submits = [submit for worker in mesh.fleet.values() for submit in worker.submits]
    plain = worker_pb2.Sampling(max_tokens=3, temperature=1.0, top_p=1.0, repetition_penalty=1.0, seed=1)
    assert [submit.sampling for submit in submits] == [plain, plain]
    assert all(submit.deadline_s > TIMEOUT_S for submit in submits)
