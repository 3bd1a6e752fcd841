#!/usr/bin/env bash
# ReMax: one sample a prompt, its greedy answer is the baseline.
#   MODEL=dir TRAIN=train.parquet VAL=val.parquet examples/scripts/remax.sh [key=value ...]
set -euo pipefail
source "$(dirname "$0")/lib/common.sh"

train verl.trainer.main_ppo \
    algorithm.adv_estimator=remax \
    actor_rollout_ref.rollout.n=1 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    algorithm.use_kl_in_reward=true \
    "$@"
