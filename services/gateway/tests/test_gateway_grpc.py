from gateway_emulated import TEXT

from tidemill.client import Client


async def test_text_in_gives_tokens_out(emulated_mesh):
    async with Client(emulated_mesh.grpc_endpoint) as client:
        done = await client.complete(model="tiny", text="hello", max_tokens=20)
    assert done.text == TEXT[:20]
