"""environment.kind = "http_step:step": an environment behind HTTP, environment.options = {url = "http://127.0.0.1:8000"}.

The server gets {"turn": ..., "state": ...}, and answers with what a step returns. A connection that fails is tried once
more, so the server, too, must keep nothing between turns. Whatever else goes wrong fails the sample and is counted:
environment.timeout_s, a status other than 200, an answer that is not JSON.
"""

import asyncio

import aiohttp

PAUSE_S = 1.0  # before the second try


async def step(turn, state, url):
    try:
        return await ask(url, {"turn": turn, "state": state})
    except aiohttp.ClientConnectionError:
        await asyncio.sleep(PAUSE_S)
        return await ask(url, {"turn": turn, "state": state})


async def ask(url, question):
    async with aiohttp.ClientSession() as session, session.post(url, json=question) as reply:
        if reply.status != 200:
            raise RuntimeError(f"{url} answered {reply.status}: {(await reply.text())[:200]}")
        return await reply.json()
