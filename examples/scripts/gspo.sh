#!/usr/bin/env bash
# GSPO: ratios and clips of full sequences.
#   MODEL=dir TRAIN=train.parquet VAL=val.parquet examples/scripts/gspo.sh [key=value ...]
set -euo pipefail
source "$(dirname "$0")/lib/common.sh"

train verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.actor.share_prompt_forward=true \
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
    actor_rollout_ref.actor.clip_ratio_low=3e-4 \
    actor_rollout_ref.actor.clip_ratio_high=4e-4 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    "$@"
