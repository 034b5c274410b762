"""The faults of a campaign: each strikes one call at one site, and may have consequences for others."""

import asyncio
import json
import signal
from collections.abc import Callable, Sequence

from aiohttp import web

from tests.integration.campaign import Campaign, Fault, Site, Strike
from tests.integration.faulty_proxy import CALL_FAULTS, FAULTS, Answer

_DOWN_S = 0.5  # until somebody starts a dead engine again
_BUCKET = "/update_weights_from_distributed"


def spoilt(kind: str, num_times: int) -> Fault:
    """Replies of one site are spoilt: once, or as often as makes the engine be fenced."""

    async def strike(c: Campaign, site: Site, answer: Answer) -> web.StreamResponse:
        left = num_times

        def spoil(rids: Sequence[str]) -> dict[str, str]:
            nonlocal left
            left -= 1
            if left <= 0:
                site.proxy.spoil = lambda rids: {}
            return dict.fromkeys(rids if kind in CALL_FAULTS else rids[:1], kind)

        site.proxy.spoil = spoil
        return await answer()

    return Fault(kind, "/generate", strike)


async def _killed(c: Campaign, site: Site, answer: Answer) -> web.StreamResponse:
    reply = await c.caught(site, answer)
    site.kill()
    c.later(asyncio.sleep(_DOWN_S), site.start(c.checkpoint(None)))
    return await reply


async def _all_killed(c: Campaign, site: Site, answer: Answer) -> web.StreamResponse:
    reply = await c.caught(site, answer)
    for each in c.sites:
        each.kill()
        c.later(asyncio.sleep(_DOWN_S), each.start(c.checkpoint(None)))
    return await reply


def _hung(seconds: Callable[[Campaign], float], *, is_killed: bool = False) -> Strike:
    async def strike(c: Campaign, site: Site, answer: Answer) -> web.StreamResponse:
        reply = await c.caught(site, answer)
        site.send(signal.SIGSTOP)

        async def end() -> None:
            await asyncio.sleep(seconds(c))
            if is_killed:
                await site.start(c.checkpoint(None))
            else:
                site.send(signal.SIGCONT)
                await site.post("/continue_generation", {})

        c.later(end())
        return await reply

    return strike


async def _slow(c: Campaign, site: Site, answer: Answer) -> web.StreamResponse:
    reply = await answer()
    await asyncio.sleep(c.timeouts.request_s / 2)
    return reply


async def _aborted(c: Campaign, site: Site, answer: Answer) -> web.StreamResponse:
    reply = await c.caught(site, answer)
    await site.post("/abort_request", {"abort_all": True})
    await site.post("/continue_generation", {})
    return await reply


async def _paused(c: Campaign, site: Site, answer: Answer) -> web.StreamResponse:
    reply = await c.caught(site, answer)
    await site.post("/pause_generation", {"mode": "retract"})
    c.later(asyncio.sleep(1.0), site.post("/continue_generation", {}))
    return await reply


async def _paused_for_good(c: Campaign, site: Site, answer: Answer) -> web.StreamResponse:
    return await (await c.caught(site, answer))


def _restarted(num_versions_ago: int | None) -> Strike:
    """Between two calls, so that nobody notices but by the version: that of an earlier push, or "default"."""

    async def strike(c: Campaign, site: Site, answer: Answer) -> web.StreamResponse:
        if num_versions_ago is None:
            await site.start(c.checkpoint(None))
        else:
            version = max(c.policy.version - num_versions_ago, 0)
            await site.start(c.checkpoint(version), str(version))
        await site.wait_healthy(c.timeouts.startup_s)
        return await answer()

    return strike


async def _refused(c: Campaign, site: Site, answer: Answer) -> web.StreamResponse:
    return web.json_response({"success": False, "message": "names, dtypes, shapes: no room"}, status=400)


async def _failed(c: Campaign, site: Site, answer: Answer) -> web.StreamResponse:
    return web.json_response({"success": False, "message": "out of memory"}, status=500)


async def _late(c: Campaign, site: Site, answer: Answer) -> web.StreamResponse:
    await asyncio.sleep(c.timeouts.sync_s + 1)
    return await answer()


async def _killed_in_push(c: Campaign, site: Site, answer: Answer) -> web.StreamResponse:
    site.kill()
    c.later(asyncio.sleep(_DOWN_S), site.start(c.checkpoint(None)))
    return await answer()


async def _hung_in_push(c: Campaign, site: Site, answer: Answer) -> web.StreamResponse:
    site.send(signal.SIGSTOP)

    async def end() -> None:
        await asyncio.sleep(c.timeouts.sync_s + 2)
        site.send(signal.SIGCONT)

    c.later(end())
    return await answer()


async def _other_weights(c: Campaign, site: Site, answer: Answer) -> web.StreamResponse:
    reply = await answer()
    assert isinstance(reply, web.Response)
    assert isinstance(reply.body, bytes)
    body = json.loads(reply.body)
    checksums = body["ranks"][0]["checksums"]
    checksums[min(checksums)] = "0" * 32
    body["per_engine_checksum"] = "0" * 64
    return web.json_response(body)


SAMPLING = [
    Fault("killed, restarted", "/generate", _killed),
    Fault("all killed, restarted", "/generate", _all_killed),
    Fault("hung, then goes on", "/generate", _hung(lambda c: c.timeouts.request_s / 2)),
    Fault("hung until fenced", "/generate", _hung(lambda c: 2 * c.timeouts.request_s + 2)),
    Fault("hung, then killed", "/generate", _hung(lambda c: c.timeouts.request_s / 2, is_killed=True)),
    Fault("slow", "/generate", _slow),
    Fault("aborted by a third party", "/generate", _aborted),
    Fault("paused by a third party", "/generate", _paused),
    Fault("paused for good", "/generate", _paused_for_good),
    Fault("restarted unnoticed, default weights", "/generate", _restarted(None)),
    Fault("restarted unnoticed, older version", "/generate", _restarted(2)),
]
PUSHES = [
    Fault("push: refused", _BUCKET, _refused, nth=1),
    Fault("push: status 500", _BUCKET, _failed, nth=2),
    Fault("push: late", _BUCKET, _late, nth=1),
    Fault("push: torn, killed between buckets", _BUCKET, _killed_in_push, nth=2),
    Fault("push: killed before it", "/pause_generation", _killed_in_push),
    Fault("push: hung between buckets", _BUCKET, _hung_in_push, nth=1),
    Fault("push: other weights", "/weights_checker", _other_weights),
    Fault("push: restarted unnoticed before it", "/pause_generation", _restarted(4)),
]
REPLIES = [spoilt(kind, num_times) for kind in FAULTS if kind != "silence" for num_times in (1, 3)]
JUDGE = ("judge: hang", "judge: crash")
