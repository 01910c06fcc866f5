"""Real etcd and NATS on free ports."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from tidemill.mesh.v1 import router_pb2, router_pb2_grpc
from tidemill.mesh.v1.common_pb2 import DomainRef
from tidemill_local import health, processes, servers
from tidemill_local.cluster import LocalCluster, running_addresses
from tidemill_local.home import Home
from tidemill_local.spec import ClusterSpec


@pytest.fixture
def home(tmp_path: Path):
    """A home whose processes are stopped after the test."""
    made = Home(tmp_path)
    made.prepare()
    yield made
    LocalCluster(made, ClusterSpec(model="")).down(grace_s=5)


def test_etcd_and_nats_start_on_free_ports_and_are_healthy(home):
    etcd, etcd_port = servers.start_etcd(home, "127.0.0.1")
    nats, nats_port = servers.start_nats(home, "127.0.0.1")
    health.wait_for(etcd, "healthy", lambda: health.http_ok(f"127.0.0.1:{etcd_port}", "/health"), 300)
    health.wait_for(nats, "healthy", lambda: health.nats_ok("127.0.0.1", nats_port), 300)
    addresses = running_addresses(home)
    assert addresses.etcd == f"127.0.0.1:{etcd_port}"
    assert addresses.nats == f"nats://127.0.0.1:{nats_port}"


def test_a_killed_server_comes_back_at_the_same_address(home):
    cluster = LocalCluster(home, ClusterSpec(model=""))
    _, port = servers.start_nats(home, "127.0.0.1")
    cluster.kill("nats")
    record = cluster.restart("nats")
    health.wait_for(record, "healthy", lambda: health.nats_ok("127.0.0.1", port), 300)


def test_up_starts_killed_servers_where_those_that_still_run_know_them(home):
    none = dict.fromkeys(("routers", "kvstores", "prefill", "decode", "gateways", "autoscalers"), 0)
    cluster = LocalCluster(home, ClusterSpec(model="", grpc_port=0, http_port=0, **none), say=lambda _: None)
    assert cluster.up() is True
    before = running_addresses(home)
    processes.start("router-1", ["sleep", "600"], run_dir=home.run, log_dir=home.logs)
    assert cluster.up() is False
    for name in ("etcd", "nats"):
        cluster.kill(name)
        assert cluster.up() is True
        assert running_addresses(home) == before


def test_up_that_is_told_to_end_takes_back_what_it_has_begun(home, tmp_path):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).touch()
    argv = [sys.executable, "-m", "tidemill_local", "up", "--model", str(tmp_path), "--http-port=0", "--grpc-port=0"]
    up = subprocess.Popen(argv, env={**os.environ, "TIDEMILL_HOME": str(home.root)}, stderr=subprocess.PIPE, text=True)
    while not processes.read_all(home.run):
        assert up.poll() is None, up.communicate()
        time.sleep(0.01)
    up.terminate()
    _, said = up.communicate(timeout=300)
    assert (up.returncode, said) == (1, "tidemill: interrupted\n")
    assert not any(map(processes.alive, processes.read_all(home.run)))


def test_a_folder_that_holds_no_model_is_refused_before_anything_starts(home):
    argv = [sys.executable, "-m", "tidemill_local", "up", "--model", str(home.root)]
    env = {**os.environ, "TIDEMILL_HOME": str(home.root)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "is no model folder" in done.stderr
    assert processes.read_all(home.run) == []


def test_a_process_that_ends_while_it_starts_is_named_with_its_last_lines(home):
    record = processes.start("gone", ["sh", "-c", "echo no such thing; exit 3"], run_dir=home.run, log_dir=home.logs)
    with pytest.raises(health.StartFailed, match=r"gone ended while it started; .*\nno such thing"):
        health.wait_for(record, "healthy", lambda: False, 300)


def test_one_that_ends_beside_a_slow_one_is_told_at_once(home):
    slow = processes.start("slow", ["sleep", "600"], run_dir=home.run, log_dir=home.logs)
    gone = processes.start("gone", ["sh", "-c", "echo no such setting; exit 2"], run_dir=home.run, log_dir=home.logs)
    with pytest.raises(health.StartFailed, match=r"gone ended while it started; .*\nno such setting"):
        health.wait_for(slow, "healthy", lambda: False, 60, beside=[slow, gone])


def test_what_is_not_healthy_in_time_is_named(home):
    record = processes.start("slow", ["sleep", "600"], run_dir=home.run, log_dir=home.logs)
    with pytest.raises(health.StartFailed, match="slow was not healthy within 0 s"):
        health.wait_for(record, "healthy", lambda: False, 0.1)


class Router(router_pb2_grpc.RouterServiceServicer):
    """Knows four workers, of which two are not to be used."""

    asked = 0

    def GetRouterStatus(self, request, context):
        self.asked += 1
        flags = {"prefill-1": {}, "decode-1": {"fenced": True}, "decode-2": {"draining": True}, "decode-3": {}}
        views = [
            router_pb2.InstanceView(domain=DomainRef(instance=name, incarnation="abc"), endpoint="h:1", **flag)
            for name, flag in flags.items()
        ]
        return router_pb2.GetRouterStatusResponse(instances=views)


def test_what_a_router_lacks_is_told_with_its_reason(home):
    record = processes.start("router-1", ["sleep", "600"], run_dir=home.run, log_dir=home.logs)
    server = grpc.server(ThreadPoolExecutor(1))
    router = Router()
    router_pb2_grpc.add_RouterServiceServicer_to_server(router, server)
    endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    with pytest.raises(health.StartFailed, match="the router does not answer"):
        health.wait_for_router(record, endpoint, {"decode-1"}, 0.1)
    server.start()
    try:
        health.wait_for_router(record, endpoint, {"prefill-1", "decode-3"}, 300)
        lacked = health.router_lacks(endpoint, {"prefill-1", "decode-1", "decode-2", "decode-4"})
        asked = router.asked
        with pytest.raises(health.StartFailed, match=r"within 0 s \(decode-4 is no member"):
            health.wait_for_router(record, endpoint, {"decode-4"}, 0.0)
        # What it told last is the reason; it is not asked again for that.
        assert router.asked == asked + 1
    finally:
        server.stop(None)
    assert lacked.startswith("decode-1 is fenced (at h:1, incarnation abc,")
    assert "), decode-2 is draining (" in lacked
    assert lacked.endswith("decode-4 is no member or has no rank that is up")


def test_the_packages_etcd_says_that_it_is_for_development(monkeypatch):
    monkeypatch.setattr(servers, "system_binary", lambda name: None)
    etcd = servers.find_etcd()
    assert etcd.development_only
    assert Path(etcd.path).exists()


def test_a_systems_own_etcd_is_used_unless_it_is_too_old(monkeypatch):
    monkeypatch.setattr(servers, "system_binary", lambda name: "/usr/bin/etcd")
    monkeypatch.setattr(servers, "version_of", lambda path: (3, 4, 23))
    assert servers.find_etcd() == servers.EtcdBinary("/usr/bin/etcd", "3.4.23", development_only=False)
    monkeypatch.setattr(servers, "version_of", lambda path: (3, 3, 25))
    assert servers.find_etcd().development_only
