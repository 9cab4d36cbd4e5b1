"""A job for test_torch_api.py: every method of the process group; its cases are those of the modules it imports."""

import torch_calls  # noqa: F401
import torch_collectives  # noqa: F401
import torch_profile  # noqa: F401
import torch_short  # noqa: F401
from torch_cases import main

if __name__ == "__main__":
    main()
