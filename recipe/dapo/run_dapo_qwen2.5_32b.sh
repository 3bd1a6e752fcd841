#!/usr/bin/env bash
# DAPO on Qwen2.5-32B with the settings of the paper (arXiv 2503.14476): 512 prompts of 16 samples per step, clip from
# 0.2 to 0.28, token-mean loss, no KL term, groups with equal accuracy replaced by new ones, overlong penalty over 4096 tokens.
#   recipe/dapo/prepare_dapo_data.sh && recipe/dapo/run_dapo_qwen2.5_32b.sh [key=value ...]
# On several nodes start Ray on each first (docs/clusters.md) and set NNODES.
set -euo pipefail
cd "$(dirname "$0")/../.."
DATA_DIR="${DATA_DIR:-data/dapo}"
prompt=$((1024 * 2)) response=$((1024 * 20)) tensor_parallel=4

python -m recipe.dapo.main_dapo \
    data.train_files="${TRAIN:-$DATA_DIR/dapo-math-17k.parquet}" \
    data.val_files="${VAL:-$DATA_DIR/aime-2024.parquet}" \
    data.train_batch_size=512 \
    data.gen_batch_size=1536 \
    data.max_prompt_length=$prompt \
    data.max_response_length=$response \
    data.truncation=left \
    algorithm.adv_estimator=grpo \
    algorithm.use_kl_in_reward=false \
    algorithm.filter_groups.enable=true \
    algorithm.filter_groups.metric=acc \
    algorithm.filter_groups.max_num_gen_batches=10 \
    actor_rollout_ref.model.path="${MODEL:-Qwen/Qwen2.5-32B}" \
    actor_rollout_ref.model.enable_gradient_checkpointing=true \
    actor_rollout_ref.actor.use_kl_loss=false \
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.clip_ratio_c=10.0 \
    actor_rollout_ref.actor.loss_agg_mode=token-mean \
    actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.actor.grad_clip=1.0 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((prompt + response)) \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
    actor_rollout_ref.actor.optim.weight_decay=0.1 \
    actor_rollout_ref.actor.fsdp_config.param_offload=true \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=true \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.rollout.top_p=1.0 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=$tensor_parallel \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.8 \
    actor_rollout_ref.rollout.max_num_batched_tokens=$((prompt + response)) \
    actor_rollout_ref.rollout.val_kwargs.do_sample=true \
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
    actor_rollout_ref.rollout.val_kwargs.top_p=0.7 \
    actor_rollout_ref.rollout.val_kwargs.n=1 \
    reward_model.overlong_buffer.enable=true \
    reward_model.overlong_buffer.len=$((1024 * 4)) \
    reward_model.overlong_buffer.penalty_factor=1.0 \
    reward_model.overlong_buffer.log=true \
    trainer.project_name=DAPO \
    trainer.experiment_name=DAPO-Qwen2.5-32B \
    trainer.nnodes="${NNODES:-16}" \
    trainer.n_gpus_per_node="${GPUS:-8}" \
    trainer.val_before_train=true \
    trainer.test_freq=5 \
    trainer.save_freq=5 \
    trainer.total_epochs=1 \
    "$@"
