"""Tenants and keys as a value, and the credential of a request."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from math import inf

import pytest
from pydantic import ValidationError

from common.tenancy.directory import Directory, KeySpec, Tenant, TenantSpec
from common.tenancy.keys import credential, hashed, make, without_credentials, without_query_credentials
from common.types import Priority

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)


def tenant(**fields: object) -> Tenant:
    return Tenant.of("acme", TenantSpec.model_validate(fields))


def test_what_is_not_given_is_not_limited():
    free = tenant()
    assert free.may_use("anything")
    assert free.may_use("")
    assert free.priority_for(None) is Priority.STANDARD


def test_models_are_names_or_beginnings():
    some = tenant(models=["llama-8b", "qwen-*"])
    assert [some.may_use(m) for m in ("llama-8b", "qwen-7b", "qwen-", "llama-8b-x", "qwen", "", "*")] == [
        *(True, True, True),
        *(False, False, False, False),
    ]


def test_a_star_alone_stands_for_every_named_model():
    assert tenant(models=["*"]).may_use("m")
    assert not tenant(models=["*"]).may_use("")


@pytest.mark.parametrize(
    ("fields", "asked", "given"),
    [
        ({}, Priority.CRITICAL, Priority.STANDARD),
        ({}, Priority.BATCH, Priority.BATCH),
        ({"priority": "batch"}, Priority.CRITICAL, Priority.BATCH),
        ({"priority": "batch", "ceiling": "standard"}, Priority.CRITICAL, Priority.STANDARD),
        ({"priority": "batch", "ceiling": "critical"}, Priority.CRITICAL, Priority.CRITICAL),
        ({"priority": "batch", "ceiling": "critical"}, None, Priority.BATCH),
        ({"priority": "critical"}, Priority.BATCH, Priority.BATCH),
    ],
)
def test_a_priority_may_be_lowered_and_raised_to_the_ceiling_only(fields, asked, given):
    assert tenant(**fields).priority_for(asked) is given


@pytest.mark.parametrize(
    "fields",
    [
        {"priority": "critical", "ceiling": "batch"},
        {"priority": "urgent"},
        {"requests_per_minute": 0},
        {"monthly_usd": float("inf")},
        {"models": [""]},
        {"regions": ["no/such"]},
        {"rpm": 5},
    ],
)
def test_what_makes_no_sense_is_refused(fields):
    with pytest.raises(ValidationError):
        tenant(**fields)


# -- keys --------------------------------------------------------------------------------------------------------------


def test_a_key_is_recognisable_and_only_its_hash_is_kept():
    key, spec = make(NOW, NOW + timedelta(days=90), "build server")
    assert re.fullmatch(r"hw-[A-Za-z0-9_-]{43}", key)
    assert spec.sha256 == sha256(key.encode()).hexdigest() == hashed(key)
    assert key not in repr(spec)
    assert key not in spec.model_dump_json()
    assert len({make(NOW)[0] for _ in range(50)}) == 50


def test_a_date_is_its_midnight_in_utc():
    digest = "0" * 64
    assert KeySpec(id="k", sha256=digest, expires=NOW.date()).expires == datetime(2026, 11, 29, tzinfo=UTC)
    offset = KeySpec.model_validate({"id": "k", "sha256": digest, "expires": "2027-01-01T02:00:00+02:00"})
    assert offset.expires == datetime(2027, 1, 1, tzinfo=UTC)
    assert KeySpec.model_validate({"id": "k", "sha256": digest, "expires": "2027-01-01T02:00"}).expires == datetime(
        2027, 1, 1, 2, tzinfo=UTC
    )


def test_a_key_itself_is_not_taken_for_its_hash():
    key, _ = make(NOW)
    with pytest.raises(ValidationError) as caught:
        KeySpec(id="k", sha256=key)
    assert "never kept" in str(caught.value)


def test_a_directory_finds_a_key_by_its_hash():
    key, spec = make(NOW, NOW)
    directory = Directory.of({"acme": TenantSpec()}, {"acme": (spec,)})
    found = directory.keys[hashed(key)]
    assert (found.tenant, found.expires_at) == ("acme", NOW.timestamp())
    assert directory.keys_of("acme") == [spec]
    assert Directory.of({}, {"acme": (make(NOW)[1],)}).keys.popitem()[1].expires_at == inf


@pytest.mark.parametrize("again", [{"id": "other"}, {"sha256": "1" * 64}])
def test_the_same_key_or_id_twice_is_refused(again):
    spec = KeySpec(id="k", sha256="0" * 64)
    with pytest.raises(ValueError, match="twice"):
        Directory.of({}, {"a": (spec,), "b": (spec.model_copy(update=again),)})


# -- what a request brings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ([], None),
        ([(b"cookie", b"x")], None),
        ([(b"authorization", b"Bearer hw-1")], "hw-1"),
        ([(b"authorization", b"bearer   hw-1 ")], "hw-1"),
        ([(b"x-api-key", b"hw-1")], "hw-1"),
        ([(b"api-key", b"hw-1")], "hw-1"),
        ([(b"x-api-key", b"hw-2"), (b"authorization", b"Bearer hw-1")], "hw-1"),
        ([(b"authorization", b"Basic dXNlcjpwYXNz")], ""),
        ([(b"authorization", b"Bearer")], ""),
        ([(b"authorization", b"Bearer a"), (b"authorization", b"Bearer b")], ""),
        ([(b"authorization", b"Bearer a"), (b"authorization", b"Bearer a")], "a"),
        ([(b"x-api-key", b"\xff" * 9)], (b"\xff" * 9).decode("ascii", "surrogateescape")),
        ([(b"x-api-key", b"a" * 20_000)], ""),
        ([(b"x-api-key", b"")], None),
    ],
)
def test_the_credential_of_a_request(headers, found):
    assert credential(headers) == found
    if found:
        assert len(hashed(found)) == 64


def test_credentials_do_not_go_on():
    kept = [(b"content-type", b"x"), (b"user-agent", b"y")]
    assert without_credentials([*kept, (b"authorization", b"1"), (b"x-api-key", b"2"), (b"api-key", b"3")]) == kept


@pytest.mark.parametrize(
    ("target", "kept"),
    [
        (b"/v1/models", b"/v1/models"),
        (b"/v1/models?a=1&b=2", b"/v1/models?a=1&b=2"),
        (b"/v1/models?api_key=1", b"/v1/models"),
        (b"/v1/models?a=1&API-Key=1&b=2&access_token=3", b"/v1/models?a=1&b=2"),
        (b"/v1/models?", b"/v1/models?"),
        (b"/v1/x?monkey=1&key=2", b"/v1/x?monkey=1&key=2"),
    ],
)
def test_keys_in_the_query_do_not_go_on(target, kept):
    assert without_query_credentials(target) == kept
