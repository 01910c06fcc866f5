"""What test_compose.sh asks a running deployment: check.py ask|workers|crash --key K --http ADDRESS --grpc ADDRESS."""

import argparse
import asyncio
import os
import signal
import sys
import time

import openai

from tidemill.client import Client
from tidemill.completion import Completion

MODEL = "smollm2"
QUESTION = "What is the capital of France?"
PATIENCE_S = 120.0


async def ask(options: argparse.Namespace) -> None:
    """The same greedy answer by gRPC and by OpenAI HTTP."""
    async with Client(options.grpc, api_key=options.key) as client:
        by_grpc = await client.complete(
            model=MODEL, messages=[{"role": "user", "content": QUESTION}], max_tokens=24, temperature=0.0
        )
    async with openai.AsyncOpenAI(base_url=f"http://{options.http}/v1", api_key=options.key) as http:
        by_http = await http.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": QUESTION}], max_tokens=24, temperature=0
        )
    assert "Paris" in by_grpc.text, by_grpc.text
    assert by_http.choices[0].message.content == by_grpc.text, by_http
    print(by_grpc.text)


async def served_by(client: Client, index: int) -> str:
    """The decode instance that served one request."""
    answer = await client.complete(
        model=MODEL, text=f"Request {index}: the sea", max_tokens=16, temperature=0.0, include_placement=True
    )
    return str(answer.placement.decode_instance)


async def workers(options: argparse.Namespace) -> None:
    """Rounds of concurrent requests until each of the expected decode workers has served one."""
    seen: set[str] = set()
    end = time.monotonic() + PATIENCE_S
    async with Client(options.grpc, api_key=options.key) as client:
        while len(seen) < options.decode:
            assert time.monotonic() < end, f"only {seen} served"
            seen |= set(await asyncio.gather(*(served_by(client, i) for i in range(options.requests))))
            seen.discard("")
    print(f"served by {', '.join(sorted(seen))}")


async def crash(options: argparse.Namespace) -> None:
    """A worker's process is killed while all streams run: all end with all their tokens, some by a second attempt."""
    tokens, streams = 64, 8
    begun = [asyncio.Event() for _ in range(streams)]

    async def stream(client: Client, index: int) -> Completion:
        answer = Completion()
        async for response in client.generate(
            model=MODEL,
            text=f"Story {index}: once",
            max_tokens=tokens,
            ignore_eos=True,
            temperature=0.0,
            include_placement=True,
        ):
            answer.add(response)
            begun[index].set()
        return answer

    async with Client(options.grpc, api_key=options.key) as client:
        running = [asyncio.create_task(stream(client, index)) for index in range(streams)]
        await asyncio.gather(*(event.wait() for event in begun))
        os.kill(options.pid, signal.SIGKILL)
        answers = await asyncio.gather(*running)
    assert [answer.usage.completion_tokens for answer in answers] == [tokens] * streams, answers
    moved = sum(answer.placement.attempts > 1 for answer in answers)
    assert moved, "the killed worker had no stream"
    print(f"{streams} streams survived the loss of process {options.pid}, {moved} of them went on elsewhere")


def main() -> int:
    """Runs one check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("check", choices=("ask", "workers", "crash"))
    parser.add_argument("--key", required=True)
    parser.add_argument("--http", required=True)
    parser.add_argument("--grpc", required=True)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--pid", type=int, default=0)
    options = parser.parse_args()
    asyncio.run({"ask": ask, "workers": workers, "crash": crash}[options.check](options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
