"""What a configuration would do: checks, batch arithmetic, memory estimate, dry runs."""
