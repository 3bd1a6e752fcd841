"""A reward function: custom_reward_function.path=examples/extending/my_reward.py"""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    """1 if the answer ends with the ground truth; `bonus` comes from custom_reward_function.reward_kwargs."""
    right = solution_str.strip().endswith(str(ground_truth))
    return {"score": float(right) + bonus, "acc": float(right)}  # further keys become metrics: reward/acc/mean
