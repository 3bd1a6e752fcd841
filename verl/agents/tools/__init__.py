"""Tools that a model calls in a conversation, and what runs them."""
