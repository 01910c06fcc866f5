"""What people see: the status table and the figures of an answer."""

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tidemill.mesh.v1 import autoscaler_pb2, kvstore_pb2, router_pb2, worker_pb2
from tidemill.mesh.v1.common_pb2 import TIER_L1, TIER_L2, DomainRef
from tidemill.mesh.v1.events_pb2 import LoadReport
from tidemill.mesh.v1.membership_pb2 import MembershipRecord, Role
from tidemill.v1 import inference_pb2
from tidemill_local import cache_view
from tidemill_local.ask import Answer, take_grpc, take_http
from tidemill_local.mesh_view import GatewayStatus, Member, MeshView, degraded_steps, gateway_status
from tidemill_local.status import render


def member(instance: str, role: int, status: object = None, **fields: object) -> Member:
    problem = str(fields.pop("problem", ""))
    return Member(MembershipRecord(instance=instance, role=role, version="1.2.3", **fields), status, problem)


def shown(*members: Member) -> str:
    return render(MeshView({item.record.instance: item for item in members}))


def line(text: str, instance: str) -> list[str]:
    return next(found for found in text.splitlines() if found.startswith(instance)).split()


def test_a_workers_domains_are_taken_together():
    loads = [
        LoadReport(
            ttft_slo_load=0.2,
            tpot_slo_load=0.1,
            running_requests=1,
            total_blocks=10,
            available_blocks=4,
            prompt_tokens_total=100,
        ),
        LoadReport(
            ttft_slo_load=0.8,
            degraded=["small_chunks"],
            waiting_requests=2,
            total_blocks=10,
            available_blocks=9,
            cached_tokens_total=25,
        ),
    ]
    status = worker_pb2.GetWorkerStatusResponse(loads=loads, holds={"requests": 3, "tickets": 0})
    text = shown(member("decode-1", Role.ROLE_DECODE, status, endpoint="h:1"))
    figures = ["0.80/0.10", "1+2", "7/0/20", "25%"]
    state = ["ok,", "degraded:", "small_chunks"]
    assert line(text, "decode-1") == ["decode-1", "decode", "1.2.3", "h:1", *figures, *state]
    assert "holds: decode-1.requests=3" in text


def test_what_a_gateway_says_in_its_metrics_is_found():
    assert degraded_steps('tidemill_gateway_degraded{step="shed_low"} 1.0\n') == ("shed_low",)
    assert degraded_steps('tidemill_gateway_degraded{step="shed_low"} 0.0\n') == ()


@pytest.fixture
def serve() -> Iterator[Callable[[dict[str, str]], str]]:
    """An HTTP server on loopback with these pages and no others; gives host:port."""
    servers: list[ThreadingHTTPServer] = []

    def start(pages: dict[str, str]) -> str:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                body = pages.get(self.path, "").encode()
                self.send_response(200 if self.path in pages else 403)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, kwargs={"poll_interval": 0.01}).start()
        return f"127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


METRICS = """# TYPE tidemill_gateway_held_legs gauge
tidemill_gateway_held_legs 2.0
tidemill_gateway_held_requests 0.0
tidemill_gateway_degraded{step="shed_low"} 1.0
"""


def test_a_gateway_that_keeps_its_list_to_its_machine_tells_its_holds_by_metrics(serve):
    told = gateway_status(serve({"/metrics": METRICS}))
    assert told == GatewayStatus({"legs": 2, "requests": 0}, ("shed_low",))
    told = gateway_status(serve({"/metrics": METRICS, "/debug/holds": '{"legs": 3}'}))
    assert told == GatewayStatus({"legs": 3}, ("shed_low",))
    assert gateway_status(serve({"/debug/holds": '{"legs": 0}'})) == GatewayStatus({"legs": 0})


@pytest.mark.parametrize("pages", [{}, {"/metrics": "tidemill_gateway_info 1.0\n"}])
def test_a_gateway_that_does_not_tell_its_holds_is_not_taken_to_hold_nothing(serve, pages):
    with pytest.raises(ValueError, match="does not tell its holds"):
        gateway_status(serve(pages))


ROUTER = {"degraded_local_prefill": 1, "fenced_instances": 2}


def test_every_role_has_its_line():
    text = shown(
        member("gateway-1", Role.ROLE_GATEWAY, GatewayStatus({"requests": 4}, ("shed_low",))),
        member("router-1", Role.ROLE_ROUTER, router_pb2.GetRouterStatusResponse(index_blocks=7, counters=ROUTER)),
        member("kvstore-1", Role.ROLE_KVSTORE, kvstore_pb2.GetKvStoreStatusResponse(blocks=5, used_bytes=3 << 20)),
        member("prefill-1", Role.ROLE_PREFILL, worker_pb2.GetWorkerStatusResponse(), draining=True),
        member("decode-1", Role.ROLE_DECODE, problem="UNAVAILABLE: gone"),
    )
    assert "4" in line(text, "gateway-1")
    assert "7 indexed" in text
    assert line(text, "gateway-1")[-1] == "shed_low"
    assert line(text, "router-1")[-2:] == ["degraded:", "local_prefill"]
    assert "5 (3 MiB of 0 MiB)" in text
    assert line(text, "prefill-1")[-1] == "draining"
    assert "UNAVAILABLE: gone" in text
    assert "holds: gateway-1.requests=4" in text


