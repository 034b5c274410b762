"""A small torch inference engine in a process of its own, speaking SGLang's HTTP API."""
