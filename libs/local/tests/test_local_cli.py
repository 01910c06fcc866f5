"""What somebody is told who gives the `tidemill` command something that cannot be."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidemill_local import processes, servers
from tidemill_local.cli import main
from tidemill_local.cluster import LocalCluster
from tidemill_local.home import Home, write_atomically
from tidemill_local.spec import ClusterSpec


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    """The command's home; what runs below it is stopped."""
    before = signal.getsignal(signal.SIGTERM)
    made = Home(tmp_path / "home")
    monkeypatch.setenv("TIDEMILL_HOME", str(made.root))
    # It would hold on to the output that pytest captures, for all later tests of this process.
    monkeypatch.setattr("tidemill_mesh.log.configure", lambda *_: None)
    yield made
    LocalCluster(made, ClusterSpec(model="")).down(grace_s=5)
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    return str(folder)


@pytest.mark.parametrize("command", [["up"], ["status"], ["down"], ["ask"], ["cache"], ["logs"]])
def test_a_home_that_cannot_be_used_is_named(command, tmp_path, monkeypatch, capsys, model):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("TIDEMILL_HOME", str(file))
    status = main([*command, "--model", model] if command == ["up"] else command)
    said = capsys.readouterr()
    assert str(file) in said.err + said.out or said.out in ("nothing was running\n", "processes: none\n")
    assert status == (0 if said.out else 1)


@pytest.mark.parametrize(("missing", "words"), [("", "no such folder"), ("tokenizer.json", "no tokenizer.json")])
def test_what_a_model_folder_lacks_is_named(missing, words, model, capsys):
    folder = Path(model)
    if missing:
        (folder / missing).unlink()
    else:
        folder = folder / "nowhere"
    assert main(["up", "--model", str(folder)]) == 1
    assert f"{folder} is no model folder: there is {words}" in capsys.readouterr().err


def test_one_port_for_two_is_refused_before_anything_starts(model, capsys, home):
    assert main(["up", "--model", model, "--http-port", "9321", "--grpc-port", "9321"]) == 1
    assert "cannot share port 9321" in capsys.readouterr().err
    assert processes.read_all(home.run) == []


def test_down_twice_is_nothing_new(capsys):
    assert [main(["down"]), main(["down"])] == [0, 0]
    assert capsys.readouterr().out == "nothing was running\n" * 2


def test_status_of_a_mesh_without_etcd_says_what_has_ended_and_what_to_do(capsys, home):
    home.prepare()
    servers.start_etcd(home, "127.0.0.1")
    servers.start_nats(home, "127.0.0.1")
    write_atomically(home.state_file, '{"model": "m"}')
    LocalCluster(home, ClusterSpec(model="m")).kill("etcd")
    assert main(["status"]) == 1
    said = capsys.readouterr().out
    assert "etcd is down" in said
    assert "processes: nats (" in said
    assert "ended: etcd " in said
    assert "make up" in said
