"""`python -m bapo_megatron.engines.embedded`: start one engine server."""

from bapo_megatron.runtime import starting

with starting():
    from bapo_megatron.engines.embedded.server import main

main()
