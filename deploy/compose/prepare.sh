#!/usr/bin/env bash
# Gets Docker, compose v2 and base images onto a Debian 12 machine that reaches package registries but no image registry:
# daemon from Debian's docker.io, started by hand where no service manager runs; compose and buildx from Debian 13's
# packages; base images by debootstrap. Root only. Skips whatever is there already.
set -euo pipefail
work=${1:?usage: prepare.sh WORK_FOLDER}
mkdir -p "$work"
say() { printf '== %s\n' "$*" >&2; }
export DEBIAN_FRONTEND=noninteractive

mirror() {
    apt-get indextargets --format '$(REPO_URI)' "Created-By: Packages" "Origin: Debian" "Codename: bookworm" | head -n 1
}

install_packages() {
    if ! command -v dockerd >/dev/null || ! command -v debootstrap >/dev/null; then
        say "installing docker.io and debootstrap"
        apt-get update -qq
        apt-get install -y -qq --no-install-recommends docker.io debootstrap iptables >"$work/apt.log" 2>&1
    fi
}

start_daemon() {
    if docker info >/dev/null 2>&1; then return; fi
    say "starting dockerd by hand (log: $work/dockerd.log)"
    # In a session of its own, so that it outlives this script; test_compose.sh ends it by this pid.
    setsid dockerd --data-root "$work/docker" >"$work/dockerd.log" 2>&1 &
    echo $! >"$work/dockerd.pid"
    for _ in $(seq 120); do
        if docker info >/dev/null 2>&1; then return; fi
        sleep 0.5
    done
    tail -n 20 "$work/dockerd.log" >&2
    exit 1
}

install_plugins() {
    plugins=${DOCKER_CONFIG:-$HOME/.docker}/cli-plugins
    if [ -x "$plugins/docker-compose" ] && [ -x "$plugins/docker-buildx" ]; then return; fi
    say "taking compose v2 and buildx from Debian 13's packages"
    apt=$work/trixie
    mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" "$apt/debs" "$plugins"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $(mirror) trixie main" >"$apt/sources.list"
    options=(-qq -o "Dir::Etc::sourcelist=$apt/sources.list" -o Dir::Etc::sourceparts=/dev/null)
    options+=(-o "Dir::State::lists=$apt/lists" -o "Dir::Cache=$apt/cache" -o APT::Sandbox::User=root)
    apt-get "${options[@]}" update
    (cd "$apt/debs" && apt-get "${options[@]}" download docker-compose docker-buildx)
    for deb in "$apt"/debs/*.deb; do dpkg-deb -x "$deb" "$apt/files"; done
    cp "$apt"/files/usr/libexec/docker/cli-plugins/* "$plugins/"
}

# base_image NAME SUITE PACKAGES: a Debian suite with packages, as an image.
base_image() {
    if docker image inspect "$1" >/dev/null 2>&1; then return; fi
    say "making $1 by debootstrap"
    root=$work/root-$2
    rm -rf "$root"
    debootstrap --variant=minbase --include="$3" "$2" "$root" "$(mirror)" >"$work/debootstrap-$2.log"
    rm -rf "$root"/var/cache/apt/archives/*.deb
    tar -C "$root" -c . | docker import -c 'CMD ["bash"]' - "$1" >/dev/null
    rm -rf "$root"
}

install_packages
start_daemon
install_plugins
base_image local/tidemill-python:bookworm bookworm python3,python3-venv,ca-certificates
base_image local/tidemill-debian:trixie trixie ca-certificates
