"""Compatibility with verl: the settings live in `verl.config.actor`."""

from dataclasses import dataclass

from verl.config.actor import *  # noqa: F403
from verl.config.megatron import McoreActorConfig  # noqa: F401


@dataclass
class RouterReplayConfig:
    """What verl replays of the routers of experts: nothing, here."""

    mode: str = "disabled"
    record_file: str | None = None
    replay_file: str | None = None

    def __post_init__(self) -> None:
        if self.mode != "disabled":
            raise ValueError(f"RouterReplayConfig.mode={self.mode!r}: the routers of experts are not replayed.")
