"""An embedded engine that soon gives up on the other ranks of a group; for odd requests, none ever come."""

from bapo_megatron.engines.embedded import server, weights

_JOIN_S = 0.3
_reach_store = weights.reach_store

if __name__ == "__main__":
    weights.reach_store = lambda host, port, world_size, _: _reach_store(host, port, world_size, _JOIN_S)
    server.main()
