#!/usr/bin/env bash
# Proves compose.yaml for real: build, up, ask by HTTP and gRPC, scale, kill a worker in mid-stream, tear down.
# `make test-compose`; needs root on Debian 12, or a running Docker with compose v2 and BASE_IMAGE, SERVERS_BASE_IMAGE set.
set -euo pipefail
cd "$(dirname "$0")/../.."
work=${TIDEMILL_HOME:-$PWD/.tidemill}/compose
mkdir -p "$work"
say() { printf '== %s\n' "$*" >&2; }
python=${TIDEMILL_HOME:-$PWD/.tidemill}/venv/bin/python

export HTTP_PORT=${HTTP_PORT:-18000} GRPC_PORT=${GRPC_PORT:-15051}
export DOCKER_BUILDKIT=1 COMPOSE_DOCKER_CLI_BUILD=1
if [ -z "${BASE_IMAGE:-}" ]; then
    export DOCKER_CONFIG=$work/config
    deploy/compose/prepare.sh "$work"
    export BASE_IMAGE=local/tidemill-python:bookworm SERVERS_BASE_IMAGE=local/tidemill-debian:trixie
fi
export CA_FILE=${CA_FILE:-/etc/ssl/certs/ca-certificates.crt} BUILD_NETWORK=${BUILD_NETWORK:-host}
compose=(docker compose -f deploy/compose/compose.yaml)

cleanup() {
    status=$?
    if [ "$status" != 0 ]; then
        "${compose[@]}" ps -a || true
        "${compose[@]}" logs --no-color --tail 40 || true
    fi
    "${compose[@]}" down -v --remove-orphans -t 20 || true
    if [ -f "$work/dockerd.pid" ]; then
        kill "$(cat "$work/dockerd.pid")" 2>/dev/null || true
        rm -f "$work/dockerd.pid"
    fi
    exit "$status"
}
trap cleanup EXIT

# pip takes a CPU build of torch from wherever it is configured to look; without one, name an index in TORCH_INDEX.
torch=$(grep '^torch==' constraints-cpu.txt)
if [ -z "${TORCH_INDEX:-}" ] && ! ls deploy/wheels/torch-*.whl >/dev/null 2>&1; then
    "$python" -m pip download -q --no-deps -d deploy/wheels "$torch"
fi

"${compose[@]}" -f deploy/compose/gpu.yaml config -q
say "building"
"${compose[@]}" build --progress=plain >"$work/build.log" 2>&1 || { tail -n 60 "$work/build.log"; exit 1; }
docker images --format '{{.Repository}} {{.Size}}' | grep '^tidemill' | sort

say "up"
time "${compose[@]}" up -d --wait --wait-timeout 600
key=$("${compose[@]}" exec -T gateway cut -d' ' -f1 /var/lib/tidemill/api_keys)
check() { "$python" deploy/compose/check.py "$@" --key "$key" --http "127.0.0.1:$HTTP_PORT" --grpc "127.0.0.1:$GRPC_PORT"; }
say "ask"
check ask

say "scale decode to 2"
"${compose[@]}" up -d --wait --wait-timeout 600 --no-recreate --scale decode=2
check workers --decode 2 --requests 8

say "kill a decode worker's process in mid-stream"
victim=$("${compose[@]}" ps -q decode)
victim=${victim%%$'\n'*} # by no pipe to head, whose end would be a failure of compose
# The container's first process is an init; the service is its only child. A kill of it is a crash, not a manual stop.
check crash --pid "$(docker inspect -f '{{.State.Pid}}' "$victim")"
for _ in $(seq 120); do
    [ "$(docker inspect -f '{{.State.Health.Status}}' "$victim")" = healthy ] && break
    sleep 1
done
[ "$(docker inspect -f '{{.RestartCount}}' "$victim")" -ge 1 ]
check workers --decode 2 --requests 4

say "no service runs as root, nor without limits"
for container in $("${compose[@]}" ps -q); do
    user=$(docker inspect -f '{{.Config.User}}' "$container")
    [ "$user" = tidemill ] || { echo "$container runs as '$user'"; exit 1; }
    limits=$(docker inspect -f '{{.HostConfig.Memory}} {{.HostConfig.NanoCpus}} {{.HostConfig.PidsLimit}}' "$container")
    case " $limits " in *" 0 "* | *"<nil>"*) echo "$container has limits of '$limits'"; exit 1 ;; esac
done

say "no image holds more than its service needs"
for service in gateway router autoscaler kvstore prefill decode; do
    unwanted="pip pytest mypy grpc_tools transformers"
    case $service in prefill | decode) ;; *) unwanted="$unwanted setuptools torch" ;; esac
    # shellcheck disable=SC2086
    "${compose[@]}" exec -T "$service" python -c 'import importlib.util, sys
found = [name for name in sys.argv[1:] if importlib.util.find_spec(name)]
sys.exit(f"it holds {found}" if found else 0)' $unwanted || { echo "image of $service"; exit 1; }
done

say "tear down"
"${compose[@]}" down -v -t 30
[ -z "$(docker ps -aq --filter label=com.docker.compose.project=tidemill)" ]
say "passed"
