"""Written against the public interface of verl 0.9; nothing here is adapted to this fork."""
