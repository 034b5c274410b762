"""A small torch inference engine in its own process, speaking SGLang's HTTP API. Start at `engine.BatchingEngine`."""
