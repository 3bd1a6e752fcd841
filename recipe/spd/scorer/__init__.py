"""The scorer: settings, heads, the model on either backbone, its policy, and its files."""
