"""What people send by HTTP that is wrong, odd or slow, on a real cluster: refused by name, and nobody else notices."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from harness.fixtures import kept
from harness.running import RunningCluster

# The first test's time includes the start of a cluster.
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CONTEXT_TOKENS = 1024
MAX_BODY_BYTES = 1 << 20


@pytest.fixture(scope="module")
def cluster(checkpoint: Callable[[str], Path]) -> Iterator[RunningCluster]:
    """One of each service, with limits that a test reaches quickly."""
    limits = {"max_body_bytes": MAX_BODY_BYTES, "slow_client_s": 1.0, "credit_window_tokens": 32}
    made = RunningCluster.start(checkpoint("llama"), settings={"gateway": limits})
    with kept(made):
        yield made


@pytest.fixture
async def http(cluster: RunningCluster) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=f"http://{cluster.http}", timeout=300) as http:
        yield http


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny-llama", "prompt": "The tide", "max_tokens": 4, "temperature": 0, "ignore_eos": True} | fields


def chat(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hi"}]
    return {"model": "tiny-llama", "messages": messages, "max_tokens": 4, "temperature": 0} | fields


async def metric(http: httpx2.AsyncClient, name: str) -> float:
    """The sum of a gateway's metric over its labels."""
    lines = (await http.get("/metrics")).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"tidemill_gateway_{name}"))


async def error_of(http: httpx2.AsyncClient, path: str, body: dict[str, Any]) -> tuple[int, str | None, str]:
    """Status, field and code of a refusal."""
    # json.dumps writes NaN and Infinity, which is what such callers send.
    answer = await http.post(path, content=json.dumps(body))
    error = answer.json()["error"]
    assert error["message"]
    return answer.status_code, error["param"], error["code"]


# --- refused by name -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "status", "param", "code"),
    [
        ({"model": "nobody"}, 404, "model", "model_not_found"),
        ({"model": ""}, 400, "model", "invalid_argument"),
        ({"prompt": ""}, 400, "prompt", "invalid_argument"),
        ({"prompt": []}, 400, "prompt", "invalid_argument"),
        ({"prompt": [[]]}, 400, "prompt", "invalid_argument"),
        ({"prompt": ["a", ""]}, 400, "prompt", "invalid_argument"),
        ({"prompt": [0] * CONTEXT_TOKENS}, 400, "prompt", "context_length_exceeded"),
        ({"prompt": "x" * 5000}, 400, "prompt", "context_length_exceeded"),
        ({"prompt": [0] * 1000, "max_tokens": 25}, 400, "max_tokens", "context_length_exceeded"),
        ({"prompt": [264]}, 400, "prompt", "invalid_argument"),
        ({"prompt": [-1]}, 400, "prompt", "invalid_argument"),
        ({"max_tokens": 0}, 400, "max_tokens", "invalid_argument"),
        ({"max_tokens": -1}, 400, "max_tokens", "invalid_argument"),
        ({"logprobs": 21}, 400, "logprobs", "invalid_argument"),
        ({"temperature": -0.5}, 400, "temperature", "invalid_argument"),
        ({"top_p": -0.1}, 400, "top_p", "invalid_argument"),
        ({"top_k": -2}, 400, "top_k", "invalid_argument"),
        ({"min_p": -1}, 400, "min_p", "invalid_argument"),
        ({"repetition_penalty": -1}, 400, "repetition_penalty", "invalid_argument"),
        ({"n": -1}, 400, "n", "invalid_argument"),
        ({"stop_token_ids": [None]}, 400, "stop_token_ids[0]", "invalid_argument"),
        ({"suffix": "end"}, 400, "suffix", "unsupported_parameter"),
        ({"guided_regex": "a*"}, 400, "guided_regex", "unsupported_parameter"),
    ],
)
async def test_a_wrong_value_is_refused_and_the_field_is_named(http, fields, status, param, code):
    assert await error_of(http, COMPLETIONS, completion(**fields)) == (status, param, code)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("field", ["temperature", "top_p", "presence_penalty"])
async def test_nan_and_infinity_are_not_json(http, field, value):
    status, _, code = await error_of(http, COMPLETIONS, completion(**{field: value}))
    assert (status, code) == (400, "invalid_argument")


