#!/usr/bin/env bash
# Trains, or serves, on a Cloud TPU pod slice: the same command on every host of it.
#
#   POD=my-v5p-128 ZONE=us-east5-a ./pod.sh --config=configs/train/llama_8b_128k.py --out=gs://BUCKET/run --mesh=seq:64
#
#   SCRIPT=serve POD=my-v5p-128 ZONE=us-east5-a ./pod.sh --model=DIR --mesh=seq:16,model:4 --host=0.0.0.0
#
# A server is started again when one of its processes was lost: then all of them
# end, and meet again. It ends with status 0 (SIGTERM) or 2 (flags).
#
# The slice exists (gcloud compute tpus tpu-vm create); the checkout lies in
# ~/ringjax on every host, or REPO says from where it is cloned.
set -euo pipefail
: "${POD:?name of the TPU slice}" "${ZONE:?zone of the TPU slice}"
REPO=${REPO:-} SCRIPT=${SCRIPT:-train}
prepare='cd ~/ringjax'
if [[ -n $REPO ]]; then
  prepare="test -d ~/ringjax || git clone -q $(printf %q "$REPO") ~/ringjax; $prepare"
fi
flags=$(printf ' %q' "$@")
begin='' end='' extras=tpu,gcs
if [[ $SCRIPT == serve ]]; then
  begin='until' extras='tpu,gcs,serve'
  end='; do status=$?; test $status -ne 2 || exit 2; sleep 5; done'
fi
gcloud compute tpus tpu-vm ssh "$POD" --zone="$ZONE" --worker=all --command="
  $prepare
  test -d .venv || { python3 -m venv .venv && .venv/bin/pip install -q -e '.[$extras]'; }
  $begin .venv/bin/python -m ringjax.launch.$SCRIPT --distributed$flags$end"
