"""Workers: what runs on the ranks."""