async def test_a_known_chat_feature_that_is_not_offered_is_refused_by_name(http):
    voice = {"audio": {"voice": "x", "format": "mp3"}}
    assert await error_of(http, CHAT, chat(**voice)) == (400, "audio", "unsupported_parameter")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'{"model": "tiny-llama", "prompt": "\xff\xfe"}', b"{" * 10_000,
     b'{"model": "tiny-llama", "prompt": "\\ud800"}', b'{"model": "tiny-llama", "prompt": "a\\udc00b"}',
     b'{"model": "tiny-llama", "prompt": "\xed\xa0\x80"}'],
)  # fmt: skip
async def test_malformed_json_bad_utf8_and_lone_surrogates_are_refused(http, body):
    answer = await http.post(COMPLETIONS, content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_a_body_over_the_limit_is_413_and_the_connection_is_no_worse_for_it(http):
    answer = await http.post(COMPLETIONS, json=completion(prompt="x" * MAX_BODY_BYTES))
    assert (answer.status_code, answer.json()["error"]["limit"]) == (413, f"{MAX_BODY_BYTES} bytes")
    assert (await http.post(COMPLETIONS, json=completion())).status_code == 200


# --- odd, but answered -----------------------------------------------------------------------------------------------


async def test_unknown_fields_are_ignored_and_counted(http):
    before = await metric(http, "unknown_fields_total")
    answer = await http.post(COMPLETIONS, json=completion(banana=1, kiwi={"deep": [None]}))
    assert answer.status_code == 200
    assert await metric(http, "unknown_fields_total") == before + 2


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_one_and_two_tokens_are_exactly_that(http, max_tokens):
    # New and long, so that no decode instance would rather compute it itself.
    prompt, headers = [max_tokens] * 500, {"x-tidemill-placement": "1"}
    answer = await http.post(COMPLETIONS, json=completion(prompt=prompt, max_tokens=max_tokens), headers=headers)
    longer = (await http.post(COMPLETIONS, json=completion(prompt=prompt, max_tokens=8))).json()
    shown, placement = answer.json(), json.loads(answer.headers["x-tidemill-placement"])
    assert shown["usage"]["completion_tokens"] == max_tokens
    assert shown["choices"][0]["finish_reason"] == "length"
    assert longer["choices"][0]["text"].startswith(shown["choices"][0]["text"])
    assert placement["prefill_instance"] == "prefill-1"
    # The only token needs no decode instance.
    assert placement["decode_instance"] == ("" if max_tokens == 1 else "decode-1")


@pytest.mark.parametrize("prompt", [" ", "\x00", "\U0001f30a\u200d", "<|im_end|>", [258], [0] * 32, [0] * 1020])
async def test_odd_prompts_are_answered(http, prompt):
    answer = await http.post(COMPLETIONS, json=completion(prompt=prompt))
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("length", [31, 32, 33, 64])
async def test_a_prompt_of_whole_blocks_sent_twice_computes_at_least_one_token(http, length):
    body = completion(prompt=[length] * length)
    first, second = [(await http.post(COMPLETIONS, json=body)).json() for _ in range(2)]
    assert first["choices"] == second["choices"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] < length


# --- clients that leave, linger or repeat ----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_ends_its_request_everywhere(cluster, http, stream):
    before = await metric(http, 'requests_total{outcome="cancelled"}')
    body = json.dumps(completion(max_tokens=900, stream=stream)).encode()
    reader, writer = await asyncio.open_connection(*cluster.http.split(":"))
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    if stream:
        await reader.readuntil(b"data: ")
    else:
        while not await holds(http, "generations"):
            await asyncio.sleep(0.005)
    writer.transport.abort()
    await cluster.holds_are_zero()
    assert await metric(http, 'requests_total{outcome="cancelled"}') == before + 1


async def holds(http: httpx2.AsyncClient, kind: str) -> int:
    return (await http.get("/debug/holds")).json()[kind]


async def test_a_live_request_id_is_refused_a_second_time_and_the_first_goes_on(cluster, http):
    body = completion(max_tokens=300, stream=True)
    for number in range(10):
        headers = {"x-request-id": f"twice-{number}"}
        async with http.stream("POST", COMPLETIONS, json=body, headers=headers) as first:
            events = first.aiter_lines()
            await anext(events)
            second = await http.post(COMPLETIONS, json=body, headers=headers)
            rest = [line async for line in events]
        assert "data: [DONE]" in rest
        # Unless this process was not run until the first had ended.
        if second.status_code != 200:
            break
    assert (second.status_code, second.json()["error"]["code"]) == (409, "already_exists")
    assert (await http.post(COMPLETIONS, json=completion(), headers=headers)).status_code == 200


async def test_a_client_that_does_not_read_is_cut_off_and_those_beside_it_are_served(cluster, http):
    before = await metric(http, "slow_clients_total")
    # 11 MB. The kernel's buffers take 3 to 4, whatever the client asks for, and what they have taken counts as read.
    big = chat(max_tokens=900, n=8, logprobs=True, top_logprobs=20, stream=True, ignore_eos=True)
    deaf = await deaf_client(cluster, CHAT, big)
    try:
        answers = await asyncio.gather(
            *(http.post(COMPLETIONS, json=completion(prompt=f"fast {i}", max_tokens=32)) for i in range(8))
        )
        assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [32] * 8
        await cluster.holds_are_zero()
        assert await metric(http, "slow_clients_total") == before + 1
    finally:
        deaf.close()


async def deaf_client(cluster: RunningCluster, path: str, body: dict[str, Any]) -> socket.socket:
    """Asks and never reads."""
    host, port = cluster.http.split(":")
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(deaf, (host, int(port)))
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    await loop.sock_sendall(deaf, head.encode() + content)
    return deaf


async def test_afterwards_no_rank_has_restarted_and_nothing_is_held(cluster):
    await cluster.holds_are_zero()
    view = await cluster.look()
    starts = {name: view.members[name].status.counters["domain_starts"] for name in ("prefill-1", "decode-1")}
    assert starts == {"prefill-1": 1, "decode-1": 1}
