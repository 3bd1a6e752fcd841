#!/usr/bin/env bash
# Runs train_spd_scorer.py as a job of a running Ray cluster: packs the working directory, submits, streams the logs
# and passes on the exit code. The job server's address comes first, or is in RAY_ADDRESS; --help describes the options.
#
#   scripts/submit_spd.sh http://head:8265 --python /opt/verl/bin/python \
#       --model /shared/target --blocks /shared/blocks.parquet --metadata /shared/metadata.parquet \
#       --output-dir /shared/run trainer.total_training_steps=400 trainer.device=cuda
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON="${PYTHON:-python}"
if [[ -x .venv/bin/python && "$PYTHON" == python ]]; then PYTHON=.venv/bin/python; fi
exec "$PYTHON" scripts/submit_spd.py "$@"
