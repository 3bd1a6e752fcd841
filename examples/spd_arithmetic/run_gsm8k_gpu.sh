#!/usr/bin/env bash
# The test bed's full chain on real models and GSM8K-format questions; needs one CUDA GPU.
#   QUESTIONS=train.jsonl TEST_QUESTIONS=test.jsonl TARGET=DIR DRAFT=DIR [OUT=DIR] examples/spd_arithmetic/run_gsm8k_gpu.sh
# Both files hold lines {"question": ..., "answer": "... #### 42"}; TARGET and DRAFT share one vocabulary.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [[ -z "${PYTHON:-}" ]]; then PYTHON=python; [[ ! -x .venv/bin/python ]] || PYTHON=.venv/bin/python; fi
OUT=${OUT:-outputs/spd_gsm8k}
STEPS=${STEPS:-300}

code=0
"$PYTHON" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else 77)' || code=$?
if [[ $code == 77 ]]; then
    echo "run_gsm8k_gpu.sh: skipped: no GPU"
    exit 0
elif [[ $code != 0 ]]; then
    exit "$code"
fi
for name in QUESTIONS TEST_QUESTIONS TARGET DRAFT; do
    if [ -z "${!name:-}" ]; then
        echo "run_gsm8k_gpu.sh: $name is not set; it names a local $([[ $name = *QUESTIONS ]] && echo file || echo folder)" >&2
        exit 2
    fi
done

"$PYTHON" -m examples.spd_arithmetic.prepare_blocks --out "$OUT/testbed" --device cuda --max-new-tokens 400 \
    --train-questions "$QUESTIONS" --test-questions "$TEST_QUESTIONS" --target "$TARGET" --draft "$DRAFT" \
    --n-train-questions "${N_TRAIN:-1000}" --n-val-questions "${N_VAL:-300}" --n-test-questions "${N_TEST:-1000}"
train=(
    "$PYTHON" train_spd_scorer.py --model "$OUT/testbed/target" --output-dir "$OUT/run"
    --blocks "$OUT/testbed/blocks_train.parquet" --metadata "$OUT/testbed/metadata_train.parquet"
    --val-blocks "$OUT/testbed/blocks_val.parquet" --val-metadata "$OUT/testbed/metadata_val.parquet"
    spd.head_inputs=pair spd.rollout.draft_path="$OUT/testbed/draft" spd.rollout.max_tokens=400
    spd.rollout.store_path="$OUT/completions.sqlite3" trainer.device=cuda trainer.total_epochs=1000
    trainer.total_training_steps="$STEPS"
)
"${train[@]}" --supervised
"${train[@]}" spd.adapter_path="$OUT/run/supervised" trainer.save_freq="$STEPS"
"$PYTHON" scripts/eval_spd_scorer.py --device cuda --out "$OUT" --max-new-tokens 400 \
    --target "$OUT/testbed/target" --draft "$OUT/testbed/draft" \
    --scorer "$OUT/run/global_step_$STEPS/actor/huggingface" \
    --questions "$OUT/testbed/questions_test.jsonl" --val-questions "$OUT/testbed/questions_val.jsonl" \
    --harm-labels "$OUT/testbed/harm_labels.jsonl" --val-harm-labels "$OUT/testbed/harm_labels_val.jsonl"
