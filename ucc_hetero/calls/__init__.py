"""One call from its arguments to its completion: collectives, messages and requests."""
