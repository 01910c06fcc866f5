"""The `tidemill` command."""

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import grpc

from tidemill.connection import key_metadata
from tidemill.errors import TidemillError
from tidemill.mesh.v1 import worker_pb2, worker_pb2_grpc
from tidemill.v1 import inference_pb2, inference_pb2_grpc
from tidemill_local import __version__, cache_view, mesh_view, model_folders, models, processes, status
from tidemill_local.ask import AskFailed, ask_grpc, ask_http
from tidemill_local.cluster import ClusterError, LocalCluster, load_spec, running_addresses, service_of
from tidemill_local.health import StartFailed
from tidemill_local.home import Home, default_home
from tidemill_local.servers import ServerMissing
from tidemill_local.spec import SERVICES, WORKERS, ClusterSpec
from tidemill_mesh import log as logs

API_KEY = "TIDEMILL_API_KEY"
QUESTION = "What is the capital of France?"
MAX_TOKENS = 48
EXPECTED = (ClusterError, StartFailed, ServerMissing, models.ModelFailed, AskFailed, TidemillError, TimeoutError)


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns its exit status."""
    options = parser().parse_args(argv)
    logs.configure("console", "warning", "tidemill", "cli")
    # As by Ctrl-C: what `up` has begun is taken back.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    command: Callable[[Home, argparse.Namespace], int] = options.command
    home = default_home()
    try:
        return command(home, options)
    except EXPECTED as error:
        print(f"tidemill: {error}", file=sys.stderr)
    except OSError as error:
        print(f"tidemill: {error} (TIDEMILL_HOME is {home.root})", file=sys.stderr)
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
    command("cache", show_cache, "Show tiers, hit rates and the prefixes that are shared most.")
    listed = command("models", show_models, "List the served models, or what model folders hold.")
    listed.add_argument("folders", nargs="*", type=Path, help="model folders, or folders of them; no cluster is needed")
    ask = command("ask", ask_question, "Ask a question by gRPC.")
    ask.add_argument("question", nargs="?", default=QUESTION)
    ask.add_argument("--max-tokens", type=int, default=256)
    ask.add_argument("--http", action="store_true", help="ask by OpenAI HTTP instead")
    for calling in (listed, ask):
        key_option(calling)
    drain = command("drain", drain_instance, "Let an instance finish what it has and leave.")
    drain.add_argument("instance")
    drain.add_argument("--deadline-s", type=float, default=30.0, help="of a worker; others have their drain_s")
    log = command("logs", show_log, "Show the end of a process's log, or name the processes.")
    log.add_argument("name", nargs="?")
    log.add_argument("--lines", type=at_least_one, default=50)
    return top


def up_options(made: argparse.ArgumentParser) -> None:
    """Options of `up`; ports also by environment, so that `make up` takes them."""
    made.add_argument("--http-port", type=port, default=os.environ.get("HTTP_PORT", "8000"), help="0: a free one")
    made.add_argument("--grpc-port", type=port, default=os.environ.get("GRPC_PORT", "50051"), help="0: a free one")
    made.add_argument("--prefill", type=at_least_one, default=1, help="prefill instances")
    made.add_argument("--decode", type=at_least_one, default=1, help="decode instances")
    made.add_argument("--model", default="", help="a Hugging Face safetensors folder; default: SmolLM2-135M-Instruct")
    made.add_argument(
        "--set", action="append", default=[], metavar="SERVICE.SETTING=VALUE", help='any setting ("all." for every one)'
    )
    made.add_argument("--no-ask", action="store_true", help="do not ask a question at the end")
    key_option(made)


def port(text: str) -> int:
    """A TCP port, 0 included."""
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: 0 to 65535")
    return int(text)


def at_least_one(text: str) -> int:
    """A count."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def key_option(made: argparse.ArgumentParser) -> None:
    """For what calls the gateway as its clients do."""
    # Not as a default, which --help would print.
    made.add_argument("--api-key", help=f"where the gateways ask for one; else the environment's {API_KEY}")


def api_key(options: argparse.Namespace) -> str | None:
    """The caller's key, if there is one."""
    return options.api_key or os.environ.get(API_KEY) or None


