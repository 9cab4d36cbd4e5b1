"""The communicator: mpi4py's methods, each a short call of the layers below."""
