"""Every service's own command line: help, version, and no torch in the process."""

import subprocess
import sys

import pytest

SERVICES = ("gateway", "router", "prefill", "decode", "kvstore", "autoscaler")


def run(*argv: str) -> str:
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("service", SERVICES)
def test_help_explains_each_setting(service: str):
    text = run("-m", f"tidemill_{service}", "--help")
    assert "Seconds after which a silent peer counts as lost" in " ".join(text.split())
    assert f"TIDEMILL_{service.upper()}_<FIELD>" in text


@pytest.mark.parametrize("service", SERVICES)
def test_version_is_shown(service: str):
    assert run("-m", f"tidemill_{service}", "--version").startswith(f"tidemill-{service} ")


@pytest.mark.parametrize("service", SERVICES)
def test_the_process_holds_no_torch(service: str):
    code = f"import sys, tidemill_{service}.__main__; print('torch' in sys.modules)"
    assert run("-c", code).strip() == "False"
