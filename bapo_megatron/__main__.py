"""`python -m bapo_megatron` is the command `bapo`."""

import sys

from bapo_megatron.cli import main

if __name__ == "__main__":
    sys.exit(main())
