"""Search on the target GPU for the best way to move pages."""
