"""A worker with faults of its own: `forgetful.py SERVICE FAULT,FAULT... FLAGS` starts it, and each fault happens once.

The fault is in the process itself, where no other process could notice it: a message that it has received, or is about
to send, is dropped, and everything else goes on.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tidemill.mesh.v1 import worker_pb2
from tidemill_engine import messages
from tidemill_worker import gateway_stream
from tidemill_worker.rank_link import RankLink
from tidemill_worker.sessions import GatewaySession

TO_RANK: dict[str, type[Any]] = {
    "submit": messages.Submit,
    "abort": messages.Abort,
    "kv ready": messages.KVReady,
}
"""Commands that are lost on their way to a rank."""


class Faults:
    """Those that have not happened yet."""

    def __init__(self, names: Sequence[str]) -> None:
        self._left = set(names)
        self._decoding: set[messages.RequestKey] = set()

    def happens(self, name: str) -> bool:
        """Once, if it was asked for."""
        if name not in self._left:
            return False
        self._left.remove(name)
        print(f"forgets: {name}", file=sys.stderr, flush=True)
        return True

    def command(self, command: messages.Command) -> bool:
        """Whether a command to a rank is lost; an abort only where there is something to abort."""
        if isinstance(command, messages.Abort) and command.key not in self._decoding:
            return False
        return any(isinstance(command, kind) and self.happens(name) for name, kind in TO_RANK.items())

    def output(self, output: messages.Output) -> bool:
        """Whether an output of a rank is lost."""
        self._decoding.discard(output.key) if output.finish else self._decoding.add(output.key)
        return self.happens("last output" if output.finish else "output") if output.token_ids else False

    def report(self, report: messages.Report) -> bool:
        """Whether a report of a rank is lost; of a step, outputs are."""
        if isinstance(report, messages.StepReport):
            report.outputs = [output for output in report.outputs if not self.output(output)]
        return isinstance(report, messages.KVWanted) and self.happens("kv wanted")


def install(faults: Faults) -> None:
    """Puts the faults into this process."""
    send, take, push, take_message = RankLink.send, RankLink._take, GatewaySession.push, gateway_stream.take_message

    def forgetful_send(link: RankLink, commands: Sequence[messages.Command]) -> None:
        send(link, [command for command in commands if not faults.command(command)])

    def forgetful_take(link: RankLink, reports: list[messages.Report]) -> None:
        take(link, [report for report in reports if not faults.report(report)])

    def forgetful_push(session: GatewaySession, message: worker_pb2.ConnectResponse) -> None:
        for output in list(message.step.outputs):
            if output.finish and output.token_ids and faults.happens("last output to the gateway"):
                message.step.outputs.remove(output)
        push(session, message)

    def forgetful_take_message(worker: Any, session: Any, message: worker_pb2.ConnectRequest, submitted: Any) -> None:
        if message.submits and faults.happens("submit of the gateway"):
            del message.submits[0]
        if message.aborts and faults.happens("abort of the gateway"):
            del message.aborts[0]
        take_message(worker, session, message, submitted)

    patched: dict[tuple[Any, str], Callable[..., None]] = {
        (RankLink, "send"): forgetful_send,
        (RankLink, "_take"): forgetful_take,
        (GatewaySession, "push"): forgetful_push,
        (gateway_stream, "take_message"): forgetful_take_message,
    }
    for (owner, name), replacement in patched.items():
        setattr(owner, name, replacement)


def main() -> int:
    """Starts the service with its faults."""
    _, service, names, *flags = sys.argv
    install(Faults(names.split(",")))
    sys.argv = [f"tidemill_{service}", *flags]
    status: int = importlib.import_module(f"tidemill_{service}.__main__").main()
    return status


if __name__ == "__main__":
    sys.exit(main())
