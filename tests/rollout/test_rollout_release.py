"""The last release, from its commit, beside the present code: in one mesh, service by service, there and back."""

import asyncio
import subprocess

import pytest
from harness.pairs import GATEWAYS
from harness.release import ReleaseMissing, checked_out, git, is_checkout, pins_unmet, release_commit
from harness.steady import SteadyLoad

PROMPT_TOKENS = 200
OUTPUT_TOKENS = 60
CASES = 24


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    if not is_checkout():
        pytest.skip("not a git checkout: the last release's commit cannot be had")
    with checked_out(tmp_path_factory.mktemp("work")) as made:
        yield made


@pytest.fixture
def repository(tmp_path):
    """Two releases and a later commit."""
    root = tmp_path / "repository"
    root.mkdir()
    git("init", "-q", root=root)
    for number, (name, text) in enumerate([("RELEASED", "0.1.0"), ("RELEASED", "0.2.0"), ("code", "later")]):
        (root / name).write_text(text)
        git("add", ".", root=root)
        git("-c", "user.name=t", "-c", "user.email=t@t.example", "commit", "-q", "-m", str(number), root=root)
    return root


def test_the_release_is_the_commit_that_last_changed_its_file_also_in_a_shallow_clone(repository, tmp_path):
    released = git("rev-parse", "HEAD~1", root=repository)
    assert release_commit(repository) == released
    shallow = tmp_path / "shallow"
    subprocess.run(["git", "clone", "-q", "--depth=1", f"file://{repository}", str(shallow)], check=True)
    assert release_commit(shallow) == released


def test_a_shallow_clone_without_its_origin_is_an_error_that_says_so(repository, tmp_path):
    shallow = tmp_path / "shallow"
    subprocess.run(["git", "clone", "-q", "--depth=1", f"file://{repository}", str(shallow)], check=True)
    git("remote", "remove", "origin", root=shallow)
    with pytest.raises(ReleaseMissing, match="unshallow"):
        release_commit(shallow)


def test_a_release_gets_the_packages_that_have_left_or_changed_since():
    pins = "# whole environment\nstarlette==1.0\ntorch==2.13.0\nTyping_Extensions==4.0\nnumpy==1.0\n"
    installed = {"torch": "2.13.0", "typing-extensions": "4.0", "numpy": "2.0"}
    assert pins_unmet(pins, installed) == ["starlette==1.0", "numpy==1.0"]


@pytest.mark.full
@pytest.mark.timeout(1500)
async def test_every_service_goes_to_the_last_release_and_back_under_load(pairs, oracle, release):
    assert release.package_file("tidemill_engine").is_relative_to(release.tree)
    load = SteadyLoad(pairs, *oracle.cases("release", CASES, PROMPT_TOKENS, OUTPUT_TOKENS), gateways=GATEWAYS)
    instances = pairs.spec.instances()
    today = {instance: pairs.cluster.record(instance).argv for _, instance in instances}
    async with load:
        await load.until_served(4)
        for commands in (dict.fromkeys(today), today):
            for service, instance in instances:
                argv = commands[instance] or release.command(pairs, service, instance)
                await asyncio.to_thread(pairs.replace, instance, argv)
                await pairs.until_members(*today)
                await load.until_served(4)
    assert {stream.gateway for stream in load.streams} == set(GATEWAYS)
    await pairs.holds_are_zero()
