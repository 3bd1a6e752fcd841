"""One module for each library of environments, which is imported in a process of its own."""
