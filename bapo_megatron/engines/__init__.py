"""Inference engines: their protocol, the client of their servers, and the servers' lives. Start at `base.Engine`."""
