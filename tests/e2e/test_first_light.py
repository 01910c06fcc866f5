"""The main job: a cluster comes up, answers by gRPC and by OpenAI HTTP, shows itself, and goes down without a rest."""

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import grpc
import httpx2
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from harness.running import RunningCluster

from tidemill.client import Client
from tidemill_local import processes, status
from tidemill_local.home import Home
from tidemill_local.servers import find_etcd

REPOSITORY = Path(__file__).resolve().parents[2]
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


async def test_every_service_tells_its_health_and_its_contract(cluster):
    members = (await cluster.look()).members
    assert set(members) == {name for _, name in cluster.spec.instances()}
    for name, member in members.items():
        async with grpc.aio.insecure_channel(member.record.endpoint) as channel:
            listing = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
            await listing.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            listed = {item.name for item in (await listing.read()).list_services_response.service}
            services = {service for service in listed if service.startswith("tidemill.")}
            assert services, name
            health = health_pb2_grpc.HealthStub(channel)
            for service in ["", *services]:
                answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING, (name, service)
        record = json.loads((cluster.home.run / f"{name}.json").read_text())
        status = record.get("status_endpoint") or record["http_endpoint"]
        async with httpx2.AsyncClient(base_url=f"http://{status}", timeout=120) as http:
            for path in ("/health", "/ready", "/metrics"):
                answer = await http.get(path)
                assert answer.status_code == 200, (name, path)
            assert f"tidemill_{name.rpartition('-')[0]}_info" in answer.text


async def test_torch_is_in_rank_processes_and_in_no_service(cluster):
    await grpc_answer(cluster, max_tokens=4)
    for _, instance in cluster.spec.instances():
        assert not has_torch(cluster.cluster.record(instance).pid), instance
    for worker in ("prefill-1", "decode-1"):
        ranks = cluster.rank_pids(worker)
        assert ranks
        assert all(has_torch(pid) for pid in ranks), worker


def has_torch(pid: int) -> bool:
    """Whether a process has mapped torch's library, however it came to import it."""
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


async def test_status_shows_every_instance(cluster):
    # Blocks are written down in the background, whenever that is worth it.
    async with asyncio.timeout(180.0):
        while "holds: none" not in (shown := status.render(await cluster.look())):
            await asyncio.sleep(0.2)
    for _, instance in cluster.spec.instances():
        assert instance in shown


async def test_status_shows_load_and_cache_of_workers(cluster):
    for _ in range(2):
        await grpc_answer(cluster, max_tokens=8)
    # SLO load of TTFT and TPOT, running+waiting, blocks in use/cached/all, hit rate.
    figures = re.compile(
        r"^\S+ +(prefill|decode) .* \d+\.\d\d/\d+\.\d\d +\d+\+\d+ +\d+/[1-9]\d*/\d+ +[1-9]\d*% +ok$", re.MULTILINE
    )
    async with asyncio.timeout(180.0):
        while not figures.search(status.render(await cluster.look())):
            await asyncio.sleep(0.2)


async def test_a_second_up_finds_all_running_and_starts_nothing(cluster):
    before = cluster.cluster.running()
    assert cluster.cluster.up() is False
    assert cluster.cluster.running() == before


def test_up_ask_status_and_down_by_make_and_from_the_command_line(checkpoint, tmp_path):
    home = Home(tmp_path / "h")
    # Nothing of a `make test` around this one.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    env["TIDEMILL_HOME"] = str(home.root)

    def run(*argv: str) -> str:
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=800, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def tidemill(*arguments: str) -> str:
        return run(sys.executable, "-m", "tidemill_local", *arguments)

    def make(target: str, *arguments: str) -> str:
        # What the test runs in is what `setup` would make.
        given = (f"VENV={sys.prefix}", f"ARGS={' '.join(arguments)}")
        return run("make", "--no-print-directory", "-C", str(REPOSITORY), "-o", "setup", target, *given)

    up = ("up", "--model", str(checkpoint("llama")), "--grpc-port", "0", "--http-port", "0")
    up += ("--set", "all.log_format=json", "--set", "all.log_level=debug")
    try:
        first = make(*up)
        assert "all healthy" in first
        assert (
            len(re.findall(r"TTFT \d+ ms, TPOT \d+\.\d ms, .* prefill prefill-1, decode decode-1$", first, re.M)) == 2
        )
        assert ("for development only" in first) == find_etcd().development_only
        assert "the cluster runs already" in make(*up)
        assert one_is_followed(home, {"gateway-1", "router-1", "prefill-1", "decode-1", "kvstore-1"})
        assert "decode-1" in make("status")
        assert "tiny-llama" in tidemill("models")
        assert "TTFT" in tidemill("ask", "--http", "--max-tokens", "5", "Hello")
        records = processes.read_all(home.run)
    finally:
        stopped = make("down")
    assert {"etcd", "nats", "gateway-1", "autoscaler-1"} <= set(stopped.removeprefix("stopped ").strip().split(", "))
    assert not any(processes.alive(record) for record in records)
    assert list(home.run.iterdir()) == []


def one_is_followed(home: Home, everybody: set[str]) -> bool:
    """Whether all of these tell of the same one of a few requests; a look into the store that is late leaves it out."""
    asked: list[str] = []
    for number in range(10):
        asked.append(f"trace-{number}")
        ask_as(home, asked[-1])
        if any(everybody <= tell_of(home, request_id, everybody) for request_id in asked):
            return True
    return False


def ask_as(home: Home, request_id: str) -> None:
    """A request of this id, to its end, of a prompt that nobody has cached and decode would not compute itself."""

    async def ask() -> None:
        async with Client(json.loads((home.run / "gateway-1.json").read_text())["endpoint"]) as client:
            text = request_id + " So long." * 40
            await client.complete(model="tiny-llama", text=text, max_tokens=6, request_id=request_id)

    asyncio.run(ask())


def tell_of(home: Home, request_id: str, instances: set[str]) -> set[str]:
    """Those whose log names the request; beyond the gateway its id has an ending."""
    return {
        instance
        for instance in instances
        if any(said.get("request_id", "").partition("~")[0] == request_id for said in json_lines(home, instance))
    }


def json_lines(home: Home, instance: str) -> list[dict]:
    """What an instance and its ranks have logged; libraries may write otherwise, and the last line be under way."""
    whole = (home.logs / f"{instance}.log").read_text().split("\n")[:-1]
    return [json.loads(line) for line in whole if line.startswith("{")]


@pytest.mark.real_model
async def test_the_real_model_knows_the_capital_of_france(start_cluster, smollm2: Path):
    cluster = start_cluster(
        model=smollm2, settings={role: {"kv_memory_bytes": 256 << 20} for role in ("prefill", "decode")}
    )
    by_grpc = await grpc_answer(cluster, max_tokens=24)
    text, _ = await http_answer(cluster, max_tokens=24)
    assert "Paris" in by_grpc.text
    assert by_grpc.text == text
    await cluster.holds_are_zero()
