"""The `tidemill` command."""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import grpc

from tidemill.errors import TidemillError
from tidemill.mesh.v1 import worker_pb2, worker_pb2_grpc
from tidemill.v1 import inference_pb2, inference_pb2_grpc
from tidemill_local import __version__, mesh_view, models, processes, status
from tidemill_local.ask import AskFailed, ask_grpc, ask_http
from tidemill_local.cluster import ClusterError, LocalCluster, load_spec, running_addresses
from tidemill_local.health import StartFailed
from tidemill_local.home import Home, default_home
from tidemill_local.servers import ServerMissing
from tidemill_local.spec import ClusterSpec
from tidemill_mesh import log as logs

QUESTION = "What is the capital of France?"
MAX_TOKENS = 48
EXPECTED = (ClusterError, StartFailed, ServerMissing, models.ModelFailed, AskFailed, TidemillError, TimeoutError)


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns its exit status."""
    options = parser().parse_args(argv)
    logs.configure("console", "warning", "tidemill", "cli")
    command: Callable[[Home, argparse.Namespace], int] = options.command
    try:
        return command(default_home(), options)
    except EXPECTED as error:
        print(f"tidemill: {error}", file=sys.stderr)
    except grpc.RpcError as error:
        print(f"tidemill: {error.code().name}: {error.details()}", file=sys.stderr)
    except KeyboardInterrupt:
        print("tidemill: interrupted", file=sys.stderr)
    return 1


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    top = argparse.ArgumentParser(prog="tidemill", description="A whole Tidemill cluster on this machine.")
    top.add_argument("--version", action="version", version=f"tidemill-local {__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[Home, argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(command=run)
        return made

    up_options(command("up", up, "Start the cluster, wait until it is healthy, ask it a question."))
    command("down", down, "Stop everything that was started, workers of the autoscaler too.")
    command("status", show_status, "Show instances, load, cache and holds.")
    command("models", show_models, "List the served models.")
    ask = command("ask", ask_question, "Ask a question by gRPC.")
    ask.add_argument("question", nargs="?", default=QUESTION)
    ask.add_argument("--max-tokens", type=int, default=256)
    ask.add_argument("--http", action="store_true", help="ask by OpenAI HTTP instead")
    drain = command("drain", drain_worker, "Let a worker finish what it has and leave.")
    drain.add_argument("instance")
    drain.add_argument("--deadline-s", type=float, default=30.0)
    log = command("logs", show_log, "Show the end of a process's log, or name the processes.")
    log.add_argument("name", nargs="?")
    log.add_argument("--lines", type=int, default=50)
    return top


def up_options(made: argparse.ArgumentParser) -> None:
    """Options of `up`; ports also by environment, so that `make up` takes them."""
    made.add_argument("--http-port", type=int, default=os.environ.get("HTTP_PORT", "8000"), help="0: a free one")
    made.add_argument("--grpc-port", type=int, default=os.environ.get("GRPC_PORT", "50051"), help="0: a free one")
    made.add_argument("--prefill", type=int, default=1, help="prefill instances")
    made.add_argument("--decode", type=int, default=1, help="decode instances")
    made.add_argument("--model", default="", help="a Hugging Face safetensors folder; default: SmolLM2-135M-Instruct")
    made.add_argument(
        "--set", action="append", default=[], metavar="SERVICE.SETTING=VALUE", help='any setting ("all." for every one)'
    )
    made.add_argument("--no-ask", action="store_true", help="do not ask a question at the end")


def up(home: Home, options: argparse.Namespace) -> int:
    """Starts what does not run, then asks by gRPC and by HTTP."""
    began = time.monotonic()
    home.prepare()
    model = Path(options.model).resolve() if options.model else models.ensure_smollm2(home)
    spec = ClusterSpec(
        model=str(model),
        http_port=options.http_port,
        grpc_port=options.grpc_port,
        prefill=options.prefill,
        decode=options.decode,
        spare_workers=spare_workers(options.prefill + options.decode),
        settings=parse_settings(options.set),
    )
    cluster = LocalCluster(home, spec)
    if cluster.up():
        print(f"all healthy after {time.monotonic() - began:.1f} s")
    else:
        print("the cluster runs already")
    if not options.no_ask:
        ask_both(cluster)
    print(f"\nOpenAI HTTP  http://{cluster.http_endpoint('gateway-1')}/v1   gRPC  {cluster.endpoint('gateway-1')}")
    print(f"state, logs and models  {home.root}   next: make status, make down")
    return 0


def spare_workers(workers: int) -> int:
    """One of each kind where there are cores for it: two workers on the cores of one only slow each other down."""
    return 1 if (os.cpu_count() or 1) >= 2 * (workers + 2) else 0


def parse_settings(given: list[str]) -> dict[str, dict[str, str]]:
    """["decode.tp_size=2"] as {"decode": {"tp_size": "2"}}; ClusterError where the form is another."""
    settings: dict[str, dict[str, str]] = {}
    for text in given:
        name, equals, value = text.partition("=")
        service, dot, field = name.partition(".")
        if not (equals and dot and service and field):
            raise ClusterError(f"--set {text}: the form is SERVICE.SETTING=VALUE")
        settings.setdefault(service, {})[field] = value
    return settings


def ask_both(cluster: LocalCluster) -> None:
    """The same question twice: by the gRPC client, then by HTTP."""
    model = cluster.spec.served_name
    print(f"\ngRPC> {QUESTION}")
    answer = asyncio.run(ask_grpc(cluster.endpoint("gateway-1"), model, QUESTION, MAX_TOKENS))
    print(f"\n      {answer.summary()}\n\nHTTP> {QUESTION}")
    answer = ask_http(cluster.http_endpoint("gateway-1"), model, QUESTION, MAX_TOKENS)
    print(f"\n      {answer.summary()}")


def running_cluster(home: Home) -> LocalCluster:
    """The home's cluster; ClusterError if none runs."""
    spec = load_spec(home)
    if spec is None:
        raise ClusterError(f"no cluster runs in {home.root}: start one (make up)")
    return LocalCluster(home, spec)


