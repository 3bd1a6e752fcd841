"""A server of OpenEnv for tests, at the port that is given: guess a number; each guess is compared with it.

The environment crashes at the guess "crash", and hangs at the guess "hang".
"""

import random
import sys
import time

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: str


class Answer(Observation):
    text: str


class GuessEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.hidden, self.steps = random.Random(seed).randint(0, 9), 0
        return Answer(text=f"Guess a number up to 9. Round {seed} .")

    def step(self, action, timeout_s=None, **kwargs):
        self.steps += 1
        if action.number == "crash":
            raise ZeroDivisionError("the game is broken")
        if action.number == "hang":
            time.sleep(600)
        right = str(self.hidden) in action.number
        text = "right" if right else "wrong, guess again"
        return Answer(text=text, reward=float(right), done=right or self.steps == 3)

    @property
    def state(self):
        return State(step_count=self.steps)


if __name__ == "__main__":
    app = create_fastapi_app(GuessEnvironment, Guess, Answer, max_concurrent_envs=64)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
