"""Settings: one dataclass a section, with default, type, range and help of every key."""
