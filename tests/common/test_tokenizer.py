"""Prompts counted with their model's own tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from common import apis
from common.config import TierConfig
from common.errors import ConfigError
from common.tier import verify
from common.tokenizer import Tokenizers
from tests.fake_engine import MODEL, FakeEngine
from tests.integration.clients import ask, chat
from tests.integration.relay.cases import PATH, records
from tests.integration.system import tiers


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A tokenizer with a token a word."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(["?"], trainers.WordLevelTrainer(special_tokens=["?"]))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


def test_a_models_own_tokenizer_counts_its_prompts_alone(file: str) -> None:
    tokenizers = Tokenizers({"llama": file, "qwen*": file})
    assert tokenizers.count("llama", "one two three") == 3
    assert tokenizers.count("qwen-7b", "one two") == 2
    assert tokenizers.count("gpt", "one") is None
    assert tokenizers.count("llama", "a " * 600_000) is None  # too long to be counted


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"prompt": "a b"}, "a b"),
        ({"prompt": ["a", "b"]}, "a\nb"),
        ({"prompt": [1, 2, 3]}, ""),
        ({"input": "a"}, "a"),
        ({"messages": [{"role": "user", "content": "a \u6f22"}, {"role": "assistant", "content": "b"}]}, "a \u6f22\nb"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "a"},
                            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                        ],
                    }
                ]
            },
            "a",
        ),
        ({"query": "q", "documents": ["d"]}, ""),
        ({}, ""),
    ],
)
def test_what_is_counted_is_the_prompts_text(body: dict[str, Any], text: str) -> None:
    assert apis.prose(json.dumps({"model": "m", **body}).encode()) == text


@pytest.mark.parametrize("content", [None, "{}", "no json"])
async def test_a_file_that_is_none_is_said_at_the_start(content: str | None, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    if content is not None:
        file.write_text(content)

    def start() -> None:
        verify(TierConfig.model_validate({"models": {"tokenizers": {"m": str(file)}}}))
        Tokenizers({"m": str(file)})

    with pytest.raises(ConfigError, match=r"models\.tokenizers: .*tokenizer\.json"):
        start()


async def test_requests_are_routed_by_the_count(file: str) -> None:
    words = " ".join(["extraordinarily"] * 3000)  # which bytes take for four times as many
    engine = FakeEngine("a")
    async with tiers(engine, models={"tokenizers": {MODEL: file}}) as world:
        for text in ("a b c", words):
            assert (await ask(world.url, PATH, chat(MODEL, text=text))).status == 200
        long, short = [record["input_tokens"] for record in await records(world)]
    assert short == 3
    assert long == pytest.approx(3000, rel=0.05)  # corrected by what the server said of the first one
