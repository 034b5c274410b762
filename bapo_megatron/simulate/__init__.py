"""A run in simulated time: the product's own scheduler on a clock that jumps, with simulated servers and trainer.
Start at `run.simulate`.

    settings + plan -> World -> SimulatedServers <-requests- Scheduler -groups-> simulated trainer -> Simulated

`Scheduler`, its stream, dispatcher, book, ledger and staleness bound, and the engine pool run as they are. Simulated
are the servers' speed, lengths, environments, training, pushes, faults, and the CPU time of trainer rank 0.
"""
