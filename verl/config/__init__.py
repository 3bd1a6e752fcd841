"""Settings: one dataclass per section, with default, type, range and help of every key."""
