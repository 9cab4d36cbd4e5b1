"""Plans lowered to programs of the native engine."""
