"""Settings: where they come from, what is refused, and what is never shown."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tidemill_mesh.config import ServiceSettings, load_settings, public_settings, setting


@dataclass(frozen=True, kw_only=True)
class DemoSettings(ServiceSettings):
    """Settings of every type."""

    depth: int = setting(3, minimum=1, maximum=10)
    """How deep it goes."""
    rate: float = setting(0.5, minimum=0.0)
    """How fast: 100 % is 1."""
    eager: bool = False
    """Whether it starts early."""
    names: tuple[str, ...] = ()
    """What it answers to."""
    sizes: tuple[int, ...] = setting((1, 2), minimum=1)
    """Its sizes."""
    cache_secret: str = setting("", secret=True)
    """The secret of the cache."""


def load(*argv: str, **env: str) -> DemoSettings:
    return load_settings(DemoSettings, "gateway", list(argv), {f"TIDEMILL_GATEWAY_{k}": v for k, v in env.items()})


def refusal(capsys: pytest.CaptureFixture[str], *argv: str, **env: str) -> str:
    with pytest.raises(SystemExit) as ended:
        load(*argv, **env)
    assert ended.value.code == 2
    return capsys.readouterr().err


def config(folder: Path, text: str) -> str:
    path = folder / "tidemill.toml"
    path.write_text(text)
    return str(path)


def test_every_field_has_a_working_default() -> None:
    assert load() == DemoSettings()


def test_flags_beat_environment_beats_file_beats_default(tmp_path: Path) -> None:
    path = config(tmp_path, 'depth = 4\n[gateway]\ndepth = 5\nrate = 2\nmesh = "file"\n')
    settings = load("--config", path, "--depth", "7", DEPTH="6", RATE="3.5")
    assert (settings.depth, settings.rate, settings.mesh, settings.port) == (7, 3.5, "file", 0)


def test_the_services_own_table_beats_the_top_level_and_other_tables_are_ignored(tmp_path: Path) -> None:
    path = config(tmp_path, 'mesh = "all"\ndepth = 2\n[gateway]\ndepth = 5\n[router]\nunheard_of = 1\n')
    settings = load(CONFIG=path)
    assert (settings.mesh, settings.depth) == ("all", 5)


@pytest.mark.parametrize(("given", "meant"), [("true", True), ("1", True), ("No", False), ("off", False)])
def test_a_switch_takes_words(given: str, meant: bool) -> None:
    assert load("--eager", given).eager is meant
    assert load(EAGER=given).eager is meant


def test_a_bare_switch_means_true() -> None:
    assert load("--eager", "--depth", "2").eager is True


def test_lists_are_comma_separated_or_toml_arrays(tmp_path: Path) -> None:
    path = config(tmp_path, 'names = ["a", "b"]\n')
    assert load("--config", path, "--sizes", "4, 5").names == ("a", "b")
    assert load("--sizes", "4, 5,").sizes == (4, 5)


@pytest.mark.parametrize("value", ["0", "11", "2.5", "x", "", "nan", "true"])
def test_a_wrong_integer_is_refused_with_field_and_range(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = refusal(capsys, "--depth", value)
    assert "depth" in told
    assert "an integer from 1 to 10" in told


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-0.1", "fast"])
def test_a_wrong_number_is_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "a number of at least 0" in refusal(capsys, f"--rate={value}")


@pytest.mark.parametrize("toml", ["depth = true", "depth = 1.0", "eager = 1", 'rate = "fast"', "names = 3", "mesh = 1"])
def test_toml_types_are_checked(toml: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert toml.split()[0] in refusal(capsys, "--config", config(tmp_path, toml))


def test_a_wrong_choice_names_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    assert "one of console, json" in refusal(capsys, LOG_FORMAT="xml")


def test_a_wrong_item_of_a_list_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "sizes" in refusal(capsys, "--sizes", "1,0")


def test_another_config_version_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "config_version" in refusal(capsys, "--config", config(tmp_path, "config_version = 2"))


def test_unknown_flags_variables_and_keys_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--no-such-flag" in refusal(capsys, "--no-such-flag", "1")
    assert "--dept" in refusal(capsys, "--dept", "1")
    assert "TIDEMILL_GATEWAY_NO_SUCH" in refusal(capsys, NO_SUCH="1")
    assert "no_such_key" in refusal(capsys, "--config", config(tmp_path, "no_such_key = 1"))
    assert "no_such_table" in refusal(capsys, "--config", config(tmp_path, "[no_such_table]\na = 1"))


def test_variables_of_other_services_are_theirs() -> None:
    assert load_settings(DemoSettings, "gateway", [], {"TIDEMILL_ROUTER_NO_SUCH": "1", "TIDEMILL_HOME": "x"})


@pytest.mark.parametrize("text", ["mesh = ", "\xff", "[gateway"])
def test_an_unreadable_file_is_refused_by_name(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(text.encode("latin-1"))
    assert "bad.toml" in refusal(capsys, "--config", str(path))
    assert "missing.toml" in refusal(capsys, CONFIG=str(tmp_path / "missing.toml"))


def test_a_secret_is_read_from_a_file_and_never_shown(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("hush-hush\n")
    settings = load("--cache-secret", f"@{path}", NATS="nats://joe:pa55@10.0.0.1:4222,nats://b:4222")
    assert settings.cache_secret == "hush-hush"
    assert "hush-hush" not in repr(settings)
    assert "hush-hush" not in str(public_settings(settings))
    assert public_settings(settings)["cache_secret"] == "(set)"
    assert public_settings(settings)["nats"] == "nats://(set)@10.0.0.1:4222,nats://b:4222"


def test_a_secret_file_that_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "missing" in refusal(capsys, "--cache-secret", f"@{tmp_path}/missing")
    (tmp_path / "large").write_bytes(b"x" * 70_000)
    assert "larger than" in refusal(capsys, "--cache-secret", f"@{tmp_path}/large")


def test_help_explains_each_field_with_range_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load("--help")
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "How deep it goes. [an integer from 1 to 10; default 3]" in text
    assert "How fast: 100 % is 1. [a number of at least 0; default 0.5]" in text
    assert "--liveness-s" in text
    assert "every liveness bound derives from it" in text


def test_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load("--version")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("tidemill-gateway ")


def test_a_secret_field_must_be_declared_as_one() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Leaky(ServiceSettings):
        api_secret: str = ""
        """A secret that would be printed."""

    with pytest.raises(AssertionError, match="secret=True"):
        load_settings(Leaky, "gateway", [], {})


def test_a_field_must_be_documented() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Silent(ServiceSettings):
        depth: int = 1

    with pytest.raises(AssertionError, match="docstring"):
        load_settings(Silent, "gateway", [], {})
