#!/usr/bin/env bash
# Trains on a Cloud TPU pod slice: the same command on every host of it.
#
#   POD=my-v5p-128 ZONE=us-east5-a ./pod.sh --config=configs/train/llama_8b_128k.py --out=gs://BUCKET/run --mesh=seq:64
#
# The slice exists (gcloud compute tpus tpu-vm create); the checkout lies in
# ~/ringjax on every host, or REPO says from where it is cloned.
set -euo pipefail
: "${POD:?name of the TPU slice}" "${ZONE:?zone of the TPU slice}"
REPO=${REPO:-}
prepare='cd ~/ringjax'
if [[ -n $REPO ]]; then
  prepare="test -d ~/ringjax || git clone -q $(printf %q "$REPO") ~/ringjax; $prepare"
fi
flags=$(printf ' %q' "$@")
gcloud compute tpus tpu-vm ssh "$POD" --zone="$ZONE" --worker=all --command="
  $prepare
  test -d .venv || { python3 -m venv .venv && .venv/bin/pip install -q -e '.[tpu,gcs]'; }
  .venv/bin/python -m launch.train --distributed$flags"
