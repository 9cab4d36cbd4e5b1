"""``ucch-doctor``: finds problems of this host, or between the ranks of a job, and their cures."""
