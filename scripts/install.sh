#!/usr/bin/env bash
# Set up, and nothing else. The argument is an extra of setup.py, such as "dev"; the default is "train". "torch" stops
# after torch, so that an image can keep it in its own layer. scripts/common.sh lists the environment variables.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

use_environment
if [[ "${1:-}" == torch ]]; then
    install_torch
else
    install_checkout "${1:-train}"
fi
