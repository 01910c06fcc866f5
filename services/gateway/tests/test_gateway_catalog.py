"""Loading of models: what goes wrong with one is named and leaves the others alone."""

import asyncio
import hashlib
import threading
from pathlib import Path

import pytest
from gateway_emulated import tiny_assets

from tidemill.mesh.v1.membership_pb2 import ROLE_DECODE, MembershipRecord
from tidemill_gateway import service
from tidemill_gateway.models import fleet
from tidemill_gateway.models.assets import Assets
from tidemill_gateway.models.catalog import Catalog
from tidemill_gateway.service import Background
from tidemill_mesh.channels import Channels
from tidemill_mesh.config import ServiceSettings
from tidemill_mesh.errors import MeshError

DATA = b"a tokenizer"
DIGEST = hashlib.sha256(DATA).hexdigest()


class Instances:
    """Records of workers, one for each model, and those who follow them."""

    def __init__(self, *models) -> None:
        self.records = {m.card.name: self._record(m) for m in models}
        self.observers = []

    def _record(self, model) -> MembershipRecord:
        return MembershipRecord(instance=model.card.name, role=ROLE_DECODE, models=[model.ref])

    def subscribe(self, observer):
        self.observers.append(observer)
        return lambda: self.observers.remove(observer)

    def add(self, model) -> None:
        record = self.records[model.card.name] = self._record(model)
        for observer in list(self.observers):
            observer(None, record)


class Files:
    """Assets in memory; those of `slow` wait for `go`, the card of `bad` fails."""

    def __init__(self, *models, slow=None, bad=None) -> None:
        self.by_digest = {digest: data for m in models for digest, data in m.by_digest.items()}
        self.slow = slow.ref.card_digest if slow else ""
        self.bad = bad.ref.card_digest if bad else ""
        self.go = asyncio.Event()
        self.asked = []

    async def get(self, digest, endpoints):
        self.asked.append(digest)
        if digest == self.bad:
            raise FileNotFoundError(f"{digest}.partial")
        if digest == self.slow:
            await self.go.wait()
        return self.by_digest[digest]


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.005)


@pytest.fixture
async def background(monkeypatch):
    monkeypatch.setattr(service, "RESTART_S", 0.0)
    tasks = Background()
    yield tasks
    await tasks.close()


def known(catalog: Catalog) -> list[str]:
    return [model.name for model in catalog.models()]


async def test_a_load_that_fails_is_named_and_the_others_go_on(background):
    good, bad, late = tiny_assets("good"), tiny_assets("bad"), tiny_assets("late")
    instances, files = Instances(bad, good), Files(bad, good, late, slow=good, bad=bad)
    catalog = Catalog(instances, files, 60.0)
    background.keep("models", catalog.run)
    await until(lambda: {files.bad, files.slow} <= set(files.asked))
    files.go.set()
    await until(lambda: "good" in known(catalog))
    instances.add(late)
    await until(lambda: "late" in known(catalog))
    assert known(catalog) == ["good", "late"]
    with pytest.raises(MeshError, match="FileNotFoundError"):
        catalog.resolve("bad")
    assert len(instances.observers) == 1


@pytest.mark.parametrize(
    "config", ["[1]", '{"chat_template": [{"name": "default"}]}', '{"chat_template": ["text"]}', "\\ud800", "{"]
)
async def test_a_configuration_of_an_odd_shape_makes_only_its_model_unusable(background, config):
    odd, good = tiny_assets("odd", template="", tokenizer_config_digest="odd"), tiny_assets("good")
    files = Files(odd, good, slow=good)
    files.by_digest["odd"] = config.encode()
    catalog = Catalog(Instances(odd, good), files, 60.0)
    background.keep("models", catalog.run)
    await until(lambda: "Error: " in problem_of(catalog, "odd"))
    files.go.set()
    await until(lambda: known(catalog) == ["good"])


async def test_a_card_that_is_none_makes_only_its_model_unusable(background):
    odd, good = tiny_assets("odd"), tiny_assets("good")
    files = Files(odd, good, slow=good)
    files.by_digest[odd.ref.card_digest] = b"\xff"
    catalog = Catalog(Instances(odd, good), files, 60.0)
    background.keep("models", catalog.run)
    await until(lambda: "DecodeError: " in problem_of(catalog, "odd"))
    files.go.set()
    await until(lambda: known(catalog) == ["good"])


def problem_of(catalog: Catalog, name: str) -> str:
    with pytest.raises(MeshError) as caught:
        catalog.resolve(name)
    return str(caught.value)


async def test_what_was_loading_when_the_catalog_failed_is_loaded_after_it_starts_again(background, monkeypatch):
    slow, other = tiny_assets("slow"), tiny_assets("other")
    instances, files = Instances(slow), Files(slow, other, slow=slow)
    catalog = Catalog(instances, files, 60.0)
    background.keep("models", catalog.run)
    await until(lambda: files.slow in files.asked)
    whole = fleet.model_refs

    def fail_once(records):
        monkeypatch.setattr(fleet, "model_refs", whole)
        raise KeyError("a record that nobody thought of")

    monkeypatch.setattr(fleet, "model_refs", fail_once)
    instances.observers[0](None, instances.records["slow"])
    await until(lambda: files.asked.count(files.slow) == 2)
    assert "being fetched" in problem_of(catalog, "slow")
    files.go.set()
    await until(lambda: known(catalog) == ["slow"])
    instances.add(other)
    await until(lambda: known(catalog) == ["other", "slow"])
    assert len(instances.observers) == 1


def assets_in(folder: Path, monkeypatch) -> Assets:
    async def fetch(endpoint: str, digest: str) -> bytes:
        return DATA

    assets = Assets(Channels(ServiceSettings()), str(folder))
    monkeypatch.setattr(assets, "_fetch", fetch)
    return assets


async def test_two_loads_of_one_asset_keep_it_once(tmp_path, monkeypatch):
    assets = assets_in(tmp_path, monkeypatch)
    both, replace = threading.Barrier(2), Path.replace

    def replace_together(self, target):
        both.wait(60.0)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", replace_together)
    found = await asyncio.gather(*(assets.get(DIGEST, lambda: ["worker:1"]) for _ in range(2)))
    assert found == [DATA, DATA]
    assert [path.name for path in tmp_path.iterdir()] == [DIGEST]
    assert await assets.get(DIGEST, list) == DATA


async def test_an_asset_that_cannot_be_kept_is_used_all_the_same(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    assets = assets_in(tmp_path / "file" / "cache", monkeypatch)
    assert await assets.get(DIGEST, lambda: ["worker:1"]) == DATA


async def test_a_write_that_fails_half_way_leaves_nothing(tmp_path, monkeypatch):
    def full(self, target):
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert await assets_in(tmp_path, monkeypatch).get(DIGEST, lambda: ["worker:1"]) == DATA
    assert list(tmp_path.iterdir()) == []
