"""Stands in for the package skyrl-gym: environments that count, raise, hang, die, or take memory, by the answer."""

import os
import time

ACTIONS = {
    "crash": lambda: 1 / 0,
    "hang": lambda: time.sleep(600),
    "die": lambda: os._exit(3),
    "grow": lambda: bytearray(6 << 30),
}


class Env:
    def __init__(self, name, extras):
        self.steps, self.limit = 0, extras["max_turns"]

    def init(self, prompt):
        return prompt, {}

    def step(self, action):
        self.steps += 1
        if action in ACTIONS:
            ACTIONS[action]()
        reward = float("nan") if action == "nan" else float(action == "yes")
        return {"observations": [{"role": "user", "content": "again"}], "reward": reward,
                "done": action == "yes" or self.steps == 3}  # fmt: skip

    def get_metrics(self):
        return {"steps": self.steps, "note": "text"}

    def close(self):
        pass


def make(name, env_config, extras):
    return Env(name, extras)
