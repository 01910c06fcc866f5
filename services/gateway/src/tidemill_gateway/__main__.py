"""python -m tidemill_gateway"""

import sys

from tidemill_gateway.service import serve
from tidemill_gateway.settings import GatewaySettings
from tidemill_mesh.config import load_settings
from tidemill_mesh.service import run_service


def main() -> int:
    """Runs the gateway; its exit status."""
    return run_service("gateway", load_settings(GatewaySettings, "gateway"), serve)


if __name__ == "__main__":
    sys.exit(main())
