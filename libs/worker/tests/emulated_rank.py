"""An emulated rank: speaks the rank's side of the socket and behaves as its first argument says. No model, no torch."""

import argparse
import socket
import struct
import sys
import time

from tidemill_engine import messages
from tidemill_engine.kv_groups import KVGroupSpec, kv_format
from tidemill_engine.settings import EngineSettings, decode_settings

GROUP = KVGroupSpec(name="kv", kind="paged", layers=(0,), dtype="float32", num_heads=2, head_values=8)


def ready(settings: EngineSettings) -> messages.RankReady:
    """A small rank's first report."""
    return messages.RankReady(
        rank=settings.rank,
        transfer_address=f"tcp://127.0.0.1:1/{settings.rank}",
        head_start=0,
        head_end=2,
        num_blocks=8,
        num_snapshots=0,
        kv_dtype="float32",
        kv_groups=[GROUP],
        kv_format=kv_format((GROUP,), settings.block_size),
        kv_bytes_per_token=64,
        load_seconds=0.0,
        backend="emulated",
    )


def main() -> int:
    """Behaves."""
    parser = argparse.ArgumentParser()
    parser.add_argument("behaviour")
    parser.add_argument("--settings")
    parser.add_argument("--socket")
    args = parser.parse_args()
    settings = decode_settings(args.settings)
    if args.behaviour == "dies-at-start":
        return 3
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(args.socket)

    def send(*reports: messages.Report) -> None:
        body = messages.encode(list(reports))
        connection.sendall(struct.pack("<I", len(body)) + body)

    if args.behaviour == "never-ready":
        time.sleep(600)
    send(ready(settings))
    if args.behaviour == "garbage":
        connection.sendall(struct.pack("<I", 3) + b"abc")
    if args.behaviour == "last-words":
        send(messages.RankFailed(settings.rank, "out of memory"))
        return 1
    connection.settimeout(0.05)
    step = 0
    while True:
        if args.behaviour != "frozen":
            step += 1
            send(messages.StepReport(step=step))
        try:
            if not connection.recv(1 << 16):
                return 0
        except TimeoutError:
            continue


if __name__ == "__main__":
    sys.exit(main())
