"""Settings: one dataclass per section, with default, type, range and help of every key."""

from verl.config import defaults as defaults  # registers the resolver that the yaml files use
