"""The Ray-facing roles, one file each."""