def down(home: Home, options: argparse.Namespace) -> int:
    """Stops all."""
    del options
    stopped = LocalCluster(home, load_spec(home) or ClusterSpec(model="")).down()
    print(f"stopped {', '.join(stopped)}" if stopped else "nothing was running")
    return 0


def show_status(home: Home, options: argparse.Namespace) -> int:
    """Prints the table."""
    del options
    cluster = running_cluster(home)
    print(status.render(asyncio.run(mesh_view.look(running_addresses(home)))))
    print(status.LEGEND)
    alive = [f"{record.name} ({record.pid})" for record in cluster.running()]
    print(f"processes: {', '.join(alive) or 'none'}")
    return 0


def show_models(home: Home, options: argparse.Namespace) -> int:
    """Prints what the gateway serves."""
    del options
    with grpc.insecure_channel(running_cluster(home).endpoint("gateway-1")) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        served = stub.ListModels(inference_pb2.ListModelsRequest(), timeout=mesh_view.RPC_TIMEOUT_S).models
    rows = [(m.name, ",".join(m.aliases), m.revision, str(m.context_tokens), str(m.ready).lower()) for m in served]
    print("\n".join(status.table([("MODEL", "ALIASES", "REVISION", "CONTEXT", "READY"), *rows])))
    return 0


def ask_question(home: Home, options: argparse.Namespace) -> int:
    """Asks once and prints the figures."""
    cluster = running_cluster(home)
    model = cluster.spec.served_name
    if options.http:
        answer = ask_http(cluster.http_endpoint("gateway-1"), model, options.question, options.max_tokens)
    else:
        asked = ask_grpc(cluster.endpoint("gateway-1"), model, options.question, options.max_tokens)
        answer = asyncio.run(asked)
    print(f"\n{answer.summary()}")
    return 0


def drain_worker(home: Home, options: argparse.Namespace) -> int:
    """Asks one worker to drain."""
    with grpc.insecure_channel(running_cluster(home).endpoint(options.instance)) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        stub.Drain(worker_pb2.DrainRequest(deadline_s=options.deadline_s), timeout=mesh_view.RPC_TIMEOUT_S)
    print(f"{options.instance} drains, for at most {options.deadline_s:.0f} s")
    return 0


def show_log(home: Home, options: argparse.Namespace) -> int:
    """Prints one log's end."""
    records = {record.name: record for record in processes.read_all(home.run)}
    if options.name in records:
        print(processes.log_tail(records[options.name], options.lines))
        return 0
    print("processes: " + (", ".join(records) or "none"))
    return 0 if options.name is None else 1
