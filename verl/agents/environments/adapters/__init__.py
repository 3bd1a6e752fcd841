"""One module for each library of environments; each is imported in a process of its own."""
