#!/usr/bin/env bash
# Trains on one node: bash dllm_reasoning/scripts/run_train.sh RANKS CHECKPOINT_DIR key=value ...
set -euo pipefail
if [ $# -lt 2 ]; then
    echo "usage: $0 RANKS CHECKPOINT_DIR [key=value ...]" >&2
    exit 2
fi
ranks=$1
checkpoints=$2
shift 2
exec "${PYTHON:-python}" -m torch.distributed.run --standalone --nnodes=1 --nproc_per_node="$ranks" \
    -m dllm_reasoning.train_iterative_refine \
    trainer.default_local_dir="$checkpoints" trainer.n_gpus_per_node="$ranks" "$@"
