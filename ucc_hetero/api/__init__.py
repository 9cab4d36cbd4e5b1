"""The communicator: mpi4py's methods over one private call."""
