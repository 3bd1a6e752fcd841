#!/usr/bin/env bash
# RLOO: the baseline of a sample is the mean of the others.
#   MODEL=dir TRAIN=train.parquet VAL=val.parquet examples/scripts/rloo.sh [key=value ...]
set -euo pipefail
source "$(dirname "$0")/lib/common.sh"

train verl.trainer.main_ppo \
    algorithm.adv_estimator=rloo \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.actor.share_prompt_forward=true \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    algorithm.use_kl_in_reward=true \
    "$@"
