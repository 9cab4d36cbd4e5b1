"""``ucch-doctor``: what would go wrong on this host, or between the ranks of a job, and what cures it."""
