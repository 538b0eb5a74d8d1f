"""The console in a real Chromium, in front of three real tiers: what a person would see. Skipped without Chromium."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from common import clock
from tests.fake_engine import MODEL as FAKE_MODEL
from tests.fake_engine import FakeEngine
from tests.integration.clients import get
from tests.integration.system import PORTS, Process, headwater, tiers
from tests.servers import eventually

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
playwright = pytest.importorskip("playwright.async_api")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium here (Debian: apt install chromium)")
WAIT_MS = 30_000.0
VIEWS = ("map", "charts", "latency", "requests", "control")
TAKEOVER_S = 2.0  # from the first request that another tier stands in for, to its sight on the map


@asynccontextmanager
async def browser(**options: object) -> AsyncIterator[playwright.Page]:
    """A page that fails the test for whatever it complains of."""
    async with playwright.async_playwright() as p:
        chromium = await p.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        context = await chromium.new_context(**options)
        page = await context.new_page()
        page.set_default_timeout(WAIT_MS)
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        outside: list[str] = []
        page.on("request", lambda r: outside.append(r.url) if not r.url.startswith("http://127.0.0.1:") else None)
        yield page
        assert outside == []  # nothing is fetched from elsewhere
        expected = ("net::ERR_", "status of 503")  # what the browser itself says of a tier that is away
        assert [w for w in wrong if not any(e in w for e in expected)] == []
        await chromium.close()


async def _rows(page: playwright.Page, count: int) -> bool:
    return await page.locator("tbody tr").count() == count


async def test_every_view_shows_what_the_tiers_do():
    async with tiers(FakeEngine("one"), FakeEngine("two"), depth=3) as world, browser() as page:
        for _ in range(6):
            reply = await world.chat(stream=True, max_tokens=20)
            assert reply.status == 200
        await page.goto(f"{world.admin_url}/console")
        await page.wait_for_selector("text=live, 3 processes")
        await page.wait_for_selector("section.region[aria-label='region r'] section.cluster li.server")
        assert await page.locator("li.server").count() == 2
        assert await page.locator("#totals dd").nth(7).text_content() == "2 of 2"

        await page.keyboard.press("2")
        await page.wait_for_selector(".chart canvas")
        assert await page.locator(".chart").count() == 4
        await page.keyboard.press("3")
        await page.wait_for_selector(".bars i.seen")
        assert "seen ÷ predicted" in (await page.locator("main").text_content() or "")

        await page.keyboard.press("/")
        await page.wait_for_selector("tbody tr[data-id]")
        assert await page.evaluate("document.activeElement.type") == "search"
        assert await page.locator("tbody tr").count() == 6
        await page.keyboard.type("nothing of this name")
        await page.wait_for_selector("text=none")
        await page.locator("input[type=search]").fill(reply.header("x-headwater-decision"))
        await eventually(lambda: _rows(page, 1), 30.0)
        await page.click("tbody a")
        await page.wait_for_selector(".fall .lane b")
        text = await page.locator("main").text_content() or ""
        assert "choose region r" in text
        assert "3. tier-r-c chose the instance" in text
        await page.keyboard.press("Escape")
        await page.wait_for_selector("tbody tr[data-id]")

        before = await page.evaluate("document.documentElement.dataset.theme")
        await page.keyboard.press("Escape")  # out of the filter
        await page.keyboard.press("t")
        assert await page.evaluate("document.documentElement.dataset.theme") != before
        await page.keyboard.press("?")
        await page.wait_for_selector("dialog[open]")


async def test_a_narrow_screen_needs_no_sideways_scrolling_and_nobody_is_shut_out():
    axe = pytest.importorskip("axe_playwright_python.async_playwright")
    async with tiers(FakeEngine("one"), FakeEngine("two"), depth=3) as world:
        for _ in range(3):
            reply = await world.chat(stream=True, max_tokens=20)
        views = [*VIEWS, f"request/{reply.header('x-headwater-decision')}"]
        for scheme in ("light", "dark"):
            async with browser(viewport={"width": 360, "height": 800}, color_scheme=scheme, bypass_csp=True) as page:
                await page.goto(f"{world.admin_url}/console")
                await page.wait_for_selector("li.server")
                for view in views:
                    await page.goto(f"{world.admin_url}/console#{view}")
                    await page.wait_for_selector("main > :first-child > *")
                    assert await page.evaluate("document.documentElement.scrollWidth") <= 360, view
                    found = await axe.Axe().run(page)
                    grave = [
                        (v["id"], [n["html"][:200] for n in v["nodes"][:3]])
                        for v in found.response["violations"]
                        if v["impact"] in ("serious", "critical")
                    ]
                    assert grave == [], (view, scheme)


async def test_a_takeover_is_seen_on_the_map():
    async with tiers(FakeEngine("one"), depth=3) as world, browser() as page:
        await page.goto(f"{world.admin_url}/console")
        await page.wait_for_selector("li.server")
        assert await page.locator(".tag.bad").count() == 0
        world.chain[2].abort()
        world.chain[1].balancing.peer_lost("tier-r-c")
        assert (await world.chat()).status == 200
        began = clock.now()
        await page.wait_for_selector("section.cluster .tag.bad:has-text('run by tier-r')")
        assert clock.now() - began < TAKEOVER_S


async def test_another_policy_and_a_rollout_are_asked_about_and_done():
    async with tiers(FakeEngine("one"), FakeEngine("two"), depth=3) as world, browser() as page:
        await page.goto(f"{world.admin_url}/console")
        await page.wait_for_selector("li.server")
        await page.keyboard.press("5")
        await page.select_option("select[aria-label=policy]", "round_robin")
        await page.click("button:has-text('Change policy')")
        await page.click("dialog button:has-text('Cancel')")
        assert all(tier.balancing.balancers[tier.node].policy.name == "predicted_completion" for tier in world.chain)
        await page.click("button:has-text('Change policy')")
        await page.click("dialog button.danger")
        await page.wait_for_selector("tr:has-text('tier-r-c') td:has-text('round_robin')")
        assert [tier.balancing.balancers[tier.node].policy.name for tier in world.chain] == ["round_robin"] * 3
        await page.wait_for_selector("dialog", state="hidden")

        await page.fill("input[name=model]", FAKE_MODEL)
        await page.fill("input[name=to]", "v2")
        await page.fill("input[name=steps]", "50, 10")
        await page.click("button:has-text('Start rollout')")
        assert "must rise" in await page.evaluate("document.querySelector('input[name=steps]').validationMessage")
        assert not await page.locator("dialog").is_visible()
        await page.fill("input[name=steps]", "10, 50, 100")
        await page.click("button:has-text('Start rollout')")
        await page.click("dialog button.danger")
        await page.wait_for_selector("tr:has-text('v2') td:has-text('waiting')")
        await page.click("button:has-text('Abort')")
        await page.click("dialog button.danger")
        await page.wait_for_selector("tr:has-text('v2') td:has-text('aborted')")
        assert [r.stage.value for r in world.top.rollouts.known.values()] == ["aborted"]
        await page.click("button:has-text('Forget')")
        await page.click("dialog button.danger")
        await page.wait_for_selector("text=No rollouts.")


async def test_an_instance_is_drained_and_given_back():
    async with tiers(FakeEngine("one"), FakeEngine("two"), depth=3) as world, browser() as page:
        await page.goto(f"{world.admin_url}/console")
        await page.click("button[aria-label='Drain r/c/one']")
        await page.click("dialog button.danger")
        await page.wait_for_selector("li.server.warn:has-text('draining')")
        for _ in range(4):
            assert (await world.chat()).header("x-headwater-served-by") == "r/c/two"
        await page.click("button[aria-label='Undrain r/c/one']")
        await page.click("dialog button.danger")
        await page.wait_for_selector("button[aria-label='Drain r/c/one']")
        await page.wait_for_selector("li.server.warn", state="detached")


async def test_it_survives_a_restart_of_its_tier(tmp_path: Path):
    async with FakeEngine("one") as engine:
        data, admin = PORTS.take(), PORTS.take()
        argv = headwater(
            *("up", "--instance", engine.url, "--listen", f"127.0.0.1:{data}", "--admin", f"127.0.0.1:{admin}")
        )
        url = f"http://127.0.0.1:{admin}"
        process = Process("up", argv, f"{url}/readyz")
        try:
            await process.start()
            async with browser() as page:
                await page.goto(f"{url}/console")
                await page.wait_for_selector("li.server")
                process.kill()
                await page.wait_for_selector("text=connection lost")
                await process.start()
                await page.wait_for_selector("#link[data-state=live]")
        finally:
            process.discard()


async def test_the_page_is_served_and_nothing_beside_it():
    async with tiers(FakeEngine("one")) as world:
        page = await get(f"{world.admin_url}/console")
        assert page.status == 200
        assert "default-src 'none'" in page.header("content-security-policy")
        for name in ("app.js", "vendor/uplot.js", "style.css"):
            assert (await get(f"{world.admin_url}/console/{name}")).status == 200
        for name in (
            "../console.py",
            "%2e%2e/console.py",
            "vendor/fetch.sh",
            "nothing.js",
            "vendor",
            "%2fetc%2fpasswd",
        ):
            assert (await get(f"{world.admin_url}/console/{name}")).status == 404, name
