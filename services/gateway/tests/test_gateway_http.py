"""HTTP itself: bodies, limits, keys, connections."""

import asyncio
import json
import socket
from dataclasses import replace

import httpx2
import pytest
from gateway_emulated import TEXT, canned, tiny_assets

from tidemill.mesh.v1.membership_pb2 import ROLE_DECODE, ROLE_PREFILL
from tidemill_gateway.http.server import bind

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.fixture
async def http(emulated_mesh):
    async with httpx2.AsyncClient(base_url=emulated_mesh.http, timeout=120) as http:
        yield http


def pause(mesh, paused):
    """Workers give no outputs until they go on."""
    for worker in mesh.fleet.values():
        worker.paused = paused


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b'"text"', b'{"model": "tiny", "max_tokens": NaN}', b'{"model": "\xff"}',
     b'{"model": "\\ud800", "messages": []}', b"[" * 5000, b'{"a": 1e400}'],
)  # fmt: skip
async def test_a_body_that_is_no_json_object_is_refused(http, body):
    answer = await http.post(CHAT, content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert (await http.post(CHAT, json=BODY)).status_code == 200


async def test_a_large_body_is_refused_with_the_limit(bare_mesh):
    bare_mesh.settings = replace(bare_mesh.settings, max_body_bytes=2048)
    await bare_mesh.start_gateway()
    async with httpx2.AsyncClient(base_url=bare_mesh.http, timeout=120) as http:
        answer = await http.post(CHAT, content=b"x" * 3_000_000)
        assert answer.status_code == 413
        assert answer.json()["error"]["limit"] == "2048 bytes"


async def test_unknown_paths_and_methods_have_openais_errors(http):
    answer = await http.get("/v1/nothing")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    answer = await http.get(CHAT)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


async def test_health_ready_and_metrics_answer(http):
    assert (await http.get("/health")).json() == {"status": "ok", "ready": True}
    assert (await http.get("/ready")).status_code == 200
    await http.post(CHAT, json=BODY)
    assert 'tidemill_gateway_requests_total{outcome="ok"} 1.0' in (await http.get("/metrics")).text


async def test_without_workers_the_answer_says_when_to_retry(bare_mesh):
    bare_mesh.settings = replace(bare_mesh.settings, placement_wait_s=0.2)
    await bare_mesh.start_gateway()
    async with httpx2.AsyncClient(base_url=bare_mesh.http, timeout=120) as http:
        answer = await http.post(CHAT, json=BODY)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.headers["x-should-retry"] == "true"
        assert (await http.get("/ready")).status_code == 503
        assert (await http.get("/v1/models")).json() == {"object": "list", "data": []}


async def test_a_request_waits_for_a_worker_that_is_starting(bare_mesh):
    await bare_mesh.add(ROLE_PREFILL)
    await bare_mesh.start_gateway()
    async with httpx2.AsyncClient(base_url=bare_mesh.http, timeout=120) as http:
        asked = asyncio.create_task(http.post(CHAT, json=BODY))
        await asyncio.sleep(0.3)
        assert not asked.done()
        await bare_mesh.add(ROLE_DECODE)
        assert (await asked).status_code == 200


async def test_keys_name_tenants_and_others_are_refused(bare_mesh, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# keys\nsk-one acme\n")
    bare_mesh.settings = replace(bare_mesh.settings, api_keys_file=str(keys))
    prefill = await bare_mesh.add(ROLE_PREFILL)
    await bare_mesh.add(ROLE_DECODE)
    await bare_mesh.start_gateway()
    await bare_mesh.until_ready()
    async with httpx2.AsyncClient(base_url=bare_mesh.http, timeout=120) as http:
        for headers in ({}, {"authorization": "Bearer sk-two"}, {"authorization": "Basic sk-one"}):
            answer = await http.post(CHAT, json=BODY, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        answer = await http.post(CHAT, json=BODY, headers={"authorization": "Bearer sk-one"})
        assert answer.status_code == 200
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/ready")).status_code == 200
        # Counters of all tenants are the operator's, on a port of its own.
        for headers in ({}, {"authorization": "Bearer sk-one"}):
            assert (await http.get("/metrics", headers=headers)).status_code == 404
    assert prefill.submits[-1].tenant == "acme"


async def test_a_live_request_id_is_refused_a_second_time(emulated_mesh, http):
    pause(emulated_mesh, True)
    headers = {"x-request-id": "same"}
    slow = asyncio.create_task(http.post(CHAT, json=BODY | {"max_tokens": 50}, headers=headers))
    await emulated_mesh.until(lambda: emulated_mesh.holds() > 0)
    answer = await http.post(CHAT, json=BODY, headers=headers)
    assert (answer.status_code, answer.headers["x-should-retry"]) == (409, "false")
    pause(emulated_mesh, False)
    assert (await slow).status_code == 200
    assert (await http.post(CHAT, json=BODY, headers=headers)).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_ends_its_request(emulated_mesh, stream):
    for worker in emulated_mesh.fleet.values():
        worker.step_s = 0.01
        worker.answer = canned(TEXT, ends=False)
    port = int(emulated_mesh.http.rpartition(":")[2])
    _reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(BODY | {"max_tokens": 1000, "stream": stream}).encode()
    writer.write(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (CHAT.encode(), len(body), body))
    await emulated_mesh.until(lambda: any(w.running and "decode" in w.instance for w in emulated_mesh.fleet.values()))
    writer.close()
    await emulated_mesh.until(lambda: emulated_mesh.holds() == 0)
    async with httpx2.AsyncClient(base_url=emulated_mesh.http, timeout=120) as http:
        assert set((await http.get("/debug/holds")).json().values()) == {0}
        assert 'outcome="cancelled"} 1.0' in (await http.get("/metrics")).text


async def test_a_slow_reader_is_cut_off_and_others_keep_their_pace(bare_mesh):
    bare_mesh.settings = replace(bare_mesh.settings, slow_client_s=1.0, credit_window_tokens=64)
    bare_mesh.assets = tiny_assets(context_tokens=1 << 20)
    bare_mesh.answer = canned("x" * 64, ends=False)
    for role in (ROLE_PREFILL, ROLE_DECODE):
        await bare_mesh.add(role, step_s=0.0, num_blocks=1 << 20)
    await bare_mesh.start_gateway()
    await bare_mesh.until_ready()
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", int(bare_mesh.http.rpartition(":")[2])))
        body = json.dumps(BODY | {"max_tokens": 900_000, "stream": True, "logprobs": True, "top_logprobs": 20}).encode()
        slow.send(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (CHAT.encode(), len(body), body))
        decode = next(w for w in bare_mesh.fleet.values() if "decode" in w.instance)
        await bare_mesh.until(lambda: any(r.credit <= 0 for r in decode.running.values()), bound_s=300)
        async with httpx2.AsyncClient(base_url=bare_mesh.http, timeout=120) as http:
            quick = await http.post(CHAT, json=BODY | {"max_tokens": 200})
            assert quick.json()["usage"]["completion_tokens"] == 200
            await bare_mesh.until(lambda: bare_mesh.holds() == 0)
            assert "tidemill_gateway_slow_clients_total 1.0" in (await http.get("/metrics")).text


async def test_accepted_sockets_send_small_writes_at_once():
    listener = bind("127.0.0.1", 0)
    listener.listen()
    client = socket.create_connection(listener.getsockname())
    accepted, _ = listener.accept()
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    for one in (client, accepted, listener):
        one.close()


async def test_two_hundred_requests_at_once_all_end_and_leave_nothing(emulated_mesh):
    limits = httpx2.Limits(max_connections=200)
    async with httpx2.AsyncClient(base_url=emulated_mesh.http, timeout=120, limits=limits) as http:
        answers = await asyncio.gather(*[http.post(CHAT, json=BODY | {"max_tokens": 32}) for _ in range(200)])
        assert {answer.json()["choices"][0]["message"]["content"] for answer in answers} == {TEXT[:32]}
        await emulated_mesh.until(lambda: emulated_mesh.holds() == 0)
        assert set((await http.get("/debug/holds")).json().values()) == {0}


async def test_a_full_gateway_says_when_to_retry(bare_mesh):
    bare_mesh.settings = replace(bare_mesh.settings, max_concurrent_requests=1, max_queued_requests=1)
    for role in (ROLE_PREFILL, ROLE_DECODE):
        await bare_mesh.add(role, step_s=0.01)
    await bare_mesh.start_gateway()
    await bare_mesh.until_ready()
    async with httpx2.AsyncClient(base_url=bare_mesh.http, timeout=120) as http:
        pause(bare_mesh, True)
        asked = [asyncio.create_task(http.post(CHAT, json=BODY | {"max_tokens": 20})) for _ in range(4)]
        await bare_mesh.until(lambda: sum(task.done() for task in asked) == 2)
        pause(bare_mesh, False)
        answers = await asyncio.gather(*asked)
    assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429]
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"


async def test_a_draining_gateway_finishes_streams_and_refuses_new_work(emulated_mesh):
    for worker in emulated_mesh.fleet.values():
        worker.step_s = 0.01
    async with httpx2.AsyncClient(base_url=emulated_mesh.http, timeout=120) as http:
        await http.get("/health")
        running = asyncio.create_task(http.post(CHAT, json=BODY | {"max_tokens": 60}))
        await emulated_mesh.until(lambda: emulated_mesh.holds() > 0)
        pause(emulated_mesh, True)
        emulated_mesh.drain.request()
        await asyncio.sleep(0.05)
        health = await http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "draining")
        refused = await http.post(CHAT, json=BODY)
        assert (refused.status_code, refused.headers["connection"]) == (503, "close")
        pause(emulated_mesh, False)
        answer = await running
        assert answer.json()["usage"]["completion_tokens"] == 60
    await emulated_mesh.task
