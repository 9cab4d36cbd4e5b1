"""The launcher ``ucch-run``, the doctor and the emulated cluster. In the repository this folder is mpi_launch/."""