def up(home: Home, options: argparse.Namespace) -> int:
    """Starts what does not run, then asks by gRPC and by HTTP."""
    began = time.monotonic()
    home.prepare()
    model = Path(options.model).resolve() if options.model else models.ensure_smollm2(home)
    for name in ("", "config.json", "tokenizer.json"):
        if not (model / name).exists():
            raise ClusterError(f"{model} is no model folder: there is no {name or 'such folder'}")
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
        ask_both(cluster, api_key(options))
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
        if service not in ("all", *SERVICES):
            raise ClusterError(f"--set {text}: there is no service {service!r}, only all, {', '.join(SERVICES)}")
        settings.setdefault(service, {})[field] = value
    return settings


def ask_both(cluster: LocalCluster, key: str | None) -> None:
    """The same question twice: by the gRPC client, then by HTTP."""
    model = cluster.spec.served_name
    if key is None and "api_keys_file" in cluster.spec.settings.get("gateway", {}):
        print(f"no question asked: the gateways want an API key (--api-key or {API_KEY})")
        return
    print(f"\ngRPC> {QUESTION}")
    answer = asyncio.run(ask_grpc(cluster.endpoint("gateway-1"), model, QUESTION, MAX_TOKENS, api_key=key))
    print(f"\n      {answer.summary()}\n\nHTTP> {QUESTION}")
    answer = ask_http(cluster.http_endpoint("gateway-1"), model, QUESTION, MAX_TOKENS, api_key=key)
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
    alive = cluster.running()
    ended = [record for record in processes.read_all(home.run) if record not in alive]
    seen = any(record.name == "etcd" for record in alive)
    if seen:
        print(status.render(asyncio.run(mesh_view.look(running_addresses(home)))))
        print(status.LEGEND)
    else:
        print("etcd is down: nobody can tell who is in the mesh")
    print(f"processes: {', '.join(f'{record.name} ({record.pid})' for record in alive) or 'none'}")
    if ended:
        names = ", ".join(record.name for record in ended)
        print(f"ended: {names}   next: tidemill logs NAME says why, make up starts them again")
    return 0 if seen else 1


def show_cache(home: Home, options: argparse.Namespace) -> int:
    """Prints what the tiers hold and save."""
    del options
    running_cluster(home)
    print(cache_view.render(asyncio.run(mesh_view.look(running_addresses(home)))))
    print(cache_view.LEGEND)
    return 0


def show_models(home: Home, options: argparse.Namespace) -> int:
    """Prints what the gateway serves, or what folders hold and whether it can be served."""
    if options.folders:
        summaries = models.outline(options.folders)
        print("\n".join(status.table(model_folders.rows(summaries))))
        return 1 if any(summary.reason for summary in summaries) else 0
    with grpc.insecure_channel(running_cluster(home).endpoint("gateway-1")) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        key = key_metadata(api_key(options))
        answer = stub.ListModels(inference_pb2.ListModelsRequest(), timeout=mesh_view.RPC_TIMEOUT_S, metadata=key)
    rows = [
        (m.name, ",".join(m.aliases), m.revision, str(m.context_tokens), str(m.ready).lower()) for m in answer.models
    ]
    print("\n".join(status.table([("MODEL", "ALIASES", "REVISION", "CONTEXT", "READY"), *rows])))
    return 0


def ask_question(home: Home, options: argparse.Namespace) -> int:
    """Asks once and prints the figures."""
    cluster = running_cluster(home)
    model, key = cluster.spec.served_name, api_key(options)
    if options.http:
        endpoint = cluster.http_endpoint("gateway-1")
        answer = ask_http(endpoint, model, options.question, options.max_tokens, api_key=key)
    else:
        asked = ask_grpc(cluster.endpoint("gateway-1"), model, options.question, options.max_tokens, api_key=key)
        answer = asyncio.run(asked)
    print(f"\n{answer.summary()}")
    return 0


def drain_instance(home: Home, options: argparse.Namespace) -> int:
    """Asks a worker to drain; another service of this machine gets its SIGTERM."""
    cluster = running_cluster(home)
    if not cluster.is_running(options.instance):
        raise ClusterError(f"no process {options.instance} runs here")
    if service_of(options.instance) not in WORKERS:
        cluster.kill(options.instance, signal.SIGTERM)
        print(f"{options.instance} drains, for at most its drain_s")
        return 0
    with grpc.insecure_channel(cluster.endpoint(options.instance)) as channel:
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
