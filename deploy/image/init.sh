#!/bin/sh
# Once for each deployment: the secret of the tenants' cache salts, one API key, and the quick start's model.
set -eu
state=${1:?usage: init.sh STATE_FOLDER MODEL_FOLDER}
models=${2:?usage: init.sh STATE_FOLDER MODEL_FOLDER}
umask 077
random() { od -An -vtx1 -N32 /dev/urandom | tr -d ' \n'; }
[ -s "$state/cache_secret" ] || random >"$state/cache_secret"
[ -s "$state/api_keys" ] || echo "tm-$(random) default" >"$state/api_keys"
exec /opt/tidemill/bin/python -m tidemill_engine.loading.smollm2 --out "$models/smollm2"
