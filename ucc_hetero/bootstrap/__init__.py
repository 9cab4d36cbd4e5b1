"""From a process to a group of ranks that agree: start, teams, liveness, exit."""
