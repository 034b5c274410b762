#!/usr/bin/env bash
# Build the docs site, or serve it on this machine.
#
#   scripts/docs.sh build    build into site/; a warning, such as a dead link, is an error
#   scripts/docs.sh serve    serve on 127.0.0.1:8000 and rebuild pages as they change; DOCS_PORT sets another port
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

verb="${1:-build}"
[[ "$verb" == build || "$verb" == serve ]] || fail "scripts/docs.sh build, or scripts/docs.sh serve; got $verb"
use_environment
install_checkout docs
cd "$ROOT"
export NO_MKDOCS_2_WARNING=1
if [[ "$verb" == serve ]]; then
    exec "$PY" -m mkdocs serve --strict --dev-addr "127.0.0.1:${DOCS_PORT:-8000}"
fi
exec "$PY" -m mkdocs build --strict
