"""Written against the public interface of verl 0.7.0; nothing here is adapted to this fork."""
