import asyncio
from pathlib import Path

from common.scaling.config import WebhookTarget
from common.scaling.webhook import webhook
from tests.common.scaling.stub import Seen, Stub
from tests.servers import eventually, free_port

CLUSTER = ("eu", "eu-a")


async def test_it_is_told_by_a_post_once_a_number_and_again_after_a_while(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    with Stub() as stub:
        provider = webhook(WebhookTarget(url=f"{stub.url}/scale", token_file=str(token)), CLUSTER, "m", "l4")
        for replicas, count in ((2, 1), (2, 1), (5, 2)):
            provider.want(replicas, "forecast", at_least=False)
            await eventually(lambda count=count: len(stub.seen) >= count, 10.0)
        await asyncio.sleep(0)
        assert [seen.body["replicas"] for seen in stub.seen] == [2, 5]
        first = stub.seen[0]
        assert (first.method, first.path) == ("POST", "/scale")
        assert first.headers["authorization"] == "Bearer secret"
        assert first.body == {
            "model": "m",
            "group": "l4",
            "node": "eu/eu-a",
            "replicas": 2,
            "reason": "forecast",
            "at_least": False,
        }
        await provider.close()


async def test_failures_are_tried_again_so_many_times_and_no_more() -> None:
    with Stub(lambda seen: (500, {})) as stub:
        provider = webhook(WebhookTarget(url=stub.url, attempts=3, retry_s=0.05), CLUSTER, "m", "l4")
        provider.want(1, "floor", at_least=False)
        await eventually(lambda: provider.failures == 3, 10.0)
        provider.want(1, "floor", at_least=False)  # told again and again by its scaler, which is no reason
        await asyncio.sleep(0.2)
        assert len(stub.seen) == 3
        stub.answer = lambda seen: (204, {})
        provider.want(2, "forecast", at_least=False)
        await eventually(lambda: len(stub.seen) == 4, 10.0)
        await provider.close()
    assert provider.failures == 3


async def test_a_newer_number_does_not_wait_for_the_tries_of_an_older_one() -> None:
    def answer(seen: Seen) -> tuple[int, object]:
        return (503 if seen.body["replicas"] == 1 else 200, {})

    with Stub(answer) as stub:
        provider = webhook(WebhookTarget(url=stub.url, retry_s=60.0), CLUSTER, "m", "l4")
        provider.want(1, "floor", at_least=False)
        await eventually(lambda: provider.failures == 1, 10.0)
        provider.want(3, "panic", at_least=False)
        await eventually(lambda: stub.seen[-1].body["replicas"] == 3, 10.0)
        await provider.close()


async def test_nobody_there_is_a_failure_that_is_counted() -> None:
    target = WebhookTarget(url=f"http://127.0.0.1:{free_port()}", attempts=2, retry_s=0.05)
    provider = webhook(target, CLUSTER, "m", "l4")
    provider.want(1, "floor", at_least=False)
    await eventually(lambda: provider.failures == 2, 10.0)
    await provider.close()
