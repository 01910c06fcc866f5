"""An emulated rank that has blocks in L1 and L2, sends some to kvstore without end, and holds what it is asked for."""

import argparse
import hashlib
import socket
import struct
import sys

import msgspec
from emulated_rank import ready

from tidemill_engine import messages
from tidemill_engine.settings import decode_settings

BLOCKS = 64
STEP_S = 0.2


def answers(command: messages.Command, stored: messages.BlocksStored) -> list[messages.Report]:
    """What a rank would say, as far as it concerns what is held; its blocks come with its request."""
    match command:
        case messages.Submit():
            blocks = [b"p%015d" % i for i in range(2)]
            progress = messages.PrefillProgress(
                key=command.key,
                computed_tokens=40,
                total_tokens=40,
                first_block=0,
                block_ids=[0, 1],
                block_hashes=blocks[:1],
                remaining_s=0.0,
                final=True,
            )
            return [messages.StepReport(step=1, kv_events=[stored]), progress]
        case messages.PinBlocks():
            count = len(command.block_hashes)
            return [messages.BlocksPinned(command.pin_id, list(range(count)), [-1] * count)]
        case messages.SaveHost():
            count = len(command.block_ids)
            return [messages.TransferDone(command.transfer_id, 64 * count, 0.001, good_blocks=count)]
    return []


def main() -> int:
    """Owns, until its worker is gone."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings")
    parser.add_argument("--socket")
    args = parser.parse_args()
    settings = decode_settings(args.settings)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(args.socket)

    def send(*reports: messages.Report) -> None:
        body = messages.encode(list(reports))
        connection.sendall(struct.pack("<I", len(body)) + body)

    # Whoever connects to it waits for bytes that never come.
    silent = socket.create_server(("127.0.0.1", 0))
    more = {"num_blocks": 2 * BLOCKS, "num_host_blocks": 2 * BLOCKS}
    more |= {"transfer_address": f"tcp://127.0.0.1:{silent.getsockname()[1]}/{settings.rank}"}
    send(msgspec.structs.replace(ready(settings), **more))
    hashes = [hashlib.blake2b(b"%s %d" % (args.socket.encode(), i), digest_size=16).digest() for i in range(BLOCKS)]
    stored = messages.BlocksStored(bytes(16), hashes, [False] * BLOCKS)
    connection.settimeout(STEP_S)
    step, received = 1, b""
    while True:
        try:
            data = connection.recv(1 << 16)
            if not data:
                return 0
            received += data
        except TimeoutError:
            step += 1
            send(messages.StepReport(step=step))
        except ConnectionError:
            return 0
        while len(received) >= 4 and len(received) >= 4 + struct.unpack_from("<I", received)[0]:
            size = struct.unpack_from("<I", received)[0]
            commands = messages.decode_commands(received[4 : 4 + size])
            received = received[4 + size :]
            reports = [report for command in commands for report in answers(command, stored)]
            if reports:
                send(*reports)


if __name__ == "__main__":
    sys.exit(main())
