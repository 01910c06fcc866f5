"""What the autoscaler refuses at its start."""

import pytest

from tidemill_autoscaler.policy import Bounds
from tidemill_autoscaler.settings import AutoscalerSettings
from tidemill_mesh.config import load_settings

LOCAL = ["--templates=t.json", "--run-dir=run"]


def test_defaults_work():
    settings = load_settings(AutoscalerSettings, "autoscaler", LOCAL, {})
    assert settings.bounds("decode") == Bounds(1, 2)
    assert settings.policy().cooldown_s == settings.cooldown_s


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        ([*LOCAL, "--cooldown-s=5"], "cooldown_s"),
        ([*LOCAL, "--scale-in-after-s=5"], "scale_in_after_s"),
        ([*LOCAL, "--scale-in-load=1.5"], "scale_in_load"),
        ([*LOCAL, "--min-decode=3"], "max_replicas"),
        ([], "templates"),
    ],
)
def test_what_would_flap_or_cannot_work_is_refused_by_name(argv, name, capsys):
    with pytest.raises(SystemExit) as ended:
        load_settings(AutoscalerSettings, "autoscaler", argv, {})
    assert ended.value.code == 2
    assert name in capsys.readouterr().err
