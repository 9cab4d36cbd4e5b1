"""Starting jobs, and the emulated cluster that rehearses them; mpi_launch/ in the repository."""
