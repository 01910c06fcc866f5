"""Command lines and files of a cluster, nothing started."""

import json
import socket
import sys
from pathlib import Path

import pytest

from tidemill_local.cli import parse_settings, parser
from tidemill_local.cluster import ClusterError, LocalCluster, load_spec, service_of, stop_stage
from tidemill_local.home import Home
from tidemill_local.spec import Addresses, ClusterSpec, service_argv, worker_templates

ADDRESSES = Addresses(etcd="127.0.0.1:1", nats="nats://127.0.0.1:2")


def test_settings_of_a_service_win_over_those_of_all(tmp_path):
    spec = ClusterSpec(model="/m/tiny", settings={"all": {"liveness_s": 1.0}, "decode": {"liveness_s": 2.0, "x": True}})
    argv = service_argv(spec, Home(tmp_path), ADDRESSES, "decode", "decode-1")
    assert argv[:3] == [sys.executable, "-m", "tidemill_decode"]
    assert {"--instance=decode-1", "--liveness-s=2.0", "--x=true", "--model=/m/tiny", "--model-name=tiny"} <= set(argv)
    assert "--liveness-s=1.0" not in argv


def test_only_the_first_gateway_has_the_public_ports(tmp_path):
    spec = ClusterSpec(model="m", gateways=2, grpc_port=7, http_port=8)
    first, second = (service_argv(spec, Home(tmp_path), ADDRESSES, "gateway", f"gateway-{i}") for i in (1, 2))
    assert {"--port=7", "--http-api-port=8"} <= set(first)
    assert {"--port=0", "--http-api-port=0"} <= set(second)


def test_worker_templates_leave_the_instance_open(tmp_path):
    templates = worker_templates(ClusterSpec(model="m"), Home(tmp_path), ADDRESSES)
    assert all("--instance={instance}" in argv for argv in templates.values())


def test_the_secret_is_made_once_and_only_its_owner_can_read_it(tmp_path):
    home = Home(tmp_path)
    home.prepare()
    secret = home.secret_file.read_text()
    home.prepare()
    assert home.secret_file.read_text() == secret
    assert len(bytes.fromhex(secret)) == 32
    assert home.secret_file.stat().st_mode & 0o077 == 0


def test_the_state_file_gives_the_spec_back(tmp_path):
    home = Home(tmp_path)
    spec = ClusterSpec(model="m", decode=3, settings={"all": {"liveness_s": 1.5}})
    home.state_file.write_text(json.dumps(spec.to_json()))
    assert load_spec(home) == spec


def test_a_damaged_state_file_is_no_cluster(tmp_path):
    home = Home(tmp_path)
    home.state_file.write_text('{"no_such": 1}')
    assert load_spec(home) is None


def test_a_taken_port_is_refused_before_anything_starts(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        spec = ClusterSpec(model="m", grpc_port=taken.getsockname()[1], http_port=0)
        with pytest.raises(ClusterError, match="taken by another program"):
            LocalCluster(Home(tmp_path), spec).up()
    assert list(Path(tmp_path / "run").iterdir()) == []


def test_the_autoscaler_stops_first_and_the_servers_last():
    names = ["etcd", "router-1", "prefill-auto-0a1b2c", "gateway-1", "autoscaler-1", "nats", "decode-1", "kvstore-1"]
    ordered = sorted(names, key=stop_stage)
    assert ordered[0] == "autoscaler-1"
    assert set(ordered[-2:]) == {"etcd", "nats"}
    assert service_of("prefill-auto-0a1b2c") == "prefill"


def test_set_takes_service_setting_and_value():
    assert parse_settings(["decode.tp_size=2", "all.log_level=debug"]) == {
        "decode": {"tp_size": "2"},
        "all": {"log_level": "debug"},
    }
    with pytest.raises(ClusterError, match=r"SERVICE\.SETTING=VALUE"):
        parse_settings(["decode=2"])


def test_set_names_the_services_there_are():
    with pytest.raises(ClusterError, match=r"no service 'decod', only all, router"):
        parse_settings(["decod.tp_size=2"])


@pytest.mark.parametrize(
    "arguments",
    [("--http-port", "65536"), ("--grpc-port", "-1"), ("--http-port", "http"), ("--decode", "0"), ("--prefill", "-1")],
)
def test_ports_and_counts_that_cannot_be_are_refused_by_option(arguments, capsys):
    with pytest.raises(SystemExit):
        parser().parse_args(["up", *arguments])
    said = capsys.readouterr().err
    assert arguments[0] in said
    assert arguments[1] in said


def test_by_default_a_cluster_listens_on_loopback_at_the_ports_that_the_readme_names(monkeypatch):
    for name in ("HTTP_PORT", "GRPC_PORT"):
        monkeypatch.delenv(name, raising=False)
    options = parser().parse_args(["up"])
    assert (options.http_port, options.grpc_port, ClusterSpec(model="m").host) == (8000, 50051, "127.0.0.1")
    monkeypatch.setenv("HTTP_PORT", "81")
    assert parser().parse_args(["up"]).http_port == 81
