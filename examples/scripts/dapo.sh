#!/usr/bin/env bash
# DAPO: groups that teach nothing are drawn anew, the clip is wider above, overlong answers lose points.
#   MODEL=dir TRAIN=train.parquet VAL=val.parquet examples/scripts/dapo.sh [key=value ...]
set -euo pipefail
cd "$(dirname "$0")/../.."

python -m recipe.dapo.main_dapo \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.rollout.n=16 \
    algorithm.filter_groups.enable=true \
    algorithm.filter_groups.metric=acc \
    algorithm.filter_groups.max_num_gen_batches=10 \
    data.gen_batch_size=768 \
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.loss_agg_mode=token-mean \
    reward_model.overlong_buffer.enable=true \
    reward_model.overlong_buffer.len=256 \
    reward_model.overlong_buffer.penalty_factor=1.0 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    data.train_files="${TRAIN:?a parquet file of prompts}" \
    data.val_files="${VAL:?a parquet file of prompts}" \
    data.train_batch_size=256 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    actor_rollout_ref.model.path="${MODEL:?a directory or hub name}" \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.rollout.name=vllm \
    trainer.n_gpus_per_node="${GPUS:-8}" \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.total_epochs=15 \
    "$@"
