"""Actors."""

from verl.training.actor.base import BasePPOActor
from verl.training.actor.dp_actor import DataParallelPPOActor

__all__ = ["BasePPOActor", "DataParallelPPOActor"]
