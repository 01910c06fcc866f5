"""Real etcd and NATS on free ports."""

from pathlib import Path

import pytest

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
    health.wait_for(etcd, "healthy", lambda: health.http_ok(f"127.0.0.1:{etcd_port}", "/health"), 60)
    health.wait_for(nats, "healthy", lambda: health.nats_ok("127.0.0.1", nats_port), 60)
    addresses = running_addresses(home)
    assert addresses.etcd == f"127.0.0.1:{etcd_port}"
    assert addresses.nats == f"nats://127.0.0.1:{nats_port}"


def test_a_killed_server_comes_back_at_the_same_address(home):
    cluster = LocalCluster(home, ClusterSpec(model=""))
    _, port = servers.start_nats(home, "127.0.0.1")
    cluster.kill("nats")
    record = cluster.restart("nats")
    health.wait_for(record, "healthy", lambda: health.nats_ok("127.0.0.1", port), 60)


def test_a_process_that_ends_while_it_starts_is_named_with_its_last_lines(home):
    record = processes.start("gone", ["sh", "-c", "echo no such thing; exit 3"], run_dir=home.run, log_dir=home.logs)
    with pytest.raises(health.StartFailed, match=r"gone ended while it started; .*\nno such thing"):
        health.wait_for(record, "healthy", lambda: False, 60)


def test_what_is_not_healthy_in_time_is_named(home):
    record = processes.start("slow", ["sleep", "600"], run_dir=home.run, log_dir=home.logs)
    with pytest.raises(health.StartFailed, match="slow was not healthy within 0 s"):
        health.wait_for(record, "healthy", lambda: False, 0.1)


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
