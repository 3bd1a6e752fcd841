#!/usr/bin/env bash
# PPO with a critic that starts from the same model.
#   MODEL=dir TRAIN=train.parquet VAL=val.parquet examples/scripts/ppo.sh [key=value ...]
set -euo pipefail
cd "$(dirname "$0")/../.."

python -m verl.trainer.main_ppo \
    algorithm.adv_estimator=gae \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    critic.model.path="${CRITIC:-$MODEL}" \
    critic.optim.lr=1e-5 \
    critic.use_dynamic_bsz=true \
    critic.model.use_remove_padding=true \
    algorithm.use_kl_in_reward=true \
    algorithm.kl_ctrl.kl_coef=0.001 \
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
