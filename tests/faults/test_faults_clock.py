"""A step of the wall clock harms nothing, because nothing waits, expires or compares by it."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WALL_CLOCKS = {
    ("time", "time"),
    ("time", "time_ns"),
    ("datetime", "now"),
    ("datetime", "utcnow"),
    ("datetime", "today"),
}
# What is only shown to people or clients, by file; everything else has to take a monotonic clock.
SHOWN = {
    # When a process was started, as its files and membership record say; also tells runs of one process apart.
    "libs/local/src/tidemill_local/processes.py",
    "libs/mesh/src/tidemill_mesh/service.py",
    # When a report was sent, for whoever records reports; receivers go by when it came.
    "libs/worker/src/tidemill_worker/load_reports.py",
    # OpenAI's `created`, and the date that a chat template may ask for.
    "services/gateway/src/tidemill_gateway/http/app.py",
    "services/gateway/src/tidemill_gateway/text/chat_template.py",
}


def reads_wall_clock(source: str) -> bool:
    """Whether the code names a wall clock, called or handed on."""
    for node in ast.walk(ast.parse(source)):
        named: set[tuple[str | None, str]] = set()
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            named = {(node.value.id, node.attr)}
        if isinstance(node, ast.ImportFrom):
            named = {(node.module, name.name) for name in node.names}
        if named & WALL_CLOCKS:
            return True
    return False


def test_no_service_decides_by_the_wall_clock():
    sources = [*ROOT.glob("libs/*/src/**/*.py"), *ROOT.glob("services/*/src/**/*.py")]
    assert len(sources) > 100
    # Benchmarks are no services.
    found = {str(path.relative_to(ROOT)) for path in sources if reads_wall_clock(path.read_text())}
    assert {name for name in found if not name.startswith("libs/bench/")} == SHOWN


def test_the_check_knows_a_wall_clock_when_it_sees_one():
    assert reads_wall_clock("import time\nclock = time.time")
    assert reads_wall_clock("from time import time")
    assert reads_wall_clock("from datetime import datetime\ndatetime.now()")
    assert not reads_wall_clock("import time\ntime.monotonic()")
