"""docs/contracts.md says what the code does."""

import re
from pathlib import Path

from tidemill.v1 import errors_pb2
from tidemill_mesh.errors import GRPC_STATUS, HTTP_STATUS, code_name

REPOSITORY = Path(__file__).resolve().parent.parent.parent
PAGE = (REPOSITORY / "docs" / "contracts.md").read_text()
METRIC = re.compile(r"metrics\.(?:counter|gauge|histogram)\(\s*\"(\w+)\"")


def test_the_table_of_errors_is_the_codes() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (\d+) \|", PAGE, re.MULTILINE)
    codes = [code for code in errors_pb2.ErrorCode.values() if code != errors_pb2.ERROR_CODE_UNSPECIFIED]
    assert rows == [(code_name(code), GRPC_STATUS[code].name, str(HTTP_STATUS[code])) for code in codes]


def test_every_metric_is_listed() -> None:
    sources = [path for part in ("libs", "services") for path in (REPOSITORY / part).glob("*/src/**/*.py")]
    made = {name for path in sources for name in METRIC.findall(path.read_text())}
    listed = set(re.findall(r"`(\w+)`", PAGE))
    assert made - listed == set()
