import hashlib

import pytest

from tidemill.v1 import errors_pb2
from tidemill_gateway.auth import KeyFileError, load_keys
from tidemill_gateway.service import open_keys
from tidemill_gateway.settings import GatewaySettings
from tidemill_mesh.errors import MeshError
from tidemill_mesh.server import BindError


def test_without_a_file_everybody_is_the_default_tenant():
    assert load_keys("").tenant("") == "default"


def test_plain_and_hashed_keys_name_their_tenants(tmp_path):
    digest = hashlib.sha256(b"sk-two").hexdigest()
    (tmp_path / "keys").write_text(f"# who\nsk-one acme # comment\n\nsha256:{digest} beta\n")
    keys = load_keys(str(tmp_path / "keys"))
    assert keys.tenant("Bearer sk-one") == "acme"
    assert keys.tenant("bearer sk-two") == "beta"


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer sk-three", "Basic sk-one", "sk-one"])
def test_anything_else_is_refused(tmp_path, header):
    (tmp_path / "keys").write_text("sk-one acme\n")
    with pytest.raises(MeshError) as caught:
        load_keys(str(tmp_path / "keys")).tenant(header)
    assert caught.value.code == errors_pb2.ERROR_CODE_UNAUTHENTICATED


@pytest.mark.parametrize("content", ["", "only-a-key\n", "key tenant more\n", "key bad/tenant\n"])
def test_a_bad_key_file_is_refused(tmp_path, content):
    (tmp_path / "keys").write_text(content)
    with pytest.raises(KeyFileError):
        load_keys(str(tmp_path / "keys"))


def test_a_bind_that_others_reach_needs_keys_or_insecure(tmp_path):
    with pytest.raises(BindError, match="api_keys_file"):
        open_keys(GatewaySettings(host="0.0.0.0"))
    open_keys(GatewaySettings(host="0.0.0.0", insecure=True))
    (tmp_path / "keys").write_text("sk-one acme\n")
    open_keys(GatewaySettings(host="0.0.0.0", api_keys_file=str(tmp_path / "keys")))
    with pytest.raises(BindError, match="missing"):
        open_keys(GatewaySettings(api_keys_file=str(tmp_path / "missing")))
