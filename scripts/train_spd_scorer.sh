#!/usr/bin/env bash
# Trains the SPD scorer with full logs (LOGURU_LEVEL=DEBUG). Models and data below can be given in the environment;
# arguments (options of train_spd_scorer.py, or key=value for the trainer) are added at the end.
#
#   DATA_DIR=outputs/spd_arithmetic/testbed scripts/train_spd_scorer.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export LOGURU_LEVEL="${LOGURU_LEVEL:-DEBUG}"
export HF_HOME="${HF_HOME:-$HOME/.cache/huggingface}"
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"
if [[ -n "${CUDA_VISIBLE_DEVICES:-}" ]]; then export CUDA_VISIBLE_DEVICES; fi

# Servers of the target, comma separated; empty starts one on this machine.
export SPD_VLLM_URLS="${SPD_VLLM_URLS:-}"

DATA_DIR="${DATA_DIR:-outputs/spd_arithmetic/testbed}"
export MODEL_PATH="${MODEL_PATH:-$DATA_DIR/target}"
export TOKENIZER_PATH="${TOKENIZER_PATH:-$MODEL_PATH}"
if [[ -n "${ADAPTER_PATH:-}" ]]; then export ADAPTER_PATH; else unset ADAPTER_PATH; fi

TRAIN_BLOCKS="${TRAIN_BLOCKS:-$DATA_DIR/blocks_train.parquet}"
TRAIN_METADATA="${TRAIN_METADATA:-$DATA_DIR/metadata_train.parquet}"
VAL_BLOCKS="${VAL_BLOCKS:-$DATA_DIR/blocks_val.parquet}"
VAL_METADATA="${VAL_METADATA:-$DATA_DIR/metadata_val.parquet}"
OUTPUT_DIR="${OUTPUT_DIR:-outputs/spd_scorer}"

# SPD_SEP_TOKEN_ID: a token id that never occurs in text, for spd.backbone=own where the tokenizer has neither a sep nor a
# reserved special token (Qwen2.5); a target head needs none.

# The reward's coefficients: REWARD_ALPHA, REWARD_PENALTY_BREAK, REWARD_USELESS, REWARD_CORRECT_BASE win over
# spd.reward.*=...; where they are not set the recipe's defaults hold (recipe/spd/config/spd_trainer.yaml).

PYTHON="${PYTHON:-python}"
if [[ -x .venv/bin/python && "$PYTHON" == python ]]; then PYTHON=.venv/bin/python; fi

# An earlier run of this script on the same output folder is recorded as "pid start-time"; only that very process is
# stopped, and its Ray session goes with it.
start_time() { awk '{print $22}' "/proc/$1/stat" 2>/dev/null || true; }
mkdir -p "$OUTPUT_DIR"
RECORD="$OUTPUT_DIR/running.pid"
if [[ -f "$RECORD" ]]; then
    read -r pid started < "$RECORD" || true
    if [[ -n "${started:-}" && "$(start_time "$pid")" == "$started" ]]; then
        echo "stops the earlier run $pid in $OUTPUT_DIR" >&2
        kill -TERM "$pid"
        for _ in $(seq 60); do
            [[ "$(start_time "$pid")" == "$started" ]] || break
            sleep 1
        done
        if [[ "$(start_time "$pid")" == "$started" ]]; then
            kill -TERM "$pid" # a second one ends it without waiting for its step
            sleep 10
            [[ "$(start_time "$pid")" != "$started" ]] || kill -KILL "$pid"
        fi
    fi
fi
echo "$$ $(start_time $$)" > "$RECORD"

validation=()
if [[ -f "$VAL_BLOCKS" ]]; then validation=(--val-blocks "$VAL_BLOCKS" --val-metadata "$VAL_METADATA"); fi

exec "$PYTHON" train_spd_scorer.py \
    --blocks "$TRAIN_BLOCKS" --metadata "$TRAIN_METADATA" "${validation[@]}" \
    --output-dir "$OUTPUT_DIR" trainer.total_epochs=4 "$@"
