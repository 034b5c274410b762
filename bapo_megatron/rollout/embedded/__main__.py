"""`python -m bapo_megatron.rollout.embedded`: start one engine server."""

from bapo_megatron.rollout.embedded.server import main

main()