def test_a_worker_names_those_whose_bytes_arrive_damaged():
    loads = [LoadReport(degraded=["small_chunks"], quarantined=["p-2"]), LoadReport(quarantined=["p-1", "p-2"])]
    status = worker_pb2.GetWorkerStatusResponse(loads=loads)
    text = shown(member("decode-1", Role.ROLE_DECODE, status), member("decode-2", Role.ROLE_DECODE))
    assert "ok, degraded: small_chunks, takes nothing from: p-1, p-2" in text
    assert text.count("takes nothing") == 1


def test_a_worker_names_those_whose_bytes_do_not_arrive():
    loads = [LoadReport(quarantined=["p-1"], silent=[DomainRef(instance="p-2", epoch=epoch)]) for epoch in "ab"]
    text = shown(member("decode-1", Role.ROLE_DECODE, worker_pb2.GetWorkerStatusResponse(loads=loads)))
    assert "ok, takes nothing from: p-1, gets nothing from: p-2" in text


def test_only_the_leading_autoscaler_speaks():
    pool = autoscaler_pb2.PoolStatus(role="decode", replicas=2, max_replicas=3, last_decision="hold: all is well")
    statuses = [autoscaler_pb2.GetAutoscalerStatusResponse(leader=leads, pools=[pool]) for leads in (True, False)]
    text = shown(*(member(f"a-{i}", Role.ROLE_AUTOSCALER, status) for i, status in enumerate(statuses)))
    assert text.count("decode: 2 replicas (0..3)") == 1
    assert "all is well" in text


def test_an_answer_by_grpc_gathers_text_usage_and_workers(capsys):
    answer = Answer()
    for text in ("Pa", "ris"):
        take_grpc(answer, inference_pb2.GenerateResponse(choices=[inference_pb2.ChoiceDelta(text=text)]))
    usage = inference_pb2.Usage(prompt_tokens=9, completion_tokens=2, cached_tokens_l1=4, cached_tokens_l3=1)
    placement = inference_pb2.Placement(prefill_instance="p", decode_instance="d")
    take_grpc(answer, inference_pb2.GenerateResponse(usage=usage, placement=placement))
    assert capsys.readouterr().out == answer.text == "Paris"
    assert "9 prompt tokens (5 cached), 2 output; prefill p, decode d" in answer.summary()


def test_an_answer_by_http_gathers_the_same(capsys):
    answer = Answer()
    take_http(answer, {"choices": [{"delta": {"role": "assistant"}}]})
    take_http(answer, {"choices": [{"delta": {"content": "Paris"}}], "placement": {"decode_instance": "d"}})
    usage = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 8}}
    take_http(answer, {"choices": [], "usage": usage})
    assert capsys.readouterr().out == "Paris"
    assert "9 prompt tokens (8 cached), 1 output; prefill -, decode d" in answer.summary()


def test_the_cache_view_tells_tiers_hit_rates_and_shared_prefixes():
    workers = [
        worker_pb2.GetWorkerStatusResponse(
            counters={
                "prompt_tokens": 200,
                "cached_tokens_l1": 50,
                "cached_tokens_l3": 100,
                "peer_blocks_onboarded": 2,
            },
            tiers=[
                worker_pb2.TierUse(tier=TIER_L1, used_blocks=3, capacity_blocks=10),
                worker_pb2.TierUse(tier=TIER_L2, used_blocks=0, capacity_blocks=l2_blocks),
            ],
            hot_prefixes=[worker_pb2.HotPrefix(block_hash=b"h" * 16, tokens=64, hits=hits, tenant="acme")],
        )
        for l2_blocks, hits in ((7, 4), (0, 5))
    ]
    store = kvstore_pb2.GetKvStoreStatusResponse(
        blocks=9,
        used_bytes=2 << 20,
        capacity_bytes=8 << 20,
        counters={"blocks_hit": 6, "blocks_missed": 2, "evicted_blocks": 1, "over_quota_blocks": 1},
        tenant_bytes={"acme": 2 << 20},
    )
    members = [
        member("prefill-1", Role.ROLE_PREFILL, workers[0]),
        member("prefill-2", Role.ROLE_PREFILL, workers[1]),
        member("decode-1", Role.ROLE_DECODE, problem="UNAVAILABLE: gone"),
        member("kvstore-1", Role.ROLE_KVSTORE, store),
    ]
    text = cache_view.render(MeshView({item.record.instance: item for item in members}))
    assert " ".join(line(text, "prefill-1")) == "prefill-1 prefill 3/10 0/7 200 25% 0% 50% 25% 2 blocks"
    assert line(text, "prefill-2")[3] == "-"
    assert " ".join(line(text, "kvstore-1")) == "kvstore-1 9 2 MiB of 8 MiB 6 of 8 asked 0 2 0 acme 2 MiB"
    assert line(text, "68686868")[1:] == ["64", "9", "acme", "prefill-1,", "prefill-2"]
