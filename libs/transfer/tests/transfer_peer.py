"""A peer in its own process for tests: runs commands from stdin, one JSON object a line, all at once."""

import asyncio
import json
import sys
from typing import Any

import numpy as np
import uvloop

from tidemill_transfer.agent import TransferAgent, TransferError, open_agent
from tidemill_transfer.checksum import checksum64


def pattern(tag: int, size: int) -> np.ndarray:
    """Bytes that both sides can compute."""
    return (np.arange(-(-size // 8), dtype=np.uint64) * 2654435761 + tag).view(np.uint8)[:size].copy()


async def run_command(agents: list[TransferAgent], command: dict[str, Any]) -> None:
    agent = agents[command.get("agent", 0)]
    answer: dict[str, Any] = {"id": command["id"]}
    try:
        if command["op"] == "send":
            data = pattern(command["tag"], command["size"])
            await agent.send(command["peer"], command["tag"], data, command["deadline_s"])
        elif command["op"] == "recv":
            out = np.zeros(command["size"], np.uint8)
            await agent.recv(command["peer"], command["tag"], out, command["deadline_s"])
            answer["checksum"] = checksum64(out)
        elif command["op"] == "holds":
            answer["holds"] = agent.holds
    except TransferError as error:
        answer["error"] = error.code
    print(json.dumps(answer), flush=True)


async def main(kind: str, num_agents: int) -> None:
    agents = [await open_agent(kind, "127.0.0.1") for _ in range(num_agents)]  # type: ignore[arg-type]
    print(json.dumps([agent.address for agent in agents]), flush=True)
    stdin = asyncio.StreamReader()
    stdin_pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin
    )
    async with asyncio.TaskGroup() as commands:
        while line := await stdin.readline():
            commands.create_task(run_command(agents, json.loads(line)))
    stdin_pipe.close()
    for agent in agents:
        await agent.close()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2])))
