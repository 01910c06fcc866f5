"""What people see: the status table and the figures of an answer."""

from tidemill.mesh.v1 import autoscaler_pb2, kvstore_pb2, router_pb2, worker_pb2
from tidemill.mesh.v1.events_pb2 import LoadReport
from tidemill.mesh.v1.membership_pb2 import MembershipRecord, Role
from tidemill.v1 import inference_pb2
from tidemill_local.ask import Answer, take_grpc, take_http
from tidemill_local.mesh_view import GatewayStatus, Member, MeshView
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
        LoadReport(slo_load=0.2, running_requests=1, total_blocks=10, available_blocks=4, prompt_tokens_total=100),
        LoadReport(slo_load=0.8, waiting_requests=2, total_blocks=10, available_blocks=9, cached_tokens_total=25),
    ]
    status = worker_pb2.GetWorkerStatusResponse(loads=loads, holds={"requests": 3, "tickets": 0})
    text = shown(member("decode-1", Role.ROLE_DECODE, status, endpoint="h:1"))
    assert line(text, "decode-1") == ["decode-1", "decode", "1.2.3", "h:1", "0.80", "1+2", "7/0/20", "25%", "ok"]
    assert "holds: decode-1.requests=3" in text


def test_every_role_has_its_line():
    text = shown(
        member("gateway-1", Role.ROLE_GATEWAY, GatewayStatus({"requests": 4})),
        member("router-1", Role.ROLE_ROUTER, router_pb2.GetRouterStatusResponse(index_blocks=7)),
        member("kvstore-1", Role.ROLE_KVSTORE, kvstore_pb2.GetKvStoreStatusResponse(blocks=5, used_bytes=3 << 20)),
        member("prefill-1", Role.ROLE_PREFILL, worker_pb2.GetWorkerStatusResponse(), draining=True),
        member("decode-1", Role.ROLE_DECODE, problem="UNAVAILABLE: gone"),
    )
    assert "4" in line(text, "gateway-1")
    assert "7 indexed" in text
    assert "5 (3 MiB of 0 MiB)" in text
    assert line(text, "prefill-1")[-1] == "draining"
    assert "UNAVAILABLE: gone" in text
    assert "holds: gateway-1.requests=4" in text


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
