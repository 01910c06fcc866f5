"""What a rank is told: its service's settings, under the same names."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from tidemill_engine.settings import EngineSettings
from tidemill_worker.launch import engine_settings
from tidemill_worker.settings import WorkerSettings


def another(value: Any, choices: Any) -> Any:
    """A valid value that is not the default."""
    if choices:
        return next(choice for choice in choices if choice != value)
    if isinstance(value, bool):
        return not value
    return f"{value}0" if isinstance(value, str) else value + 1


def test_each_setting_that_service_and_rank_share_reaches_the_rank(tmp_path: Path) -> None:
    told = set(EngineSettings.__struct_fields__)
    changed = {
        item.name: another(item.default, item.metadata.get("choices"))
        for item in fields(WorkerSettings)
        if item.name in told
    }
    assert {"growth_wait_s", "move_wait_s", "kv_high_water"} <= changed.keys()
    made = engine_settings(WorkerSettings(model="/model", **changed), 0, 0, 1, tmp_path)
    assert {name: getattr(made, name) for name in changed} == changed
