"""The faults of a campaign: each strikes one call at one site, and may have consequences for others."""

import asyncio
import contextlib
import json
import signal
from collections.abc import Sequence

from aiohttp import web

from tests.integration.campaign import BUCKET, Campaign, Fault, Site, Strike
from tests.integration.faulty_proxy import CALL_FAULTS, FAULTS, Answer
from tests.integration.nursery import stop


def spoilt(kind: str, num_times: int) -> Fault:
    """Return a fault that spoils replies of one site: once, or as often as it takes to fence the engine."""

    async def strike(c: Campaign, site: Site, answer: Answer) -> web.StreamResponse:
        last = site.proxy.hits[kind] + num_times

        def spoil(rids: Sequence[str]) -> dict[str, str]:
            if site.proxy.hits[kind] >= last:
                return {}
            return dict.fromkeys(rids if kind in CALL_FAULTS else rids[:1], kind)

        site.proxy.spoil = spoil
        return await answer()

    return Fault(kind, "/generate", strike)


async def _killed(c: Campaign, site: Site, answer: Answer) -> web.StreamResponse:
    async with c.between_pushes:
        reply = await c.caught(site, answer)
        site.kill()
    c.later(site, c.fenced(site), site.start(c.checkpoint(None)))
    return await reply


async def _all_killed(c: Campaign, site: Site, answer: Answer) -> web.StreamResponse:
    async with c.between_pushes:
        reply = await c.caught(site, answer)
        for each in c.sites:
            each.kill()
    for each in c.sites:  # whether or not the others were missed by then
        c.later(each, c.fenced(site), each.start(c.checkpoint(None)))
    return await reply


async def _hung(c: Campaign, site: Site, answer: Answer) -> web.StreamResponse:
    async with c.between_pushes:
        reply = await c.caught(site, answer)
        site.send(signal.SIGSTOP)
        site.proxy.hold()
    c.later(site, c.until_waited_for(site), c.going_on(site))
    return await reply


async def _hung_until_fenced(c: Campaign, site: Site, answer: Answer) -> web.StreamResponse:
    async with c.between_pushes:
        reply = await c.caught(site, answer)
        site.send(signal.SIGSTOP)

    async def let_deadlines_pass() -> None:
        async for _ in c.until_fenced(site):
            site.client.expire()

    c.later(site, let_deadlines_pass(), c.going_on(site))
    return await reply


async def _hung_then_killed(c: Campaign, site: Site, answer: Answer) -> web.StreamResponse:
    async def release() -> None:
        site.proxy.release()

    async with c.between_pushes:
        reply = await c.caught(site, answer)
        site.send(signal.SIGSTOP)
        site.proxy.hold()
    c.later(site, c.until_waited_for(site), site.start(c.checkpoint(None)), release())
    return await reply


async def _slow(c: Campaign, site: Site, answer: Answer) -> web.StreamResponse:
    reply = await answer()
    site.proxy.hold()
    try:
        await c.until_waited_for(site)
    finally:
        site.proxy.release()
    return reply


async def _aborted(c: Campaign, site: Site, answer: Answer) -> web.StreamResponse:
    async with c.between_pushes:
        reply = await c.caught(site, answer)
        await site.post("/abort_request", {"abort_all": True})
        await site.post("/continue_generation", {})
    return await reply


async def _paused(c: Campaign, site: Site, answer: Answer) -> web.StreamResponse:
    async with c.between_pushes:
        reply = await c.caught(site, answer)
        await site.post("/pause_generation", {"mode": "retract"})
        site.proxy.hold()
    c.later(site, c.until_waited_for(site), c.going_on(site))
    return await reply


async def _paused_for_good(c: Campaign, site: Site, answer: Answer) -> web.StreamResponse:
    async with c.between_pushes:
        reply = await c.caught(site, answer)

    async def let_deadlines_pass() -> None:
        async for _ in c.until_fenced(site):
            if await site.paused() != "in_place":  # a push has resumed it
                return
            site.client.expire("/generate")

    c.later(site, let_deadlines_pass())
    return await reply


def _restarted(num_versions_ago: int | None, *, in_push: bool = False) -> Strike:
    """Restart the engine between two calls, so that only its version shows it: an earlier push's, or "default"."""

    async def strike(c: Campaign, site: Site, answer: Answer) -> web.StreamResponse:
        version = None if num_versions_ago is None else max(c.policy.version - num_versions_ago, 0)
        async with contextlib.nullcontext() if in_push else c.between_pushes:
            await site.start(c.checkpoint(version), "default" if version is None else str(version))
            await site.wait_healthy()
        return await answer()

    return strike


async def _refused(c: Campaign, site: Site, answer: Answer) -> web.StreamResponse:
    return web.json_response({"success": False, "message": "names, dtypes, shapes: no room"}, status=400)


async def _failed(c: Campaign, site: Site, answer: Answer) -> web.StreamResponse:
    return web.json_response({"success": False, "message": "out of memory"}, status=500)


async def _late(c: Campaign, site: Site, answer: Answer) -> web.StreamResponse:
    c.vain.silent.add(site.proxy.url)
    try:
        await asyncio.Event().wait()  # until the trainer has given up
    finally:
        c.later(site, answer())
    raise AssertionError("the event is never set")


async def _killed_in_push(c: Campaign, site: Site, answer: Answer) -> web.StreamResponse:
    site.kill()
    c.later(site, c.fenced(site), site.start(c.checkpoint(None)))
    return await answer()


async def _hung_in_push(c: Campaign, site: Site, answer: Answer) -> web.StreamResponse:
    assert site.pid is not None
    await asyncio.to_thread(stop, site.pid)
    c.vain.silent.add(site.proxy.url)
    c.later(site, c.fenced(site), c.going_on(site))
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
    Fault("all killed, restarted", "/generate", _all_killed, is_everywhere=True),
    Fault("hung, then continues", "/generate", _hung),
    Fault("hung until fenced", "/generate", _hung_until_fenced),
    Fault("hung, then killed", "/generate", _hung_then_killed),
    Fault("slow", "/generate", _slow),
    Fault("aborted by a third party", "/generate", _aborted),
    Fault("paused by a third party", "/generate", _paused),
    Fault("paused for good", "/generate", _paused_for_good),
    Fault("restarted unnoticed, default weights", "/generate", _restarted(None)),
    Fault("restarted unnoticed, older version", "/generate", _restarted(2)),
]
PUSHES = [
    Fault("push: refused", BUCKET, _refused, nth=1, is_absent=True),
    Fault("push: status 500", BUCKET, _failed, nth=2, is_absent=True),
    Fault("push: late", BUCKET, _late, nth=1, is_absent=True),
    Fault("push: torn, killed between buckets", BUCKET, _killed_in_push, nth=2),
    Fault("push: killed before it", "/pause_generation", _killed_in_push),
    Fault("push: hung between buckets", BUCKET, _hung_in_push, nth=1, is_absent=True),
    Fault("push: other weights", "/weights_checker", _other_weights, part=b"checksum"),
    Fault("push: restarted unnoticed before it", "/pause_generation", _restarted(4, in_push=True)),
]
SPOILT = [kind for kind in FAULTS if kind != "silence"]
JUDGE = ("judge: hang", "judge: crash")
