"""The main job: a cluster comes up, answers by gRPC and by OpenAI HTTP, shows itself, and goes down without a rest."""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import openai
import pytest
from harness.running import RunningCluster

from tidemill_local import processes, status
from tidemill_local.home import Home

QUESTION = "What is the capital of France?"


async def grpc_answer(cluster: RunningCluster, **options):
    async with cluster.client() as client:
        return await client.complete(
            model=cluster.model,
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0.0,
            include_placement=True,
            **options,
        )


async def http_answer(cluster: RunningCluster, max_tokens: int) -> tuple[str, openai.types.CompletionUsage]:
    async with openai.AsyncOpenAI(base_url=cluster.base_url, api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model=cluster.model,
            messages=[{"role": "user", "content": QUESTION}],
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        text, usage = "", None
        async for chunk in stream:
            usage = chunk.usage or usage
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        assert usage is not None
        return text, usage


async def test_both_apis_give_the_same_greedy_answer(cluster):
    by_grpc = await grpc_answer(cluster, max_tokens=24)
    text, usage = await http_answer(cluster, max_tokens=24)
    assert by_grpc.text == text
    assert (by_grpc.usage.prompt_tokens, by_grpc.usage.completion_tokens) == (
        usage.prompt_tokens,
        usage.completion_tokens,
    )


async def test_the_answer_says_which_workers_served_it(cluster):
    answer = await grpc_answer(cluster, max_tokens=4)
    assert answer.placement.prefill_instance or answer.placement.decode_instance
    assert {answer.placement.prefill_instance, answer.placement.decode_instance} <= {"prefill-1", "decode-1", ""}


async def test_afterwards_nothing_is_held(cluster):
    await asyncio.gather(*(grpc_answer(cluster, max_tokens=8, request_id=f"r{i}") for i in range(8)))
    await cluster.holds_are_zero()


async def test_status_shows_every_instance(cluster):
    shown = status.render(await cluster.look())
    for _, instance in cluster.spec.instances():
        assert instance in shown
    assert "holds: none" in shown


async def test_status_shows_load_and_cache_of_workers(cluster):
    for _ in range(2):
        await grpc_answer(cluster, max_tokens=8)
    # SLO load, running+waiting, blocks in use/cached/all, hit rate.
    figures = re.compile(
        r"^\S+ +(prefill|decode) .* \d+\.\d\d +\d+\+\d+ +\d+/[1-9]\d*/\d+ +[1-9]\d*% +ok$", re.MULTILINE
    )
    async with asyncio.timeout(10.0):
        while not figures.search(status.render(await cluster.look())):
            await asyncio.sleep(0.2)


async def test_a_second_up_finds_all_running_and_starts_nothing(cluster):
    before = cluster.cluster.running()
    assert cluster.cluster.up() is False
    assert cluster.cluster.running() == before


@pytest.mark.timeout(300)
def test_up_ask_status_and_down_from_the_command_line(checkpoint, tmp_path):
    home = Home(tmp_path / "h")
    env = {**os.environ, "TIDEMILL_HOME": str(home.root)}

    def tidemill(*arguments: str) -> str:
        argv = [sys.executable, "-m", "tidemill_local", *arguments]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    up = ("up", "--model", str(checkpoint("llama")), "--grpc-port", "0", "--http-port", "0")
    try:
        first = tidemill(*up)
        assert "all healthy" in first
        assert first.count("TTFT") == 2
        assert "the cluster runs already" in tidemill(*up)
        assert "decode-1" in tidemill("status")
        assert "tiny-llama" in tidemill("models")
        assert "TTFT" in tidemill("ask", "--http", "--max-tokens", "5", "Hello")
        records = processes.read_all(home.run)
    finally:
        stopped = tidemill("down")
    assert {"etcd", "nats", "gateway-1", "autoscaler-1"} <= set(stopped.removeprefix("stopped ").strip().split(", "))
    assert not any(processes.alive(record) for record in records)
    assert list(home.run.iterdir()) == []


@pytest.mark.real_model
@pytest.mark.timeout(600)
async def test_the_real_model_knows_the_capital_of_france(start_cluster, smollm2: Path):
    cluster = start_cluster(
        model=smollm2, settings={role: {"kv_memory_bytes": 256 << 20} for role in ("prefill", "decode")}
    )
    by_grpc = await grpc_answer(cluster, max_tokens=24)
    text, _ = await http_answer(cluster, max_tokens=24)
    assert "Paris" in by_grpc.text
    assert by_grpc.text == text
    await cluster.holds_are_zero()
